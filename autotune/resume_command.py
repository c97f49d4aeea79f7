"""`autotune resume`: goes on with a search that was stopped, or that is given more time or trials."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune import completing
from autotune.console import Debug, Json, Quiet, Verbose
from autotune.search_options import TrustRunDir
from autotune.watched import watched

if TYPE_CHECKING:
    from autotune.events import Observer
    from autotune.result import TuningResult


def resume(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that was stopped, or is to go on.")],
    max_time: Annotated[
        str | None, typer.Option(help="Of the whole search, what is spent included [as it was].")
    ] = None,
    max_trials: Annotated[int | None, typer.Option(min=1, help="The same of its trials [as it was].")] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="quick, standard, thorough: with its limits [as it was].", autocompletion=completing.EFFORTS),
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
        from autotune.rundir import ANSWER_FILE

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
