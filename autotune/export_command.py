"""`autotune export`: the answer of a search as the files of launchers and libraries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.console import Debug, Json, guarded, print_json, stdout
from autotune.errors import InputError, suggestion

if TYPE_CHECKING:
    from autotune.result import TuningResult


def export(
    best: Annotated[Path, typer.Argument(help="best-config.json, or the run directory it lies in.")],
    to: Annotated[str, typer.Option(help="training-args, accelerate, fsdp, deepspeed, or all.")] = "all",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; of all, a directory.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the best configuration as files that Trainer, accelerate, FSDP and DeepSpeed read."""

    def write() -> None:
        from autotune.launch_files import FILE_NAMES

        result = _result(best)
        if to == "all":
            _save_all(result, output, as_json=as_json)
            return
        if to not in FILE_NAMES:
            known = (*FILE_NAMES, "all")
            raise InputError(f"--to {to}: expected {', '.join(known[:-1])} or {known[-1]}{suggestion(to, known)}")
        text = result.file_text(to)
        if output is None:
            stdout().out(text, end="", highlight=False)
            return
        _write(text, output)
        _tell([output], result, as_json=as_json)

    guarded(write, as_json=as_json, debug=debug)


def _result(best: Path) -> TuningResult:
    from autotune.result import load
    from autotune.rundir import ANSWER_FILE

    return load(best / ANSWER_FILE if best.is_dir() else best)


def _save_all(result: TuningResult, directory: Path | None, *, as_json: bool) -> None:
    if directory is None:
        raise InputError("--to all needs a directory for the files (--output DIR)")
    try:
        paths = result.save_files(directory)
    except OSError as error:
        raise InputError(f"--output {directory}: can't be written: {error.strerror}") from None
    _tell(list(paths), result, as_json=as_json)


def _write(text: str, path: Path) -> None:
    from autotune.files import write_text

    try:
        write_text(text, path)
    except OSError as error:
        raise InputError(f"--output {path}: can't be written: {error.strerror}") from None


def _tell(paths: list[Path], result: TuningResult, *, as_json: bool) -> None:
    document: dict[str, Any] = {"files": [str(path) for path in paths], "launch": list(result.launch_commands)}
    if as_json:
        print_json(document)
        return
    for path in document["files"]:
        stdout().print(f"written: {path}", highlight=False, soft_wrap=True)
    for command in document["launch"]:
        stdout().print(f"launch:  {command}", highlight=False, soft_wrap=True)
