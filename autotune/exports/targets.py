"""The targets of an export: one table, what is done with all of them alike, and the lines of a shell that train.

A target is a function from the answer to a :class:`Draft`. What it can't express of the answer is listed in its
files and in the draft; an answer that it can't train at all is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from autotune.errors import InputError, suggestion
from autotune.exports import launch_files, scripts
from autotune.exports.launch_files import ACCELERATE, ARGUMENTS, DEEPSPEED, FILE_NAMES, FSDP, SCRIPT, Draft
from autotune.value import save_bytes
from autotune.values.result import ResultData

ALL = "all"


class Exported(NamedTuple):
    """The files written for a target."""

    paths: tuple[Path, ...]
    launch: tuple[str, ...]  # command lines, the preferred one first
    not_expressed: tuple[str, ...]  # what the target can't express of the answer, a line each


_SCRIPTS: dict[str, Callable[[ResultData], Draft]] = {"python": scripts.trainer, "trl": scripts.trl}
TARGETS = (ARGUMENTS, "python", ACCELERATE, DEEPSPEED, FSDP, "trl")


def draft(result: ResultData, target: str, answer: str = "best-config.json") -> Draft:
    """Return the file of a target, without writing it, and command lines that name the file `answer`."""
    if target not in TARGETS:
        known = (*TARGETS, ALL)
        raise InputError(f"{target}: expected {', '.join(known[:-1])} or {ALL}{suggestion(target, known)}")
    made_by_user = result.workload.own_code is not None or result.workload.model.source == "own"
    if made_by_user and target not in FILE_NAMES:
        commands = launch_files.launch_commands(result, answer)
        way = f"it trains by: {commands[0]}" if commands else f"--to {ARGUMENTS} writes its arguments"
        raise InputError(f"{target}: your own code makes the model, which no exported file can; {way}")
    if result.workload.recipe is not None and target not in ("trl", ARGUMENTS):
        raise InputError(
            f"{target}: {result.workload.recipe.kind.trainer} trained it; --to trl writes a script with it"
        )
    if result.best.config.parallelism.sequence_parallel > 1 and target not in FILE_NAMES:
        raise InputError(f"{target}: sequence parallel takes position_ids in each batch; {SCRIPT} is yours")
    if target in _SCRIPTS:
        return _SCRIPTS[target](result)
    commands = launch_files.launch_commands(result, answer)
    launch = (launch_files.accelerate_command(result),) if target == ACCELERATE else commands
    lost = launch_files.in_code(result) if target == ARGUMENTS else ()
    if lost and result.workload.own_code is not None and (gain := launch_files.gain_of_flags(result)):
        lost = (*lost, gain)
    return Draft({FILE_NAMES[target]: launch_files.text_of(target, result)}, launch, lost)


def drafts(
    result: ResultData, target: str = ALL, answer: str = "best-config.json"
) -> tuple[dict[str, Draft], dict[str, str]]:
    """Return the draft of a target, or of all that can train the answer, and the reasons why the others can't."""
    if target != ALL:
        return {target: draft(result, target, answer)}, {}
    made: dict[str, Draft] = {}
    left_out: dict[str, str] = {}
    for name in TARGETS:
        try:
            made[name] = draft(result, name, answer)
        except InputError as error:
            left_out[name] = str(error)
    return made, left_out


def write(
    result: ResultData, target: str, found: dict[str, Draft], directory: Path, answer: str = "best-config.json"
) -> Exported:
    """Write the drafts of a target into a directory, which is made; with all come the command lines, in a file too."""
    files = {name: text for one in found.values() for name, text in one.files.items()}
    launch = launch_files.launch_commands(result, answer) if target == ALL else found[target].launch
    if target == ALL and launch:
        files[launch_files.COMMANDS_FILE] = "".join(f"{command}\n" for command in launch)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        save_bytes(text.encode(), directory / name)
    lost = tuple(f"{f'{name}: ' * (target == ALL)}{line}" for name, one in found.items() for line in one.lost)
    return Exported(tuple(directory / name for name in files), launch, lost)


def to_train(result: ResultData, answer: str) -> tuple[str, ...]:
    """Return lines of a shell that train with the answer in `answer`, by a script that they write if none is known."""
    commands = launch_files.launch_commands(result, answer)
    if not commands:
        what = "training_arguments(output_dir)" if result.workload.own_code is not None else "best.config"
        return (f"# in your own code: autotune.load({answer!r}).{what}",)
    if result.workload.own_code is not None:
        return commands
    return (_writes_script(result, answer), commands[0])


def missing_script(result: ResultData, answer: str, made: Exported) -> str:
    """Return a remark on `train.py` in the command lines if it is none of the files written; '' if it is."""
    if not any(SCRIPT in command.split() for command in made.launch):
        return ""
    if result.workload.own_code is not None or any(path.name == SCRIPT for path in made.paths):
        return ""
    way = _writes_script(result, answer)
    return f"{SCRIPT} is a script of yours that takes these arguments, or that of: {way}"


def _writes_script(result: ResultData, answer: str) -> str:
    target = "python" if result.workload.recipe is None else "trl"
    return f"autotune export {shlex.quote(answer)} --to {target} --output {SCRIPT}"
