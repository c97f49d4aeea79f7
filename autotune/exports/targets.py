"""The targets of an export: one table, what is done with all of them alike, and the lines of a shell that train.

A target is a function from a :class:`Winner` to a :class:`Draft`. What it can't express of the answer is listed in its
files and in the draft; an answer that it can't train at all is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autotune.errors import InputError, suggestion
from autotune.exports import launch_files, scripts
from autotune.exports.accelerate_loop import accelerate_loop
from autotune.exports.winner import Draft, Winner

if TYPE_CHECKING:
    from autotune.values.result import ResultData

ALL = "all"


class Exported(NamedTuple):
    """The files written for a target."""

    paths: tuple[Path, ...]
    launch: tuple[str, ...]  # command lines, the preferred one first
    not_expressed: tuple[str, ...]  # what the target can't express of the answer, a line each


def _launch_file(name: str, winner: Winner) -> Draft:
    launch = (launch_files.accelerate_command(winner.result),) if name == launch_files.ACCELERATE else ()
    lost = launch_files.in_code(winner.result) if name == launch_files.ARGUMENTS else ()
    if lost and winner.result.workload.own_code is not None and (gain := launch_files.gain_of_flags(winner.result)):
        lost = (*lost, gain)
    return Draft({launch_files.FILE_NAMES[name]: launch_files.text_of(name, winner.result)}, launch, lost)


TARGETS: dict[str, Callable[[Winner], Draft]] = {
    launch_files.ARGUMENTS: partial(_launch_file, launch_files.ARGUMENTS),
    "python": scripts.python,
    launch_files.ACCELERATE: partial(_launch_file, launch_files.ACCELERATE),
    "accelerate-loop": accelerate_loop,
    launch_files.DEEPSPEED: partial(_launch_file, launch_files.DEEPSPEED),
    launch_files.FSDP: partial(_launch_file, launch_files.FSDP),
    "trl": scripts.trl,
}


def draft(result: ResultData, target: str, answer: str = "best-config.json") -> Draft:
    """Return the file of a target, without writing it, and command lines that name the file `answer`.

    Raises:
        InputError: There is no such target, or it can't train this.
    """
    if target not in TARGETS:
        known = (*TARGETS, ALL)
        raise InputError(f"{target}: expected {', '.join(known[:-1])} or {ALL}{suggestion(target, known)}")
    made_by_user = result.workload.own_code is not None or result.workload.model.source == "own"
    if made_by_user and target not in launch_files.FILE_NAMES:
        commands = launch_files.launch_commands(result, answer)
        way = f"it trains by: {commands[0]}" if commands else f"--to {launch_files.ARGUMENTS} writes its arguments"
        raise InputError(f"{target}: your own code makes the model, which no exported file can; {way}")
    if result.workload.recipe is not None and target not in ("trl", launch_files.ARGUMENTS):
        raise InputError(
            f"{target}: {result.workload.recipe.kind.trainer} trained it; --to trl writes a script with it"
        )
    if result.best.config.parallelism.sequence_parallel > 1 and target not in launch_files.FILE_NAMES:
        raise InputError(
            f"{target}: sequence parallel takes position_ids in each batch; {launch_files.SCRIPT} is yours"
        )
    made = TARGETS[target](Winner(result))
    return made if made.launch else made._replace(launch=launch_files.launch_commands(result, answer))


def drafts(result: ResultData, answer: str = "best-config.json") -> tuple[dict[str, Draft], dict[str, str]]:
    """Return the drafts of all targets that can train the answer in `answer`, and the reasons why the others can't."""
    made: dict[str, Draft] = {}
    left_out: dict[str, str] = {}
    for target in TARGETS:
        try:
            made[target] = draft(result, target, answer)
        except InputError as error:
            left_out[target] = str(error)
    return made, left_out


def files_of_all(result: ResultData, found: dict[str, Draft], answer: str = "best-config.json") -> dict[str, str]:
    """Return the files of several targets, which may share some, and the command lines, which name `answer`."""
    files = {name: text for one in found.values() for name, text in one.files.items()}
    return {**files, **launch_files.commands_file(result, answer)}


def save(result: ResultData, target: str, directory: Path) -> Exported:
    """Write the files of a target, or of all that can train the answer, into a directory.

    Raises:
        InputError: There is no such target, or it can't train this.
        OSError: The directory can't be written.
    """
    if target != ALL:
        made = draft(result, target)
        return Exported(launch_files.written(made.files, directory), made.launch, made.lost)
    found, _ = drafts(result)
    lost = tuple(f"{name}: {line}" for name, one in found.items() for line in one.lost)
    paths = launch_files.written(files_of_all(result, found), directory)
    return Exported(paths, launch_files.launch_commands(result), lost)


def to_train(result: ResultData, answer: str) -> tuple[str, ...]:
    """Return lines of a shell that train with the answer in `answer`, by a script that they write if none is known."""
    commands = launch_files.launch_commands(result, answer)
    if not commands:
        what = "training_arguments(output_dir)" if result.workload.own_code is not None else "best.config"
        return (f"# in your own code: autotune.load({answer!r}).{what}",)
    if result.workload.own_code is not None:
        return commands
    return (_writes_script(result, answer), commands[0])


def missing_script(result: ResultData, answer: str, commands: Collection[str], files: Collection[str]) -> str:
    """Return a remark on `train.py` in the command lines if it is none of the files written; '' if it is."""
    if not any(launch_files.SCRIPT in command.split() for command in commands):
        return ""
    if result.workload.own_code is not None or launch_files.SCRIPT in files:
        return ""
    way = _writes_script(result, answer)
    return f"{launch_files.SCRIPT} is a script of yours that takes these arguments, or that of: {way}"


def _writes_script(result: ResultData, answer: str) -> str:
    target = "python" if result.workload.recipe is None else "trl"
    return f"autotune export {shlex.quote(answer)} --to {target} --output {launch_files.SCRIPT}"
