"""Intervals of predicted time, held against published rows: each source by what the other sources' errors say.

The model is the one that predicts (`autotune.cost.corrections`): the logarithm of measured over predicted seconds is
the device's error, alike for all configurations, a weight for each knob, on several devices two more, and a residual.
All is estimated by moments, sources weighing alike, by what is known of the device; where it has one-device rows of two
sources, by those alone. Factor on the priors of knobs and residual: what one-device rows differ from their source's
median by, over what the priors would give. The device's error: the medians of source and GPU. Several devices: the
medians of their rows, and what each differs from them by, beyond the former; both wider by Student's t, as so few
sources say little of another one.

`left_out` estimates them without a source and asks how many of its rows lie within the interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost.corrections import TimeSpread, Z, known_by, time_process
from autotune.cost.gaussian_process import Process
from published.speed import Timed

# Half the width that holds 95 % of Student's t with 1, 2 ... degrees of freedom, which so many sources' errors are.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

# A source of fewer rows says little about a share.
_SOURCE_ROWS = 20


@dataclass(frozen=True)
class Held:
    """A row with its interval: the deviation of the logarithm, and whether the measurement lies within."""

    timed: Timed
    deviation: float
    log_error: float

    @property
    def within(self) -> bool:
        """Whether what was measured lies in the 95 % interval."""
        return abs(self.log_error) <= Z * self.deviation


def features_of(timed: Timed) -> dict[str, float]:
    """Return what of a row may make the prediction of its time wrong, by the names of `time_features`."""
    setup, row = timed.setup, timed.row
    family, spread = setup.family, setup.spread.parallelism
    found = {"all": 1.0, "samples": math.log2(setup.micro_batch) / 4}
    names = [f"precision={family.autocast or family.dtype}", f"optim={setup.optim}"]
    names += [f"attention={family.attn_implementation}"]
    names += [f"checkpointing={family.checkpointing}"] * (family.checkpointing != "none")
    names += ["adapter"] * (setup.software.lora is not None)
    if setup.software.quantization is not None:
        names.append(f"quantization={setup.software.quantization.kind}")
    if spread.world_size > 1:
        names += ["several", *[f"sharding={spread.sharding}"] * (spread.sharding != "none")]
    names += ["compile=inductor"] * (row.compile in (True, "torch.compile"))
    return {**found, **dict.fromkeys(names, 1.0)}


def known_of(timed: Timed) -> str:
    """Return what is known of a row's device."""
    return known_by(timed.setup.gpu.name, timed.setup.gpu.capability)


def estimated(rows: Iterable[Timed]) -> dict[str, TimeSpread]:
    """Return the deviations by what is known of the devices, from the errors of rows."""
    listed = list(rows)
    alone, spread = ([t for t in listed if t.setup.spread.parallelism.is_single is s] for s in (True, False))
    common, each = _of_several(spread)
    found = {}
    for kind, known in _grouped(listed, known_of).items():
        sources = _sources([t for t in known if t in alone])
        enough = len(sources) > 1
        ratios = [_ratio(source) for source in (sources if enough else _sources(alone)) if len(source) > 1]
        groups = _grouped([t for t in known if not enough or t in alone], lambda t: (t.row.group, t.setup.gpu.name))
        medians = [_median(group) for group in groups.values()]
        found[kind] = TimeSpread(
            _root_mean_square(medians), math.sqrt(np.mean(ratios)) if ratios else 1.0, common, each
        )
    return found


def _of_several(rows: Sequence[Timed]) -> tuple[float, float]:
    """Return the deviations of a further source's median and of its rows from it, on several devices."""
    sources = _sources(rows)
    within = [_root_mean_square([t.log_factor - _median(source) for t in source]) for source in sources]
    wider = _STUDENT[min(len(sources), len(_STUDENT)) - 1] / Z if sources else 1.0
    return wider * _root_mean_square([_median(source) for source in sources]), wider * _root_mean_square(within)


def _ratio(source: Sequence[Timed]) -> float:
    """Return the variance of rows about their median over what the priors of their knobs would give."""
    process = time_process(TimeSpread(0.0))
    usual = process.predict([features_of(t) for t in source])[1] ** 2 + process.noise**2
    return float(np.mean([(t.log_factor - _median(source)) ** 2 for t in source]) / np.mean(usual))


def _median(rows: Sequence[Timed]) -> float:
    return float(np.median([t.log_factor for t in rows]))


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(float(np.mean(np.square(values)))) if len(values) else 0.0


def _sources(rows: Iterable[Timed]) -> list[list[Timed]]:
    return list(_grouped(rows, lambda t: t.row.group).values())


def _grouped(rows: Iterable[Timed], key: Callable[[Timed], Any]) -> dict[Any, list[Timed]]:
    found: dict[Any, list[Timed]] = defaultdict(list)
    for timed in rows:
        found[key(timed)].append(timed)
    return found


def left_out(rows: Sequence[Timed]) -> list[Held]:
    """Return each row with the interval that the rows of the other sources give it; none where there is one source."""
    held = []
    for source in dict.fromkeys(t.row.group for t in rows):
        spreads = estimated(t for t in rows if t.row.group != source)
        if not spreads:
            continue
        widest = max(spreads.values())  # of what nothing is known by the others
        for timed in (t for t in rows if t.row.group == source):
            spread = spreads.get(known_of(timed), widest)
            held.append(_held(time_process(spread), timed, spread))
    return held


def after_one(rows: Sequence[Timed], spreads: dict[str, TimeSpread]) -> list[Held]:
    """Return each row with its interval after the first row of the same source, model and devices was measured."""
    groups: dict[tuple[str, str, int], list[Timed]] = defaultdict(list)
    for timed in rows:
        groups[timed.row.group, timed.setup.spec.name, timed.setup.spread.parallelism.world_size].append(timed)
    held = []
    for first, *others in groups.values():
        spread = spreads[known_of(first)]
        process = time_process(spread, [features_of(first)], [first.log_factor])
        held += [_held(process, timed, spread) for timed in others]
    return held


def _held(process: Process, timed: Timed, spread: TimeSpread) -> Held:
    mean, deviation = process.predict([features_of(timed)])
    each = 0.0 if timed.setup.spread.parallelism.is_single else spread.each
    return Held(timed, math.hypot(float(deviation[0]), process.noise, each), timed.log_factor - float(mean[0]))


def figures(held: Iterable[Held]) -> dict[str, Any]:
    """Return count, absolute error, coverage and typical half width of intervals, as shares."""
    listed = list(held)
    size = np.abs([np.expm1(-h.log_error) for h in listed])
    return {
        "count": len(listed),
        "signed_median": round(float(np.median([np.expm1(-h.log_error) for h in listed])), 4),
        "median": round(float(np.median(size)), 4),
        "p90": round(float(np.percentile(size, 90)), 4),
        "coverage": round(sum(h.within for h in listed) / len(listed), 4),
        "half_width": round(math.expm1(Z * float(np.median([h.deviation for h in listed]))), 4),
    }


def time_figures(rows: Sequence[Timed]) -> dict[str, Any]:
    """Return the figures of predicted time: left out by source, and after one trial."""
    held, spreads = left_out(rows), estimated(rows)
    groups: dict[str, list[Held]] = defaultdict(list)
    for h in held:
        row, devices = h.timed.row, h.timed.setup.spread.parallelism.world_size
        groups["all"].append(h)
        groups[f"all, {'several devices' if devices > 1 else 'one device'}"].append(h)
        groups[f"known by {known_of(h.timed)}"].append(h)
        groups[f"source {row.group}"].append(h)
        groups[f"device {h.timed.setup.gpu.name}{f' x {devices}' * (devices > 1)}"].append(h)
        groups[f"technique {h.timed.setup.technique}{' on several' * (devices > 1)}"].append(h)
    after: dict[str, list[Held]] = defaultdict(list)
    for h in after_one(rows, spreads):
        after["one device" if h.timed.setup.spread.parallelism.is_single else "several devices"].append(h)
    return {
        "left_out": {name: figures(group) for name, group in sorted(groups.items())},
        "after_one_trial": {name: figures(group) for name, group in sorted(after.items())},
        "half_widths": _half_widths(rows, spreads),
        "deviations": {kind: [round(x, 3) for x in spread] for kind, spread in spreads.items()},
    }


def _half_widths(rows: Sequence[Timed], spreads: dict[str, TimeSpread]) -> dict[str, float]:
    """Return the typical half width of intervals with all sources, by what is known of the device."""
    groups: dict[str, list[float]] = defaultdict(list)
    for timed in rows:
        kind, single = known_of(timed), timed.setup.spread.parallelism.is_single
        held = _held(time_process(spreads[kind]), timed, spreads[kind])
        groups[f"{kind}, {'one device' if single else 'several'}"].append(held.deviation)
    return {name: round(math.expm1(Z * float(np.median(found))), 4) for name, found in groups.items()}


def report_time(found: dict[str, Any]) -> None:
    """Print the figures of predicted time."""
    print(f"\n{'predicted seconds over measured, source left out':62}   n  signed  median    p90  in 95 %  +-width")
    after = {f"after one trial of the model, {name}": f for name, f in found["after_one_trial"].items()}
    for name, f in {**found["left_out"], **after}.items():
        shares = (
            f"{f['signed_median']:+7.1%} {f['median']:6.1%} {f['p90']:6.1%} {f['coverage']:7.1%} {f['half_width']:7.1%}"
        )
        few = "" if f["count"] >= _SOURCE_ROWS else "  (few)"
        print(f"{name:62} {f['count']:3} {shares}{few}")
    print(f"typical half width with all sources: {found['half_widths']}")
    print(f"deviation of the device, factor on the knobs' priors, deviations of several: {found['deviations']}")
