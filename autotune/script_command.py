"""`autotune script`: tunes an unchanged script around transformers' Trainer, or runs it with an answer laid over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.console import Debug, Json, Quiet, Verbose, guarded
from autotune.watched import watched

if TYPE_CHECKING:
    from autotune.events import Observer
    from autotune.result import TuningResult

# All after the first word is the script's.
SETTINGS = {"allow_interspersed_args": False}


def script(
    command: Annotated[list[str], typer.Argument(help="-- python train.py and its arguments.")],
    apply: Annotated[Path | None, typer.Option(help="Train: the script with this best-config.json laid over.")] = None,
    allow: Annotated[str, typer.Option(help="What may change: exact, numerics, optimizer, method.")] = "optimizer",
    effort: Annotated[str, typer.Option(help="How long to search: quick, standard, thorough.")] = "standard",
    space: Annotated[str | None, typer.Option(help="Built-in search space or YAML file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[str | None, typer.Option(help="Device memory to stay within, such as 24GiB.")] = None,
    max_trials: Annotated[int | None, typer.Option(min=1, help="Trials of the search.")] = None,
    max_time: Annotated[str | None, typer.Option(help="Time of the whole search, such as 10m.")] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure every point; write table.jsonl.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Times each point is measured (--exhaustive).")] = 1,
    train_steps: Annotated[int | None, typer.Option(min=1, help="Minimise the time of a run of so many steps.")] = None,
    train_tokens: Annotated[str | None, typer.Option(help="The same in tokens, such as 20B.")] = None,
    check_loss: Annotated[int | None, typer.Option(min=0, help="Steps whose losses must agree [20; quick 0].")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where all is kept [runs/<script>-<time>].")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer here too.")] = None,
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
