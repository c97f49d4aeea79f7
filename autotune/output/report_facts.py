"""The texts and figures of a report, as lines and rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autotune.output.explanation import contribution_rows
from autotune.output.memory import component_sizes
from autotune.output.table import remark_lines, show_config, show_interval, times_baseline, verdict_line
from autotune.space.knobs import SHORT_NAMES, shown_changes
from autotune.units import show_memory, show_rate, show_time
from autotune.values.result import Breakdown, Contender, ResultData, RunReport, TrialRow, shown_rate
from autotune.values.trial import Measurement, Purpose, TrialStatus

Row = tuple[str, ...]


def subject(report: RunReport) -> str:
    """Return workload, device and memory budget in one line."""
    workload = report.workload
    parts = (workload.model.name, str(workload.task), workload.shown_length, workload.shown_batch)
    within = f"within {show_memory(report.memory_bytes)}"
    return f"{', '.join(filter(None, parts))}, on {report.hardware.name} {within}"


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


def sides_of(result: ResultData) -> dict[str, Contender]:
    """Return baseline and winner by name, or one entry if they are the same."""
    if result.best.config == result.baseline.config:
        return {"baseline = winner": result.best}
    return {"baseline": result.baseline, "winner": result.best}


def against(result: ResultData) -> list[Row]:
    """Return rows that compare baseline and winner: the quantity, and the value of each."""
    figures: dict[str, Callable[[Measurement], str | None]] = {
        "throughput, samples/s": lambda m: shown_rate(m) + show_interval(m),
        "throughput, tokens/s": _tokens,
        "optimizer step, s": lambda m: f"{statistics.fmean(m.step_times_s):.3g}",
        "peak memory": lambda m: _peak(m, result.memory_bytes),
        "first step (compiling included), s": lambda m: f"{m.first_step_s:.3g}",
        "waiting for data": lambda m: None if m.data_wait_share is None else f"{m.data_wait_share:.1%} of a step",
    }
    sides = sides_of(result).values()
    found = [(what, *(_figure(c.measurement, shown) for c in sides)) for what, shown in figures.items()]
    return [
        ("x baseline", *(times_baseline(result, c) or "–" for c in sides_of(result).values())),
        *(row for row in found if any(cell != "–" for cell in row[1:])),
        ("measured in trials", *(", ".join(map(str, c.trials)) or "none" for c in sides)),
        ("configuration", *(show_config(c.config) for c in sides)),
    ]


def _tokens(measured: Measurement) -> str | None:
    is_sure = measured.shown_interval.is_narrow
    return show_rate(measured.tokens_per_second) if measured.tokens_per_second and is_sure else None


def _figure(measured: Measurement | None, shown: Callable[[Measurement], str | None]) -> str:
    return "–" if measured is None else shown(measured) or "–"


def _peak(measured: Measurement, budget_bytes: int) -> str | None:
    if not measured.memory.is_known:
        return None
    share = measured.memory.peak_bytes / budget_bytes
    return f"{show_memory(measured.memory.peak_bytes)} ({'<1%' if share < 0.01 else f'{share:.0%}'} of the budget)"


def knobs(result: ResultData) -> list[Row]:
    """Return rows of the winner's changes: knob, baseline's value, winner's value, class of the change."""
    return [(SHORT_NAMES.get(c.knob, c.knob), c.before, c.after, str(c.allowance)) for c in result.best.changes]


def contributions(report: RunReport) -> list[Row]:
    """Return rows of contributions: change, factor, evidence."""
    return [] if report.explanation is None else [*contribution_rows(report.explanation)]


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


def memory_rows(report: RunReport) -> tuple[Row, list[Row]]:
    """Return the heading and the rows of predicted memory by component; no rows if it is unknown."""
    found = report.breakdowns
    rows: list[Row] = [
        (name, *(show_memory(size) if size else "–" for size in sizes))
        for name, sizes in component_sizes(report).items()
    ]
    if found:
        rows.append(("predicted peak", *(show_memory(b.predicted.device_peak_bytes) for b in found)))
        seen = ("–" if b.measured_bytes is None else show_memory(b.measured_bytes) for b in found)
        rows.append(("measured peak", *seen))
        rows += _phase_rows(found)
    return ("component", *(b.name for b in found)), rows


def _phase_rows(found: Sequence[Breakdown]) -> list[Row]:
    """Return rows of what is allocated at the most in each phase of a training; a star marks the peak's."""
    allocated = [{phase.name: phase.allocated_bytes for phase in b.predicted.phases} for b in found]
    rows: list[Row] = []
    for name in dict.fromkeys(name for each in allocated for name in each):
        cells = (
            "–" if name not in each else show_memory(each[name]) + (" *" if b.predicted.phase == name else "")
            for each, b in zip(allocated, found, strict=True)
        )
        rows.append((f"allocated, {name}", *cells))
    return rows


def remarks(report: RunReport) -> list[str]:
    """Return the remarks on a result: checks, allowances, disturbances and notes, a line each."""
    if report.result is None:
        return []
    return [*remark_lines(report.result), *(f"note: {line}" for line in report.result.notes)]


def machine(report: RunReport) -> list[Row]:
    """Return rows about device, host, model and settings of the search."""
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


def versions(report: RunReport) -> list[Row]:
    """Return rows of the packages and their versions."""
    return [("autotune", report.autotune_version), *report.hardware.versions.items()]


class Cell(NamedTuple):
    """A cell of a table: its text, and its key for sorting."""

    shown: str
    value: float | None = None


TRIAL_COLUMNS = (
    "trial", "purpose", "what changes", "status", "samples/s", "predicted samples/s", "peak memory", "predicted peak",
    "took", "reason",
)  # fmt: skip


def trial_cells(trial: TrialRow, position: int) -> tuple[Cell, ...]:
    """Return a trial's cells in the order of the columns; `position` is its place in the report."""
    purpose = str(trial.purpose) if trial.purpose is not None else ""
    prediction = trial.prediction
    return (
        Cell(trial.label or "–", position),
        Cell(purpose),
        Cell(shown_changes(trial.changes or ())),
        Cell("refused" if trial.status is TrialStatus.REJECTED else str(trial.status)),
        _cell(trial.samples_per_second, show_rate),
        _cell(prediction.samples_per_second if prediction else None, show_rate),
        _cell(trial.peak_bytes, show_memory),
        _cell(prediction.peak_bytes if prediction else None, show_memory),
        Cell("", None) if trial.duration_s is None else Cell(f"{trial.duration_s:.1f} s", trial.duration_s),
        Cell(trial.cause or ""),
    )


def _cell(value: float | None, show: Callable[[float], str]) -> Cell:
    return Cell("") if value is None else Cell(show(value), float(value))
