"""Uses the lasting record in a search: earlier trials refuse configurations, propose one, and correct predictions.

The search first measures the baseline, which shows how much faster or slower the machine is now (its drift), then the
winner of the earlier searches. If its rate is the recorded one times the drift, the record is confirmed: recorded
configurations count as measured when the next trial is chosen. Otherwise the record only corrects the cost model.

A configuration that ran out of memory within this budget or a larger one is refused in any case. One that ran into its
time limit is refused only once the drift is known, and the baseline never is. Finals and the answer use the trials of
this search alone.
"""

from __future__ import annotations

import functools
import itertools
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

# Standard deviation of the logarithm of a rate between processes, beyond the spread of the steps: measured 4 % for
# models of 2M to 4M weights on a shared CPU; for a GPU the noise that `space.history` assumes.
_TRIAL_NOISE = {"cpu": 0.04, "cuda": 0.01}

# Half of a 95 % interval, in standard deviations.
_Z = 1.96

# Recorded trials that the cost model learns from; more would hardly change it.
_MOST_LESSONS = 120

_CONFIRMED_VERDICTS = ("faster", "no_clear_winner", "baseline_failed")

Standing = Literal["empty", "waiting", "unconfirmed", "confirmed", "contradicted", "a prior"]

Pair = tuple[Measurement, Measurement]  # of one configuration: by this search, by an earlier one


class Recall:
    """The trials of earlier searches with the same key, the latest first, as far as they say something to this one.

    Attributes:
        statements: What to tell the user of the record, in the order in which it came out.
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
        return self._plan.search_space

    @property
    def candidate(self) -> TrainConfig | None:
        """The winner of the earlier searches, while it is still to be measured by this one."""
        return self._candidate.config if self._candidate and self._standing == "unconfirmed" else None

    @property
    def foreword(self) -> str | None:
        """A note that the baseline ran into its time limit before; None if it did not."""
        known, budget = self._latest.get(self._plan.baseline), self._plan.budget
        if known is None or known.result.status is not TrialStatus.TIMED_OUT:
            return None
        took_s, limit = known.recorded.duration_s, show_time(budget.trial_timeout_s)
        took = f"{show_time(took_s)} on {known.recorded.day}"
        text = f"the baseline did not end within {took} (record); it is tried for {limit} now"
        return text if took_s < budget.trial_timeout_s else f"{text}; {budget.against_timeouts}"

    @property
    def is_empty(self) -> bool:
        """Whether no earlier search has a trial that can be used."""
        return not self._latest

    @property
    def counted(self) -> int:
        """How many configurations count as measured by the confirmed record, those measured by this search left out."""
        return self._unmeasured if self._standing == "confirmed" else 0

    def is_enough(self, trials: int) -> bool:
        """Whether the confirmed record and `trials` of this search together reach the budget's number of trials."""
        return self.counted > 0 and self.counted + trials >= self._plan.budget.max_trials

    def advance(self, history: History) -> bool:
        """Judge the record by the trials so far; return whether the judgement has changed."""
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
        """Return the standing of the record, and the statement for the user."""
        baseline = history.known(self._plan.baseline)
        if not self._latest or baseline is None:
            return self._standing, ""
        if self._standing == "waiting":
            self._candidate = self._old_winner(history)
        last_day = max(known.recorded.day for known in self._latest.values())
        known = f"{len(self._latest)} configurations of this search, the last on {last_day}"
        if self._candidate is None:
            return "a prior", f"the record knows {known}, but none that can be tried first; it guides the predictions"
        now = history.known(self._candidate.config)
        if now is None:
            return "unconfirmed", f"the record knows {known}; next is {self._called(self._candidate)}"
        return self._compared(history, self._candidate, now)

    def _compared(self, history: History, then: Known, now: TrialResult) -> tuple[Standing, str]:
        """Return whether the rate of the old winner agrees with the record, after the drift and within the noise."""
        anchors = self._pairs(then.search, history, (self._plan.baseline,))
        drift = _drift(anchors)
        fastest = self._called(then)
        if now.measurement is None:
            return "contradicted", f"{fastest} is {now.status} now: the record only guides the predictions"
        expected = self._rate(scaled(then.result, drift))
        seen = history.rate(now)
        readings = [now.measurement, then.result.measurement, *itertools.chain.from_iterable(anchors)]
        allowed = _Z * math.sqrt(sum(self._variance(m) for m in readings if m is not None))
        figures = f"{show_rate(seen)} samples/s, {show_rate(expected)} expected, the machine {drift:.2f} times as fast"
        if abs(math.log(seen / expected)) <= allowed:
            return "confirmed", f"{fastest} gives {figures}: what was recorded is not measured again"
        return "contradicted", f"{fastest} gives {figures}: the record only guides the predictions"

    def refusal(self, config: TrainConfig) -> str | None:
        """Return the reason why the record makes a trial of `config` needless, or None."""
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
        """Return recorded trials for the cost model to learn from, scaled to the present speed of the machine."""
        anchors = [self._plan.baseline]
        if self._standing == "confirmed" and self._candidate is not None:
            anchors.append(self._candidate.config)
        drifts = [_drift(self._pairs(index, history, anchors)) for index in range(len(self._runs))]
        unmeasured = [known for config, known in self._latest.items() if history.known(config) is None]
        return [scaled(known.result, drifts[known.search]) for known in unmeasured[:_MOST_LESSONS]]

    def _old_winner(self, history: History) -> Known | None:
        """Return the configuration to measure first: the fastest answer of an earlier search.

        If another recorded configuration was faster than that by more than the noise, it is that one. Answers are
        preferred as finals confirmed them. The baseline is never returned.
        """
        baseline = (self._plan.baseline,)
        drifts = [_drift(self._pairs(index, history, baseline)) for index in range(len(self._runs))]
        rates = {
            known.config: self._rate(scaled(known.result, drifts[known.search]))
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
        """Whether a configuration is a legal point of this search, isn't the baseline, and isn't known not to fit."""
        space = self._space
        point = space.complete(space.point(config))
        choices = {dimension.name: dimension.choices for dimension in space.dimensions}
        if config == self._plan.baseline or any(value not in choices[name] for name, value in point.items()):
            return False
        return (
            space.config(point) == config and space.refusal(config) is None and self._refused_for_memory(config) is None
        )

    def _pairs(self, search: int, history: History, configs: Sequence[TrainConfig]) -> list[Pair]:
        """Return the measurements by this and by an earlier search of each configuration that both completed."""
        tried = ((history.known(config), self._runs[search].get(config)) for config in configs)
        both = ((now.measurement, then.result.measurement) for now, then in tried if now and then)
        return [(now, then) for now, then in both if now and then]

    def _variance(self, measurement: Measurement) -> float:
        """Return the variance of the logarithm of a rate: between processes, and between the steps of one."""
        interval = measurement.samples_per_second_interval
        if not 0 < interval.low <= interval.high < math.inf:
            return 4 * self._noise**2  # too few steps to tell
        return self._noise**2 + (math.log(interval.high / interval.low) / 2 / _Z) ** 2

    def _rate(self, result: TrialResult) -> float:
        return self._plan.objective.rate(result.measurement) if result.measurement else 0.0

    def _called(self, known: Known) -> str:
        """Return words for the candidate, which may have been slower than the baseline of its search."""
        baseline = self._runs[known.search].get(self._plan.baseline)
        won = baseline is None or self._rate(known.result) >= self._rate(baseline.result)
        return f"{'the winner' if won else 'what came next to the baseline'} of {known.recorded.day} (record)"

    def _was_out_of_time(self, known: Known) -> bool:
        """Whether a trial was ended at a time limit too short to show that it was far slower than the candidate."""
        usual_s = self._candidate.recorded.duration_s if self._candidate else 0.0
        return known.result.status is TrialStatus.TIMED_OUT and known.recorded.duration_s < HOPELESS_FACTOR * usual_s

    def _refused_for_time(self, config: TrainConfig) -> str | None:
        """Return the reason why a configuration would run into its time limit again, or None."""
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


def _drift(pairs: Sequence[Pair]) -> float:
    """Return how many times as fast the machine is now, by measurements of now and then; 1 if there are none."""
    ratios = [now.samples_per_second / then.samples_per_second for now, then in pairs]
    return statistics.geometric_mean(ratios) if ratios else 1.0
