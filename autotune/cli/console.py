"""Shared by all commands: common options, errors as one line with an exit code, and output on stdout and stderr."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn, TextIO

import typer

from autotune.errors import EXIT_BUG, EXIT_INTERRUPTED, AutotuneError, InfrastructureError, InputError, names_checked
from autotune.units import visible

Json = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer, and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show predictions, refusals and conditions, too.")]

_LONGEST = 2000  # characters of an error, which may repeat what was given

_NO_TERMINAL = 120  # columns of output that no terminal shows

# Warns at import, on processors with bfloat16 instructions, of a missing kernel for inference (bitsandbytes 0.50).
_UNNEEDED_WARNING = "bitsandbytes.backends.cpu.ops"


@contextlib.contextmanager
def told_errors(*, as_json: bool, debug: bool) -> Iterator[None]:
    """Turn an error into one line, or a JSON object, and an exit code; with `debug` keep its traceback."""
    try:
        with names_checked():
            yield
    except AutotuneError as error:
        if debug:
            raise
        _fail(str(error), type(error).__name__, error.exit_code, as_json=as_json)
    except KeyboardInterrupt:
        _fail("interrupted", "KeyboardInterrupt", EXIT_INTERRUPTED, as_json=as_json)
    except typer.Exit:
        raise
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(0) from None
    except Exception as error:
        if debug:
            raise
        where = f"{str(error.filename)[:100]}: " if isinstance(error, OSError) and error.filename else ""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"{where}the disk is full", "InfrastructureError", InfrastructureError.exit_code, as_json=as_json)
        text = f"a bug in autotune: {type(error).__name__}: {error} (--debug shows the traceback)"
        _fail(text, type(error).__name__, EXIT_BUG, as_json=as_json)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that runs within `told_errors` and has the option --debug beside its own options."""
    own = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)

    @functools.wraps(command)
    def run(*arguments: Any, debug: bool = False, **options: Any) -> None:
        with told_errors(as_json=options.get("as_json", False), debug=debug):
            hush(verbose=options.get("verbose", False))
            if not options.get("verbose"):
                os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            command(*arguments, **options)

    run.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    return run


def hush(*, verbose: bool) -> None:
    """Keep a library's warning that concerns no training from the output, unless it is `verbose`."""
    logging.getLogger(_UNNEEDED_WARNING).setLevel(logging.NOTSET if verbose else logging.ERROR)


@contextlib.contextmanager
def writing(where: str) -> Iterator[None]:
    """Turn an OSError into an error about `where`, such as '--output DIR'.

    Raises:
        InputError: The file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{where}: can't be written: {error.strerror}") from None


def error_document(error: AutotuneError) -> dict[str, Any]:
    """Return an error as `--json` prints it."""
    return {"error": {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}}


def _fail(message: str, kind: str, exit_code: int, *, as_json: bool) -> NoReturn:
    line = visible(" ".join(message.split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    if as_json:
        print_json({"error": {"kind": kind, "message": line, "exit_code": exit_code}})
    print(f"autotune: {line}", file=sys.stderr)
    raise typer.Exit(exit_code)


def print_json(document: Any) -> None:
    """Print a document on stdout."""
    print(json.dumps(document, indent=2))


def print_text(*lines: str, file: TextIO | None = None) -> None:
    """Print lines on `file` (stdout by default), with invisible characters as escapes."""
    for line in lines:
        print(visible(line), file=file)


def stdout() -> Any:
    """Return rich's console on stdout; without a terminal it is 120 columns wide, unless COLUMNS is set."""
    from autotune.output.terminal import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_NO_TERMINAL)


def stderr(*, quiet: bool = False, verbose: bool = False) -> Any:
    """Return rich's console on stderr, which prints nothing if `quiet`; InputError: both are asked for."""
    from autotune.output.terminal import Console

    if quiet and verbose:
        raise InputError("--quiet and --verbose contradict each other; drop one of the two")
    return Console(stderr=True, quiet=quiet)
