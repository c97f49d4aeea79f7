"""Commands that show something: models, GPUs, search spaces, earlier searches, the abilities of this machine.

And those on finished searches: `report`, `explain`, `compare` and `export`.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autotune.cli import console
from autotune.cli.console import Json, Quiet, TrustRunDir, Verbose, guarded
from autotune.errors import InputError, writing

if TYPE_CHECKING:
    from autotune.storage.record import Record


def _listed(rows: Sequence[Any], table: Callable[[Any], Any], *, as_json: bool) -> None:
    console.show([row.model_dump(mode="json") for row in rows], table(rows), as_json=as_json)


@guarded
def models(
    name: Annotated[str, typer.Argument(help="Show only models whose name contains this.")] = "", as_json: Json = False
) -> None:
    """List the built-in catalogue of models."""
    from autotune.output.listings import models_table
    from autotune.values.catalogue import catalogue

    entries = [e for e in catalogue() if name.lower() in " ".join([e.id, *e.names, e.family]).lower()]
    if not entries:
        raise InputError(f"no model of the catalogue has {name!r} in its name; a directory or hub id works as well")
    _listed(entries, models_table, as_json=as_json)


@guarded
def gpus(
    name: Annotated[str, typer.Argument(help="Show only GPUs whose name, vendor or architecture contains this.")] = "",
    as_json: Json = False,
) -> None:
    """List the built-in table of GPUs: memory, bandwidth and peaks, with sources."""
    from autotune.output.listings import gpus_table
    from autotune.values.catalogue import gpus_like

    _listed(gpus_like(name), gpus_table, as_json=as_json)


@guarded
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Show what this machine and installation can do, and why they can't do the rest."""
    from autotune.doctor import examine
    from autotune.output.listings import doctor_table

    report = examine(device)
    console.show(report.model_dump(mode="json"), doctor_table(report), as_json=as_json)


@guarded
def spaces(as_json: Json = False) -> None:
    """List the built-in search spaces."""
    from autotune.output.listings import spaces_table
    from autotune.space.file import builtin_spaces, load_space

    _listed([load_space(name) for name in builtin_spaces()], spaces_table, as_json=as_json)


history = typer.Typer(help="List earlier searches, or forget them.", rich_markup_mode=None)


@history.callback(invoke_without_command=True)
@guarded
def listed(context: typer.Context, as_json: Json = False) -> None:
    """List earlier searches, with what they measured at best."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise InputError(f"--json: goes behind {context.invoked_subcommand}")
        return

    from autotune.output.listings import history_table

    database = _database()
    found = database.searches()
    rows = [s.model_dump(mode="json") | {"best": s.best_samples_per_second, "trials": len(s.trials)} for s in found]
    console.show(rows, history_table(found, database.where), as_json=as_json)


@history.command()
@guarded
def forget(
    key: Annotated[str | None, typer.Argument(help="A key of the list.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is recorded.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the recorded searches of a key, or all; run directories are left alone."""
    if everything == (key is not None):
        raise InputError("name what to forget: a KEY of `autotune history`, or --all")
    database = _database()
    found = [search for search in database.searches() if everything or search.key == key]
    if key is not None and not found:
        raise InputError(f"history {key}: nothing is recorded under this key; `autotune history` lists them")
    trials = sum(len(search.trials) for search in found)
    counted = f"{len(found)} search{'es' if len(found) != 1 else ''}, {trials} trials"
    if found and not yes:
        try:
            agreed = typer.confirm(f"forget {counted}?", err=True)
        except typer.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise InputError(f"forget {counted}? nobody answered; --yes doesn't ask") from None
        if not agreed:
            raise typer.Exit(0)
    if found:
        database.forget(found)
    console.show({"searches": len(found), "trials": trials}, f"forgotten: {counted}", as_json=as_json)


def _database() -> "Record":
    from autotune.storage.record import VARIABLE, record

    found = record()
    if found is None:
        raise InputError(f"{VARIABLE} is off: there is no record")
    return found


@guarded
def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search, finished or not.")],
    form: Annotated[Literal["html", "json"] | None, typer.Option("--format", help="[as --out ends, or html]")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write [RUN_DIR/report.html].")] = None,
    as_json: Json = False,
) -> None:
    """Write what a search found as one HTML page, or as JSON."""
    from autotune.output.gather import gather
    from autotune.output.report import answer, html_report
    from autotune.value import check_savable, save_bytes, write_bytes

    chosen = form or ("html" if out is None else out.suffix.lower().lstrip("."))
    if chosen not in ("html", "json"):
        raise InputError(f"--out {out}: its name doesn't say the format; add --format html|json")
    path, found = out or run_dir / f"report.{chosen}", gather(run_dir)
    content = found.model_dump_json(indent=2) + "\n" if chosen == "json" else html_report(found)
    with writing(f"--out {path}"):
        check_savable(path, '"autotune_version"' if chosen == "json" else "<title>autotune: ")
        (write_bytes if out is None else save_bytes)(content.encode(), path)
    if as_json:
        console.print_json({"file": str(path), "format": chosen, "answer": answer(found)})
    elif path.is_file():  # a pipe gets the report alone
        console.print_text(answer(found), f"written: {path}")


@guarded
def explain(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that has found something.")],
    max_time: Annotated[str | None, typer.Option(help="Begin no trial beyond this, such as 10m [find's].")] = None,
    trust_run_dir: TrustRunDir = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure what each knob of the winner contributes, by putting it back to the baseline's value."""
    from autotune.output.table import explanation_table
    from autotune.planning.options import SearchOptions, options_of
    from autotune.search.explain import explain as explained

    limit_s = options_of(SearchOptions, {"model": "", "max_time": max_time}).max_time_s
    with console.progress(quiet=quiet, verbose=verbose) as progress:
        found = explained(run_dir, max_time_s=limit_s, trust_run_dir=trust_run_dir, observer=progress)
    document = {**found.model_dump(mode="json"), "settled": found.is_settled}
    console.show(document, explanation_table(found), as_json=as_json)
    if not (as_json or quiet):
        console.print_text(f"`autotune report {shlex.quote(str(run_dir))}` shows it")


@guarded
def compare(
    first: Annotated[Path, typer.Argument(help="An answer: best-config.json; with --python a run directory.")],
    second: Annotated[Path | None, typer.Argument(help="A later answer of the same training.")] = None,
    python: Annotated[
        str | None, typer.Option(help="Measure the first's winner in this Python's environment and here, in turn.")
    ] = None,
    trust_run_dir: TrustRunDir = False,
    as_json: Json = False,
) -> None:
    """Compare two answers, or two environments: the speed of the same configuration, and what differs."""
    from autotune.output import compare as comparing
    from autotune.tuning_result import load

    if python is not None and second is None:
        from autotune.search.environments import compare_environments

        with console.progress(quiet=as_json, verbose=False) as progress:
            answer, found = compare_environments(first, python, trust_run_dir=trust_run_dir, observer=progress)
    elif second is not None and python is None:
        answer = load(first)
        found = comparing.compare(answer, load(second))
    else:
        raise InputError("compare takes two answers, or a run directory and --python PYTHON of another environment")
    console.show(found.model_dump(mode="json"), comparing.comparison_table(answer, found), as_json=as_json)


_KINDS = "training-args, python, accelerate, accelerate-loop, deepspeed, fsdp, trl"


@guarded
def export(
    best: Annotated[Path, typer.Argument(help="best-config.json, or the run directory it lies in.")],
    to: Annotated[str, typer.Option(help=f"{_KINDS}, or all that can train it.")] = "all",
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File, or a directory; for all a directory.", metavar="<path>")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the best configuration as a script, or as files that other tools read."""
    from autotune.exports import targets
    from autotune.storage.run_directory import ANSWER_FILE
    from autotune.tuning_result import load

    path = best / ANSWER_FILE if best.is_dir() else best
    result, answer = load(path), str(path)
    found, left_out = targets.drafts(result, to, answer)
    if output is None:
        if to == targets.ALL:
            raise InputError(f"the files need a directory (--output DIR); a single one is printed by --to: {_KINDS}")
        if as_json:
            raise InputError("--json lists the files that were written, so it needs --output")
        sys.stdout.write(found[to].text)
        console.print_text(*(f"not expressed: {line}" for line in found[to].lost), file=sys.stderr)
        return
    is_folder = to == targets.ALL or output.endswith("/") or Path(output).is_dir()
    folder = Path(output) if is_folder else Path(output).parent
    if to != targets.ALL:  # a single file, which goes there as it is called, or under another name
        found[to] = found[to].placed(folder / found[to].name if is_folder else Path(output))
    with writing(f"--output {folder}"):
        made = targets.write(result, to, found, folder, answer)
    missing = targets.missing_script(result, answer, made)
    if as_json:
        lost = {target: draft.lost for target, draft in found.items() if draft.lost}
        document = {"files": list(map(str, made.paths)), "launch": made.launch, "not_expressed": lost}
        console.print_json({**document, "left_out": left_out, **({"note": missing} if missing else {})})
    else:
        lines = [*(f"written: {file}" for file in made.paths), *(f"launch:  {command}" for command in made.launch)]
        lines += [f"note:    {missing}"] * bool(missing) + [f"not expressed: {line}" for line in made.not_expressed]
        lines += [f"left out: {reason}" for reason in left_out.values()]
        # A pipe gets the document alone.
        console.print_text(*lines, file=None if all(path.is_file() for path in made.paths) else sys.stderr)
