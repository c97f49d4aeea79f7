"""A report as one self-contained HTML page, without network, fonts or other files; and a result for a notebook.

The page is a Jinja template with charts, each drawn for wide and for narrow screens. The template, and
`svg` for charts, escape all texts. What a notebook shows is a fragment of another page: its styles are confined to
it, it has no script, and it follows the theme of JupyterLab, VS Code and Colab, or else the system's.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from autotune.exports import targets
from autotune.output import report_facts as facts
from autotune.output.drawing import svg, variables
from autotune.output.explanation import waterfall
from autotune.output.scatter import best_over_time, throughput_against_memory
from autotune.output.table import result_table
from autotune.output.terminal import Console
from autotune.space.knobs import with_changes
from autotune.storage.run_directory import ANSWER_FILE
from autotune.units import visible
from autotune.values.result import ResultData, RunReport, TrialRow
from autotune.values.time_spent import spent_on
from autotune.values.trial import TrialStatus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Widths of charts in pixels, for screens of 1,400 and of 400 pixels.
WIDE, NARROW = 620.0, 346.0

# Words with more characters may be broken, into pieces of at most as many.
_LONGEST = 14
_LONG_WORD = re.compile(r"(\S+)")
_BREAKS = re.compile(rf".{{1,{_LONGEST}}}?[-_/.,:=]+|.{{1,{_LONGEST}}}")

SCOPE = ".autotune-result"

_WIDTH = 120  # columns of a printed table

# Selectors of the themes of notebooks.
_DARK = ('body[data-jp-theme-light="false"]', "body.vscode-dark", 'html[theme="dark"]', 'html[data-theme="dark"]')
_LIGHT = ('body[data-jp-theme-light="true"]', "body.vscode-light", 'html[data-theme="light"]')


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
        "memory_rows": memory_rows,
        "time_rows": facts.time_rows(report),
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
    widths = {"wide": WIDE, "narrow": NARROW}
    charts: dict[str, Callable[[float], Figure | None]] = {
        "waterfall": lambda width: waterfall(report.explanation, width),
        "pareto": lambda width: throughput_against_memory(report, width),
        "progress": lambda width: best_over_time(report, width),
    }
    return {
        name: Markup().join(svg(draw, width, name, kind) for kind, width in widths.items())
        for name, draw in charts.items()
    }


def _trial_row(trial: TrialRow, position: int, report: RunReport) -> dict[str, Any]:
    kind = {TrialStatus.COMPLETED: "completed", TrialStatus.REJECTED: "refused"}.get(trial.status, "failed")
    best = report.result is not None and trial.config == report.result.best.config
    return {"kind": kind, "best": best, "cells": facts.trial_cells(trial, position)}


def text_of(result: ResultData) -> str:
    """Return a result as the command line shows it."""
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(result_table(result), highlight=False)
    return file.getvalue().rstrip("\n")


def html_of(result: ResultData) -> str:
    """Return a result as a self-contained HTML fragment."""
    return result_html(report_of(result))


def report_of(result: ResultData) -> RunReport:
    """Return the report of a result alone, without a run directory."""
    return RunReport(
        run_directory="",
        written="",
        autotune_version=result.autotune_version,
        is_running=False,
        command=None,
        **result.problem.problem_fields(),
        result=result,
        trials=with_changes(result.trials, result.problem),
        spent=result.spent or spent_on((), result.search_time_s, {}),
    )


def result_html(report: RunReport) -> str:
    """Return the HTML fragment of a report with a result."""
    pareto = svg(lambda width: throughput_against_memory(report, width), WIDE, "pareto")
    template = page_environment().get_template("result.html.j2")
    return template.render(**summary(report), themes=Markup(_themes()), pareto=pareto)


def _themes() -> str:
    """Return the declarations of colours for all themes, confined to `SCOPE`."""
    rules = [f"{SCOPE} {{ {variables('light')} }}"]
    rules.append(f"@media (prefers-color-scheme: dark) {{ {SCOPE} {{ {variables('dark')} }} }}")
    for theme, hosts in (("light", _LIGHT), ("dark", _DARK)):
        rules.append(f"{', '.join(f'{host} {SCOPE}' for host in hosts)} {{ {variables(theme)} }}")
    return "\n".join(rules)
