"""A result as `print` and notebooks show it: as a table in text, or as HTML with figures, changes and two charts.

The HTML is a fragment of another page: its styles are confined to it, it has no script, and it follows the theme of
JupyterLab, VS Code and Colab, or else the system's. The template and the charts escape all texts.
"""

from __future__ import annotations

import io

from markupsafe import Markup

from autotune.output.panels import panels
from autotune.output.report_html import page_environment, summary
from autotune.output.run_report import RunReport
from autotune.output.svg import variables
from autotune.output.table import result_table
from autotune.output.terminal import Console
from autotune.space.knobs import with_changes
from autotune.values.result import ResultData
from autotune.values.time_spent import spent_on

SCOPE = ".autotune-result"

# Charts that need no more than the trials of a result.
_CHARTS = ("pareto", "predicted_rate")
_CHART_WIDTH = 620.0

_WIDTH = 120  # columns of a printed table

# Selectors of the themes of notebooks.
_DARK = (
    'body[data-jp-theme-light="false"]',
    "body.vscode-dark",
    'html[theme="dark"]',
    'html[data-theme="dark"]',
)
_LIGHT = ('body[data-jp-theme-light="true"]', "body.vscode-light", 'html[data-theme="light"]')


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
    environment = page_environment()
    sheet = Markup(style(environment.get_template("chart.css").render()))
    charts = [
        {"title": panel.title, "drawing": Markup(chart.svg())}
        for panel in panels(report)
        if panel.name in _CHARTS and (chart := panel.draw(_CHART_WIDTH)) is not None
    ]
    return environment.get_template("result.html.j2").render(**summary(report), style=sheet, charts=charts)


def style(chart_css: str) -> str:
    """Return the style sheet of charts and themes, confined to `SCOPE`; each line of `chart_css` is a rule."""
    rules = [f"{SCOPE} {{ {variables('light')} }}"]
    rules.append(f"@media (prefers-color-scheme: dark) {{ {SCOPE} {{ {variables('dark')} }} }}")
    for theme, hosts in (("light", _LIGHT), ("dark", _DARK)):
        rules.append(f"{', '.join(f'{host} {SCOPE}' for host in hosts)} {{ {variables(theme)} }}")
    rules += [f"{SCOPE} {rule}" for rule in chart_css.splitlines() if rule.strip()]
    return "\n".join(rules)
