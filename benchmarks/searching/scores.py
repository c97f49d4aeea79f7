"""How good the trials of a search were, by the recorded table. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from searching.replay import Replayed
from searching.tables import Table

from autotune.errors import InputError
from autotune.values.config import TrainConfig
from autotune.values.trial import TrialStatus

# Of the distance from the median configuration to the best, what random search has to come for a score's clock to stop.
CUTOFF = 0.95
_MOMENTS = 50

Curve = NDArray[np.float64]
Runs = Sequence[Sequence[Replayed]]


def rates_of(table: Table) -> dict[TrainConfig, float]:
    """Return the mean samples/s of every point that completed each of its trials; `InputError` if none did."""
    rates = {p.config: p.samples_per_second for p in table.points if p.rates and len(p.rates) == len(p.trials)}
    if not rates:
        raise InputError("no point of the table has completed a trial")
    return rates


def noise_of(table: Table) -> float:
    """Return the standard deviation of one trial's samples/s, as a share of it, by the repeats; 0 without repeats."""
    pairs = [p.rates[:2] for p in table.points if len(p.rates) > 1]
    if len(pairs) < 2:
        return 0.0
    # What the whole second round was slower or faster is no noise of a trial.
    differences = [math.log(a / b) for a, b in pairs]
    return statistics.stdev(differences) / math.sqrt(2)


def near_best(table: Table, within: float) -> frozenset[TrainConfig]:
    """Return the points whose mean is within a share of the best's, differences within the table's noise left out.

    That is one standard deviation of the difference of two means. Who is best of many is lucky, too: the bar is set by
    the mean over its repeats, which overrates it.
    """
    rates = rates_of(table)
    slack = noise_of(table) * math.sqrt(2 / max(1, table.header.repeats))
    bar = max(rates.values()) * (1 - within) * math.exp(-slack)
    return frozenset(config for config, rate in rates.items() if rate >= bar)


def first_hit(trials: Sequence[Replayed], near: frozenset[TrainConfig]) -> int | None:
    """Return how many trials it took until one of `near` was measured, None if none was."""
    hits = (n for n, t in enumerate(trials, start=1) if t.status is TrialStatus.COMPLETED and t.config in near)
    return next(hits, None)


def _mean_reached(runs: Runs, rates: dict[TrainConfig, float], moments: Curve) -> Curve:
    """Return the samples/s that runs reached by each moment in seconds; before the first trial the worst there is."""
    values = np.full((len(runs), len(moments)), min(rates.values()))
    for reached, trials in zip(values, runs, strict=True):
        for trial in trials:
            if trial.status is TrialStatus.COMPLETED and trial.config in rates:
                late = moments >= trial.ended_at_s
                reached[late] = np.maximum(reached[late], rates[trial.config])
    return np.mean(values, axis=0)


def performance_score(runs: Runs, by_chance: Runs, table: Table) -> float:
    """Return how much of the way from random search to the optimum a strategy comes, as a mean over time.

    After Willemsen and others, "A methodology for comparing optimization algorithms for auto-tuning" (Future Generation
    Computer Systems 159, 2024): time runs until random search has come 95 % of the way from the median configuration to
    the best; 1 is the optimum from the start on, 0 is as good as random search.
    """
    rates = rates_of(table)
    best, median = max(rates.values()), statistics.median(rates.values())
    bar = median + CUTOFF * (best - median)
    end_s = max(trial.ended_at_s for run in by_chance for trial in run)
    fine = np.linspace(0, end_s, 2000)
    chance = _mean_reached(by_chance, rates, fine)
    over = np.flatnonzero(chance >= bar)
    stop_s = float(fine[over[0]]) if len(over) else end_s
    moments = np.linspace(stop_s / _MOMENTS, stop_s, _MOMENTS)
    ours, others = _mean_reached(runs, rates, moments), _mean_reached(by_chance, rates, moments)
    if best == median:
        return 0.0
    return float(np.mean((ours - others) / np.maximum(best - others, (1 - CUTOFF) * (best - median))))


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return median and 90th percentile, lowest and highest; None stands for never, which is later than any number."""
    numbers = sorted(math.inf if v is None else v for v in values)
    p90 = numbers[math.ceil(0.9 * len(numbers)) - 1]
    found = {"median": statistics.median_low(numbers), "p90": p90, "lowest": numbers[0], "highest": numbers[-1]}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def figures(runs: Runs, table: Table) -> dict[str, Any]:
    """Return the figures of a strategy on a table, over its seeds."""
    found: dict[str, Any] = {}
    for within in (0.05, 0.01):
        near = near_best(table, within)
        hits = [first_hit(run, near) for run in runs]
        seconds = [run[hit - 1].ended_at_s if hit else None for run, hit in zip(runs, hits, strict=True)]
        name = f"{within:.0%}"
        found[f"trials_to_{name}"] = spread(hits)
        found[f"seconds_to_{name}"] = spread(seconds)
        found[f"never_{name}"] = hits.count(None)
    failed = [_out_of_memory(run) for run in runs]
    found["trials_in_all"] = spread([len(run) for run in runs])
    found["out_of_memory_in_all"] = spread(failed)
    found["out_of_memory_share"] = sum(failed) / max(1, sum(len(run) for run in runs))
    # The baseline is the user's, and is measured whatever is thought of it.
    chosen = [t for run in runs for t in run if t.config != table.header.baseline]
    found["out_of_memory_share_of_chosen"] = _out_of_memory(chosen) / max(1, len(chosen))
    return found


def _out_of_memory(trials: Sequence[Replayed]) -> int:
    return sum(t.status is TrialStatus.OUT_OF_MEMORY for t in trials)
