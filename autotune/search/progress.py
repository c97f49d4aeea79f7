"""Tells who listens of each trial before and after it, and how the search stands then. Decides nothing.

Called by the conductor in `autotune.search.tuner`, and by `autotune.search.explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from autotune.search.limits import Pace
from autotune.space.knobs import changes, shown_changes
from autotune.values.config import TrainConfig
from autotune.values.events import Detail, Leader, Observer, Standing, TrialEnded, TrialStarted
from autotune.values.problem import Change
from autotune.values.result import ResultData
from autotune.values.trial import Measurement, TrialRequest, TrialResult, TrialStatus
from autotune.verification.finals import Finals
from autotune.verification.verdict import verdict_of

# Of the configurations that were refused since the last trial, so many are named with their reasons.
_NAMED = 3


class Teller:
    """Tells of one search.

    Args:
        finals: Of the search.
        pace: Its limits.
        observer: Who listens.
    """

    def __init__(self, finals: Finals, pace: Pace, observer: Observer) -> None:
        self._finals = finals
        self._plan = finals.plan
        self._history = finals.history
        self._results = finals.state.results
        self._refused = finals.state.refused
        self._pace = pace
        self._observer = observer
        self._refusals_told = 0

    def started(self, request: TrialRequest) -> None:
        """Tell of a trial that is about to run, and of what was refused before it."""
        self._tell_refusals()
        self._observer(
            TrialStarted(
                number=request.number,
                purpose=request.purpose,
                config=request.config,
                changes=self._changes(request.config),
                time_left_s=max(0.0, self._pace.left_s()),
                trials_left=self._pace.trials_left(),
                prediction=request.prediction,
                standing=self._standing(),
            )
        )

    def ended(self, result: TrialResult) -> None:
        """Tell of a trial that has been taken in."""
        best = self._history.best()
        self._observer(
            TrialEnded(
                result=result,
                changes=self._changes(result.request.config),
                best_samples_per_second=best.measurement.samples_per_second if best and best.measurement else None,
                standing=self._standing(),
            )
        )

    def _changes(self, config: TrainConfig) -> tuple[Change, ...]:
        return changes(config, self._plan)

    def _tell_refusals(self) -> None:
        """Say, to who wants to know, how many configurations were refused since the last trial, and why."""
        fresh = len(self._refused) - self._refusals_told
        if not fresh:
            return
        named = islice(self._refused.items(), self._refusals_told, self._refusals_told + _NAMED)
        for config, reason in named:
            self._observer(Detail(text=f"refused: {shown_changes(self._changes(config))}: {reason}"))
        if fresh > _NAMED:
            self._observer(Detail(text=f"refused: {fresh - _NAMED} more (the report has them all)"))
        self._refusals_told = len(self._refused)

    def _standing(self) -> Standing:
        return _standing(self._plan.memory_bytes, self._results, len(self._refused), self._leader())

    def _leader(self) -> Leader | None:
        """Return the best by the finals' figures, as far as there are any, otherwise by the search's."""
        fastest = self._history.best()
        if fastest is None:
            return None
        config, proven = fastest.request.config, None
        if any(r.request.purpose.closes for r in self._results):
            config, _, proven, _ = verdict_of(self._finals)
        known = self._history.known(config)
        measured = self._finals.merged(config) or (known.measurement if known is not None else None)
        if measured is None:
            return None
        speedup = proven.ratio if proven is not None else self._seen_speedup(config)
        return _leader(self._changes(config), measured, speedup)

    def _seen_speedup(self, config: TrainConfig) -> float | None:
        """Return how much faster than the baseline the search saw `config`."""
        known, baseline = self._history.known(config), self._history.known(self._plan.baseline)
        if known is None or baseline is None or baseline.measurement is None or config == self._plan.baseline:
            return None
        return self._history.rate(known) / self._history.rate(baseline)


def standing_of_answer(result: ResultData, trials: Sequence[TrialResult], refused: int) -> Standing:
    """Return how a search stands that is over and whose answer is looked into by more `trials`."""
    measured = result.best.measurement
    speedup = result.speedup.ratio if result.speedup is not None else None
    leader = _leader(result.best.changes, measured, speedup) if measured is not None else None
    return _standing(result.memory_bytes, trials, refused, leader)


def _standing(memory_bytes: int, trials: Sequence[TrialResult], refused: int, leader: Leader | None) -> Standing:
    statuses = [trial.status for trial in trials]
    completed, out_of_memory = map(statuses.count, (TrialStatus.COMPLETED, TrialStatus.OUT_OF_MEMORY))
    return Standing(
        memory_bytes=memory_bytes,
        completed=completed,
        out_of_memory=out_of_memory,
        failed=len(statuses) - completed - out_of_memory,
        refused=refused,
        leader=leader,
    )


def _leader(changed: tuple[Change, ...], measured: Measurement, speedup: float | None) -> Leader:
    return Leader(
        changes=changed,
        samples_per_second=measured.samples_per_second,
        peak_bytes=measured.memory.peak_bytes if measured.memory.is_known else None,
        speedup=speedup,
    )
