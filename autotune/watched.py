"""Runs a search for the command line: its progress is drawn on stderr, the answer printed on stdout."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autotune.console import guarded, print_json, print_text, stderr, stdout
from autotune.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from autotune.events import Observer
    from autotune.result import TuningResult


def watched(
    search: Callable[[Observer], tuple[TuningResult, Path]],
    *,
    output: Path | None,
    as_json: bool,
    debug: bool,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """Run a search with its progress drawn, then print the answer.

    Args:
        search: Runs it, and returns its answer and the file that holds it.
        output: Where the search writes the answer too, if that is said anew.
        as_json: Whether it is printed as JSON.
        debug: Whether errors show their traceback.
        quiet: Whether the answer alone is printed.
        verbose: Whether more is told of each trial.
    """

    def run() -> None:
        from autotune.output.progress import Progress
        from autotune.tuner import SearchInterrupted

        console = stderr(quiet=quiet, verbose=verbose)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
        interrupted = None
        try:
            with Progress(console, verbose=verbose) as progress:
                result, path = search(progress)
        except SearchInterrupted as error:
            if error.result is None:
                raise
            interrupted, result, path = error, error.result, error.path
        kept, path = str(path.parent), output or _wanted(path)
        if as_json:
            print_json(result.model_dump(mode="json"))
        else:
            from autotune.output.table import result_table

            stdout().print(result_table(result, str(path), kept), highlight=False, crop=False)
        if interrupted is not None:
            print_text(f"autotune: {interrupted}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED)

    guarded(run, as_json=as_json, debug=debug)


def _wanted(answer: Path) -> Path:
    """Return where the user looks for an answer: the file that was named when its search began, or its own."""
    from autotune.search_plan import read_plan

    named = read_plan(answer.parent).output
    return answer if named is None else Path(named)
