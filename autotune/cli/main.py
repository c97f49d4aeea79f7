"""The command line: turns words into values, draws what happens, and turns errors into exit codes.

Nothing heavy is imported before a command needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import dashboard, export, history, listings, options, reports, search
from autotune.cli.console import (
    Debug,
    Json,
    Quiet,
    Verbose,
    error_document,
    guarded,
    print_json,
    print_text,
    stderr,
    stdout,
)
from autotune.cli.knobs import KnobCommand, given_knobs
from autotune.cli.options import (
    Allow,
    CheckLoss,
    Device,
    Effort,
    Engine,
    Exhaustive,
    Gpu,
    MaxTime,
    MaxTrials,
    Memory,
    Model,
    Output,
    Repeat,
    Space,
    Task,
    TrainSteps,
    TrainTokens,
)
from autotune.cli.search import watched
from autotune.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autotune.estimates.report import Report
    from autotune.tuning_result import TuningResult
    from autotune.values.events import Observer

app = typer.Typer(
    name="autotune",
    help="Find the fastest training configuration that fits the memory of a GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 found, 1 a bug, 2 bad input, 3 the machine lacks something, 4 infrastructure failed, "
    "5 nothing fits, 130 interrupted.",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of autotune and libraries.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """Answer what is asked of no command."""
    if version:
        guarded(lambda: _show_versions(as_json=as_json), as_json=as_json, debug=False)
        raise typer.Exit
    if as_json:
        context.fail("--json before a command goes with --version alone; it belongs behind the command")
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


def _show_versions(*, as_json: bool) -> None:
    from autotune.cli.versions import versions

    print(versions().model_dump_json(indent=2) if as_json else versions().text)


@app.command()
def find(
    model: Model,
    task: Task = None,
    data: Annotated[str | None, typer.Option(help="JSONL, CSV, Parquet or text; default: synthetic.")] = None,
    text_field: Annotated[str | None, typer.Option(help="Column of --data that holds the text.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, or frames [512; CPU 128].")] = None,
    target_len: Annotated[int | None, typer.Option(min=1, help="Decoder tokens [as --seq-len; speech 128].")] = None,
    global_batch: Annotated[str | None, typer.Option(help="Samples per step, or 'any' [64; CPU 16].")] = None,
    baseline: Annotated[str | None, typer.Option(help="JSON of your TrainingArguments to compare with.")] = None,
    allow: Allow = "optimizer",
    effort: Effort = "standard",
    space: Space = None,
    device: Device = "auto",
    devices: Annotated[str | None, typer.Option(help="Spread each training over so many, or all [1].")] = None,
    memory: Memory = None,
    max_trials: MaxTrials = None,
    max_time: MaxTime = None,
    exhaustive: Exhaustive = False,
    repeat: Repeat = 1,
    train_steps: TrainSteps = None,
    train_tokens: TrainTokens = None,
    check_loss: CheckLoss = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where all is kept [runs/<model>-<time>].")] = None,
    output: Output = None,
    seed: Annotated[int, typer.Option(help="Of weights, data and the search.")] = 42,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    no_record: Annotated[bool, typer.Option("--no-record", help="Don't use or add to `autotune history`.")] = False,
    report_to: Annotated[str, typer.Option(help="Tell tensorboard, wandb, mlflow (commas) of each trial.")] = "",
    workers: Annotated[int | None, typer.Option(min=1, help="Trials at once, each on a device or cores [1].")] = None,
    engine: Engine = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster [RAY_ADDRESS, else one here].")] = None,
    kind: Annotated[str | None, typer.Option(help="Part of a device's name in a mixed cluster [most nodes].")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Search for the fastest configuration that fits, and write best-config.json."""

    def search(observer: Observer) -> tuple[TuningResult, Path]:
        from autotune import api
        from autotune.storage.run_directory import ANSWER_FILE, default_run_directory

        directory = run_dir or default_run_directory(model)
        result = api.find(
            model,
            task=task,
            data=data,
            text_field=text_field,
            seq_len=seq_len,
            target_len=target_len,
            global_batch=_global_batch(global_batch),
            baseline=baseline,
            allow=allow,
            effort=effort,
            space=space,
            device=device,
            devices=_count(devices, "--devices", "all"),
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
            revision=revision,
            trust_remote_code=trust_remote_code,
            record=not no_record,
            report_to=report_to,
            workers=workers,
            engine=engine,
            address=address,
            kind=kind,
            output=output,
            observer=observer,
        )
        return result, directory / ANSWER_FILE

    watched(search, output=output, as_json=as_json, debug=debug, quiet=quiet, verbose=verbose)


app.command()(search.resume)


@app.command(cls=KnobCommand)
def estimate(
    context: typer.Context,
    model: Model,
    gpu: Gpu = None,
    memory: Annotated[str | None, typer.Option(help="Device memory; without --gpu some GPU of this size.")] = None,
    task: Task = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, or frames [512; CPU 128].")] = None,
    target_len: Annotated[int | None, typer.Option(min=1, help="Decoder tokens [as --seq-len; speech 128].")] = None,
    global_batch: Annotated[str | None, typer.Option(help="Samples per step, or 'any' [64; CPU 16].")] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="What a ranking may change, as of find [optimizer].", autocompletion=options.ALLOWANCES),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Length of a run to cost, such as 20B or 300e9.")] = None,
    prices: Annotated[str | None, typer.Option(help="YAML or JSON: a currency, prices per hour by GPU.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines that --devices are on [of 8 each].")] = None,
    network_gb_s: Annotated[float | None, typer.Option(help="GB/s of a node to others [25 a device].")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Of a node, for what is offloaded [this machine's].")] = None,
    device: Annotated[
        str, typer.Option(help="Of this machine: auto, cpu, cuda or cuda:N.", autocompletion=options.DEVICES)
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict memory and speed without running: of the knobs given, or of the best.

    With a knob (--micro-batch ... --adapter-rank) the estimate is of that configuration; without, the best
    predicted ones are ranked; with --gpu all, the devices of the table; with --devices, the ways to share.
    """

    def predict() -> Report:
        from autotune.estimates import estimate
        from autotune.estimates.run_cost import parse_count
        from autotune.units import parse_memory

        options = estimate.options_of(
            model=model,
            task=task,
            seq_len=seq_len,
            target_len=target_len,
            global_batch=_global_batch(global_batch),
            gpu=gpu,
            memory_bytes=None if memory is None else parse_memory(memory),
            nodes=nodes,
            network_gb_s=network_gb_s,
            host_memory_bytes=None if host_memory is None else parse_memory(host_memory),
            device=device,
            knobs=given_knobs(context),
            allow=allow,
            tokens=None if tokens is None else parse_count(tokens),
            prices=prices,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        return estimate.report(options)

    guarded(lambda: _show_estimate(predict, as_json=as_json, quiet=quiet), as_json=as_json, debug=debug)


def _global_batch(text: str | None) -> Any:
    """Return a number above 0, 'any' or None."""
    return _count(text, "--global-batch", "any")


def _count(text: str | None, option: str, word: str) -> Any:
    """Return a number above 0, `word` or None."""
    if text is None or text == word:
        return text
    # More digits are no number that is meant, and Python converts no more than 4300.
    if not re.fullmatch("[0-9]{1,100}", text) or int(text) < 1:
        raise InputError(f"{option} {text[:100]}: expected a whole number above 0, or {word}")
    return int(text)


def _show_estimate(predict: Callable[[], Report], *, as_json: bool, quiet: bool) -> None:
    """Print an estimate; one of a configuration that doesn't fit ends with an error all the same."""
    with stderr(quiet=quiet or not sys.stderr.isatty()).status("tracing the model"):
        report = predict()
    from autotune.estimates.estimate import shortfall

    error = shortfall(report)
    if as_json:
        document = report.model_dump(mode="json")
        print_json(document if error is None else {**document, **error_document(error)})
    else:
        from autotune.output.estimate_table import estimate_table

        stdout().print(estimate_table(report, with_notes=not quiet), highlight=False)
    if error is not None:
        print_text(f"autotune: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code)


for _command in (listings.models, listings.gpus, listings.spaces, listings.doctor):
    app.command()(_command)
app.command(context_settings=search.SETTINGS)(search.script)
app.command()(reports.report)
app.command()(reports.explain)
app.command()(export.export)
app.command()(dashboard.dashboard)
app.command()(options.completion)
app.add_typer(history.history, name="history")


def main() -> None:
    """Run the command line; usage errors end with exit code 2, as typer has it."""
    app()
