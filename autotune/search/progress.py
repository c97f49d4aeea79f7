"""How far a search is: what is left of its time and trials, and the events that report it.

:class:`Pace` says how long and how finely a trial may measure; :class:`Teller` reports each trial before and after it,
and how the search stands then. Neither decides what is tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import islice

from autotune.space.knobs import changes, shown_changes
from autotune.values.config import TrainConfig
from autotune.values.events import Detail, Leader, Observer, Standing, TrialEnded, TrialStarted
from autotune.values.problem import Change
from autotune.values.result import ResultData
from autotune.values.trial import Measurement, Purpose, TrialRequest, TrialResult, TrialStatus
from autotune.verification.checks import Check
from autotune.verification.finals import FINALIST_SHARE, Finals
from autotune.verification.verdict import verdict_of

# A trial of the search that takes this much longer than the leader's is not worth its time.
HOPELESS_FACTOR = 2.5
HOPELESS_S = 15.0

# A check of many steps may take longer than a trial's usual limit, by this factor of what is expected.
LONG_CHECK_FACTOR = 2.0

# A soak writes a checkpoint, which is no larger than the peak of the training: a disk of a network takes its time.
SLOW_DISK_BYTES_S = 100e6


class Pace:
    """The limits of one search.

    Args:
        finals: Of the search.
        clock: Seconds from some moment on.
    """

    def __init__(self, finals: Finals, clock: Callable[[], float]) -> None:
        self._finals = finals
        self._plan = finals.plan
        self._history = finals.history
        self._clock = clock
        self._started = clock()
        self._before_s = 0.0
        self.running = 0  # trials of the search that have begun and not ended

    def add(self, seconds: float) -> None:
        """Count in what an earlier, killed run of the search took."""
        self._before_s += seconds

    def spent_s(self) -> float:
        """Return the seconds that the search has taken."""
        return self._before_s + self._clock() - self._started

    def left_s(self) -> float:
        """Return the seconds that are left of the search's."""
        return self._plan.budget.max_time_s - self.spent_s()

    def searched(self) -> int:
        """Return how many trials the search has run, baseline, finals and checks not counted."""
        return sum(r.request.purpose is Purpose.SEARCH for r in self._finals.state.results)

    def trials_left(self) -> int:
        """Return how many it may still run."""
        return self._plan.budget.max_trials - self.searched() - self.running

    def may_go_on(self) -> bool:
        """Whether another trial fits the budget, with time reserved for the finalists."""
        return self.trials_left() > 0 and self.left_s() > self.reserved_s() + self._typical_s()

    def reserved_s(self) -> float:
        """Return the time that finals and checks should take, or half of all where that is less.

        Nothing is reserved where it would leave no time for a single trial: an unconfirmed answer is better than none.
        A recording has no finals.
        """
        if self._plan.exhaustive:
            return 0.0
        reserved_s = min(self._finals.expected_s() + self._finals.proof.expected_s(), self._plan.budget.max_time_s / 2)
        if not self.searched() and self.left_s() <= reserved_s + self._typical_s():
            return 0.0
        return reserved_s

    def timeout_s(self, config: TrainConfig, purpose: Purpose, check: Check | None) -> float:
        """Return the time limit of a trial: what is left for it, and of a search trial what a winner would need."""
        usual_s = self._plan.budget.trial_timeout_s
        if check is not None and check.task is not None:
            usual_s = max(usual_s, LONG_CHECK_FACTOR * check.expected_s)
        if purpose is Purpose.SOAK and (measured := self._finals.state.measured(config)) and measured.memory.is_known:
            usual_s += measured.memory.peak_bytes / SLOW_DISK_BYTES_S
        limit_s = min(usual_s, self.left_s())
        if purpose is Purpose.SEARCH and not self._plan.exhaustive:
            limit_s = min(limit_s, self.left_s() - self.reserved_s())
            leader = self._history.best()
            if leader is not None and config.torch_compile_backend is None:  # a cold compile may take minutes
                limit_s = min(limit_s, HOPELESS_S + HOPELESS_FACTOR * leader.duration_s)
        return max(1.0, limit_s)

    def to_beat(self, purpose: Purpose) -> float | None:
        """Return the samples/s below which a trial's exact rate doesn't matter: no finalist is that slow.

        None where it always matters: the length of a run may count otherwise, and a table has no losers.
        """
        best = self._history.best()
        if purpose is not Purpose.SEARCH or best is None or self._plan.exhaustive:
            return None
        if self._plan.objective.run_samples is not None:
            return None
        return FINALIST_SHARE * best.measurement.samples_per_second if best.measurement else None

    def _typical_s(self) -> float:
        return statistics.median([r.duration_s for r in self._history.ranking()] or [0.0])


# Of the configurations that were refused since the last trial, so many are named with their reasons.
_NAMED = 3


class Teller:
    """Reports the progress of one search.

    Args:
        finals: Of the search.
        pace: Its limits.
        observer: Is called with each event.
    """

    def __init__(self, finals: Finals, pace: Pace, observer: Observer) -> None:
        self._finals = finals
        self._plan = finals.plan
        self._history = finals.history
        self._results = finals.state.results
        self._refused = finals.state.refused
        self._pace = pace
        self._observer = observer
        self._refusals_reported = 0

    def started(self, request: TrialRequest) -> None:
        """Report a trial that is about to run, and what was refused before it."""
        self._report_refusals()
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
        """Report a trial that has ended and is part of the state."""
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

    def _report_refusals(self) -> None:
        """Report as details how many configurations were refused since the last trial, and why."""
        fresh = len(self._refused) - self._refusals_reported
        if not fresh:
            return
        named = islice(self._refused.items(), self._refusals_reported, self._refusals_reported + _NAMED)
        for config, reason in named:
            self._observer(Detail(text=f"refused: {shown_changes(self._changes(config))}: {reason}"))
        if fresh > _NAMED:
            self._observer(Detail(text=f"refused: {fresh - _NAMED} more (the report has them all)"))
        self._refusals_reported = len(self._refused)

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
    """Return the standing of a finished search whose answer is explained by more `trials`."""
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
