"""`autotune script`: tunes an unchanged script around transformers' Trainer, or runs it with an answer laid over."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options
from autotune.cli.console import Debug, Json, Quiet, Verbose, guarded, print_json, print_text, stderr, stdout
from autotune.cli.options import (
    Allow,
    CheckLoss,
    Device,
    Effort,
    Exhaustive,
    MaxTime,
    MaxTrials,
    Memory,
    Output,
    Repeat,
    Space,
    TrainSteps,
    TrainTokens,
    TrustRunDir,
)
from autotune.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from autotune.tuning_result import TuningResult
    from autotune.values.events import Observer

# Runs a search for the command line: its progress is drawn on stderr, the answer printed on stdout.


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
        from autotune.search.tuner import SearchInterrupted
        from autotune.tuning_result import with_methods

        console = stderr(quiet=quiet, verbose=verbose)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
        interrupted = None
        try:
            with Progress(console, verbose=verbose) as progress:
                result, path = search(progress)
        except SearchInterrupted as error:
            if error.result is None:
                raise
            interrupted, result, path = error, with_methods(error.result), error.path
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
    from autotune.storage.run_directory import read_plan

    named = read_plan(answer.parent).output
    return answer if named is None else Path(named)


# `autotune resume`: goes on with a search that was stopped, or that is given more time or trials.


def resume(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that was stopped, or is to go on.")],
    max_time: Annotated[
        str | None, typer.Option(help="Of the whole search, what is spent included [as it was].")
    ] = None,
    max_trials: Annotated[int | None, typer.Option(min=1, help="The same of its trials [as it was].")] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="quick, standard, thorough: with its limits [as it was].", autocompletion=options.EFFORTS),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer here too [as find].")] = None,
    trust_run_dir: TrustRunDir = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with a search, within other limits if you like; what was measured is not measured again."""

    def search(observer: Observer) -> tuple[TuningResult, Path]:
        from autotune import api
        from autotune.storage.run_directory import ANSWER_FILE

        result = api.resume(
            run_dir,
            max_time=max_time,
            max_trials=max_trials,
            effort=effort,
            output=output,
            trust_run_dir=trust_run_dir,
            observer=observer,
        )
        return result, run_dir / ANSWER_FILE

    watched(search, output=output, as_json=as_json, debug=debug, quiet=quiet, verbose=verbose)


# All after the first word is the script's.
SETTINGS = {"allow_interspersed_args": False}


def script(
    command: Annotated[list[str], typer.Argument(help="-- python train.py and its arguments.")],
    apply: Annotated[Path | None, typer.Option(help="Train: the script with this best-config.json laid over.")] = None,
    allow: Allow = "optimizer",
    effort: Effort = "standard",
    space: Space = None,
    device: Device = "auto",
    memory: Memory = None,
    max_trials: MaxTrials = None,
    max_time: MaxTime = None,
    exhaustive: Exhaustive = False,
    repeat: Repeat = 1,
    train_steps: TrainSteps = None,
    train_tokens: TrainTokens = None,
    check_loss: CheckLoss = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where all is kept [runs/<script>-<time>].")] = None,
    output: Output = None,
    seed: Annotated[int, typer.Option(help="Of the search and the order of samples.")] = 42,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tune an unchanged script that trains with transformers' Trainer, or trl's: autotune script -- python train.py ...

    Its own arguments are the baseline. With --apply it is run to its end with an answer laid over it.
    """
    if apply is not None:
        _apply(apply, command, as_json=as_json, debug=debug)
        return

    def search(observer: Observer) -> tuple[TuningResult, Path]:
        from autotune import api
        from autotune.planning.user_trainer import code_of
        from autotune.storage.run_directory import ANSWER_FILE, default_run_directory

        directory = run_dir or default_run_directory(code_of(command).name)
        result = api.find(
            script=command,
            allow=allow,
            effort=effort,
            space=space,
            device=device,
            memory=memory,
            max_trials=max_trials,
            max_time=max_time,
            exhaustive=exhaustive,
            repeat=repeat,
            train_steps=train_steps,
            train_tokens=train_tokens,
            check_loss=check_loss,
            run_dir=directory,
            seed=seed,
            output=output,
            observer=observer,
        )
        return result, directory / ANSWER_FILE

    watched(search, output=output, as_json=as_json, debug=debug, quiet=quiet, verbose=verbose)


def _apply(answer: Path, command: list[str], *, as_json: bool, debug: bool) -> None:
    """Run the script; its errors and its exit code are its own."""
    from autotune.integrations import apply
    from autotune.storage.run_directory import ANSWER_FILE

    ready: list[apply.Run] = []
    path = answer / ANSWER_FILE if answer.is_dir() else answer
    guarded(lambda: ready.append(apply.prepared(path, command)), as_json=as_json, debug=debug)
    apply.run(ready[0])
