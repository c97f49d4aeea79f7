"""How much of a search's time and trials is left, and how long and how finely a trial may measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from autotune.values.config import TrainConfig
from autotune.values.trial import Purpose
from autotune.verification.checks import Check
from autotune.verification.finals import FINALIST_SHARE, Finals

# A trial of the search that takes this much longer than the leader's is not worth its time.
HOPELESS_FACTOR = 2.5
HOPELESS_S = 15.0

# A check of many steps may take longer than a trial's usual limit, by this factor of what is expected.
LONG_CHECK_FACTOR = 2.0


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
        """Whether another trial fits the budget, with time kept for the finalists."""
        return self.trials_left() > 0 and self.left_s() > self.kept_s() + self._typical_s()

    def kept_s(self) -> float:
        """Return the time that finals and checks should take, or half of all where that is less.

        Nothing is kept where it would leave no time for a single trial: an unconfirmed answer is better than none. A
        recording has no finals.
        """
        if self._plan.exhaustive:
            return 0.0
        kept_s = min(self._finals.expected_s() + self._finals.proof.expected_s(), self._plan.budget.max_time_s / 2)
        if not self.searched() and self.left_s() <= kept_s + self._typical_s():
            return 0.0
        return kept_s

    def timeout_s(self, config: TrainConfig, purpose: Purpose, check: Check | None) -> float:
        """Return the time limit of a trial: what is left for it, and of a search trial what a winner would need."""
        usual_s = self._plan.budget.trial_timeout_s
        if check is not None and check.task is not None:
            usual_s = max(usual_s, LONG_CHECK_FACTOR * check.expected_s)
        limit_s = min(usual_s, self.left_s())
        if purpose is Purpose.SEARCH and not self._plan.exhaustive:
            limit_s = min(limit_s, self.left_s() - self.kept_s())
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
