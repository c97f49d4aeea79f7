"""Draws the lists: models, search spaces, and what the doctor found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.doctor import Report
from autotune.output.fitted import Fitted
from autotune.space.file import SpaceFile
from autotune.space.space import MOST_POINTS
from autotune.values.catalogue import CatalogueEntry


def models_table(entries: Sequence[CatalogueEntry]) -> RenderableType:
    """Return the catalogue as a table."""
    table = Table(title=f"{len(entries)} models; weights are random, figures from each source", title_justify="left")
    for heading in ("name", "full id", "kind", "parameters"):
        table.add_column(heading, justify="right" if heading == "parameters" else "left", overflow="fold")
    for entry in entries:
        name = entry.names[0] if entry.names else ""
        table.add_row(name, entry.id, entry.kind, f"{entry.parameters / 1e6:,.1f}M")
    return Fitted(table)


def spaces_table(found: Sequence[tuple[SpaceFile, int]], device: str, global_batch: int) -> RenderableType:
    """Return the built-in search spaces as a table, with the number of points that are legal on a device."""
    table = Table(title="search spaces (--space NAME, or your own YAML file)", title_justify="left")
    for heading in ("name", "for whom", "points here", "parameters"):
        table.add_column(heading, justify="right" if heading == "points here" else "left")
    for space, points in found:
        count = f"{points:,} or more" if points >= MOST_POINTS else f"{points:,}"
        table.add_row(space.name, space.description, count, ", ".join(space.parameters))
    note = (
        f"points here: legal on {device} for a mixture of experts at a global batch of {global_batch}, with "
        "--effort standard --allow method; other models and options leave fewer"
    )
    return Group(Fitted(table), Text(note))


def doctor_table(report: Report) -> RenderableType:
    """Return the doctor's findings as a table."""
    table = Table(title=report.machine, title_justify="left")
    for heading in ("", "", "why, and what it would bring"):
        table.add_column(heading)
    for finding in report.findings:
        mark = Text("yes", "green") if finding.available else Text("no", "yellow")
        table.add_row(finding.name, mark, Text(finding.detail))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return Group(Fitted(table), Text(versions))
