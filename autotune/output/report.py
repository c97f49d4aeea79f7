"""A report as one self-contained HTML page, without network, fonts or other files; and a result for a notebook.

The page is a Jinja template with charts, each drawn for wide and for narrow screens. The template, and
`svg` for charts, escape all texts. A notebook shows a fragment of another page: its styles are confined to
it, it has no script, and it follows the theme of JupyterLab, VS Code and Colab, or else the system's.
"""

from __future__ import annotations

import io
import json
import math
import re
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from autotune.exports import targets
from autotune.output.chart_style import svg, variables
from autotune.output.charts import best_over_time, throughput_against_memory, waterfall
from autotune.output.table import (
    contribution_rows,
    remark_lines,
    result_table,
    show_config,
    times_baseline,
    verdict_line,
)
from autotune.output.terminal import Console
from autotune.space.knobs import SHORT_NAMES, shown_changes, with_changes
from autotune.storage.run_directory import ANSWER_FILE
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.values.estimate import MemoryBreakdown
from autotune.values.result import ResultData, RunReport, TrialRow, shown_rate
from autotune.values.time_spent import spent_on
from autotune.values.trial import Measurement, Purpose, TrialStatus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = tuple[str, ...]

# Widths of charts in pixels, for screens of 1,400 and of 400 pixels.
WIDE, NARROW = 620.0, 346.0

# Words with more characters may be broken, into pieces of at most as many.
_LONGEST = 14
_LONG_WORD = re.compile(r"(\S+)")
_BREAKS = re.compile(rf".{{1,{_LONGEST}}}?[-_/.,:=]+|.{{1,{_LONGEST}}}")

SCOPE = ".autotune-result"

# Selectors of the themes of notebooks.
_DARK = ('body[data-jp-theme-light="false"]', "body.vscode-dark", 'html[theme="dark"]', 'html[data-theme="dark"]')
_LIGHT = ('body[data-jp-theme-light="true"]', "body.vscode-light", 'html[data-theme="light"]')


def answer(report: RunReport) -> str:
    """Return the result of the search in a sentence."""
    result = report.result
    if result is None:
        return f"No answer: {report.nothing}."
    verdict = verdict_line(result)
    return f"{verdict[0].upper()}{verdict[1:]}."


def state(report: RunReport) -> str:
    """Return the progress of the search: numbers of trials, time, and whether it is running."""
    ran = sum(t.purpose is not None and t.purpose is not Purpose.EXPLAIN for t in report.trials)
    refused = sum(t.purpose is None for t in report.trials)
    explained = len(report.trials) - ran - refused
    words = f"{ran} trials in {show_time(report.spent.total_s)}, {refused} configurations refused without one"
    if explained:
        words += f", {explained} trials to explain the winner"
    if report.unfinished and report.is_running:
        words += f", {report.unfinished} running"
    elif report.unfinished:
        words += f", {report.unfinished} begun and not finished"
    if report.is_running:
        words += f"; still running, as of {report.written}"
    return words


def _against(result: ResultData) -> tuple[list[str], list[Row]]:
    """Return the names of baseline and winner, and rows that compare them: the quantity, and the value of each."""
    sides = {"baseline": result.baseline, "winner": result.best}
    if result.best.config == result.baseline.config:
        sides = {"baseline = winner": result.best}

    def rate(m: Measurement) -> str:
        if not m.shown_interval.is_narrow:
            return shown_rate(m)
        low, high = show_rate(m.shown_interval.low), show_rate(m.shown_interval.high)
        return shown_rate(m) + (" (± under 1 %)" if low == high else f" ({low} to {high})")

    def tokens(m: Measurement) -> str | None:
        return show_rate(m.tokens_per_second) if m.tokens_per_second and m.shown_interval.is_narrow else None

    def peak(m: Measurement) -> str | None:
        if not m.memory.is_known:
            return None
        share = m.memory.peak_bytes / result.memory_bytes
        return f"{show_memory(m.memory.peak_bytes)} ({'<1%' if share < 0.01 else f'{share:.0%}'} of the budget)"

    figures: dict[str, Callable[[Measurement], str | None]] = {
        "throughput, samples/s": rate,
        "throughput, tokens/s": tokens,
        "optimizer step, s": lambda m: f"{statistics.fmean(m.step_times_s):.3g}",
        "peak memory": peak,
        "first step (compiling included), s": lambda m: f"{m.first_step_s:.3g}",
        "waiting for data": lambda m: None if m.data_wait_share is None else f"{m.data_wait_share:.1%} of a step",
    }
    measured = [contender.measurement for contender in sides.values()]
    found = [(name, *("–" if m is None else shown(m) or "–" for m in measured)) for name, shown in figures.items()]
    return [*sides], [
        ("x baseline", *(times_baseline(result, c) or "–" for c in sides.values())),
        *(row for row in found if any(cell != "–" for cell in row[1:])),
        ("measured in trials", *(", ".join(map(str, c.trials)) or "none" for c in sides.values())),
        ("configuration", *(show_config(c.config) for c in sides.values())),
    ]


def explained(report: RunReport) -> str:
    """Return how to read the contributions, and how to measure those that are uncertain."""
    found, result = report.explanation, report.result
    if found is None:
        return "The baseline itself is the winner: there is no knob to explain." if result is not None else ""
    words = (
        "Each factor is the winner's throughput over that of the winner with this knob put back to the baseline's "
        "value. Independent knobs multiply to the whole; where they don't, “together” is the rest"
    )
    words += ": below 1 they overlap, above 1 they help each other." if found.together is not None else "."
    if any(c.ratio is None for c in found.contributions) and found.together is not None:
        words += " What has no factor of its own is in it, too."
    if not found.is_settled:
        words += (
            " Part of it is only told by trials of the search that differ in one knob, not run in turn: "
            f"`autotune explain {report.run_directory}` measures it."
        )
    return words


def accuracy(report: RunReport) -> list[str]:
    """Return the errors of the predictions that were made before trials, a line each for throughput and memory."""
    lines = []
    predicted = [(t, t.prediction) for t in report.trials if t.prediction is not None and t.is_compared]
    for words, pairs in (
        ("throughput", [(t, p.samples_per_second, t.samples_per_second) for t, p in predicted]),
        ("peak memory", [(t, float(p.peak_bytes), t.peak_bytes) for t, p in predicted]),
    ):
        errors = [(said / seen - 1, trial) for trial, said, seen in pairs if seen and math.isfinite(said) and said > 0]
        if errors:
            median = statistics.median(abs(error) for error, _ in errors)
            worst, trial = max(errors, key=lambda found: abs(found[0]))
            lines.append(
                f"{words}: median error {median:.0%}, largest {worst:+.0%} (trial {trial.label}), of {len(errors)} "
                "predictions, each made before its trial"
            )
    return lines


def time_rows(report: RunReport) -> list[Row]:
    """Return rows of the kinds of work in a search's time, in descending order: kind, time, share."""
    spent = report.spent
    shares = spent.shares() if spent.total_s else {}
    rows: list[Row] = [(what, show_time(share * spent.total_s), f"{share:.0%}") for what, share in shares.items()]
    return rows + ([("waiting for a quiet machine", show_time(spent.waiting_s), "")] if rows and spent.waited else [])


def memory_parts(memory: MemoryBreakdown, *, on_cpu: bool) -> dict[str, int]:
    """Return the bytes of each component of predicted memory by name.

    The last component is the difference between the others and the device's peak.
    """
    parts = memory.components
    beyond = "beyond the tensors" if on_cpu else "context, allocator"
    return {**parts, beyond: max(0, memory.device_peak_bytes - sum(parts.values()))}


def _memory_rows(report: RunReport) -> list[Row]:
    """Return the rows of predicted memory by component and by phase; none if it is unknown."""
    found = report.breakdowns
    if not found:
        return []
    stacks = [memory_parts(b.predicted, on_cpu=report.hardware.is_cpu) for b in found]
    rows: list[Row] = [
        (name, *(show_memory(stack[name]) if stack[name] else "–" for stack in stacks))
        for name in stacks[0]
        if any(stack[name] for stack in stacks)
    ]
    rows.append(("predicted peak", *(show_memory(b.predicted.device_peak_bytes) for b in found)))
    rows.append(("measured peak", *("–" if b.measured_bytes is None else show_memory(b.measured_bytes) for b in found)))
    # What is allocated at the most in each phase of a training; a star marks the phase of the peak.
    allocated = [{phase.name: phase.allocated_bytes for phase in b.predicted.phases} for b in found]
    for name in dict.fromkeys(name for each in allocated for name in each):
        cells = (
            "–" if name not in each else show_memory(each[name]) + (" *" if b.predicted.phase == name else "")
            for each, b in zip(allocated, found, strict=True)
        )
        rows.append((f"allocated, {name}", *cells))
    return rows


def _machine(report: RunReport) -> list[Row]:
    hardware = report.hardware
    free = show_memory(hardware.free_bytes)
    capability = ".".join(map(str, hardware.capability)) if hardware.capability else ""
    model = report.workload.model.reference
    if report.facts.parameters:  # 0: the user's training loop makes the model
        model += f", {report.facts.parameters / 1e6:,.1f} million parameters"
    rows = [
        ("device", f"{hardware.name} ({hardware.device})"),
        ("device memory", f"{show_memory(hardware.memory_bytes)}, {free} free at the start"),
        ("memory budget", show_memory(report.memory_bytes)),
        ("compute capability", capability),
        ("driver", hardware.driver or ""),
        ("host", f"{hardware.cores} cores, {show_memory(hardware.host_memory_bytes)}"),
        ("vector extensions", ", ".join(hardware.features)),
        ("model", model),
        ("what may change", str(report.allowance)),
        ("seed", str(report.workload.seed)),
        ("run directory", report.run_directory),
    ]
    return [row for row in rows if row[1]]


class Cell(NamedTuple):
    """A cell of the table of trials."""

    shown: str
    value: float | None = None  # by which the column is sorted


def _trial_row(report: RunReport, trial: TrialRow, position: int) -> dict[str, Any]:
    """Return the row of the table of trials; `position` is its place in the report."""

    def figure(value: float | None, show: Callable[[float], str]) -> Cell:
        return Cell("") if value is None else Cell(show(value), float(value))

    prediction = trial.prediction
    cells = (
        Cell(trial.label or "–", position),
        Cell(str(trial.purpose) if trial.purpose is not None else ""),
        Cell(shown_changes(trial.changes or ())),
        Cell("refused" if trial.status is TrialStatus.REJECTED else str(trial.status)),
        figure(trial.samples_per_second, show_rate),
        figure(prediction.samples_per_second if prediction else None, show_rate),
        figure(trial.peak_bytes, show_memory),
        figure(prediction.peak_bytes if prediction else None, show_memory),
        figure(trial.duration_s, lambda seconds: f"{seconds:.1f} s"),
        Cell(trial.cause or ""),
    )
    kind = {TrialStatus.COMPLETED: "completed", TrialStatus.REJECTED: "refused"}.get(trial.status, "failed")
    best = report.result is not None and trial.config == report.result.best.config
    return {"kind": kind, "best": best, "cells": cells}


def html_report(report: RunReport) -> str:
    """Return the page."""
    result, widths = report.result, {"wide": WIDE, "narrow": NARROW}
    charts: dict[str, Callable[[float], Figure | None]] = {
        "waterfall": lambda width: waterfall(report.explanation, width),
        "pareto": lambda width: throughput_against_memory(report, width),
        "progress": lambda width: best_over_time(report, width),
    }
    drawn = {
        name: Markup().join(svg(draw, width, name, kind) for kind, width in widths.items())
        for name, draw in charts.items()
    }
    columns = (
        "trial", "purpose", "what changes", "status", "samples/s", "predicted samples/s", "peak memory",
        "predicted peak", "took", "reason",
    )  # fmt: skip
    answer_file = f"{report.run_directory}/{ANSWER_FILE}"
    context = {
        **_summary(report),
        **drawn,
        "report": report,
        "light": variables("light"),
        "dark": variables("dark"),
        "state": state(report),
        "contributions": contribution_rows(report.explanation) if report.explanation is not None else [],
        "explained": with_code(explained(report)),
        "accuracy": accuracy(report),
        "memory_heading": ("component", *(b.name for b in report.breakdowns)),
        "memory_rows": _memory_rows(report),
        "time_rows": time_rows(report),
        "machine": _machine(report),
        "versions": [("autotune", report.autotune_version), *report.hardware.versions.items()],
        "columns": columns,
        "trials": [_trial_row(report, trial, at) for at, trial in enumerate(report.trials)],
        "launch": Markup("\n").join(map(visible, targets.to_train(result, answer_file))) if result else "",
        "arguments": escape(json.dumps(result.arguments.training_arguments, indent=2)) if result is not None else "",
    }
    return _environment().get_template("report.html.j2").render(**context) + "\n"


def _environment() -> jinja2.Environment:
    """Return the environment of templates, which escapes texts and shows their invisible characters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.output", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["breakable"] = breakable
    return environment


def _summary(report: RunReport) -> dict[str, Any]:
    """Return the variables that the templates of pages and notebooks share."""
    result, workload = report.result, report.workload
    subject = (workload.model.name, str(workload.task), workload.shown_length, workload.shown_batch)
    within = f"on {report.hardware.name} within {show_memory(report.memory_bytes)}"
    sides, against = _against(result) if result is not None else ([], [])
    changes = result.best.changes if result is not None else ()
    notes = [*remark_lines(result), *(f"note: {line}" for line in result.notes)] if result is not None else []
    return {
        "subject": f"{', '.join(filter(None, subject))}, {within}",
        "answer": answer(report),
        "sides": sides,
        "against": against,
        "knobs": [(SHORT_NAMES.get(c.knob, c.knob), c.before, c.after, str(c.allowance)) for c in changes],
        "remarks": notes,
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


def text_of(result: ResultData) -> str:
    """Return a result as the command line shows it."""
    file = io.StringIO()
    Console(file=file, width=120, color_system=None).print(result_table(result), highlight=False)
    return file.getvalue().rstrip("\n")


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


def html_of(result: ResultData) -> str:
    """Return a result as a self-contained HTML fragment."""
    report = report_of(result)
    rules = [f"{SCOPE} {{ {variables('light')} }}"]
    rules.append(f"@media (prefers-color-scheme: dark) {{ {SCOPE} {{ {variables('dark')} }} }}")
    for theme, hosts in (("light", _LIGHT), ("dark", _DARK)):
        rules.append(f"{', '.join(f'{host} {SCOPE}' for host in hosts)} {{ {variables(theme)} }}")
    pareto = svg(lambda width: throughput_against_memory(report, width), WIDE, "pareto")
    template = _environment().get_template("result.html.j2")
    return template.render(**_summary(report), themes=Markup("\n".join(rules)), pareto=pareto)
