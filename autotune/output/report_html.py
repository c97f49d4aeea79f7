"""A report as one self-contained HTML page, without network, fonts or other files.

The page is a Jinja template with the charts of `panels`, each drawn for wide and for narrow screens. The template, and
`svg` within charts, escape all texts.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2
from markupsafe import Markup, escape

from autotune.exports import targets
from autotune.output import report_facts as facts
from autotune.output.bars import component_icon, component_sizes
from autotune.output.panels import panels
from autotune.output.run_report import RunReport
from autotune.output.svg import tag, variables
from autotune.storage.run_directory import ANSWER_FILE
from autotune.units import visible
from autotune.values.trial import TrialStatus
from autotune.values.trial_row import TrialRow

# Widths of charts in pixels, for screens of 1,400 and of 400 pixels.
WIDE, NARROW = 620.0, 346.0

# Words with more characters may be broken, into pieces of at most as many.
_LONGEST = 14
_LONG_WORD = re.compile(r"(\S+)")
_BREAKS = re.compile(rf".{{1,{_LONGEST}}}?[-_/.,:=]+|.{{1,{_LONGEST}}}")


def html_report(report: RunReport) -> str:
    """Return the page."""
    environment = page_environment()
    return environment.get_template("report.html.j2").render(**_context(report)) + "\n"


def page_environment() -> jinja2.Environment:
    """Return the environment of templates, which escapes texts and shows their invisible characters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.output", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["breakable"] = breakable
    return environment


def _context(report: RunReport) -> dict[str, Any]:
    result = report.result
    heading, memory_rows = facts.memory_rows(report)
    answer = f"{report.run_directory}/{ANSWER_FILE}"
    icons = {
        name: Markup(tag("svg", component_icon(name), viewBox="0 0 18 16", aria_hidden="true", class_="key"))
        for name in component_sizes(report)
    }
    return {
        **summary(report),
        "report": report,
        "light": variables("light"),
        "dark": variables("dark"),
        "state": facts.state(report),
        "contributions": facts.contributions(report),
        "explained": with_code(facts.explained(report)),
        "accuracy": facts.accuracy(report),
        "memory_heading": heading,
        "memory_rows": [{"icon": icons.get(row[0], ""), "cells": row} for row in memory_rows],
        "machine": facts.machine(report),
        "versions": facts.versions(report),
        "columns": facts.TRIAL_COLUMNS,
        "trials": [_trial_row(t, at, report) for at, t in enumerate(report.trials)],
        "launch": Markup("\n").join(map(visible, targets.to_train(result, answer))) if result else "",
        "arguments": escape(json.dumps(result.arguments.training_arguments, indent=2)) if result is not None else "",
        **_drawings(report),
    }


def summary(report: RunReport) -> dict[str, Any]:
    """Return the variables that the templates of pages and notebooks share."""
    result = report.result
    return {
        "subject": facts.subject(report),
        "answer": facts.answer(report),
        "sides": list(facts.sides_of(result)) if result is not None else [],
        "against": facts.against(result) if result is not None else [],
        "knobs": facts.knobs(result) if result is not None else [],
        "remarks": facts.remarks(report),
    }


def breakable(words: str) -> Markup:
    """Return an escaped text with line-break opportunities in long words, after punctuation if possible.

    The CSS property `overflow-wrap: anywhere` would break short words too in narrow columns.
    """
    pieces = []
    for word in _LONG_WORD.split(visible(words)):
        parts = _BREAKS.findall(word) if len(word) > _LONGEST else [word]
        pieces.append(Markup("<wbr>").join(parts))
    return Markup("").join(pieces)


def with_code(words: str) -> Markup:
    """Return an escaped text, with parts between backticks as code."""
    pieces = words.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(visible(p)) if at % 2 else visible(p) for at, p in enumerate(pieces)
    )


def _drawings(report: RunReport) -> dict[str, Markup]:
    """Return the charts by name, each at both widths; empty: there is nothing to draw."""
    found = {}
    for panel in panels(report):
        charts = {kind: panel.draw(width) for kind, width in (("wide", WIDE), ("narrow", NARROW))}
        found[panel.name] = Markup("".join(chart.svg(kind) for kind, chart in charts.items() if chart is not None))
    return found


def _trial_row(trial: TrialRow, position: int, report: RunReport) -> dict[str, Any]:
    kind = {TrialStatus.COMPLETED: "completed", TrialStatus.REJECTED: "refused"}.get(trial.status, "failed")
    best = report.result is not None and trial.config == report.result.best.config
    return {"kind": kind, "best": best, "cells": facts.trial_cells(trial, position)}
