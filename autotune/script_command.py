"""`autotune script`: tunes an unchanged script around transformers' Trainer, or runs it with an answer laid over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.completing import Effort, Space
from autotune.console import Debug, Json, Quiet, Verbose, guarded
from autotune.search_options import (
    Allow,
    CheckLoss,
    Device,
    Exhaustive,
    MaxTime,
    MaxTrials,
    Memory,
    Output,
    Repeat,
    TrainSteps,
    TrainTokens,
)
from autotune.watched import watched

if TYPE_CHECKING:
    from autotune.events import Observer
    from autotune.result import TuningResult

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
        from autotune.own_plan import code_of
        from autotune.rundir import ANSWER_FILE, default_run_directory

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
    from autotune import applying
    from autotune.rundir import ANSWER_FILE

    ready: list[applying.Run] = []
    path = answer / ANSWER_FILE if answer.is_dir() else answer
    guarded(lambda: ready.append(applying.prepared(path, command)), as_json=as_json, debug=debug)
    applying.run(ready[0])
