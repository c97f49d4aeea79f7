"""What the lasting record is worth to a search: what is known not to fit, what was fastest, what was learned.

Pure. The record never answers for a measurement: the baseline is measured, and then the old winner. How much faster or
slower the machine is than it was shows in the baseline; if the old winner agrees with the record after that, what was
recorded counts as measured when the next trial is chosen, and only then. Memory doesn't drift: what ran out of it
within this budget or a larger one is refused either way. Time does: what did not end in its time is refused only once
the baseline has told how fast the machine is now, and the baseline itself is always tried. Finals and answer see the
trials of their own search alone.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from autotune.planning.plan import SearchPlan
from autotune.search.progress import HOPELESS_FACTOR, HOPELESS_S
from autotune.search.recorded_trials import Known, beyond, scaled, speed, tried
from autotune.space.history import History, is_no_harder
from autotune.space.space import SearchSpace
from autotune.storage.recorded import RecordedSearch
from autotune.units import show_rate, show_time
from autotune.values.config import TrainConfig
from autotune.values.trial import Measurement, TrialResult, TrialStatus

# By how much the logarithm of a rate differs from one process to the next, beyond what its own steps show: 4 % for
# models of 2M to 4M weights on a shared CPU; a GPU is taken at what `space.history` calls noise.
_TRIAL_NOISE = {"cpu": 0.04, "cuda": 0.01}

# Half of a 95 % interval, in standard deviations.
_Z = 1.96

# More lessons than these only repeat what they say together.
_MOST_LESSONS = 120

_CONFIRMED_VERDICTS = ("faster", "no clear winner", "baseline did not complete")

Standing = Literal["empty", "waiting", "unconfirmed", "confirmed", "contradicted", "a prior"]


class Recall:
    """The record as one search sees it.

    Args:
        plan: The search.
        searches: Earlier ones with the same key, the latest first.
    """

    def __init__(self, plan: SearchPlan, searches: Sequence[RecordedSearch] = ()) -> None:
        self._plan = plan
        self._searches = searches
        self._runs = [tried(plan, search, index) for index, search in enumerate(searches)]
        self._latest: dict[TrainConfig, Known] = {}
        for run in self._runs:
            self._latest = {**run, **self._latest}
        self._too_large = beyond([k for run in self._runs for k in run.values()], plan.memory_bytes)
        self._noise = _TRIAL_NOISE["cpu" if plan.hardware.is_cpu else "cuda"]
        self._candidate: Known | None = None
        self._standing: Standing = "waiting" if self._latest else "empty"
        self._unmeasured = len(self._latest)
        self._speeds: list[float | None] = [None for _ in self._runs]
        self._leader: TrialResult | None = None
        self.statements: list[str] = []

    @functools.cached_property
    def _space(self) -> SearchSpace:
        return self._plan.search_space()

    @property
    def candidate(self) -> TrainConfig | None:
        """The old winner, as long as it is to be confirmed."""
        waits = self._standing == "unconfirmed" and self._candidate is not None
        return self._candidate.config if waits and self._candidate else None

    @property
    def foreword(self) -> str | None:
        """What is to be known before the baseline is tried again; None if it wasn't too slow for its time."""
        known, budget = self._latest.get(self._plan.baseline), self._plan.budget
        if known is None or known.result.status is not TrialStatus.TIMED_OUT:
            return None
        took_s, limit = known.recorded.duration_s, show_time(budget.trial_timeout_s)
        took = f"{show_time(took_s)} on {known.recorded.day}"
        text = f"the baseline did not end within {took} (record); it is tried for {limit} now"
        return text if took_s < budget.trial_timeout_s else f"{text}; {budget.against_timeouts}"

    @property
    def is_empty(self) -> bool:
        """Whether no earlier search has anything to say."""
        return not self._latest

    @property
    def counted(self) -> int:
        """How many configurations, beside those measured anew, count as measured because the record holds."""
        return self._unmeasured if self._standing == "confirmed" else 0

    def is_enough(self, trials: int) -> bool:
        """Whether the record holds and has, with `trials` of this search, as many trials as a search may."""
        return self.counted > 0 and self.counted + trials >= self._plan.budget.max_trials

    def advance(self, history: History) -> bool:
        """Take note of the trials so far; return whether that has changed what the record is worth."""
        baseline = self._plan.baseline
        self._leader = history.best()
        self._speeds = [speed(run.get(baseline), history.known(baseline)) for run in self._runs]
        standing, statement = self._judged(history)
        if standing == self._standing:
            return False
        self._standing = standing
        self._unmeasured = sum(history.known(config) is None for config in self._latest)
        slow = sum(self._refused_for_time(config) is not None for config in self._latest)
        self.statements.append(f"{statement}; {slow} that did not end in time left out" if slow else statement)
        return True

    def _judged(self, history: History) -> tuple[Standing, str]:
        baseline = history.known(self._plan.baseline)
        if not self._latest or baseline is None:
            return self._standing, ""
        if self._standing == "waiting":
            self._candidate = self._old_winner(history)
        known = f"{len(self._latest)} configurations of this search, the last on {self._last_day()}"
        if self._candidate is None:
            return "a prior", f"the record knows {known}, but none that can be tried first; it guides the predictions"
        now = history.known(self._candidate.config)
        if now is None:
            return "unconfirmed", f"the record knows {known}; next is {self._called(self._candidate)}"
        return self._compared(history, self._candidate, now)

    def _compared(self, history: History, then: Known, now: TrialResult) -> tuple[Standing, str]:
        """Return whether the old winner is what it was, the machine's drift allowed for."""
        drift = self._drift(then.search, history, (self._plan.baseline,))
        fastest = self._called(then)
        if now.measurement is None:
            return "contradicted", f"{fastest} is {now.status} now: the record only guides the predictions"
        expected = self._rate(scaled(then.result, drift))
        seen = history.rate(now)
        readings = [now.measurement, then.result.measurement, *self._anchors(then.search, history)]
        allowed = _Z * math.sqrt(sum(self._variance(m) for m in readings if m is not None))
        figures = f"{show_rate(seen)} samples/s, {show_rate(expected)} expected, the machine {drift:.2f} times as fast"
        if abs(math.log(seen / expected)) <= allowed:
            return "confirmed", f"{fastest} gives {figures}: what was recorded is not measured again"
        return "contradicted", f"{fastest} gives {figures}: the record only guides the predictions"

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why `config` needs no trial after what was recorded, or None."""
        hopeless = self._refused_for_memory(config) or self._refused_for_time(config)
        if hopeless is not None or self._standing != "confirmed":
            return hopeless
        known = self._latest.get(config)
        if known is None or self._was_out_of_time(known):
            return None
        if known.result.measurement is None:
            return f"{known.recorded.status} on {known.recorded.day} (record)"
        return f"gave {show_rate(self._rate(known.result))} samples/s on {known.recorded.day} (record)"

    def lessons(self, history: History) -> list[TrialResult]:
        """Return what the cost model can learn from: recorded trials at the speed that the machine has now."""
        anchors = [self._plan.baseline]
        if self._standing == "confirmed" and self._candidate is not None:
            anchors.append(self._candidate.config)
        drifts = [self._drift(index, history, anchors) for index in range(len(self._runs))]
        unmeasured = [known for config, known in self._latest.items() if history.known(config) is None]
        return [scaled(known.result, drifts[known.search]) for known in unmeasured[:_MOST_LESSONS]]

    def _old_winner(self, history: History) -> Known | None:
        """Return what is to be confirmed: the fastest answer of a search, unless something was clearly faster still.

        Answers were measured again, which single trials weren't; the baseline tells nothing beyond itself.
        """
        rates = {
            known.config: self._rate(scaled(known.result, self._drift(known.search, history, (self._plan.baseline,))))
            for known in self._latest.values()
            if known.result.measurement is not None and self._may_be_tried(known.config)
        }
        if not rates:
            return None
        fastest = max(rates, key=rates.__getitem__)
        least = rates[fastest] * math.exp(-_Z * math.sqrt(2) * self._noise)
        answers = [c for c in self._answers() if rates.get(c, 0.0) >= least]
        return self._latest[max(answers, key=rates.__getitem__, default=fastest)]

    def _answers(self) -> Iterator[TrainConfig]:
        for search, run in zip(self._searches, self._runs, strict=True):
            if search.verdict in _CONFIRMED_VERDICTS:
                yield from (c for c, known in run.items() if known.recorded.config_id == search.best_config_id)

    def _may_be_tried(self, config: TrainConfig) -> bool:
        """Whether a configuration other than the baseline is a point of this search that can fit."""
        space = self._space
        point = space.complete(space.point(config))
        choices = {dimension.name: dimension.choices for dimension in space.dimensions}
        if config == self._plan.baseline or any(value not in choices[name] for name, value in point.items()):
            return False
        return (
            space.config(point) == config and space.refusal(config) is None and self._refused_for_memory(config) is None
        )

    def _drift(self, search: int, history: History, anchors: Sequence[TrainConfig]) -> float:
        """Return how many times as fast the machine is as in an earlier search, by what both measured; 1 by nothing."""
        ratios = []
        for config in anchors:
            now, then = history.known(config), self._runs[search].get(config)
            if now is not None and then is not None and now.measurement and then.result.measurement:
                ratios.append(now.measurement.samples_per_second / then.result.measurement.samples_per_second)
        return statistics.geometric_mean(ratios) if ratios else 1.0

    def _anchors(self, search: int, history: History) -> list[Measurement]:
        """Return the measurements of the baseline, now and then, that the drift is known from."""
        now, then = history.known(self._plan.baseline), self._runs[search].get(self._plan.baseline)
        if now is None or then is None or now.measurement is None or then.result.measurement is None:
            return []
        return [now.measurement, then.result.measurement]

    def _variance(self, measurement: Measurement) -> float:
        """Return the variance of a rate's logarithm: from one process to the next, and from step to step."""
        interval = measurement.samples_per_second_interval
        if not 0 < interval.low <= interval.high < math.inf:
            return 4 * self._noise**2  # too few steps to tell
        return self._noise**2 + (math.log(interval.high / interval.low) / 2 / _Z) ** 2

    def _rate(self, result: TrialResult) -> float:
        return self._plan.objective.rate(result.measurement) if result.measurement else 0.0

    def _called(self, known: Known) -> str:
        """Return what the candidate is called: it may have been second to the baseline."""
        baseline = self._runs[known.search].get(self._plan.baseline)
        won = baseline is None or self._rate(known.result) >= self._rate(baseline.result)
        return f"{'the winner' if won else 'what came next to the baseline'} of {known.recorded.day} (record)"

    def _last_day(self) -> str:
        return max(known.recorded.day for known in self._latest.values())

    def _was_out_of_time(self, known: Known) -> bool:
        """Whether a trial was cut short for want of time, before it was hopelessly slower than the winner."""
        usual_s = self._candidate.recorded.duration_s if self._candidate else 0.0
        return known.result.status is TrialStatus.TIMED_OUT and known.recorded.duration_s < HOPELESS_FACTOR * usual_s

    def _refused_for_time(self, config: TrainConfig) -> str | None:
        """Return why a configuration whose recorded trial did not end wouldn't end now either, or None."""
        known = self._latest.get(config)
        if known is None or config == self._plan.baseline or known.result.status is not TrialStatus.TIMED_OUT:
            return None
        drift, took_s = self._speeds[known.search], known.recorded.duration_s
        limit_s = self._plan.budget.trial_timeout_s
        if self._leader is not None and config.torch_compile_backend is None:
            limit_s = min(limit_s, HOPELESS_S + HOPELESS_FACTOR * self._leader.duration_s)
        if drift is None or took_s / drift < limit_s:
            return None
        return f"did not end within {show_time(took_s)} on {known.recorded.day} (record)"

    def _refused_for_memory(self, config: TrainConfig) -> str | None:
        if config in self._too_large:
            return self._too_large[config]
        easier = (reason for other, reason in self._too_large.items() if is_no_harder(other, config))
        reason = next(easier, None)
        return None if reason is None else f"a configuration no harder on memory {reason}"
