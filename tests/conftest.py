"""Fixtures that several test modules share: tiny models in local directories, and the command line in a process."""

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT, printed, python

# Two processes test at a time on as few as two cores: threads that wait for each other would slow both down.
os.environ["OMP_NUM_THREADS"] = "1"

# Started by nohup or in the background, Python ignores these, and so do the processes that it starts; tests send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Each process that tests on the stand-in for CUDA has a machine of its own.
if "FAKECUDA_STATE" in os.environ and not os.environ["FAKECUDA_STATE"].endswith(
    worker := os.environ.get("PYTEST_XDIST_WORKER", "")
):
    os.environ["FAKECUDA_STATE"] += f"-{worker}"

# Files that take long come first: no process is left alone with one of them at the end.
LONG = ("test_api.py", "test_examples.py", "test_tuner.py")

TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=5, help="kills of replayed searches (tests/faults) [5]")
    parser.addoption("--real-kills", type=int, default=6, help="kills of each process of real searches [6]")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import tests and libraries without looking for garbage, which took a fifth of the time: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="module", autouse=True)
def _imported_stays():
    """Spare each Trainer, which looks for garbage several times, all libraries that are there."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory) -> Path:
    """A home of the tests' own: they neither see nor change what the user keeps."""
    folder = tmp_path_factory.mktemp("home")
    os.environ["AUTOTUNE_HOME"] = str(folder)  # for the processes that tests start, too
    os.environ["AUTOTUNE_RECORD"] = "off"  # no test's search knows of another's
    os.environ["FINISHED_SEARCHES"] = str(tmp_path_factory.mktemp("finished"))
    return folder


@pytest.fixture
def own_home(tmp_path, monkeypatch) -> Path:
    """A home of the test's own, not made yet."""
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session", autouse=True)
def _no_fsync():
    """Nothing that tests write has to outlive a power cut; waiting for the disk took a quarter of scripted searches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def write_model(directory: Path, config: dict | str | bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config) if isinstance(config, dict) else config
    (directory / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", TINY_LLAMA)


@pytest.fixture(scope="session")
def thin_llama(tmp_path_factory) -> Path:
    """A Llama that is soon trained, for whole searches."""
    thin = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return write_model(tmp_path_factory.mktemp("models") / "thin-llama", {**TINY_LLAMA, **thin})


@pytest.fixture(scope="session")
def wide_llama(tmp_path_factory) -> Path:
    """A Llama whose logits alone take 250 MiB at a micro-batch of 16 x 128: it can be made to run out of memory."""
    wide = {"vocab_size": 32000, "num_hidden_layers": 1}
    return write_model(tmp_path_factory.mktemp("models") / "wide-llama", {**TINY_LLAMA, **wide})


@pytest.fixture(scope="session")
def answer(tmp_path_factory, thin_llama) -> Path:
    """The best-config.json of a real, short search: that of an example, whose output is in printed.txt beside it."""
    path = tmp_path_factory.mktemp("answer") / "best-config.json"
    limits = ("--max-trials", "1", "--max-time", "60s")
    lines = printed(ROOT / "examples/quick_start.py", thin_llama, *limits, "--output", path.name, cwd=path.parent)
    (path.parent / "printed.txt").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def bench(tiny_llama, tmp_path_factory):
    """What runs trials of the tiny Llama, and of other models."""
    from benches import Bench

    from autotune.training.resolve import resolve

    made = Bench(resolve(str(tiny_llama)), tmp_path_factory.mktemp("run"))
    with made.runner:
        made.runner.start()
        yield made


@pytest.fixture
def lent(bench):
    """Searches of this process start no launcher of their own, which takes seconds."""
    with bench.lent():
        yield


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command line as the fixture `autotune` does, but in this process."""
    from typer.testing import CliRunner

    from autotune.cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    wide = {"COLUMNS": "200"}
    return lambda *words, **options: CliRunner().invoke(app, [*map(str, words)], **{"env": wide, **options})


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a script, which the process is in until the test ends."""
    from own_trainings import SCRIPT, write

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    write(tmp_path, SCRIPT)
    return tmp_path


@pytest.fixture
def autotune(tmp_path):
    """Return a function that runs the command line in `tmp_path`, as a user would."""

    def run(*arguments: object, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
        wide = {"COLUMNS": "200", **environment}
        return python("-m", "autotune", *arguments, cwd=tmp_path, timeout=timeout, **wide)

    return run


@pytest.fixture
def directory(tmp_path):
    """An empty run directory."""
    from autotune.storage.run_directory import RunDirectory

    (tmp_path / "a run").mkdir()
    return RunDirectory(tmp_path / "a run")


@pytest.fixture
def whole_device(tmp_path_factory):
    """Let no other process test meanwhile what a CUDA device's memory comes to."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "cuda.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
