"""`autotune export`: writes the best configuration of a search as files of other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.console import Json, guarded, print_json, print_text, writing
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.exports.winner import Draft

_TARGETS = (
    "training-args, python, accelerate, accelerate-loop, deepspeed, fsdp, trl, axolotl, llama-factory, dockerfile, "
    "or all that can train it."
)


@guarded
def export(
    best: Annotated[Path, typer.Argument(help="best-config.json, or the run directory it lies in.")],
    to: Annotated[str, typer.Option(help=_TARGETS)] = "all",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; of several files, a directory.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the names of the files alone.")] = False,
    as_json: Json = False,
) -> None:
    """Write the best configuration as a script, or as files that other tools read."""
    from autotune.exports import launch_files, targets
    from autotune.storage.run_directory import ANSWER_FILE
    from autotune.tuning_result import load

    answer = best / ANSWER_FILE if best.is_dir() else best
    result = load(answer)
    left_out: dict[str, str] = {}
    if to == targets.ALL:
        found, left_out = targets.drafts(result, str(answer))
        if output is None:
            raise InputError("--to all needs a directory for the files (--output DIR)")
        launch = launch_files.launch_commands(result, str(answer))
        paths = _written(targets.files_of_all(result, found, str(answer)), output)
    else:
        draft = targets.draft(result, to, str(answer))
        if output is None and not as_json:
            _print(draft, quiet=quiet)
            return
        draft, paths = _save(draft, output)
        found, launch = {to: draft}, draft.launch
    lost = {target: draft.lost for target, draft in found.items()}
    missing = targets.missing_script(result, str(answer), launch, [path.name for path in paths])
    _tell(paths, launch, lost, left_out, missing, as_json=as_json, quiet=quiet)


def _save(draft: Draft, output: Path | None) -> tuple[Draft, list[Path]]:
    """Write the files of one target: a single file as `output` or into that directory, several into the directory."""
    if output is None:
        raise InputError("--json lists the files that were written, so it needs --output")
    if len(draft.files) > 1:
        return draft, _written(draft.files, output)
    placed = draft.placed(output / next(iter(draft.files)) if output.is_dir() else output)
    return placed, _written(placed.files, output if output.is_dir() else output.parent)


def _written(files: dict[str, str], directory: Path) -> list[Path]:
    from autotune.exports.launch_files import written

    with writing(f"--output {directory}"):
        return list(written(files, directory))


def _print(draft: Draft, *, quiet: bool) -> None:
    """Print the first file on stdout and, unless `quiet`, remarks on stderr."""
    first, *others = draft.files
    sys.stdout.write(draft.files[first])
    if quiet:
        return
    if others:
        print_text(f"further files: {', '.join(others)} (--output DIR writes all)", file=sys.stderr)
    print_text(*(f"not expressed: {line}" for line in draft.lost), file=sys.stderr)


def _tell(
    paths: list[Path],
    launch: tuple[str, ...],
    lost: dict[str, tuple[str, ...]],
    left_out: dict[str, str],
    missing: str,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    document: dict[str, Any] = {
        "files": [str(path) for path in paths],
        "launch": list(launch),
        "not_expressed": {target: list(lines) for target, lines in lost.items() if lines},
        "left_out": left_out,
        **({"note": missing} if missing else {}),
    }
    if as_json:
        print_json(document)
        return
    if quiet:
        print_text(*document["files"])
        return
    several = len(lost) > 1
    lines = [f"written: {path}" for path in document["files"]]
    lines += [f"launch:  {command}" for command in document["launch"]]
    lines += [f"note:    {missing}"] if missing else []
    lines += [
        f"not expressed: {f'{target}: ' if several else ''}{line}" for target, found in lost.items() for line in found
    ]
    lines += [f"left out: {reason}" for reason in left_out.values()]
    print_text(*lines)
