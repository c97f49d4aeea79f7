"""The command line: errors are one line, or an object, and an exit code; its options don't change unnoticed."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from unittest.mock import Mock

import pytest
import typer
from factories import make_plan
from running import process
from typer.testing import CliRunner

from autotune.__main__ import main
from autotune.cli.console import Verbose, guarded
from autotune.cli.main import app
from autotune.storage.run_directory import RunDirectory

COMMANDS = (
    "find", "resume", "estimate", "report", "explain", "models", "doctor", "spaces", "history", "export", "compare",
    "script",
)  # fmt: skip

FIND_OPTIONS = {
    "Model and data": {
        "--model", "--task", "--seq-len", "--target-len", "--global-batch", "--revision", "--trust-remote-code",
        "--data", "--text-field", "--train-steps", "--train-tokens", "--seed", "--images", "--image-size",
        "--freeze-vision", "--recipe", "--prompt-len", "--completion-len", "--generations", "--reward",
    },
    "What may change": {"--against", "--baseline", "--allow", "--fix", "--only", "--space"},
    "Limits": {"--memory", "--effort", "--max-trials", "--max-time", "--check-loss"},
    "Where it runs": {"--device", "--devices", "--nodes", "--workers", "--engine", "--address", "--kind"},
    "Output": {
        "--record", "--report-to", "--output", "--run-dir", "--dry-run", "--quiet", "--verbose", "--json", "--debug",
        "--help",
    },
}  # fmt: skip


def test_help_lists_the_commands(autotune):
    done = autotune("--help")
    assert done.returncode == 0
    assert not [command for command in COMMANDS if command not in done.stdout]


@pytest.mark.parametrize(
    ("typed", "completed"), [("autotune estim", "estimate"), ("autotune find --check-l", "--check-loss")]
)
def test_a_shell_completes_commands_and_options_that_are_made_when_they_are_used(typed, completed):
    asked = {"_AUTOTUNE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert CliRunner().invoke(app, [], prog_name="autotune", env=asked).stdout.split() == [completed]


def groups(command: str) -> dict[str, set[str]]:
    """Return the options that the help of a command lists, by heading."""
    found: dict[str, set[str]] = {}
    for line in CliRunner().invoke(app, [command, "--help"]).stdout.splitlines():
        if re.fullmatch(r"\S.*:", line):
            group = found.setdefault(line[:-1], set())
        elif re.match(r"  -", line):
            group |= set(re.findall(r"(?<!\S)--[\w-]+", line[:34].partition("<")[0])[:1])
    return found


def test_options_of_find_are_frozen_each_in_its_group():
    assert groups("find") == FIND_OPTIONS
    for command in ("find", "script", "estimate"):
        text = CliRunner().invoke(app, [command, "--help"]).stdout
        assert f"\n  Example: autotune {command} --m" in text.partition("Model and data:")[0]


@pytest.mark.parametrize("command", ["script", "estimate"])
def test_a_shared_option_is_in_the_same_group(command):
    found = groups(command)
    assert list(found)[-1] == "Output"
    for group, options in found.items():
        for other, known in FIND_OPTIONS.items():
            assert other == group or not options & known, options & known


DIGITS = "9" * 5000

# A command line, its exit code, and words of the line that is said of it. `file` is a file, `train.py` a script.
ERRORS = [
    ("find --model t5-smal", 2, "t5-small"), ("find --model .", 2, "config.json"),
    (f"find --model gpt2 --global-batch {DIGITS}", 2, "expected a whole number"),
    ("find --model gpt2 --global-batch ²", 2, "expected a whole number or any"),
    ("find --model gpt2 --devices some", 2, "--devices some: expected a whole number"),
    ("find --model gpt2 --device cpu --devices 2 --global-batch 7", 2, "6 and 8 do"),
    ("find --model gpt2 --memory 900TiB", 2, "--memory"), ("find --model gpt2 --run-dir file/run", 2, "file/run"),
    ("find --model gpt2 --fix optm=sgd", 2, "--fix optm: no such knob (did you mean 'optim'?)"),
    (f"find --model gpt2 --fix {'x' * 5000}=1", 2, "no such knob"),
    ("find --model gpt2 --only optim --only acumulation", 2, "--only acumulation"),
    ("find --model gpt2 --device abacus", 2, "--device abacus"), ("find --model gpt2 --device cuda:99", 3, "cuda:99"),
    ("find --model gpt2 --device cpu --space no.yaml --dry-run --quiet", 2, "no.yaml"),
    ("find --model gpt2 --device cpu --dry-run -o best.json", 2, "--output: is of a search, and --dry-run has none"),
    (f"find --model gpt2 --space {'s' * 5000}", 2, "sss"), ("find --model gpt2 --space digits.yaml", 2, "digits.yaml"),
    ("find --model gpt2 --data nowhere.jsonl", 2, "nowhere.jsonl"),
    ("find --model gpt2 -o no/place.json", 2, "no/place.json"), ("find --model gpt2 -o file", 2, "file is another"),
    ("find --model t5 --report-to tensorbord", 2, "expected tensorboard, wandb, mlflow (did you mean 'tensorboard'?)"),
    ("find --model gpt2 --quiet --verbose", 2, "--quiet and --verbose contradict each other; drop"),
    ("script -- torchrun --nnodes 1:2 train.py", 2, "torchrun: 1:2 machines: name one number of them"),
    ("script -- python missing.py", 2, "missing.py: no such script"),
    ("script --apply none.json --quiet -- python train.py", 2, "--quiet: is of a search, and --apply trains"),
    ("script --apply none.json -- python train.py", 2, "none.json: No such file or directory"),
    ("script --space nowhere.yaml --device cpu -- python train.py", 2, "nowhere.yaml"),
    ("resume .", 2, "holds no search"), ("report .", 2, "holds no search"), ("explain .", 2, "holds no search"),
    ("export 'a\x1b[2J\n\u202eb.json'", 2, r"a\x1b[2J"),
    ("models zzz", 2, "no model of the catalogue has 'zzz' in its name"),
    ("--json models", 2, "No such option: --json"),
]  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("words", "code", "said"), ERRORS, ids=[case[0][:60] for case in ERRORS])
def test_an_error_is_one_short_line_and_its_exit_code(command, tmp_path, words, code, said):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "digits.yaml").write_text(f"seed: {DIGITS}")
    RunDirectory.create(tmp_path / "run").write_plan(make_plan())
    done = command(*shlex.split(words))
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("autotune: ")
    assert (done.stderr.count("\n"), done.stderr.strip().isprintable(), len(done.stderr) < 2100) == (1, True, True)
    assert said in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_an_option_that_a_command_within_another_would_not_heed_is_refused(command):
    done = command("history", "--json", "forget", "--all")
    assert (done.exit_code, json.loads(done.stdout)["error"]["message"]) == (2, "--json: goes behind forget")


def test_an_error_is_an_object_with_json_and_has_a_traceback_with_debug(command, autotune, monkeypatch):
    done = command("find", "--model", "t5-smal", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["kind"], error["exit_code"]) == (2, "UnknownModelError", 2)
    assert "t5-small" in error["message"]
    for words, said in ((), "Missing option '--model' (`"), (("--model",), "Option '--model' requires an argument (`"):
        assert json.loads(command("find", "--json", *words).stdout)["error"]["message"].startswith(said)
    assert "Traceback" in autotune("find", "--model", "t5-smal", "--debug").stderr


def test_ctrl_c_is_told_while_modules_are_imported_and_while_options_are_made(command, capsys, monkeypatch):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    for name in ("console._made", "main.__import__"):
        monkeypatch.setattr(f"autotune.cli.{name}", interrupted, raising=False)
        done = command("find", "--model", "gpt2", "--json")
        assert (done.exit_code, json.loads(done.stdout)["error"]["message"]) == (130, "interrupted")
    monkeypatch.delattr("autotune.cli.main.main")
    monkeypatch.setattr("autotune.cli.main.__getattr__", interrupted, raising=False)  # of whom it is imported from
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "autotune: interrupted\n"


@pytest.mark.parametrize("options", [(), ("--verbose",)])
def test_what_bitsandbytes_lacks_on_a_processor_is_said_with_verbose_alone(caplog, options):
    """It says so at its import, on a processor with bfloat16 instructions, about a kernel for inference."""

    @guarded
    def imports(verbose: Verbose = False) -> None:
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")

    program = typer.Typer()
    program.command()(imports)
    assert CliRunner().invoke(program, options).exit_code == 0
    assert len(caplog.records) == len(options)


def test_a_standard_stream_that_is_closed_has_its_number_taken_by_no_file(tmp_path):
    """Of a file that takes it, what a process prints would become a part."""
    program = tmp_path / "closed.py"
    program.write_text(
        "import os, sys\n"
        "from autotune.cli import main\n"
        "found = lambda **_: ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3))\n"
        "main.app = lambda **_: open('found', 'w').write(found())\n"
        "main.main()\n"
    )
    subprocess.run(f"exec {sys.executable} {program} <&- >&- 2>&-", shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "found").read_text().split() == [os.devnull] * 3


@pytest.mark.parametrize("options", [("spaces",), ("spaces", "--json"), ("--version",)])
def test_where_nobody_reads_or_the_disk_is_full_a_command_ends_without_a_traceback(options):
    reader, writer = os.pipe()
    os.close(reader)
    command = process("-m", "autotune", *options, PYTHONUNBUFFERED="")
    for stdout, expected in (
        (writer, (0, "")),
        (os.open("/dev/full", os.O_WRONLY), (4, "autotune: the disk is full\n")),
    ):
        done = subprocess.run(**command, stdout=stdout, stderr=subprocess.PIPE)
        os.close(stdout)
        assert (done.returncode, done.stderr) == expected
