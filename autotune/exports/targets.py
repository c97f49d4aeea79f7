"""The targets of an export: one table, and what is done with all of them alike.

A target is a writer, from an answer to a :class:`Draft`. What it can't say of the answer it lists, and a line for each
stands in its files too; an answer that it can't train at all is refused. Called by `result` and the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autotune.errors import InputError, suggestion
from autotune.exports import images, launch_files, scripts
from autotune.exports.axolotl import axolotl
from autotune.exports.draft import Draft
from autotune.exports.llama_factory import llama_factory
from autotune.exports.winner import Winner
from autotune.value import save_text

if TYPE_CHECKING:
    from autotune.values.result import ResultData

ALL = "all"

# Targets of earlier versions, and what to do instead.
_GONE = {"torchtune": "torchtune is no longer developed; use --to axolotl or --to llama-factory"}
LAUNCH_FILE = "launch.txt"


class Exported(NamedTuple):
    """What was written for a target."""

    paths: tuple[Path, ...]
    launch: tuple[str, ...]  # command lines, the one to prefer first
    not_expressed: tuple[str, ...]  # what of the answer the target can't say, a line each


def _launcher_file(name: str, winner: Winner) -> Draft:
    measured = launch_files.measured_of(winner.result)
    text = launch_files.text_of(name, measured)
    launch = (launch_files.accelerate_command(measured),) if name == launch_files.ACCELERATE else ()
    return Draft({launch_files.FILE_NAMES[name]: text}, launch)


TARGETS: dict[str, Callable[[Winner], Draft]] = {
    launch_files.ARGUMENTS: partial(_launcher_file, launch_files.ARGUMENTS),
    "python": scripts.python,
    launch_files.ACCELERATE: partial(_launcher_file, launch_files.ACCELERATE),
    "accelerate-loop": scripts.accelerate_loop,
    launch_files.DEEPSPEED: partial(_launcher_file, launch_files.DEEPSPEED),
    launch_files.FSDP: partial(_launcher_file, launch_files.FSDP),
    "trl": scripts.trl,
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "dockerfile": images.dockerfile,
}


def draft(result: ResultData, target: str) -> Draft:
    """Return what a target's files hold, without writing them.

    Raises:
        InputError: There is no such target, or it can't train this.
    """
    if target in _GONE:
        raise InputError(_GONE[target])
    if target not in TARGETS:
        known = (*TARGETS, ALL)
        raise InputError(f"{target}: expected {', '.join(known[:-1])} or {ALL}{suggestion(target, known)}")
    made_by_user = result.workload.own_code is not None or result.workload.model.source == "own"
    if made_by_user and target not in launch_files.FILE_NAMES:
        raise InputError(f"{target}: your own code makes the model, which no script can; --to {launch_files.ARGUMENTS}")
    made = TARGETS[target](Winner(result))
    return made if made.launch else made._replace(launch=launch_files.launch_commands(result))


def drafts(result: ResultData) -> tuple[dict[str, Draft], dict[str, str]]:
    """Return the drafts of all targets that can train an answer, and why the others can't."""
    made: dict[str, Draft] = {}
    left_out: dict[str, str] = {}
    for target in TARGETS:
        try:
            made[target] = draft(result, target)
        except InputError as error:
            left_out[target] = str(error)
    return made, left_out


def save(result: ResultData, target: str, directory: Path) -> Exported:
    """Write the files of a target, or of all that can train the answer, into a directory.

    Raises:
        InputError: There is no such target, or it can't train this.
        OSError: The directory can't be written.
    """
    if target != ALL:
        made = draft(result, target)
        return Exported(written(made.files, directory), made.launch, made.lost)
    found, _ = drafts(result)
    return Exported(
        written(files_of_all(result, found), directory), launch_files.launch_commands(result), lost_of_all(found)
    )


def files_of_all(result: ResultData, found: dict[str, Draft]) -> dict[str, str]:
    """Return the files of several targets, which may share some, and the command lines."""
    files = {name: text for one in found.values() for name, text in one.files.items()}
    return {**files, LAUNCH_FILE: "".join(f"{command}\n" for command in launch_files.launch_commands(result))}


def lost_of_all(found: dict[str, Draft]) -> tuple[str, ...]:
    """Return what several targets can't say."""
    return tuple(f"{target}: {line}" for target, one in found.items() for line in one.lost)


def written(files: dict[str, str], directory: Path) -> tuple[Path, ...]:
    """Write files into a directory, which is made; return their paths.

    Raises:
        OSError: The directory can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        save_text(text, directory / name)
    return tuple(directory / name for name in files)
