"""The command line: turns words into values, draws what happens, and turns errors into exit codes.

Nothing heavy is imported before a command needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune import export_command, history_commands, listing_commands, report_commands
from autotune.console import Debug, Json, error_document, guarded, print_json, stdout
from autotune.errors import EXIT_INTERRUPTED, InputError
from autotune.knob_options import KnobCommand, given_knobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from autotune.estimate_report import Report
    from autotune.events import Observer
    from autotune.result import TuningResult

app = typer.Typer(
    name="autotune",
    help="Find the fastest training configuration that fits the memory of a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 found, 1 a bug, 2 bad input, 3 the machine lacks something, 4 infrastructure failed, "
    "5 nothing fits, 130 interrupted.",
)


@app.command()
def find(
    model: Annotated[str, typer.Option(help="Catalogue name, directory with config.json, or hub id.")],
    task: Annotated[str | None, typer.Option(help="Head to train; by default the architecture's usual one.")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL, CSV, Parquet or text; default: synthetic.")] = None,
    text_field: Annotated[str | None, typer.Option(help="Column of --data that holds the text.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, or frames [512; CPU 128].")] = None,
    target_len: Annotated[int | None, typer.Option(min=1, help="Decoder tokens [as --seq-len; speech 128].")] = None,
    global_batch: Annotated[str | None, typer.Option(help="Samples per step, or 'any' [64; CPU 16].")] = None,
    baseline: Annotated[str | None, typer.Option(help="JSON of your TrainingArguments to compare with.")] = None,
    allow: Annotated[str, typer.Option(help="What may change: exact, numerics, optimizer, method.")] = "optimizer",
    effort: Annotated[str, typer.Option(help="How long to search: quick, standard, thorough.")] = "standard",
    space: Annotated[str | None, typer.Option(help="Built-in search space or YAML file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    devices: Annotated[str | None, typer.Option(help="Spread each training over so many, or all [1].")] = None,
    memory: Annotated[str | None, typer.Option(help="Device memory to stay within, such as 24GiB.")] = None,
    max_trials: Annotated[int | None, typer.Option(min=1, help="Trials of the search.")] = None,
    max_time: Annotated[str | None, typer.Option(help="Time of the whole search, such as 10m.")] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure every point; write table.jsonl.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Times each point is measured (--exhaustive).")] = 1,
    train_steps: Annotated[int | None, typer.Option(min=1, help="Minimise the time of a run of so many steps.")] = None,
    train_tokens: Annotated[str | None, typer.Option(help="The same in tokens, such as 20B.")] = None,
    check_loss: Annotated[int | None, typer.Option(min=0, help="Steps whose losses must agree [20; quick 0].")] = None,
    shallow: Annotated[bool | None, typer.Option(help="Run candidates with few layers first [no].")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where all is kept [runs/<model>-<time>].")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer here too.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data and the search.")] = 42,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    no_record: Annotated[bool, typer.Option("--no-record", help="Don't use or add to `autotune history`.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Trials at once, each on a device or cores [1].")] = None,
    engine: Annotated[str, typer.Option(help="What runs trials: local, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster [RAY_ADDRESS, else one here].")] = None,
    kind: Annotated[str | None, typer.Option(help="Part of a device's name in a mixed cluster [most nodes].")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Search for the fastest configuration that fits, and write best-config.json."""

    def search(observer: Observer) -> tuple[TuningResult, Path]:
        from autotune import api
        from autotune.rundir import ANSWER_FILE, default_run_directory

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
            shallow=shallow,
            run_dir=directory,
            seed=seed,
            revision=revision,
            trust_remote_code=trust_remote_code,
            record=not no_record,
            workers=workers,
            engine=engine,
            address=address,
            kind=kind,
            observer=observer,
        )
        return result, directory / ANSWER_FILE

    _search(search, output=output, as_json=as_json, debug=debug)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that was stopped.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer here too.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with a search; what was measured is not measured again."""

    def search(observer: Observer) -> tuple[TuningResult, Path]:
        from autotune import api
        from autotune.rundir import ANSWER_FILE

        return api.resume(run_dir, observer=observer), run_dir / ANSWER_FILE

    _search(search, output=output, as_json=as_json, debug=debug)


@app.command(cls=KnobCommand)
def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Catalogue name, directory with config.json, or hub id.")],
    gpu: Annotated[str | None, typer.Option(help="Device of `autotune gpus`, or all [this machine's].")] = None,
    memory: Annotated[str | None, typer.Option(help="Device memory; without --gpu some GPU of this size.")] = None,
    task: Annotated[str | None, typer.Option(help="Head to train; by default the architecture's usual one.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, or frames [512; CPU 128].")] = None,
    target_len: Annotated[int | None, typer.Option(min=1, help="Decoder tokens [as --seq-len; speech 128].")] = None,
    global_batch: Annotated[str | None, typer.Option(help="Samples per step, or 'any' [64; CPU 16].")] = None,
    allow: Annotated[str | None, typer.Option(help="What a ranking may change, as of find [optimizer].")] = None,
    tokens: Annotated[str | None, typer.Option(help="Length of a run to cost, such as 20B or 300e9.")] = None,
    prices: Annotated[str | None, typer.Option(help="YAML or JSON: a currency, prices per hour by GPU.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines that --devices are on [of 8 each].")] = None,
    network_gb_s: Annotated[float | None, typer.Option(help="GB/s of a node to others [25 a device].")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Of a node, for what is offloaded [this machine's].")] = None,
    device: Annotated[str, typer.Option(help="Of this machine: auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict memory and speed without running: of the knobs given, or of the best.

    With a knob (--micro-batch ... --adapter-rank) the estimate is of that configuration; without, the best
    predicted ones are ranked; with --gpu all, the devices of the table; with --devices, the ways to share.
    """

    def predict() -> Report:
        from autotune import estimating
        from autotune.run_cost import parse_count
        from autotune.units import parse_memory

        options = estimating.options_of(
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
        return estimating.report(options)

    guarded(lambda: _show_estimate(predict, as_json=as_json), as_json=as_json, debug=debug)


def _global_batch(text: str | None) -> Any:
    """Return a number above 0, 'any' or None."""
    return _count(text, "--global-batch", "any")


def _count(text: str | None, option: str, word: str) -> Any:
    """Return a number above 0, `word` or None."""
    if text is None or text == word:
        return text
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{option} {text}: expected a whole number above 0, or {word}")
    return int(text)


def _show_estimate(predict: Callable[[], Report], *, as_json: bool) -> None:
    """Print an estimate; one of a configuration that doesn't fit ends with an error all the same."""
    from rich.console import Console

    with Console(stderr=True).status("tracing the model"):
        report = predict()
    from autotune.estimating import shortfall

    error = shortfall(report)
    if as_json:
        document = report.model_dump(mode="json")
        print_json(document if error is None else {**document, **error_document(error)})
    else:
        from autotune.output.estimate_table import estimate_table

        stdout().print(estimate_table(report), highlight=False)
    if error is not None:
        print(f"autotune: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code)


def _search(
    search: Callable[[Observer], tuple[TuningResult, Path]],
    *,
    output: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Run a search with its progress drawn on stderr, then print the answer."""

    def run() -> None:
        from rich.console import Console

        from autotune.output.progress import Progress
        from autotune.tuner import SearchInterrupted

        if output is not None:
            _check_writable(output)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
        interrupted = None
        try:
            with Progress(Console(stderr=True)) as progress:
                result, path = search(progress)
        except SearchInterrupted as error:
            if error.result is None:
                raise
            interrupted, result, path = error, error.result, error.path
        if output is not None:
            result.save(output)
            path = output
        if as_json:
            print(result.model_dump_json(indent=2))
        else:
            from autotune.output.table import result_table

            stdout().print(result_table(result, str(path)), highlight=False)
        if interrupted is not None:
            print(f"autotune: {interrupted}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED)

    guarded(run, as_json=as_json, debug=debug)


def _check_writable(path: Path) -> None:
    """Fail in second 0, not after an hour."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"--output {path}: can't be written: {error.strerror}") from None


for _command in (listing_commands.models, listing_commands.gpus, listing_commands.spaces, listing_commands.doctor):
    app.command()(_command)
app.command()(report_commands.report)
app.command()(report_commands.explain)
app.command()(export_command.export)
app.add_typer(history_commands.history, name="history")


def main() -> None:
    """Run the command line; usage errors end with exit code 2, as typer has it."""
    app()
