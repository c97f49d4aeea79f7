"""Computes the contribution of each knob of the winner from the trials of a search and of `autotune explain`.

A knob is removed from the winner by putting it back to the baseline's value. The best evidence is the configuration
without it measured in the same rounds as the winner; the second best, measured once by the search; the third, any two
trials of the search that differ in this knob alone, whose ratio may differ from the winner's.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.values.config import Parallelism, TrainConfig
from autotune.values.result import Basis, Contribution, Explanation, ResultData
from autotune.values.statistics import ratio_of_means
from autotune.values.trial import Purpose, TrialResult, TrialStatus

# Knobs that have to be put back together with another.
DEPENDENTS: dict[str, frozenset[str]] = {
    "torch_compile_backend": frozenset({"torch_compile_mode"}),
    "dataloader_num_workers": frozenset({"dataloader_prefetch_factor"}),
    "adapter": frozenset({"quantization"}),  # quantized base weights can't be trained
    "parallelism.world_size": frozenset(f"parallelism.{f}" for f in Parallelism.model_fields if f != "world_size"),
    "parallelism.sharding": frozenset({"parallelism.wrapping", "parallelism.offload"}),
}


def removals(result: ResultData) -> list[Contribution]:
    """Return the removals of the winner's knobs one at a time, in the order of the knobs; no trial has told of any."""
    changed = {c.knob: c for c in result.best.changes}
    found = []
    for knob, change in changed.items():
        if any(knob in DEPENDENTS.get(other, ()) for other in changed):
            continue
        group = (change, *(changed[d] for d in changed if d in DEPENDENTS.get(knob, ())))
        try:
            config = put_back(result.best.config, result.baseline.config, [c.knob for c in group])
            result.workload.accumulation_steps(config)
        except ValueError as error:
            cause = f"there is no such configuration: {str(error).strip().splitlines()[-1].strip()}"
            found.append(Contribution(changes=group, config=None, basis="fails", cause=cause))
        else:
            found.append(Contribution(changes=group, config=config, basis="unknown"))
    return found


def put_back(config: TrainConfig, baseline: TrainConfig, knobs: Sequence[str]) -> TrainConfig:
    """Return `config` with the baseline's values for `knobs`, named as in `Change`; ValueError: it can't be."""
    document = config.model_dump()
    for knob in knobs:
        parent, dot, field = knob.partition(".")
        value = getattr(baseline, parent)
        document[parent] = {**document[parent], field: getattr(value, field)} if dot else value
    return TrainConfig.model_validate(document)


def explanation_of(
    result: ResultData, trials: Sequence[TrialResult], refused: Mapping[TrainConfig, str] | None = None
) -> Explanation | None:
    """Return the contribution of each knob of the winner by trials, or why it was `refused`; None for the baseline."""
    if result.best.config == result.baseline.config:
        return None
    evidence = Evidence(result, trials)
    found = [evidence._contribution(removal, refused or {}) for removal in removals(result)]
    ours, theirs = (c.rate(result.objective) or None for c in (result.best, result.baseline))
    seen, proven = ours / theirs if ours is not None and theirs is not None else None, result.speedup
    return Explanation(
        winner=result.best.config,
        winner_samples_per_second=ours,
        baseline_samples_per_second=theirs,
        total=proven.ratio if proven is not None else seen,
        total_interval=proven.interval if proven is not None else None,
        contributions=tuple(sorted(found, key=lambda c: -(c.ratio or 0.0))),
    )


def _label(trial: TrialResult) -> str:
    return trial.request.purpose.label(trial.request.number)


# Purposes of the trials of which each was chosen and measured by itself.
_SEARCHED = (Purpose.BASELINE, Purpose.SEARCH)


class Evidence:
    """The trials of a search, and of `autotune explain`, by configuration and purpose."""

    def __init__(self, result: ResultData, trials: Sequence[TrialResult]) -> None:
        self.result = result
        self.trials = [t for t in trials if t.request.task is None]

    def elsewhere(self, knobs: Sequence[str]) -> dict[str, Any] | None:
        """Return the ratio by the two trials of the search nearest to the winner that differ in `knobs` alone."""
        best, baseline = self.result.best.config, self.result.baseline.config
        measured = dict.fromkeys(t.request.config for t in self._completed(_SEARCHED))
        pairs: dict[TrainConfig, TrainConfig] = {}
        for config in measured:
            with contextlib.suppress(ValueError):
                without = put_back(config, baseline, knobs)
                if put_back(config, best, knobs) == config != without and without in measured:
                    pairs[config] = without
        if not pairs:
            return None
        nearest = min(pairs, key=lambda c: sum(getattr(c, n) != getattr(best, n) for n in TrainConfig.model_fields))
        return self.compare(nearest, pairs[nearest], _SEARCHED)

    def _completed(self, purposes: tuple[Purpose, ...], config: TrainConfig | None = None) -> list[TrialResult]:
        found = [t for t in self.trials if t.measurement is not None and t.request.purpose in purposes]
        return [t for t in found if config is None or t.request.config == config]

    def compare(self, ours: TrainConfig, without: TrainConfig, purposes: tuple[Purpose, ...]) -> dict[str, Any] | None:
        """Return, as fields of a contribution, the throughput of one over the other's; None: one wasn't measured."""
        with_it, without_it = self._completed(purposes, ours), self._completed(purposes, without)
        if not with_it or not without_it:
            return None
        others = dict.fromkeys(t.request.config for t in self._completed(purposes))
        in_rounds = purposes != _SEARCHED
        spread = [self._times(c, purposes) for c in others if c not in (ours, without)] if in_rounds else []
        times = self._times(without, purposes)
        ratio, interval = ratio_of_means(times, self._times(ours, purposes), spread)
        rate = 1 / statistics.fmean(t for trial in times for t in trial)
        labels = tuple(map(_label, (*with_it, *without_it)))
        return {"ratio": ratio, "interval": interval, "trials": labels, "samples_per_second": rate}

    def _times(self, config: TrainConfig, purposes: tuple[Purpose, ...]) -> list[list[float]]:
        """Return the seconds per sample of each measured step, a list per trial; a run's start is spread over it."""
        samples = self.result.workload.samples_per_step(config)
        measured = [t.measurement for t in self._completed(purposes, config) if t.measurement is not None]
        start_s = max(self.result.objective.start_s_per_sample(m) for m in measured)
        return [[t / samples + start_s for t in m.step_times_s] for m in measured]

    def _contribution(self, removal: Contribution, refused: Mapping[TrainConfig, str]) -> Contribution:
        config, result = removal.config, self.result

        def found(basis: Basis, **fields: Any) -> Contribution:
            return removal.model_copy(update={"basis": basis, **fields})

        if config is None:
            return removal
        for purpose in (Purpose.EXPLAIN, Purpose.FINAL):
            if (reading := self.compare(result.best.config, config, (purpose,))) is not None:
                return found("in turn", **reading)
        for trial in self.trials:
            # Of the trials that timed out, only those of `autotune explain` count, which had all the time.
            is_slow = trial.status is TrialStatus.TIMED_OUT and trial.request.purpose is Purpose.EXPLAIN
            if trial.request.config == config and trial.outcome.kind == "failure" and (trial.has_failed or is_slow):
                cause = f"{trial.status}: {trial.outcome.cause} (trial {_label(trial)})"
                return found("slow" if is_slow else "fails", cause=cause, trials=(_label(trial),))
        if config in refused:
            return found("fails", cause=refused[config])
        if (reading := self.compare(result.best.config, config, _SEARCHED)) is not None:
            return found("once", **reading)
        if (reading := self.elsewhere([c.knob for c in removal.changes])) is not None:
            return found("elsewhere", **reading | {"samples_per_second": None})
        why = next((t.cause for t in result.trials if t.number is None and t.config == config), None)
        cause = f"the search refused it: {why}" if why else "no two trials of the search differ in it alone"
        return found("unknown", cause=cause)
