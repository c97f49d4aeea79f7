"""Commands that list models, GPUs, search spaces, earlier searches, the abilities of this machine, and versions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.console import Json, guarded, print_json, print_text, stdout
from autotune.errors import InputError, suggestion

if TYPE_CHECKING:
    from autotune.storage.record import Record
    from autotune.storage.recorded import RecordedSearch

# Packages on which no measurement depends, but which a bug report should name.
_ALSO_VERSIONS_OF = ("ray", "optuna-dashboard")

Names = Annotated[bool, typer.Option("--quiet", "-q", help="Print the names alone, one a line.")]


def _listed(
    rows: Sequence[Any], table: Callable[[Any], Any], name: Callable[[Any], str], *, quiet: bool, as_json: bool
) -> None:
    """Print rows as JSON, by their names alone, or as a table."""
    if as_json:
        print_json([row.model_dump(mode="json") for row in rows])
    elif quiet:
        print_text(*map(name, rows))
    else:
        stdout().print(table(rows), highlight=False)


@guarded
def models(
    name: Annotated[str, typer.Argument(help="Show only models whose name contains this.")] = "",
    quiet: Names = False,
    as_json: Json = False,
) -> None:
    """List the built-in catalogue of models."""
    from autotune.output.listings import models_table
    from autotune.values.catalogue import catalogue

    entries = [e for e in catalogue() if name.lower() in " ".join([e.id, *e.names, e.family]).lower()]
    if not entries:
        raise InputError(f"no model of the catalogue has {name!r} in its name; a directory or hub id works as well")
    _listed(entries, models_table, lambda e: e.names[0] if e.names else e.id, quiet=quiet, as_json=as_json)


@guarded
def gpus(
    name: Annotated[str, typer.Argument(help="Show only GPUs whose name, vendor or architecture contains this.")] = "",
    quiet: Names = False,
    as_json: Json = False,
) -> None:
    """List the built-in table of GPUs: memory, bandwidth and peaks, with sources."""
    from autotune.output.listings import gpus_table
    from autotune.values.catalogue.gpus import gpus_like

    _listed(gpus_like(name), gpus_table, lambda gpu: str(gpu.name), quiet=quiet, as_json=as_json)


@guarded
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure and store the device's rates.")] = False,
    as_json: Json = False,
) -> None:
    """Show what this machine and installation can do, and why they can't do the rest."""
    from autotune.doctor import examine
    from autotune.output.listings import doctor_table, rates_table

    report = examine(device, measure=calibrate)
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    stdout().print(doctor_table(report))
    if calibrate and report.rates is not None and report.rates_file is not None:
        stdout().print(rates_table(report.rates, report.table_rates, report.rates_file))


@guarded
def spaces(quiet: Names = False, as_json: Json = False) -> None:
    """List the built-in search spaces, and how many of their points are legal on this machine."""
    from autotune.output.listings import spaces_table
    from autotune.planning.workload import DEFAULT_GLOBAL_BATCH
    from autotune.space.file import builtin_spaces, load_space
    from autotune.space.space import points_here
    from autotune.values.hardware import detect

    if quiet and not as_json:
        print_text(*builtin_spaces())
        return
    hardware = detect("auto")
    batch = DEFAULT_GLOBAL_BATCH[hardware.kind]
    found = [(space, points_here(space, hardware, batch)) for space in map(load_space, builtin_spaces())]
    if as_json:
        print_json([{**s.model_dump(mode="json"), "legal_points_here": n} for s, n in found])
    else:
        stdout().print(spaces_table(found, hardware.name, batch))


def show_versions(*, as_json: bool) -> None:
    """Print the versions of autotune, Python, the platform and the libraries, none of which is imported."""
    from autotune.values.hardware import PACKAGES, installed_versions
    from autotune.version import __version__

    packages = {name: version for name, version in installed_versions().items() if name != "python"}
    for name in _ALSO_VERSIONS_OF:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    missing = [name for name in (*PACKAGES, *_ALSO_VERSIONS_OF) if name not in packages]
    found = {"autotune": __version__, "python": platform.python_version(), "platform": platform.platform()}
    if as_json:
        print_json({**found, "packages": packages, "missing": missing})
        return
    lines = [f"autotune {found['autotune']}", f"Python {found['python']}, {found['platform']}"]
    lines += [f"{name} {version}" for name, version in packages.items()]
    print_text(*lines, *([f"not installed: {', '.join(missing)}"] if missing else []))


history = typer.Typer(help="What earlier searches measured: list, forget.", rich_markup_mode=None)


@history.callback(invoke_without_command=True)
@guarded
def listed(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Only searches of models whose name contains this.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the keys alone, one a line.")] = False,
    as_json: Json = False,
) -> None:
    """List what earlier searches measured, by model, workload, device and versions."""
    if context.invoked_subcommand is not None:
        return

    from autotune.output.listings import groups, history_table

    database = _database()
    searches = [search for search in database.searches() if model.lower() in search.model.lower()]
    if model and not searches:
        raise InputError(f"--model {model}: nothing is recorded of a model with this in its name")
    found = groups(searches)
    _listed(found, lambda rows: history_table(rows, database.where), lambda g: str(g.key), quiet=quiet, as_json=as_json)


@history.command()
@guarded
def forget(
    key: Annotated[str | None, typer.Argument(help="A key of the list, or its beginning.")] = None,
    model: Annotated[str | None, typer.Option(help="All searches of the model of this name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is recorded.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the recorded searches of a key, of a model, or all; run directories are left alone."""
    if sum((key is not None, model is not None, everything)) != 1:
        raise InputError("name what to forget: a KEY of `autotune history`, --model NAME, or --all")
    database = _database()
    found = database.searches()
    if key is not None:
        found = _with_key(found, key)
    elif model is not None:
        names = {search.model for search in found}
        found = [search for search in found if search.model.lower() == model.lower()]
        if not found:
            near = suggestion(model, names)
            raise InputError(f"--model {model}: nothing is recorded of it{near}; `autotune history` lists the names")
    trials = sum(len(search.trials) for search in found)
    counted = f"{len(found)} search{'es' if len(found) != 1 else ''}, {trials} trials"
    if found and not yes:
        try:
            agreed = typer.confirm(f"forget {counted}?", err=True)
        except typer.Abort:  # nobody there to answer
            raise InputError(f"forget {counted}? nobody answered; --yes doesn't ask") from None
        if not agreed:
            raise typer.Exit(0)
    if found:
        database.forget(found)
    if as_json:
        print_json({"searches": len(found), "trials": trials})
    else:
        stdout().print(f"forgotten: {counted}", highlight=False)


def _database() -> Record:
    from autotune.storage.record import VARIABLE, record

    found = record()
    if found is None:
        raise InputError(f"{VARIABLE} is off: there is no record")
    return found


def _with_key(searches: list[RecordedSearch], key: str) -> list[RecordedSearch]:
    """Return the searches of the one key that begins with `key`."""
    found = sorted({s.key.short for s in searches if s.key.short.startswith(key.lower())})
    if not key or not found:
        raise InputError(f"history {key}: nothing is recorded under this key; `autotune history` lists them")
    if len(found) > 1:
        raise InputError(f"history {key}: could be {', '.join(found)}; write more of it")
    return [search for search in searches if search.key.short == found[0]]
