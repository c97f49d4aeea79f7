"""Bad input of any kind is one line and an exit code, without traceback or warning, in ten seconds of a processor.

The input is data, in `options` and `files`. Every twenty-third kind is tried by default, all of them with `-m slow`.
"""

import copy
import json
import os
import shlex
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from exporting import answer_of
from factories import make_config
from faults import files, options
from typer.testing import CliRunner

import autotune
from autotune.cli.main import app
from autotune.execution.describe import run_describe
from autotune.execution.runner import LocalRunner
from autotune.value import Value, write_value


class Done(NamedTuple):
    """What a command left behind that ran in this process: the child that looks at the model answers here."""

    exit_code: int
    stdout: str
    stderr: str
    processor_s: float


class TrialBegan(BaseException):
    """The input was taken for good."""


def run(words: list[str], folder: Path, files: Mapping[str, Any], environment: Mapping[str, str]) -> Done:
    """Run a command in `folder`, in which `files` lie; a value that is neither text nor bytes is written as JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, Path):
            shutil.copytree(content, path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    before, started = Path.cwd(), time.process_time()
    os.chdir(folder)
    try:
        with (
            patch.object(signal, "signal", lambda *_: None),
            patch.object(LocalRunner, "begin", lambda self: None),
            patch.object(LocalRunner, "start", lambda self: None),
            patch.object(LocalRunner, "ask", _asked),
            patch.object(LocalRunner, "run", _began),
            warnings.catch_warnings(record=True) as caught,
        ):
            done = CliRunner().invoke(app, words, env={"COLUMNS": "200", **environment})
    finally:
        os.chdir(before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    said = done.stderr + "".join(f"{w.filename}: {w.message}\n" for w in caught)
    return Done(done.exit_code, done.stdout, said, time.process_time() - started)


def _asked(runner: Any, name: str, entry: str, request: Value, *, timeout_s: float, ranks: None) -> Path:
    """Answer as the child would."""
    if not entry.endswith(":run_describe"):
        raise TrialBegan
    directory: Path = runner._run_directory / name
    directory.mkdir(parents=True, exist_ok=True)
    write_value(request, directory / "request.json")
    run_describe(directory)
    return directory


def _began(runner: Any, request: Any) -> None:
    raise TrialBegan


LONGEST_S = 10.0

MODEL = {"m/config.json": files.LLAMA}
FIND = ["find", "--model", "m", "--device", "cpu", "--max-trials", "1", "--quiet"]
ESTIMATE = ["estimate", "--model", "m", "--gpu", "a100-80gb", "--seq-len", "64", "--quiet"]
ONE = [*ESTIMATE, "--fix", "micro-batch=1"]  # configuration


class Case(NamedTuple):
    """A kind of bad input, and the exit code that it deserves."""

    words: list[str]
    files: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})
    code: int = 2

    @property
    def name(self) -> str:
        contents = [str(content) for content in self.files.values() if content is not files.LLAMA]
        return " ".join([*self.words, *self.environment.values(), *contents])[:90].encode("unicode_escape").decode()


def of_options() -> list[Case]:
    cases = [Case([*ONE, option, value], MODEL) for option, values in options.ESTIMATE.items() for value in values]
    fixed = [f"{knob}={value}" for knob, values in options.FIX.items() for value in values]
    cases += [Case([*ESTIMATE, "--fix", words], MODEL) for words in fixed]
    cases += [Case([*FIND, *shlex.split(words)], MODEL) for words in options.RECIPES]
    cases += [Case([*FIND, option, value], MODEL) for option, values in options.FIND.items() for value in values]
    lacking = ((option, value) for option, values in options.LACKING.items() for value in values)
    cases += [Case([*FIND, option, value], MODEL, code=3) for option, value in lacking]
    cases += [Case(shlex.split(line), MODEL) for line in options.COMMANDS]
    set_to = ({name: value} for name, values in options.ENVIRONMENT.items() for value in values)
    return [*cases, *(Case(["history"], environment=environment) for environment in set_to)]


def of_files() -> list[Case]:
    models = [*files.NO_JSON.values(), *files.MODELS]
    baselines = [*files.NO_JSON.values(), *files.BASELINES]
    cases = [Case(ONE, {"m/config.json": content}) for content in models]
    cases += [Case([*FIND, "--baseline", "b.json"], {**MODEL, "b.json": content}) for content in baselines]
    cases += [Case([*FIND, "--space", "s.yaml"], {**MODEL, "s.yaml": content}) for content in files.SPACES]
    cases += [Case([*FIND, "--data", name], {**MODEL, name: content}) for name, content in files.DATA]
    prompts = [*FIND, "--data", "d.jsonl", "--recipe"]
    cases += [Case([*prompts, name], {**MODEL, "d.jsonl": content}) for name, content in files.PROMPTS]
    for command in ("report", "resume", "explain"):
        cases += [Case([command, "run"], {"run/search.json": content}) for content in files.NO_JSON.values()]
    for content in [*files.NO_JSON.values(), *answers()]:
        cases.append(Case(["export", "best.json", "--to", "python"], {"best.json": content}))
        apply = ["script", "--apply", "best.json", "--", "python", "t.py"]
        cases.append(Case(apply, {"t.py": "", "best.json": content}))
    cases.append(Case([*FIND, "--data", "d.txt", "--output", "d.txt"], {**MODEL, "d.txt": "A B C\n" * 64}))
    cases.append(Case([*FIND, "--model", "./\udcfc"], {"\udcfc/config.json": files.LLAMA}))  # a byte that is no UTF-8
    return cases


def answers() -> list[Any]:
    """Return answers of which a field or a version was changed by hand."""
    good = json.loads(answer_of(make_config(16)).model_dump_json())
    made = [{**good, **change} for change in files.ANSWERS]
    for version in files.VERSIONS:
        made.append(copy.deepcopy(good))
        made[-1]["hardware"]["versions"] = {"transformers": version}
    return made


CASES = of_options() + of_files()


def test_there_are_as_many_kinds_as_are_promised():
    assert len({repr(case) for case in CASES}) >= 900


@pytest.fixture(scope="module", autouse=True)
def _as_in_a_fresh_process():
    """A command has the library warn of nothing, which it reads when it is imported."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{number} {case.name}", marks=[pytest.mark.slow] if number % 23 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(case, tmp_path):
    done = run(case.words, tmp_path, case.files, {"HF_HUB_OFFLINE": "1", **case.environment})
    assert done.exit_code == case.code, done.stderr
    assert "No such option" not in done.stderr or "--nonsense" in case.words  # it would hide what is tried
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("autotune: ")
    assert len(lines[0]) > len("autotune: ") + 10
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.processor_s < LONGEST_S


@pytest.mark.parametrize("option", ["model", "data", "space", "baseline", "run_dir", "output"])
def test_a_name_that_is_too_long_is_refused_to_programs_as_well(option, tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(files.LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(autotune.errors.InputError):
        autotune.find(**{"model": "m", "device": "cpu", option: "x" * 300})
