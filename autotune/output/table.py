"""The result of a search, and its trials, as tables and lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.estimates.many_devices import shown
from autotune.exports import launch_files
from autotune.output.terminal import table_of
from autotune.space.knobs import shown_changes
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.values.config import KNOBS, TrainConfig, knob_values
from autotune.values.problem import Change
from autotune.values.result import Contender, ResultData
from autotune.values.trial import Interval, Measurement, Prediction, TrialStatus
from autotune.values.workload import Workload

# Least share of padding that is reported.
WORTH_A_WORD = 0.05

# Least half-width of an interval, as a share of the rate, that is shown as a number.
_SMALLEST_SHOWN = 0.005

# Least share of the search's time that is reported.
WORTH_A_SHARE = 0.005


def show_config(config: TrainConfig) -> str:
    """Return a configuration in one line."""
    parts = [f"micro-batch {config.per_device_train_batch_size}", str(config.precision), config.optim]
    if not config.parallelism.is_single:
        parts.insert(0, f"{config.parallelism.world_size} x {shown(config.parallelism) or 'one'}")
    words = (
        known.filled(known.knob.word, value) for known, value in zip(KNOBS.values(), knob_values(config), strict=True)
    )
    for word in filter(None, words):
        if word.startswith(" "):
            parts[-1] += word
        else:
            parts.append(word)
    return ", ".join(parts)


def result_table(
    result: ResultData, answer_path: str | None = None, run_directory: str | None = None
) -> RenderableType:
    """Return the result of a search: table, verdict, remarks, and the paths of result and run directory if given.

    Print it with `crop=False`: lines to be pasted are not wrapped.
    """
    same = result.best.config == result.baseline.config
    missing = result.baseline_cause or "not measured"
    rows: list[Sequence[str | Text]] = [] if same else [_row("baseline", result.baseline, missing=missing)]
    best = _row("winner = baseline" if same else "winner", result.best)
    rows += [[Text(cell, "bold green") for cell in best], *(_row("runner-up", c) for c in result.runners_up)]
    figures = ("samples/s", "tokens/s", "peak memory")
    title = {"title": visible(_title(result)), "title_style": "bold"}
    table = table_of(("", *figures, "what changes"), rows, right=figures, **title)
    lines = [
        verdict_line(result),
        *_compilation_lines(result),
        *_proof_lines(result),
        *_allowance_lines(result),
        *_spending_lines(result),
    ]
    to_paste = []
    if answer_path is not None:
        to_paste = [f"written: {answer_path}", *_launch_lines(result, answer_path)]
        to_paste += launch_files.user_launch(result, answer_path)
    if run_directory is not None:
        if result.verdict == "unconfirmed":
            to_paste.append(f"to give it more time: autotune resume {run_directory} --max-time TIME")
        to_paste.append(f"all of it: {run_directory} (autotune report {run_directory})")
    return Group(
        table,
        *(Text(visible(line)) for line in lines),
        *(Text(visible(line), no_wrap=True, overflow="ignore") for line in to_paste),
        *(Text(visible(f"note: {n}")) for n in _closing_notes(result)),
    )


def _launch_lines(result: ResultData, answer_path: str) -> list[str]:
    """Return how a training with several ranks is launched."""
    spread = result.best.config.parallelism
    if spread.is_single:
        return []
    return [
        f"launch: {' or '.join(launch_files.launch_commands(result))} "
        f"(files: autotune export {answer_path} --output DIR)"
    ]


def remark_lines(result: ResultData) -> list[str]:
    """Return lines on compiling, checks, allowances and disturbances."""
    lines = [*_compilation_lines(result), *_proof_lines(result), *_allowance_lines(result)]
    return [*lines, *_closing_notes(result)]


def _compilation_lines(result: ResultData) -> list[str]:
    """Return the time of compiling, and the step from which on it pays off."""
    if result.compilation is None:
        return []
    steps = result.compilation.break_even_steps
    pays = f"pays from step {steps:,} on" if steps is not None else "is not won back"
    return [f"compiling: {show_time(result.compilation.cold_start_s)} at the start, which {pays}"]


def verdict_line(result: ResultData) -> str:
    """Return the verdict in one sentence."""
    if result.verdict == "faster" and result.speedup is not None:
        s = result.speedup
        return (
            f"{s.ratio:.2f}x the throughput of {s.reference} "
            f"(95 % interval {s.interval.low:.2f} to {s.interval.high:.2f}), both measured again in turn"
        )
    if result.verdict == "no clear winner":
        return "no clear winner: nothing tried is faster than the baseline beyond the noise; the baseline is kept"
    if result.verdict == "baseline did not complete":
        return f"the baseline did not complete here ({result.baseline_cause}); this is the fastest that does"
    unconfirmed = "unconfirmed: the search ended before the best could be measured again beside the baseline"
    return f"{unconfirmed}; the baseline is kept: {result.kept_because}" if result.kept_because else unconfirmed


def trial_line(number: int, outcome_status: TrialStatus, changed: Sequence[Change], detail: str) -> str:
    """Return one line about a finished trial."""
    return f"trial {number}: {shown_changes(changed)}: {outcome_status}{', ' + detail if detail else ''}"


def measurement_detail(measurement: Measurement, prediction: Prediction | None = None) -> str:
    """Return throughput and peak memory in words, with the predicted values if given."""
    text = f"{show_rate(measurement.samples_per_second)} samples/s"
    half = _relative_half(measurement)
    if half is not None:
        text += f" ± {half:.0%}" if half >= _SMALLEST_SHOWN else " ± under 1 %"
    peak = f"peak {show_memory(measurement.memory.peak_bytes)}"
    if prediction is None:
        return f"{text}, {peak}"
    return (
        f"{text} (predicted {show_rate(prediction.samples_per_second)}), "
        f"{peak} (predicted {show_memory(prediction.peak_bytes)})"
    )


def _relative_half(measurement: Measurement) -> float | None:
    interval = measurement.shown_interval
    if not math.isfinite(interval.high) or interval.low <= 0:
        return None
    return (interval.high - interval.low) / 2 / measurement.samples_per_second


def about(workload: Workload) -> str:
    """Return a workload in words: 'gpt2 (causal-lm), global batch 32, sequence 512'."""
    parts = (f"{workload.model.name} ({workload.task})", workload.shown_batch, workload.shown_length)
    return ", ".join(filter(None, parts))


def _title(result: ResultData) -> str:
    took_s = result.spent.elapsed_s if result.spent is not None else result.search_time_s
    return (
        f"{about(result.workload)}, on {result.hardware.name} "
        f"within {show_memory(result.memory_bytes)}; {show_time(took_s)}"
    )


def _row(label: str, contender: Contender, *, missing: str = "") -> tuple[str, ...]:
    measured = contender.measurement
    if measured is None:
        return label, visible(missing), "", "", visible(show_config(contender.config))
    return (
        label if contender.confirmed else f"{label} *",
        show_rate(measured.samples_per_second) + show_interval(measured.shown_interval),
        show_rate(measured.tokens_per_second) if measured.tokens_per_second else "",
        show_memory(measured.memory.peak_bytes),
        visible(shown_changes(contender.changes) if contender.changes else show_config(contender.config)),
    )


def show_interval(interval: Interval) -> str:
    """Return an interval as a suffix of its value: ' (9.5 to 10.2)', or ' (± under 1 %)' for equal ends."""
    if show_rate(interval.low) == show_rate(interval.high):
        return " (± under 1 %)"
    high = show_rate(interval.high) if math.isfinite(interval.high) else "?"
    return f" ({show_rate(interval.low)} to {high})"


def _proof_lines(result: ResultData) -> list[str]:
    """Return the results of the winner's checks."""
    lines = [f"soaked: {result.soaked}"] if result.soaked is not None else []
    if result.skewed_routing is not None:
        lines.append(f"with uneven routing: {result.skewed_routing}")
    if result.loss_check is not None:
        lines.append(f"checked: {result.loss_check.statement}")
    return [*lines, *result.proof_notes]


def _allowance_lines(result: ResultData) -> list[str]:
    """Return the fastest throughput of each allowance, if there are several."""
    if len(result.best_by_allowance) < 2:
        return []
    worth = ", ".join(
        f"{allowance}: {show_rate(c.measurement.samples_per_second)}"
        for allowance, c in result.best_by_allowance.items()
        if c.measurement
    )
    return [f"fastest seen by what may change, samples/s: {worth}"]


def _spending_lines(result: ResultData) -> list[str]:
    """Return the time of the search by kind of work, without small parts."""
    spent = result.spent
    if spent is None or not spent.total_s:
        return []
    parts = ", ".join(f"{share:.0%} {what}" for what, share in spent.shares().items() if share >= WORTH_A_SHARE)
    each = f"; {spent.overhead_per_trial_s:.1f} s to set up a trial" if spent.overhead_per_trial_s else ""
    at_once = f", {show_time(spent.at_once_s)} of it beside other trials" if spent.at_once_s >= 1 else ""
    return [f"where the time went ({show_time(spent.total_s)}{at_once}): {parts}{each}"]


def _closing_notes(result: ResultData) -> list[str]:
    shown = [result.baseline, result.best, *result.runners_up]
    notes = []
    if any(c.measurement and not c.confirmed for c in shown):
        notes.append("* measured once, with part of the accumulation inferred")
    padding = result.baseline.measurement.padding_share if result.baseline.measurement else None
    if padding is not None and padding >= WORTH_A_WORD:
        notes.append(f"{padding:.0%} of what the baseline runs is padding, which tokens/s leaves out")
    notes += [result.outshone] if result.outshone is not None else []
    return [*notes, *result.disturbances]
