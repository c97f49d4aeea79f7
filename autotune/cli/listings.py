"""Commands that list models, GPUs, search spaces, the abilities of this machine, and installed versions."""

from __future__ import annotations

import importlib.metadata
import platform
from contextlib import suppress
from typing import Annotated, Any

import typer

from autotune.cli.console import Json, guarded, print_json, print_text, stdout
from autotune.errors import InputError

# Packages on which no measurement depends, but which a bug report should name.
_ALSO_VERSIONS_OF = ("ray", "optuna-dashboard")

Names = Annotated[bool, typer.Option("--quiet", "-q", help="Print the names alone, one a line.")]


@guarded
def models(
    name: Annotated[str, typer.Argument(help="Show only models whose name contains this.")] = "",
    quiet: Names = False,
    as_json: Json = False,
) -> None:
    """List the built-in catalogue of models."""
    from autotune.values.catalogue import catalogue

    entries = [e for e in catalogue() if name.lower() in " ".join([e.id, *e.names, e.family]).lower()]
    if not entries:
        raise InputError(f"no model of the catalogue has {name!r} in its name; a directory or hub id works as well")
    if as_json:
        print_json([e.model_dump(mode="json") for e in entries])
        return
    if quiet:
        print_text(*(e.names[0] if e.names else e.id for e in entries))
        return
    from autotune.output.listings import models_table

    stdout().print(models_table(entries))


@guarded
def gpus(
    name: Annotated[str, typer.Argument(help="Show only GPUs whose name, vendor or architecture contains this.")] = "",
    quiet: Names = False,
    as_json: Json = False,
) -> None:
    """List the built-in table of GPUs: memory, bandwidth and peaks, with sources."""
    from autotune.values.catalogue.gpus import gpus_like

    found = gpus_like(name)
    if as_json:
        print_json([gpu.model_dump(mode="json") for gpu in found])
        return
    if quiet:
        print_text(*(gpu.name for gpu in found))
        return
    from autotune.output.listings import gpus_table

    stdout().print(gpus_table(found))


@guarded
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure and store the device's rates.")] = False,
    as_json: Json = False,
) -> None:
    """Show what this machine and installation can do, and why they can't do the rest."""
    from autotune.doctor import examine

    report = examine(device, measure=calibrate)
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    from autotune.output.listings import doctor_table

    stdout().print(doctor_table(report))
    if calibrate and report.rates is not None and report.rates_file is not None:
        from autotune.output.listings import rates_table

        stdout().print(rates_table(report.rates, report.table_rates, report.rates_file))


@guarded
def spaces(quiet: Names = False, as_json: Json = False) -> None:
    """List the built-in search spaces, and how many of their points are legal on this machine."""
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
        return
    from autotune.output.listings import spaces_table

    stdout().print(spaces_table(found, hardware.name, batch))


def show_versions(*, as_json: bool) -> None:
    """Print the installed versions, for a bug report."""
    found = versions()
    if as_json:
        print_json(found)
        return
    lines = [f"autotune {found['autotune']}", f"Python {found['python']}, {found['platform']}"]
    lines += [f"{name} {version}" for name, version in found["packages"].items()]
    print_text(*lines, *([f"not installed: {', '.join(found['missing'])}"] if found["missing"] else []))


def versions() -> dict[str, Any]:
    """Return the versions of autotune, Python, the platform and the libraries, none of which is imported."""
    from autotune.values.hardware import PACKAGES, installed_versions
    from autotune.version import __version__

    packages = {name: version for name, version in installed_versions().items() if name != "python"}
    for name in _ALSO_VERSIONS_OF:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "autotune": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "missing": [name for name in (*PACKAGES, *_ALSO_VERSIONS_OF) if name not in packages],
    }
