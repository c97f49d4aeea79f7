"""Fixtures that several test modules share: tiny models in local directories, and the command line in a process."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Two processes test at a time on as few as two cores: threads that wait for each other would slow both down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory) -> Path:
    """A home of the tests' own: they neither see nor change what the user keeps."""
    folder = tmp_path_factory.mktemp("home")
    os.environ["AUTOTUNE_HOME"] = str(folder)  # for the processes that tests start, too
    os.environ["AUTOTUNE_RECORD"] = "off"  # no test's search knows of another's
    return folder


def write_model(directory: Path, config: dict) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", TINY_LLAMA)


@pytest.fixture(scope="session")
def wide_llama(tmp_path_factory) -> Path:
    """A Llama whose logits alone take 250 MiB at a micro-batch of 16 x 128: it can be made to run out of memory."""
    return write_model(
        tmp_path_factory.mktemp("models") / "wide-llama", {**TINY_LLAMA, "vocab_size": 32000, "num_hidden_layers": 1}
    )


@pytest.fixture(scope="session")
def answer(tmp_path_factory, tiny_llama) -> Path:
    """The best-config.json of a real, short search: that of an example, whose output is in printed.txt beside it."""
    path = tmp_path_factory.mktemp("answer") / "best-config.json"
    example = [sys.executable, str(ROOT / "examples/quick_start.py"), str(tiny_llama)]
    done = subprocess.run(
        [*example, "--max-trials", "1", "--max-time", "25s", "--output", path.name],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    (path.parent / "printed.txt").write_text(done.stdout)
    return path


@pytest.fixture
def autotune(tmp_path):
    """Return a function that runs the command line in `tmp_path`, as a user would."""

    def run(*arguments: object, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autotune", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "COLUMNS": "200", **environment},
        )

    return run


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread, since small matrices lose by more, and spare each Trainer a collection of all libraries."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
