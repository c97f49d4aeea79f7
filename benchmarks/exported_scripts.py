"""The exported training scripts of an answer, run as a user runs them. A part of `export_throughput.py`.

A script trains a checkpoint. The model of the answer is saved as one, with random weights and a tokenizer of its own
(TRL's trainer wants one), so that nothing is downloaded; this is done in a process by itself, which is this file run
as a script.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from provenance import ROOT

import autotune
from autotune.exports.launch_files import ARGUMENTS, SCRIPT, written
from autotune.exports.targets import draft
from autotune.exports.winner import Draft
from autotune.tuning_result import TuningResult

TIMEOUT_S = 900.0
SCRIPTS = ("python", "accelerate", "accelerate-loop", "trl")

# Train with the arguments of the file that is exported for Trainer, by accelerate's launcher.
_WITH_ARGUMENTS_FILE = """\
import json
import pathlib

import train

train.TRAINING_ARGUMENTS = json.loads(pathlib.Path("training_args.json").read_text())

if __name__ == "__main__":
    train.main()
"""


class ExportedScripts:
    """Scripts of an answer in a folder, with a checkpoint to train.

    Args:
        path: The answer.
        folder: Where they are put.
        trl_python: An interpreter that has TRL.
        environment: Of the processes, such as the devices they may see.
    """

    def __init__(self, path: Path, folder: Path, *, trl_python: str, environment: dict[str, str]) -> None:
        self._result = autotune.load(path)
        self._folder, self._trl_python, self._environment = folder, trl_python, environment
        self._model = folder / "checkpoint"
        _run([sys.executable, __file__, str(path), str(self._model)], folder.parent, {"PYTHONPATH": _module_path()})

    def trainer(self, name: str, steps: int) -> Callable[[], float]:
        """Return a function that trains by the script of that name and returns its samples per second.

        Raises:
            InputError: The answer has no such script.
        """
        made = _draft(self._result, name)
        place = self._folder / name
        written(made.files, place)
        command = self._command(made.launch[0], name, steps)
        told = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, shlex.split(made.launch[0])))

        def train() -> float:
            printed = _run(command, place, {**self._environment, **told})
            last = [line for line in printed.splitlines() if line.startswith('{"')][-1]
            return float(json.loads(last)["samples_per_second"])

        return train

    def _command(self, line: str, name: str, steps: int) -> list[str]:
        """Return a command line with the programs beside the interpreter that is to run it."""
        words = [word for word in shlex.split(line) if "=" not in word or word.startswith("-")]
        interpreter = self._trl_python if name == "trl" else sys.executable
        program = interpreter if words[0] == "python" else str(Path(interpreter).with_name(words[0]))
        return [program, *words[1:], "--model", str(self._model), "--steps", str(steps + 1)]


def _draft(result: TuningResult, name: str) -> Draft:
    """Return the files of a script, and its command; accelerate's launcher starts the plain Trainer's."""
    made = draft(result, name)
    if name != "accelerate":
        return made
    script = draft(result, "python").files
    wrapper = {"with_arguments_file.py": _WITH_ARGUMENTS_FILE}
    files = {**made.files, **draft(result, ARGUMENTS).files, **script, **wrapper}
    return made._replace(files=files, launch=(made.launch[0].replace(SCRIPT, *wrapper),))


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command in a folder and return what it printed.

    Raises:
        RuntimeError: It failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environment}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _module_path() -> str:
    return os.pathsep.join([str(ROOT), *sys.path])


def save_checkpoint(result: TuningResult, folder: Path) -> None:
    """Save the model of an answer with random weights, and a tokenizer whose words are numbers."""
    from autotune.training.build import build_model

    model: Any = build_model(result.workload.model, result.workload.task, dtype="float32", device="cpu")
    model.save_pretrained(folder)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    if vocabulary is not None:
        tokenizer(vocabulary).save_pretrained(folder)


def tokenizer(size: int) -> Any:
    """Return a tokenizer with so many words, which are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    words = [*special.values(), *(str(number) for number in range(size - len(special)))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


if __name__ == "__main__":
    save_checkpoint(autotune.load(sys.argv[1]), Path(sys.argv[2]))
