"""The progress of a search: the time and trials that are left, and the leader so far.

:class:`Pace` sets the time limit of a trial and how exactly it has to measure; it doesn't decide what is tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from autotune.space.knobs import changes
from autotune.values.config import TrainConfig
from autotune.values.problem import Leader
from autotune.values.trial import Purpose
from autotune.verification.checks import Check
from autotune.verification.finals import FINALIST_SHARE, Finals
from autotune.verification.verdict import measurement_of, verdict_of

# A trial of the search is ended when it takes this factor times as long as the leader's, plus these seconds.
HOPELESS_FACTOR = 2.5
HOPELESS_S = 15.0


class Pace:
    """The time and the trials that one search has left, which began `starting_s` before the construction."""

    def __init__(self, finals: Finals, clock: Callable[[], float], starting_s: float = 0.0) -> None:
        self._finals = finals
        self._plan = finals.plan
        self._history = finals.history
        self._clock = clock
        self._started = clock()
        self._starting_s = starting_s
        self.before_s = 0.0  # taken by earlier runs of this search
        self.running = 0  # trials of the search that have begun and not ended

    def spent_s(self) -> float:
        """Return the seconds that the search has taken since its first trial was chosen."""
        return self.before_s + self._clock() - self._started

    def left_s(self) -> float:
        """Return the seconds until trials have to end: the time limit less start, trials and the end of the command."""
        limit_s = self._plan.budget.max_time_s
        closing_s = min(2.0, 0.05 * limit_s)  # for writing the answer and ending all processes
        return limit_s - closing_s - self._starting_s - self.spent_s()

    def searched(self) -> int:
        """Return how many trials the search has run, baseline, finals and checks not counted."""
        return sum(r.request.purpose is Purpose.SEARCH for r in self._finals.state.results)

    def trials_left(self) -> int:
        return self._plan.budget.max_trials - self.searched() - self.running

    def may_go_on(self) -> bool:
        """Whether another trial fits the budget, with time reserved for the finalists."""
        return self.trials_left() > 0 and self.left_s() > self.reserved_s() + self._typical_s()

    def reserved_s(self) -> float:
        """Return the seconds to keep for finals and checks: what they are expected to take, at most half of all time.

        None is kept if the rest would not suffice for a first trial: an unconfirmed answer is better than none.
        """
        reserved_s = min(self._finals.expected_s() + self._finals.proof.expected_s(), self._plan.budget.max_time_s / 2)
        if not self.searched() and self.left_s() <= reserved_s + self._typical_s():
            return 0.0
        return reserved_s

    def timeout_s(self, config: TrainConfig, purpose: Purpose, check: Check | None) -> float:
        """Return the time limit of a trial in seconds: the usual one, within what is left.

        A trial of the search is also limited by what a configuration as fast as the leader would need.
        """
        usual_s = self._plan.budget.trial_timeout_s
        if check is not None and check.task is not None:
            usual_s = max(usual_s, 2 * check.expected_s)
        if purpose is Purpose.SOAK and (measured := self._finals.state.measured(config)) and measured.memory.is_known:
            # A checkpoint is no larger than the peak of the training. A network's disk may be so slow: 100 MB/s.
            usual_s += measured.memory.peak_bytes / 100e6
        if purpose is Purpose.BASELINE and self.left_s() < 1.5 * usual_s:  # too little would be left for another trial
            usual_s = self.left_s()
        limit_s = min(usual_s, self.left_s())
        if purpose is Purpose.SEARCH:
            limit_s = min(limit_s, self.left_s() - self.reserved_s())
            leader = self._history.best()
            if leader is not None and config.torch_compile_backend is None:  # a cold compile may take minutes
                limit_s = min(limit_s, HOPELESS_S + HOPELESS_FACTOR * leader.duration_s)
        return max(1.0, limit_s)

    def has_time_for(self, configs: Sequence[TrainConfig]) -> bool:
        """Whether final trials of `configs` fit what is left: in turn at least half as long as alone."""
        needed_s = self._least_s(configs, 0.5) if len(configs) > 1 else self._finals.expected_s(configs)
        return self.left_s() >= needed_s

    def _least_s(self, configs: Sequence[TrainConfig], factor: float = 1.0) -> float:
        """Return the seconds of trials in turn that are measured `factor` times as long as one that runs alone."""
        measured_s = factor * self._plan.budget.measure_time_s
        return sum(self._finals.setup_s(config) + measured_s for config in configs)

    def choose_finalists(self) -> None:
        """Leave as many finalists as there is time for, with the checks; finals that have begun stay as they are."""
        finals = self._finals
        while finals.finalists > 1 and not any(map(finals.trials, finals.contenders())):
            configs, checks_s = finals.next_trials(), finals.proof.expected_s()
            needed_s = self._least_s(configs) if len(configs) > 1 else finals.expected_s()
            if self.left_s() >= needed_s + checks_s:
                return
            finals.finalists -= 1

    def limits_in_turn(self, configs: Sequence[TrainConfig]) -> dict[str, float]:
        """Return the limits of trials that run in turn: they measure long, unless the checks need the time."""
        budget, finals = self._plan.budget, self._finals
        for_each_s = (self.left_s() - finals.proof.expected_s() - sum(map(finals.setup_s, configs))) / len(configs)
        longest_s = budget.when_in_turn["measure_time_s"]
        return {
            "measure_time_s": min(longest_s, max(budget.measure_time_s, for_each_s)),
            "timeout_s": max(1.0, min(len(configs) * budget.trial_timeout_s, self.left_s())),
        }

    def to_beat(self, purpose: Purpose) -> float | None:
        """Return the samples/s below which a trial can't become a finalist, so that it may measure less exactly.

        None if every rate has to be exact: in finals, before anything has completed, and if the objective is a run's
        time.
        """
        best = self._history.best()
        if purpose is not Purpose.SEARCH or self._plan.objective.run_samples is not None or best is None:
            return None
        return FINALIST_SHARE * best.measurement.samples_per_second if best.measurement else None

    def _typical_s(self) -> float:
        return statistics.median([r.duration_s for r in self._history.ranking()] or [0.0])


def leader_of(finals: Finals) -> Leader | None:
    """Return the leader by the finals, or by the trials of the search if there are no finals yet."""
    plan, fastest = finals.plan, finals.history.best()
    if fastest is None or not finals.contenders():
        return None
    config, proven = fastest.request.config, None
    if any(r.request.purpose.closes for r in finals.state.results):
        decision = verdict_of(finals)
        config, proven = decision.best, decision.speedup
    if (measured := measurement_of(finals, config)) is None:
        return None
    speedup = proven.ratio if proven is not None else None
    if proven is None and config != plan.baseline and (base := measurement_of(finals, plan.baseline)) is not None:
        corrections, rate = finals.corrections(), plan.objective.rate  # single trials are noisy
        sides = ((config, measured), (plan.baseline, base))
        expected, reference = (rate(m) * corrections.get(c, 1.0) for c, m in sides)
        speedup = expected / reference
    return Leader(changes=changes(config, plan), samples_per_second=measured.samples_per_second, speedup=speedup)
