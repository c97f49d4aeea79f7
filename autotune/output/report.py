"""A report as one self-contained HTML page, without network, fonts or other files.

The template, and `svg` for charts, escape all texts.
"""

import json
import shlex
from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup

from autotune.exports import targets
from autotune.output.charts import best_over_time, contributions, svg, throughput_against_memory
from autotune.output.step_time import step_rows
from autotune.output.table import about, answer_rows, contribution_rows, remarks, verdict_line
from autotune.space.knobs import short_name, shown_changes
from autotune.storage.run_directory import ANSWER_FILE
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.values.estimate import MemoryBreakdown
from autotune.values.result import RunReport, TrialRow
from autotune.values.trial import Purpose, TrialStatus

Row = tuple[str, ...]


def html_report(report: RunReport) -> str:
    result, found = report.result, report.explanation
    changes = result.best.changes if result is not None else ()
    lines, told = remarks(result) if result is not None else ([], [])
    notes = [*lines, *told, *(f"note: {line}" for line in (result.notes if result is not None else ()))]
    total_s, shares = report.spent.total_s, report.spent.shares() if report.spent.total_s else {}
    launch = targets.to_train(result, f"{report.run_directory}/{ANSWER_FILE}") if result is not None else ()
    context = {
        "report": report,
        "subject": f"{about(report.workload)}, on {report.hardware.name} within {show_memory(report.memory_bytes)}",
        "answer": answer(report),
        "state": state(report),
        "against": answer_rows(result) if result is not None else [],
        "knobs": [(short_name(c.knob), c.before, c.after, str(c.allowance)) for c in changes],
        "factors": svg(lambda: contributions(found), "factors"),
        "pareto": svg(lambda: throughput_against_memory(report), "pareto"),
        "progress": svg(lambda: best_over_time(report), "progress"),
        "contributions": contribution_rows(found) if found is not None else [],
        "explained": explained(report),
        "memory_rows": _memory_rows(report),
        "step_rows": step_rows(result.steps) if result is not None else [],
        "time_rows": [(kind, show_time(share * total_s), f"{share:.0%}") for kind, share in shares.items()],
        "machine": _machine(report),
        "versions": [("autotune", report.autotune_version), *report.hardware.versions.items()],
        "columns": _COLUMNS,
        "trials": [_trial_row(report, trial, at) for at, trial in enumerate(report.trials)],
        "remarks": notes,
        "launch": Markup("\n").join(map(visible, launch)),
        "arguments": Markup.escape(json.dumps(result.arguments.training_arguments, indent=2)) if result else "",
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.output", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    return environment.get_template("report.html.j2").render(**context) + "\n"


def answer(report: RunReport) -> str:
    if report.result is None:
        return f"No answer: {report.nothing}."
    verdict = verdict_line(report.result)
    return f"{verdict[0].upper()}{verdict[1:]}."


def state(report: RunReport) -> str:
    ran = sum(t.purpose is not None and t.purpose is not Purpose.EXPLAIN for t in report.trials)
    refused = sum(t.purpose is None for t in report.trials)
    explained = len(report.trials) - ran - refused
    words = f"{ran} trial{'s' * (ran != 1)} in {show_time(report.spent.passed_s)}, "
    words += f"{refused} configuration{'s' * (refused != 1)} refused without one"
    if explained:
        words += f", {explained} trials to explain the winner"
    if report.unfinished:
        words += f", {report.unfinished} {'running' if report.is_running else 'begun and not finished'}"
    if report.is_running:
        words += f"; still running, as of {report.written}"
    return words


def explained(report: RunReport) -> str:
    """Return how to read the contributions, and how to measure those that are uncertain."""
    found, result = report.explanation, report.result
    if found is None:
        return "The baseline itself is the winner: there is no knob to explain." if result is not None else ""
    words = (
        "Each factor is the winner's throughput over that of the winner with this knob put back to the baseline's "
        "value. Independent knobs multiply to the whole."
    )
    if not found.is_settled:
        words += (
            " Part of it is only told by trials of the search that differ in one knob, not run in turn: "
            f"`autotune explain {shlex.quote(report.run_directory)}` measures it."
        )
    return words


def memory_parts(memory: MemoryBreakdown, *, on_cpu: bool) -> dict[str, int]:
    """Return the bytes of each component of predicted memory by name; the last is the rest of the device's peak."""
    parts = memory.components
    beyond = "beyond the tensors" if on_cpu else "context, allocator"
    return {**parts, beyond: max(0, memory.device_peak_bytes - sum(parts.values()))}


def _memory_rows(report: RunReport) -> list[Row]:
    found = report.breakdowns
    if not found:
        return []

    def row(name: str, values: list[int | None]) -> Row:
        return name, *(show_memory(value) if value else "–" for value in values)

    stacks = [memory_parts(b.predicted, on_cpu=report.hardware.is_cpu) for b in found]
    rows: list[Row] = [("component", *(b.name for b in found))]
    rows += [row(name, [s[name] for s in stacks]) for name in stacks[0] if any(s[name] for s in stacks)]
    rows.append(row("predicted peak", [b.predicted.device_peak_bytes for b in found]))
    rows.append(row("measured peak", [b.measured_bytes for b in found]))
    # What is allocated at the most in each phase of a training; a star marks the phase of the peak.
    allocated = [{phase.name: phase.allocated_bytes for phase in b.predicted.phases} for b in found]
    for name in dict.fromkeys(name for each in allocated for name in each):
        first, *cells = row(f"allocated, {name}", [each.get(name) for each in allocated])
        rows.append((first, *(c + " *" * (b.predicted.phase == name) for c, b in zip(cells, found, strict=True))))
    return rows


def _machine(report: RunReport) -> list[Row]:
    hardware = report.hardware
    free = show_memory(hardware.free_bytes)
    model = report.workload.model.reference
    if report.facts.parameters:  # 0: the user's training loop makes the model
        model += f", {report.facts.parameters / 1e6:,.1f} million parameters"
    rows = [
        ("device", f"{hardware.name} ({hardware.device})"),
        ("device memory", f"{show_memory(hardware.memory_bytes)}, {free} free at the start"),
        ("memory budget", show_memory(report.memory_bytes)),
        ("compute capability", ".".join(map(str, hardware.capability or ()))),
        ("driver", hardware.driver or ""),
        ("host", f"{hardware.cores} cores, {show_memory(hardware.host_memory_bytes)}"),
        ("vector extensions", ", ".join(hardware.features)),
        ("model", model),
        ("what may change", str(report.allowance)),
        ("seed", str(report.workload.seed)),
        ("run directory", report.run_directory),
    ]
    return [row for row in rows if row[1]]


_COLUMNS = (
    "trial", "purpose", "what changes", "status", "samples/s", "predicted samples/s", "peak memory", "predicted peak",
    "took", "reason",
)  # fmt: skip


def _trial_row(report: RunReport, trial: TrialRow, position: int) -> dict[str, Any]:
    """Return a row of the table of trials: of each cell its text, and the number by which its column is sorted."""

    def figure(value: float | None, show: Callable[[float], str]) -> tuple[str, float | None]:
        return ("", None) if value is None else (show(value), float(value))

    prediction = trial.prediction
    cells = (
        (trial.label or "–", position),
        (str(trial.purpose or ""), None),
        (shown_changes(trial.changes or ()), None),
        ("refused" if trial.status is TrialStatus.REJECTED else str(trial.status), None),
        figure(trial.samples_per_second, show_rate),
        figure(prediction.samples_per_second if prediction else None, show_rate),
        figure(trial.peak_bytes, show_memory),
        figure(prediction.peak_bytes if prediction else None, show_memory),
        figure(trial.duration_s, lambda seconds: f"{seconds:.1f} s"),
        (trial.cause or "", None),
    )
    kind = {TrialStatus.COMPLETED: "completed", TrialStatus.REJECTED: "refused"}.get(trial.status, "failed")
    best = report.result is not None and trial.config == report.result.best.config
    return {"kind": kind, "best": best, "cells": cells}
