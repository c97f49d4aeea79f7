"""The result of a search, its trials and the contributions of the winner's knobs, as tables and lines of text."""

import io
import math
import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.cost.lengths import padding_share
from autotune.estimates.many_devices import shown
from autotune.exports import launch_files, targets
from autotune.output.step_time import step_lines, step_rows
from autotune.output.terminal import Console, table_of
from autotune.space.knobs import MICRO_BATCH, short_name, shown_changes, shown_value
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.values.config import KNOBS, TrainConfig, knob_values
from autotune.values.problem import Change
from autotune.values.result import Contender, Explanation, ResultData
from autotune.values.trial import Interval, Measurement, Prediction, Purpose, TrialStatus
from autotune.values.workload import Workload

# Notes that the terminal shows; the report has all.
_MOST_NOTES = 3

COULD_NOT_TELL = "couldn't tell"


def show_config(config: TrainConfig, workload: Workload | None = None) -> str:
    """Return a configuration in words: the three that matter most, but for the code's own, and unusual values."""
    said, always, never = list[str](), {MICRO_BATCH, "precision", "optim"}, set[str]()
    if workload is not None and workload.own_step is not None and workload.own_step.knobs:
        never = always - workload.own_step.knobs.keys()
    elif workload is not None and workload.own_code is not None:
        never = {"optim"} & workload.own_code.held.keys()
    if not config.parallelism.is_single:
        said.append(f"{config.parallelism.world_size} x {shown(config.parallelism) or 'one'}")
    for (name, known), value in zip(KNOBS.items(), knob_values(config), strict=True):
        is_usual = value is None or value == known.field.default or name.startswith("parallelism.") or name in never
        if name in always - never or not (is_usual or (name == "dataloader_pin_memory" and not value)):
            said.append(f"{short_name(name)} {shown_value(value)}")
    return ", ".join((*said, *(f"{name} {value}" for name, value in config.own.model_dump().items())))


def result_table(result: ResultData, answer_path: str | None = None, run_dir: str | None = None) -> RenderableType:
    """Return the result of a search, with paths if given; print it with `crop=False`, as some lines are to paste."""
    names, best, *others = answer_rows(result)
    rows: list[Sequence[str | Text]] = [[Text(cell, "bold green") for cell in best], *others]
    table = table_of(names, rows, right=names[1:4], box=None, pad_edge=False, padding=(0, 2, 0, 0))
    lines, notes = remarks(result)
    further = len(notes) - _MOST_NOTES
    if (spent := result.spent) is not None and spent.total_s and result.best.measurement is not None:
        largest = (f"{share:.0%} {what}" for what, share in list(spent.shares().items())[:3])
        lines.append(f"where the time went: {', '.join(largest)}")
    lines += [n if n.startswith("noise: ") else f"note: {n}" for n in notes[:_MOST_NOTES]]
    lines += [f"{further} more note{'s' if further > 1 else ''} in the report"] if further > 0 else []
    to_paste = [] if answer_path is None else [f"written: {answer_path}"]
    if answer_path is not None:
        if result.workload.is_users_own:
            to_paste += launch_files.user_launch(result, answer_path)
        elif result.best.config.parallelism.is_single:
            to_paste.append(f"train with it: {' && '.join(targets.to_train(result, answer_path))}")
        else:
            commands = " or ".join(launch_files.launch_commands(result))
            files = f"(files: autotune export {shlex.quote(answer_path)} --output DIR)"
            to_paste.append(f"launch{launch_files.on_each_machine(result)}: {commands} {files}")
    if run_dir is not None:
        is_alone = {row.config for row in result.trials if row.number is not None} == {result.baseline.config}
        is_worthless = is_alone and "expected to gain" in (result.untried or "")
        if result.verdict == "unconfirmed" and not is_worthless:
            to_paste.append(f"to give it more time: autotune resume {shlex.quote(run_dir)} --max-time TIME")
        to_paste.append(f"all of it: {run_dir} (autotune report {shlex.quote(run_dir)})")
    took = show_time(spent.passed_s if spent is not None else result.search_time_s)
    within = show_memory(result.memory_bytes)
    return Group(
        Text(visible(verdict_line(result)), "bold green" if result.verdict == "faster" else "bold"),
        Text(visible(f"{about(result.workload)}, on {result.hardware.name} within {within}; {took}"), "dim"),
        *((Text(), table, Text()) if result.best.measurement is not None else ()),
        *(Text(visible(line)) for line in lines),
        *(Text(visible(line), no_wrap=True, overflow="ignore") for line in to_paste),
    )


def text_of(result: ResultData) -> str:
    file = io.StringIO()
    Console(file=file, width=120, color_system=None).print(result_table(result), highlight=False)
    return file.getvalue().rstrip("\n")


def answer_rows(result: ResultData) -> list[tuple[str, ...]]:
    """Return headings, and a row each for the winner, the baseline if it is another configuration, and runners-up."""
    labels = [*reversed(result.sides.items()), *(("runner-up", contender) for contender in result.runners_up)]
    names = ("", "x baseline", "samples/s", "peak memory", "what changes")
    return [names, *(_row(result, label, contender) for label, contender in labels)]


def remarks(result: ResultData) -> tuple[list[str], list[str]]:
    """Return lines on speed, `*` in the table, compiling, checks and allowances, and notes."""
    speeds = [f"{label} {said}" for label, one in reversed(result.sides.items()) if (said := _speed(one))]
    lines = [*(["; ".join(speeds)] if speeds else []), *step_lines(result), *device_lines(result)]
    shown = (result.baseline, result.best, *result.runners_up)
    once = {c.config: c.measurement for c in shown if c.measurement is not None and not c.confirmed}
    if once:
        inferred = any(m.accumulation_steps < result.workload.accumulation_steps(c) for c, m in once.items())
        why = "; not all micro-batches of a step ran, the time of the rest is inferred" if inferred else ""
        luck = ", and corrected for the luck of the fastest" if any(c.correction != 1.0 for c in shown) else ""
        lines.append(f"* measured once, not in turn with the baseline{luck}{why}")
    if result.compilation is not None:
        steps = result.compilation.break_even_steps
        pays = f"pays from step {steps:,} on" if steps is not None else "is not won back"
        cached = " (perhaps more with an empty compile cache)" if result.objective.run_samples is None else ""
        lines.append(f"compiling: {show_time(result.compilation.cold_start_s)} at the start{cached}, which {pays}")
    if result.soaked is not None:
        code = result.workload.own_code
        samples = "the longest samples" if code is None or code.reorders else "samples in your code's order"
        lines.append(f"checked on {samples}: {result.soaked}")
    if result.loss_check is not None:
        lines.append(f"checked: {result.loss_check.statement}")
    lines += _allowance_lines(result)
    notes = [note for note in (result.outshone, result.untried) if note is not None]
    notes += [*result.proof_notes, *result.disturbances]
    if (padding := padding_share(result.workload, result.baseline.config)) >= 0.05:
        notes.append(f"about {padding:.0%} of what the baseline runs is padding")
    return lines, notes


def device_lines(result: ResultData) -> list[str]:
    """Return how fast the fastest configuration of each number of devices is; empty: there is one number."""
    shown = (result.best, result.baseline, *result.runners_up)
    ranked = sorted(shown, key=lambda one: (one.confirmed, one.rate(result.objective)))
    fastest = {contender.config.parallelism.world_size: contender for contender in ranked}  # the last of each number
    lines, rates = list[str](), dict[int, float]()
    for number, contender in sorted(fastest.items()):
        if (measured := contender.measurement) is not None:
            rates[number] = contender.rate(result.objective) / number
            whole, each = (measured.shown_rate(contender.correction, tokens=1 / share) for share in (1, number))
            lines.append(f"{number}: {whole} samples/s, {each} each")
    if len(rates) < 2:
        return []
    most = max(rates, key=lambda number: rates[number])
    return [f"devices: {'; '.join(lines)}; {most} of them {'has' if most == 1 else 'have'} the most samples a device"]


def _slower_numbers(result: ResultData) -> str:
    """Return a remark on numbers of devices that are surely slower than the fewer of the answer; '' without any."""
    best, is_baseline = result.best.config.parallelism.world_size, result.best.config == result.baseline.config
    if result.speedup is None and not is_baseline:
        return ""
    least, most = 1.0 if is_baseline or result.speedup is None else result.speedup.interval.low, dict[int, float]()
    for contender in result.runners_up:
        number, lead = contender.config.parallelism.world_size, contender.speedup
        if number > best and lead is not None:
            most[number] = max(most.get(number, 0.0), lead.interval.high)
    return "".join(f"; {number} devices are slower than {best}" for number in sorted(most) if most[number] < least)


def verdict_line(result: ResultData) -> str:
    """Return the answer in a line: whether a configuration is faster than the baseline, and by how much."""
    return _verdict(result) + _slower_numbers(result)


def _verdict(result: ResultData) -> str:
    changed = shown_changes(result.best.changes)
    if result.verdict == "faster" and result.speedup is not None:
        ratio, interval = result.speedup.ratio, result.speedup.interval
        if not interval.is_narrow:
            least = f"at least {interval.low:.2f} x as fast as your baseline"
            return f"{least}, how much more couldn't be told: {changed}"
        return f"{ratio:.2f} x as fast as your baseline ({_ends(interval)} x): {changed}"
    if result.verdict == "baseline_failed":
        return f"your baseline did not complete here ({result.baseline_cause}); the fastest that does: {changed}"
    if result.others_share is not None:
        cause = f"couldn't tell: other processes took {result.others_share:.0%} of the machine; the baseline is kept"
        return f"{cause}. Try again when it is quiet"
    if result.verdict in ("no_clear_winner", "undecided"):
        return _why_kept(result)
    unconfirmed = "couldn't tell: your baseline and the fastest were not both measured again to the end"
    if result.kept_because:
        return f"{unconfirmed}; the baseline is kept: {result.kept_because}"
    return f"{unconfirmed}; the fastest so far: {changed}"


def _why_kept(result: ResultData) -> str:
    """Return why the baseline is kept: by how much the others may be faster at most, if trials could tell."""
    if result.challenger is None:  # nothing came near the baseline or stood the finals
        return "nothing tried is clearly faster than your baseline; the baseline is kept"
    if (bound := result.challenger.bound) is None:
        return (
            "couldn't tell whether anything tried is faster than your baseline: trials differ too much; "
            "the baseline is kept"
        )
    others = [t for t in result.trials if t.config != result.baseline.config and t.purpose is not None]
    tried = len({t.config for t in others if t.purpose is not None and t.purpose.explores})
    again = len({t.config for t in others if t.purpose is Purpose.FINAL and t.status is TrialStatus.COMPLETED})
    who = f"none of the {again} fastest of {tried} configurations tried is" if again > 1 else "the fastest tried isn't"
    percent = math.ceil((bound - 1) * 100 - 0.01)
    by_more = f" by more than {percent} %" if percent > 0 else ""
    return f"{who} faster than your baseline{by_more}; the baseline is kept"


def trial_line(number: int, outcome_status: TrialStatus, changed: Sequence[Change], detail: str) -> str:
    return f"trial {number}: {shown_changes(changed)}: {outcome_status}{', ' + detail if detail else ''}"


def measurement_detail(measurement: Measurement, prediction: Prediction | None = None) -> str:
    rate, interval = measurement.samples_per_second, measurement.shown_interval
    text = f"{measurement.shown_rate()} samples/s"
    if interval.is_narrow:
        half = (interval.high - interval.low) / 2 / rate
        text += f" ± {half:.0%}" if half >= 0.005 else " ± under 1 %"
    peak = f"peak {show_memory(measurement.memory.peak_bytes)}"
    if prediction is None:
        return f"{text}, {peak}"
    text += f" (predicted {show_rate(prediction.samples_per_second)})"
    return f"{text}, {peak} (predicted {show_memory(prediction.peak_bytes)})"


def about(workload: Workload) -> str:
    """Return a workload in words: 'gpt2 (causal-lm), global batch 32, sequence 512'."""
    frozen, size = "vision part frozen" * workload.model.freeze_vision, workload.global_batch_size
    batch = "free global batch" if size is None else f"global batch {size}"
    how = workload.recipe.name if workload.recipe is not None else workload.task
    return ", ".join(filter(None, (f"{workload.model.name} ({how})", frozen, batch, workload.shown_length)))


def _row(result: ResultData, label: str, contender: Contender) -> tuple[str, ...]:
    measured, words = contender.measurement, show_config(contender.config, result.workload)
    if measured is None:  # the verdict has the cause
        return label, "–", "–", "–", visible(words)
    return (
        label if contender.confirmed else f"{label} *",
        times_baseline(result, contender),
        measured.shown_rate(contender.correction),
        show_memory(measured.memory.peak_bytes),
        visible(shown_changes(contender.changes) if contender.changes else words),
    )


def _speed(contender: Contender) -> str:
    """Return the samples/s of a next run, tokens/s and the model FLOP utilisation, as far as they are known."""
    measured, tokens, used, said = contender.measurement, contender.tokens_per_second, contender.mfu, list[str]()
    if measured is not None and contender.confirmed and (span := measured.shown_interval).is_narrow:
        said.append(f"{show_rate(span.low)} to {show_rate(span.high)} samples/s in a next run")
    if measured is not None and tokens is not None:
        each = tokens / (measured.samples_per_second * contender.correction)
        said.append(f"{measured.shown_rate(contender.correction, tokens=each)} tokens/s")
    return ", ".join([*said, f"{used:.0%} MFU"] if used is not None else said)


def times_baseline(result: ResultData, contender: Contender) -> str:
    """Return a throughput over the baseline's, with its interval if measured in turn, else 'about 1.5'; '': unknown."""
    if contender.config == result.baseline.config:
        return "1"
    lead = contender.speedup or (result.speedup if contender.config == result.best.config else None)
    if lead is not None:
        return show_ratio(lead.ratio, lead.interval)
    ours, theirs = contender.measurement, result.baseline.measurement
    if ours is None or theirs is None:
        return ""
    if not (ours.shown_interval.is_narrow and theirs.shown_interval.is_narrow):
        return COULD_NOT_TELL
    ratio, most = contender.rate(result.objective) / result.baseline.rate(result.objective), math.inf
    if contender.config != result.best.config and result.best.confirmed:  # rounding doesn't lift it above the winner
        most = result.speedup.ratio if result.speedup is not None else 1.0
    return f"about {show_rate(min(float(f'{ratio:.2g}'), max(ratio, most)))}"


def show_ratio(ratio: float, interval: Interval | None) -> str:
    """Return a ratio with its interval: '1.43 (1.40 to 1.46)'; if that is wide, the end towards 1, or neither."""
    if interval is None or (not interval.is_narrow and interval.low <= 1.0 <= interval.high):
        return COULD_NOT_TELL
    if interval.is_narrow:
        return f"{ratio:.2f} ({_ends(interval)})"
    return f"at least {interval.low:.2f}" if interval.low > 1.0 else f"at most {interval.high:.2f}"


def _ends(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"


def _allowance_lines(result: ResultData) -> list[str]:
    """Return the fastest configuration of each allowance; classes with the same one stand together."""
    classes: dict[TrainConfig, list[str]] = {}
    for allowance, contender in result.best_by_allowance.items():
        classes.setdefault(contender.config, []).append(str(allowance))
    if len(classes) < 2:
        return []
    parts = []
    for contender in {c.config: c for c in result.best_by_allowance.values()}.values():
        times = times_baseline(result, contender).partition(" (")[0]
        if times == COULD_NOT_TELL:
            return []
        said = f" {times} x with" if times and contender.changes else ""
        parts.append(f"{', '.join(classes[contender.config])}:{said} {shown_changes(contender.changes)}")
    return [f"fastest seen by what may change (--allow): {'; '.join(parts)}"]


_BASIS = {
    "in turn": "measured in turn with the winner",
    "once": "told by one trial of the search each",
    "fails": "the winner does not run without it",
    "slow": "without it no trial ends within its time limit",
    "unknown": "not told by the trials at hand",
}


def explanation_table(found: Explanation) -> RenderableType:
    lines = ["a factor is the winner's throughput over that of the winner with the baseline's value in this knob"]
    if not found.is_settled:
        lines.append("not all of it was measured in turn with the winner; `autotune explain` goes on")
    rate, total = found.winner_samples_per_second, found.total_interval
    is_sure = total is None or total.is_narrow
    title = "the winner" if rate is None else f"the winner: {show_rate(rate, is_sure=is_sure)} samples/s"
    title += "" if found.total is None else f"; x baseline: {show_ratio(found.total, total)}"
    headings = ("knob of the winner", "factor", "how it is known")
    table = table_of(headings, contribution_rows(found), title=title, title_style="bold")
    steps = step_rows(found.steps)
    where = table_of(steps[0], steps[1:], title="where a step's time goes", title_style="bold") if steps else ""
    return Group(*([where, Text()] if where else []), table, *map(Text, lines))


def contribution_rows(found: Explanation) -> list[tuple[str, str, str]]:
    """Return change, factor and evidence of each knob."""
    rows = []
    for part in found.contributions:
        knobs = ", ".join(f"{short_name(c.knob)} {c.before} → {c.after}" for c in part.changes)
        factor = {"fails": "needed", "slow": "too slow"}.get(part.basis, "not told")
        if part.ratio is not None:
            factor = show_ratio(part.ratio, part.interval)
        known = part.cause
        if known is None:
            numbers = ", ".join(sorted((label.removeprefix("explain ") for label in part.trials), key=int))
            kind = "explain trials" if any(label.startswith("explain ") for label in part.trials) else "trials"
            known = _BASIS[part.basis] + (f" ({kind} {numbers})" if numbers else "")
        rows.append((knobs, factor, known))
    return rows
