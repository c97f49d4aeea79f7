"""Compares two answers to the same question: how much faster one is, what differs between their machines, and where.

By what both have measured of the same configuration: the first one's winner, or else the baseline. Their intervals are
those of a next run, so they hold between machines too, and the ratio's is of both.
"""

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.errors import InputError
from autotune.output.table import COULD_NOT_TELL, about, show_config, show_ratio
from autotune.output.terminal import table_of
from autotune.units import show_memory, show_rate
from autotune.values.result import Compared, Comparison, Contender, ResultData, differing_versions
from autotune.values.statistics import DRIFT
from autotune.values.trial import Interval, StepPart


def compare(first: ResultData, second: ResultData) -> Comparison:
    """Return the comparison; InputError: they train something else, or have measured no configuration in common."""
    if (differing := first.workload.differing(second.workload)) is not None:
        raise InputError(f"the answers train something else: {differing}")
    theirs = {contender.config: contender for contender in _measured(second)}
    pairs = [(one, theirs[one.config]) for one in _measured(first) if one.config in theirs]
    wanted = [(one, other) for one, other in pairs if one.config in (first.best.config, first.baseline.config)]
    if not (wanted := wanted or pairs[:1]):
        raise InputError("the answers have measured no configuration in common; search again with --fix for each knob")
    one, other = first.hardware, second.hardware
    sides = {
        "device": (one.name, other.name),
        "memory": (show_memory(one.memory_bytes), show_memory(other.memory_bytes)),
        "driver": (one.driver or "", other.driver or ""),
        "cores": (str(one.cores), str(other.cores)),
        "autotune": (first.autotune_version, second.autotune_version),
        "disturbances": ("; ".join(first.disturbances) or "none", "; ".join(second.disturbances) or "none"),
    }
    changed = {what: values for what, values in sides.items() if values[0] != values[1]}
    changed |= differing_versions(one.versions, other.versions)
    return Comparison(compared=tuple(_compared(*pair, DRIFT[one.kind]) for pair in wanted), changed=changed)


def _measured(result: ResultData) -> list[Contender]:
    known = (result.best, result.baseline, *result.runners_up)
    return list({c.config: c for c in known if c.measurement is not None}.values())


def _compared(one: Contender, other: Contender, drift: float) -> Compared:
    measured = [contender.measurement for contender in (one, other) if contender.measurement is not None]
    rates = [measurement.samples_per_second for measurement in measured]
    ratio, spans = rates[1] / rates[0], [measurement.shown_interval for measurement in measured]
    halves = [math.log(span.high / span.low) / 2 if 0 < span.low <= span.high else math.inf for span in spans]
    # That of a trial which ran once is of its steps, not of a next run.
    half = math.hypot(*halves, *(0.0 if contender.confirmed else 1.96 * drift for contender in (one, other)))
    steps, more = [c.step for c in (one, other)], dict[StepPart, float]()
    if steps[0] is not None and steps[1] is not None:
        sides = [{part: share * step.seconds for part, share in step.shares.items()} for step in steps if step]
        more = {part: sides[1].get(part, 0.0) - sides[0].get(part, 0.0) for part in sides[0].keys() | sides[1].keys()}
    of_both: dict[str, Any] = {"samples_per_second": rates, "peak_bytes": [m.memory.peak_bytes for m in measured]}
    interval = Interval(low=ratio * math.exp(-half), high=ratio * math.exp(half))
    largest_first = dict(sorted(more.items(), key=lambda part: -abs(part[1])))
    return Compared(config=one.config, **of_both, ratio=ratio, interval=interval, more_s=largest_first)


def comparison_table(first: ResultData, found: Comparison) -> RenderableType:
    """Return a comparison as a table for each configuration, and a line for what changed."""
    parts: list[RenderableType] = [Text(about(first.workload), "bold")]
    for one in found.compared:
        peaks = f", peak memory {' for '.join(map(show_memory, reversed(one.peak_bytes)))}" * all(one.peak_bytes)
        parts.append(Text(f"{_verdict(one, found.names)}{peaks}: {show_config(one.config, first.workload)}"))
        least = 0.05 * sum(map(abs, one.more_s.values()))
        largest = [(part, more) for part, more in one.more_s.items() if abs(more) >= least]
        if largest and not one.interval.low <= 1.0 <= one.interval.high:
            told = ", ".join(f"{part} {'+' if more > 0 else '-'}{show_rate(abs(more))} s" for part, more in largest)
            parts.append(Text(f"  a step's parts, second less first: {told}"))
    rows = [(what, *values) for what, values in found.changed.items()]
    parts.append(table_of(("what differs", *found.names), rows) if rows else Text("device and versions are the same"))
    return Group(*parts)


def _verdict(one: Compared, names: tuple[str, str]) -> str:
    rates = " for ".join(show_rate(rate, is_sure=one.interval.is_narrow) for rate in reversed(one.samples_per_second))
    word, ratio = "the same speed, as far as can be told", show_ratio(one.ratio, one.interval)
    if one.interval.high < 1.0 or one.interval.low > 1.0:
        word = f"{names[1]} is {'slower' if one.ratio < 1.0 else 'faster'}"
    if ratio == COULD_NOT_TELL:
        return f"couldn't tell which is faster: {rates} samples/s"
    return f"{word}: {ratio} x, {rates} samples/s"
