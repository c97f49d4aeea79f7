"""Computes the contribution of each knob of the winner from the trials of a search and of `autotune explain`.

A knob is removed from the winner by putting it back to the baseline's value. The best evidence is the configuration
without it measured in the same rounds as the winner; the second best, measured once by the search.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from autotune.planning.plan import SearchPlan, SearchState
from autotune.space.knobs import OF_SHARDING, put_back
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.result import Basis, Contribution, Explanation, ResultData
from autotune.values.statistics import Speedup
from autotune.values.trial import Measurement, Purpose, TrialResult, TrialStatus
from autotune.verification.finals import Finals

# Knobs that have to be put back together with another.
DEPENDENTS: dict[str, frozenset[str]] = {
    "torch_compile_backend": frozenset({"torch_compile_mode", "activation_memory_budget"}),
    "checkpointing": frozenset({"activation_memory_budget"}),
    "dataloader_num_workers": frozenset({"dataloader_prefetch_factor"}),
    "dataloader_pin_memory": frozenset({"non_blocking"}),
    "adapter": frozenset({"quantization"}),  # quantized base weights can't be trained
    "parallelism.world_size": frozenset(f"parallelism.{f}" for f in Parallelism.model_fields if f != "world_size"),
    "parallelism.sharding": frozenset(f"parallelism.{name}" for name in OF_SHARDING),
}


def removals(result: ResultData) -> list[Contribution]:
    """Return the removal of each of the winner's knobs, in the order of the knobs, before any trial is looked at."""
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


def explanation_of(plan: SearchPlan, result: ResultData, trials: Sequence[TrialResult]) -> Explanation | None:
    """Return what each knob of the winner contributes by trials, or why it can't be taken away; None: it has none."""
    if result.best.config == result.baseline.config:
        return None
    evidence = _Evidence(plan, result, trials)
    found = [evidence.contribution(removal) for removal in removals(result)]
    ours, theirs = (c.rate(result.objective) or None for c in (result.best, result.baseline))
    seen, proven = ours / theirs if ours is not None and theirs is not None else None, result.speedup
    return Explanation(
        winner=result.best.config,
        winner_samples_per_second=ours,
        baseline_samples_per_second=theirs,
        total=proven.ratio if proven is not None else seen,
        total_interval=proven.interval if proven is not None else None,
        contributions=tuple(sorted(found, key=lambda c: -(c.ratio or 0.0))),
        steps=result.steps,
    )


def _label(trial: TrialResult) -> str:
    return trial.request.purpose.label(trial.request.number)


class _Evidence:
    """The trials of a search, and of `autotune explain`, without checks."""

    def __init__(self, plan: SearchPlan, result: ResultData, trials: Sequence[TrialResult]) -> None:
        self._plan, self._result = plan, result
        self._trials = [t for t in trials if t.request.task is None]
        self._finals = Finals(SearchState(plan, self._trials))

    def contribution(self, removal: Contribution) -> Contribution:
        config, best = removal.config, self._result.best.config

        def found(basis: Basis, **fields: Any) -> Contribution:
            return removal.model_copy(update={"basis": basis, **fields})

        if config is None:
            return removal
        for purpose in (Purpose.EXPLAIN, Purpose.FINAL):
            if (reading := self._lead(config, purpose)) is not None:
                if purpose is Purpose.FINAL and (lead := self._finals.speedup(best, config)) is not None:
                    reading |= dict(lead)  # its turns are compared in pairs
                return found("in turn", **reading)
        for trial in self._trials:
            # Of the trials that timed out, only those of `autotune explain` count, which had all the time.
            is_slow = trial.status is TrialStatus.TIMED_OUT and trial.request.purpose is Purpose.EXPLAIN
            if trial.request.config == config and trial.outcome.kind == "failure" and (trial.has_failed or is_slow):
                cause = f"{trial.status}: {trial.outcome.cause} (trial {_label(trial)})"
                return found("slow" if is_slow else "fails", cause=cause, trials=(_label(trial),))
        if (why := self._plan.search_space.refusal(config)) is not None:
            return found("fails", cause=why)
        if (reading := self._lead(config)) is not None:
            return found("once", **reading)
        why = next((t.cause for t in self._result.trials if t.number is None and t.config == config), None)
        cause = f"the search refused it: {why}" if why else "no two trials of the search differ in it alone"
        return found("unknown", cause=cause)

    def _lead(self, without: TrainConfig, purpose: Purpose | None = None) -> dict[str, Any] | None:
        """Return the winner's throughput over that `without` a knob, as fields of a contribution.

        `purpose`: of the trials that count; None: those of the search. None is returned if one of the two has none.
        """
        best, measured = self._result.best.config, dict[TrainConfig, list[tuple[TrialResult, Measurement]]]()
        for trial in self._finals.series() if purpose is Purpose.FINAL else self._trials:
            counts = trial.request.purpose is purpose if purpose is not None else trial.request.purpose.explores
            if trial.measurement is not None and counts:
                measured.setdefault(trial.request.config, []).append((trial, trial.measurement))
        if best not in measured or without not in measured:
            return None
        times = {}  # seconds per sample of each measured step, a list per trial; a run's start is spread over it
        for config, trials in measured.items():
            samples = self._result.workload.samples_per_step(config)
            start_s = max(self._result.objective.start_s_per_sample(m) for _, m in trials)
            times[config] = [[t / samples + start_s for t in m.step_times_s] for _, m in trials]
        # Trials of the search ran in no rounds: each was chosen and measured by itself.
        spread = [t for c, t in times.items() if c not in (best, without)] if purpose is not None else []
        rate = 1 / statistics.fmean(t for trial in times[without] for t in trial)
        labels = tuple(_label(trial) for trial, _ in (*measured[best], *measured[without]))
        lead = Speedup.of_means(times[without], times[best], spread)
        return {**dict(lead), "trials": labels, "samples_per_second": rate}
