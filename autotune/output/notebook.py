"""A result as a notebook and `print` show it; `ResultData` calls this. What is drawn is drawn in `output`."""

from __future__ import annotations

import io

from autotune.output.result_html import result_html
from autotune.output.run_report import RunReport
from autotune.output.table import result_table
from autotune.output.terminal import Console
from autotune.space.knobs import with_changes
from autotune.values.result import ResultData
from autotune.values.time_spent import spent_on

_WIDTH = 120  # columns of a printed table


def text_of(result: ResultData) -> str:
    """Return an answer as the command line shows it."""
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(result_table(result), highlight=False)
    return file.getvalue().rstrip("\n")


def html_of(result: ResultData) -> str:
    """Return an answer as an HTML fragment that needs nothing else and leaves the page around it alone."""
    return result_html(report_of(result))


def report_of(result: ResultData) -> RunReport:
    """Return what an answer alone knows of its search, in the form that charts are drawn from."""
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
