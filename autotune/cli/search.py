"""Commands that search: `autotune find`, `resume` and `script`; and `autotune estimate`, which predicts alone.

Progress is drawn on stderr; the answer is printed on stdout.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console
from autotune.cli.console import Debug, Json, Quiet, TrustRunDir, Verbose, guarded
from autotune.errors import EXIT_INTERRUPTED, AutotuneError, InputError, MachineError, NothingFitsError
from autotune.units import show_memory

if TYPE_CHECKING:
    from autotune.tuning_result import TuningResult

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be tried; run no trial.")]


@guarded
def find(
    context: typer.Context,
    run_dir: Annotated[Path | None, typer.Option(help="Where all is kept [runs/<model>-<time>-<process>].")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Search for the fastest configuration that fits, and write best-config.json.

    Example: autotune find --model gpt2 --data texts.jsonl --max-time 10m
    """
    asked = console.given(context)
    _find(context, asked, asked["model"], run_dir, dry_run=dry_run, as_json=as_json, quiet=quiet, verbose=verbose)


@guarded
def resume(
    context: typer.Context,
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that was stopped, or is to go on.")],
    max_time: Annotated[
        str | None, typer.Option(help="Time of the whole search, with what is spent [as it was].")
    ] = None,
    max_trials: Annotated[int | None, typer.Option(min=1, help="Trials of the whole search [as it was].")] = None,
    effort: Annotated[str | None, typer.Option(help="quick, standard, thorough: with its limits [as it was].")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer here too [as find].")] = None,
    trust_run_dir: TrustRunDir = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Go on with a search, within other limits if you like; no measurement is repeated."""
    from autotune import api

    limits: dict[str, Any] = {"max_time": max_time, "max_trials": max_trials, "effort": effort}
    search = partial(api.resume, run_dir, **limits, output=output, trust_run_dir=trust_run_dir)
    _watched(context, search, run_dir, output, as_json=as_json, quiet=quiet, verbose=verbose)


def script(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="-- python train.py and its arguments.")],
    apply: Annotated[
        Path | None,
        typer.Option(help="Train: the script with this best-config.json laid over.", rich_help_panel="What may change"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run: its exact memory on a GPU that isn't here, or all.", rich_help_panel="Where it runs"
        ),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where all is kept [runs/<script>-<time>-<process>].")] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    debug: Debug = False,
) -> Callable[[], None] | None:
    """Tune an unchanged script that trains with transformers' Trainer, or trl's.

    Example: autotune script --max-time 10m -- python train.py --bf16 true

    Its own arguments are the baseline. With --apply it is run to its end with an answer laid over it; with --gpu and
    --dry-run a few steps of it run without a GPU, on a stand-in for one, for its memory.
    """
    console.silence_libraries(verbose=verbose)
    with console.reporting_errors(as_json=as_json, debug=debug):
        if gpu is not None:
            if not dry_run:
                raise InputError(f"--gpu {gpu}: a search needs the device; --dry-run tells the memory without it")
            heeded = {"gpu", "dry_run", "devices", "quiet", "verbose", "as_json"}
            _leave_out(context, heeded, "and with --gpu the script is run as it is")
            _rehearse(gpu, command, console.given(context).get("devices"), quiet=quiet, as_json=as_json)
            return None
        if apply is None:
            from autotune.planning.launchers import code_of

            asked = {**console.given(context), "script": command}
            shown = {"as_json": as_json, "quiet": quiet, "verbose": verbose}
            _find(context, asked, code_of(command).name, run_dir, dry_run=dry_run, **shown)
            return None
        _leave_out(context, {"apply"}, "and --apply trains")
        from autotune.integrations.apply import prepared, run

        return partial(run, *prepared(apply, command))


def _leave_out(context: typer.Context, allowed: set[str], why: str) -> None:
    """Refuse (InputError) options of a search beside those that are allowed."""
    for parameter in context.command.get_params(context):
        name, heeded = str(parameter.name), {*allowed, "command", "debug"}
        if name not in heeded and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise InputError(f"{parameter.opts[0]}: is of a search, {why}; leave one of them out")


def _rehearse(gpu: str, command: list[str], devices: str | None, *, quiet: bool, as_json: bool) -> None:
    from autotune.output.estimate_table import cards_table, rehearsal_table
    from autotune.rehearsal import rehearse, rehearse_on_all

    console.take_signals_for_ctrl_c()
    with console.stderr(quiet=quiet or not sys.stderr.isatty()).status("running it on the stand-in"):
        asked: dict[str, Any] = {"script": command, "devices": devices}
        found = rehearse_on_all(**asked) if gpu == "all" else [rehearse(gpu=gpu, **asked)]
    first, told = found[0], [each for each in found if each.refused is None]
    error: AutotuneError | None = None
    if not told:
        error = MachineError(f"its memory can't be told here: {first.refused}")
    elif all(each.chance_to_fit < 0.5 for each in told):
        needed = show_memory(min(each.peak.peak_bytes for each in told))
        how = "where memory is ample, what torch's allocator holds unused included"
        error = NothingFitsError(f"{first.workload.model.name} takes {needed} {how}")
    documents = [each.model_dump(mode="json") for each in found]
    document = {"gpus": documents} if gpu == "all" else documents[0]
    table = cards_table(found) if gpu == "all" else rehearsal_table(first) if first.refused is None else ""
    _print_with_error(document, table, error, as_json=as_json)


def _print_with_error(document: dict[str, Any], table: Any, error: AutotuneError | None, *, as_json: bool) -> None:
    """Print what was found; end with the exit code of an `error` that is part of it (typer.Exit)."""
    if error is not None:
        document["error"] = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    console.show(document, table, as_json=as_json)
    if error is not None:
        console.print_text(f"autotune: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code)


@guarded
def estimate(context: typer.Context, quiet: Quiet = False, as_json: Json = False) -> None:
    """Predict memory and speed of a configuration without running it, or rank configurations.

    Example: autotune estimate --model llama-3-8b --gpu a100-80gb

    It ranks the best configurations; with --gpu all the devices of the table, with --devices 8 the ways to share a
    training. With --fix precision=bf16,micro-batch=8 it estimates that configuration.
    """
    with console.stderr(quiet=quiet or not sys.stderr.isatty()).status("tracing the model"):
        from autotune.estimates.estimate import report, shortfall
        from autotune.planning.options import EstimateOptions, options_of

        found = report(options_of(EstimateOptions, console.given(context)))
        from autotune.output.estimate_table import estimate_table

        table = estimate_table(found, with_notes=not quiet)
    _print_with_error(found.model_dump(mode="json"), table, shortfall(found), as_json=as_json)


def _find(
    context: typer.Context, asked: dict[str, Any], name: str, run_dir: Path | None, *, dry_run: bool, **shown: bool
) -> None:
    """Search for what is asked, by default in a run directory of that name, or with `dry_run` show what would be."""
    from autotune import api

    if not dry_run:
        from autotune.storage.run_directory import default_run_directory

        directory = run_dir or default_run_directory(name)
        _watched(context, partial(api.find, **asked, run_dir=directory), directory, asked.get("output"), **shown)
        return
    if asked.get("output") is not None:
        raise InputError("--output: is of a search, and --dry-run has none; leave one of them out")
    from autotune.output.listings import preview_table

    with console.progress(quiet=shown["quiet"], verbose=shown["verbose"]) as progress:
        found = api.preview(**asked, observer=progress)
    console.show(found.model_dump(mode="json"), preview_table(found), as_json=shown["as_json"])


def _watched(
    context: typer.Context,
    search: Callable[..., "TuningResult"],
    directory: Path,
    output: str | Path | None,
    **shown: bool,
) -> None:
    """Run a search with a progress display and print its answer, the one so far if it is interrupted (typer.Exit)."""
    from autotune.search.tuner import SearchInterrupted
    from autotune.storage.run_directory import ANSWER_FILE, PLAN_FILE, read_plan
    from autotune.tuning_result import with_methods
    from autotune.values.time_spent import command_began

    command_began.set(context.obj)  # None: unknown
    interrupted = None
    try:
        with console.progress(quiet=shown["quiet"], verbose=shown["verbose"]) as progress:
            result = search(observer=progress)
    except SearchInterrupted as error:
        if error.result is None:
            raise
        interrupted, result = error, with_methods(error.result)
    except KeyboardInterrupt as error:  # while predicting
        raise SearchInterrupted(None, directory / ANSWER_FILE) if (directory / PLAN_FILE).exists() else error from None
    plan = read_plan(directory)
    if shown["as_json"]:
        console.print_json(result.model_dump(mode="json"))
    else:
        from autotune.output.table import result_table

        path = output or plan.output or directory / ANSWER_FILE
        console.stdout().print(result_table(result, str(path), str(directory)), highlight=False, crop=False)
    if plan.earlier is not None:
        from rich.text import Text

        from autotune.output.compare import compare, comparison_table

        try:
            compared = comparison_table(plan.earlier, compare(plan.earlier, result))
        except InputError as error:  # its winner failed
            compared = Text(str(error))
        (console.stderr() if shown["as_json"] else console.stdout()).print(Text(), compared, highlight=False)
    if interrupted is not None:
        console.print_text(f"autotune: {interrupted}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
