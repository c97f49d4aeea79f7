"""`autotune estimate`: predicts memory and speed of a training without running it."""

from __future__ import annotations

import sys

import typer

from autotune.cli import options
from autotune.cli.console import Json, Quiet, error_document, guarded, print_json, print_text, stderr, stdout


@guarded
def estimate(context: typer.Context, quiet: Quiet = False, as_json: Json = False) -> None:
    """Predict memory and speed of a configuration without running it, or rank configurations.

    Example: autotune estimate --model llama-3-8b --gpu a100-80gb

    With a knob (--micro-batch ... --adapter-rank) that configuration is estimated; without, the best are
    ranked; with --gpu all, the devices of the table; with --devices, the ways to share the training.
    """
    with stderr(quiet=quiet or not sys.stderr.isatty()).status("tracing the model"):
        from autotune.estimates.estimate import report, shortfall
        from autotune.estimates.request import EstimateOptions
        from autotune.planning.options import options_of

        asked = {**options.given(context), "knobs": options.given_knobs(context)}
        found = report(options_of(EstimateOptions, asked))
    error = shortfall(found)
    if as_json:
        document = found.model_dump(mode="json")
        print_json(document if error is None else {**document, **error_document(error)})
    else:
        from autotune.output.estimate_table import estimate_table

        stdout().print(estimate_table(found, with_notes=not quiet), highlight=False)
    if error is not None:
        print_text(f"autotune: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code)
