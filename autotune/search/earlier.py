"""Uses the lasting record in a search: earlier trials refuse configurations, propose one, and correct predictions.

The search first measures the baseline, which shows how much faster or slower the machine is now (its drift), then the
winner of the earlier searches. If its rate is the recorded one times the drift, the record is confirmed: recorded
configurations count as measured when the next trial is chosen. Otherwise the record only corrects the cost model.

A configuration that ran out of memory within this budget or a larger one is refused in any case. One that ran into its
time limit is refused only once the drift is known, and the baseline never is. Finals and the answer use the trials of
this search alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from autotune.errors import AutotuneError
from autotune.execution.outcome import OUTCOMES
from autotune.planning.plan import SearchPlan, request_of
from autotune.search.progress import HOPELESS_FACTOR, HOPELESS_S
from autotune.space.space import History, is_no_harder
from autotune.storage.recorded import RecordedSearch, RecordedTrial
from autotune.units import show_memory, show_rate, show_time
from autotune.values.config import TrainConfig
from autotune.values.trial import Interval, Measurement, Memory, TrialResult, TrialStatus

# Standard deviation of the logarithm of a rate between processes, beyond the spread of the steps: measured 4 % for
# models of 2M to 4M weights on a shared CPU; for a GPU the noise that `space.history` assumes.
_TRIAL_NOISE = {"cpu": 0.04, "cuda": 0.01}

# Relative difference between the peaks of two runs of one configuration, as in `autotune.cost.corrections`.
_MEMORY_NOISE = 0.01

# Half of a 95 % interval, in standard deviations.
_Z = 1.96

# Recorded trials that the cost model learns from; more would hardly change it.
_MOST_LESSONS = 120

_CONFIRMED_VERDICTS = ("faster", "no_clear_winner", "baseline_failed")

Standing = Literal["empty", "waiting", "unconfirmed", "confirmed", "contradicted", "a prior"]


class _Known(NamedTuple):
    """A trial of an earlier search, as a result of this one."""

    result: TrialResult
    ended: str  # UTC, ISO 8601
    search: int  # index of the earlier search, the latest first

    @property
    def day(self) -> str:
        return self.ended[:10]

    @property
    def is_out_of_time(self) -> bool:
        return self.result.status is TrialStatus.TIMED_OUT


class EarlierSearches:
    """The trials of earlier searches with the same key, the latest first, as far as they say something to this one.

    Attributes:
        notes: What to tell the user of the record, in the order in which it came out.
    """

    def __init__(self, plan: SearchPlan, searches: Sequence[RecordedSearch] = ()) -> None:
        self._plan = plan
        self._searches = searches
        self._runs = [_explored(plan, search, index) for index, search in enumerate(searches)]
        self._latest: dict[TrainConfig, _Known] = {}
        for run in self._runs:
            self._latest = {**run, **self._latest}
        self._too_large = _too_large([k for run in self._runs for k in run.values()], plan.memory_bytes)
        self._noise = _TRIAL_NOISE["cpu" if plan.hardware.is_cpu else "cuda"]
        self._winner: _Known | None = None
        self._standing: Standing = "waiting" if self._latest else "empty"
        self._unmeasured = len(self._latest)
        self._speeds: list[float | None] = [None for _ in self._runs]
        self._leader: TrialResult | None = None
        self.notes: list[str] = []

    @property
    def winner(self) -> TrainConfig | None:
        """The winner of the earlier searches, while it is still to be measured by this one."""
        return self._winner.result.request.config if self._winner and self._standing == "unconfirmed" else None

    @property
    def warning(self) -> str | None:
        """A note that the baseline ran into its time limit before; None if it did not."""
        known, budget = self._latest.get(self._plan.baseline), self._plan.budget
        if known is None or not known.is_out_of_time:
            return None
        took_s, limit = known.result.duration_s, show_time(budget.trial_timeout_s)
        took = f"{show_time(took_s)} on {known.day}"
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

    def compare(self, history: History) -> bool:
        """Judge the record by the trials so far; return whether the judgement has changed."""
        baseline = self._plan.baseline
        self._leader = history.best()
        self._speeds = [_speed(run.get(baseline), history.known(baseline)) for run in self._runs]
        standing, note = self._judged(history)
        if standing == self._standing:
            return False
        self._standing = standing
        self._unmeasured = sum(history.known(config) is None for config in self._latest)
        slow = sum(self._refused_for_time(config) is not None for config in self._latest)
        self.notes.append(f"{note}; {slow} that did not end in time left out" if slow else note)
        return True

    def _judged(self, history: History) -> tuple[Standing, str]:
        """Return the standing of the record, and the note for the user."""
        baseline = history.known(self._plan.baseline)
        if not self._latest or baseline is None:
            return self._standing, ""
        if self._standing == "waiting":
            self._winner = self._old_winner(history)
        last_day = max(known.day for known in self._latest.values())
        known = f"{len(self._latest)} configurations of this search, the last on {last_day}"
        if self._winner is None:
            return "a prior", f"the record knows {known}, but none that can be tried first; it guides the predictions"
        now = history.known(self._winner.result.request.config)
        if now is None:
            return "unconfirmed", f"the record knows {known}; next is {self._called(self._winner)}"
        return self._confirmed(history, self._winner, now)

    def _confirmed(self, history: History, then: _Known, now: TrialResult) -> tuple[Standing, str]:
        """Return whether the rate of the old winner agrees with the record, after the drift and within the noise."""
        readings = self._in_both(then.search, history, (self._plan.baseline,))
        drift, fastest = _drift(readings), self._called(then)
        if now.measurement is None:
            return "contradicted", f"{fastest} is {now.status} now: the record only guides the predictions"
        expected = self._rate(_at_speed(then.result, drift))
        seen = history.rate(now)
        measured = [now.measurement, then.result.measurement, *(m for pair in readings for m in pair)]
        allowed = _Z * math.sqrt(sum(self._variance(m) for m in measured if m is not None))
        figures = f"{show_rate(seen)} samples/s, {show_rate(expected)} expected, the machine {drift:.2f} times as fast"
        if abs(math.log(seen / expected)) <= allowed:
            return "confirmed", f"{fastest} gives {figures}: what was recorded is not measured again"
        return "contradicted", f"{fastest} gives {figures}: the record only guides the predictions"

    def refusal(self, config: TrainConfig) -> str | None:
        """Return the reason why the record makes a trial of `config` needless, or None."""
        too_hard = self._refused_for_memory(config) or self._refused_for_time(config)
        if too_hard is not None or self._standing != "confirmed":
            return too_hard
        known = self._latest.get(config)
        # A time limit that was too short doesn't show that a configuration was far slower than the winner.
        usual_s = self._winner.result.duration_s if self._winner else 0.0
        if known is None or (known.is_out_of_time and known.result.duration_s < HOPELESS_FACTOR * usual_s):
            return None
        if known.result.measurement is None:
            return f"{known.result.status} on {known.day} (record)"
        return f"gave {show_rate(self._rate(known.result))} samples/s on {known.day} (record)"

    def lessons(self, history: History) -> list[TrialResult]:
        """Return recorded trials for the cost model to learn from, scaled to the present speed of the machine."""
        both = [self._plan.baseline]
        if self._standing == "confirmed" and self._winner is not None:
            both.append(self._winner.result.request.config)
        drifts = [_drift(self._in_both(index, history, both)) for index in range(len(self._runs))]
        unmeasured = [known for config, known in self._latest.items() if history.known(config) is None]
        return [_at_speed(known.result, drifts[known.search]) for known in unmeasured[:_MOST_LESSONS]]

    def _old_winner(self, history: History) -> _Known | None:
        """Return the configuration to measure first: the fastest answer of an earlier search.

        If another recorded configuration was faster than that by more than the noise, it is that one. Answers are
        preferred as finals confirmed them. The baseline is never returned.
        """
        baseline = (self._plan.baseline,)
        drifts = [_drift(self._in_both(index, history, baseline)) for index in range(len(self._runs))]
        rates = {
            config: self._rate(_at_speed(known.result, drifts[known.search]))
            for config, known in self._latest.items()
            if known.result.measurement is not None and self._may_be_tried(config)
        }
        if not rates:
            return None
        fastest = max(rates, key=rates.__getitem__)
        least = rates[fastest] * math.exp(-_Z * math.sqrt(2) * self._noise)
        answers = [
            config
            for search, run in zip(self._searches, self._runs, strict=True)
            for config in run
            if search.verdict in _CONFIRMED_VERDICTS
            and config.config_id == search.best_config_id
            and rates.get(config, 0.0) >= least
        ]
        return self._latest[max(answers, key=rates.__getitem__, default=fastest)]

    def _may_be_tried(self, config: TrainConfig) -> bool:
        """Whether a configuration is a legal point of this search, isn't the baseline, and isn't known not to fit."""
        space = self._plan.search_space
        point = space.complete(space.point(config))
        choices = {dimension.name: dimension.choices for dimension in space.dimensions}
        if config == self._plan.baseline or any(value not in choices[name] for name, value in point.items()):
            return False
        return (
            space.config(point) == config and space.refusal(config) is None and self._refused_for_memory(config) is None
        )

    def _in_both(
        self, search: int, history: History, configs: Sequence[TrainConfig]
    ) -> list[tuple[Measurement, Measurement]]:
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

    def _called(self, known: _Known) -> str:
        """Return words for the old winner, which may have been slower than the baseline of its search."""
        baseline = self._runs[known.search].get(self._plan.baseline)
        won = baseline is None or self._rate(known.result) >= self._rate(baseline.result)
        return f"{'the winner' if won else 'what came next to the baseline'} of {known.day} (record)"

    def _refused_for_time(self, config: TrainConfig) -> str | None:
        """Return the reason why a configuration would run into its time limit again, or None."""
        known = self._latest.get(config)
        if known is None or config == self._plan.baseline or not known.is_out_of_time:
            return None
        drift, took_s = self._speeds[known.search], known.result.duration_s
        limit_s = self._plan.budget.trial_timeout_s
        if self._leader is not None and config.torch_compile_backend is None:
            limit_s = min(limit_s, HOPELESS_S + HOPELESS_FACTOR * self._leader.duration_s)
        if drift is None or took_s / drift < limit_s:
            return None
        return f"did not end within {show_time(took_s)} on {known.day} (record)"

    def _refused_for_memory(self, config: TrainConfig) -> str | None:
        if config in self._too_large:
            return self._too_large[config]
        easier = (reason for other, reason in self._too_large.items() if is_no_harder(other, config))
        reason = next(easier, None)
        return None if reason is None else f"a configuration no harder on memory {reason}"


def _explored(plan: SearchPlan, search: RecordedSearch, index: int) -> dict[TrainConfig, _Known]:
    """Return the trials of an earlier search by configuration; of several trials of one configuration, the median.

    Finals and checks are left out, and so are numbers of devices that this search, with the `plan`, doesn't try.
    """
    found: dict[TrainConfig, list[_Known]] = {}
    for recorded in search.trials:
        result = _result(plan, recorded) if recorded.purpose.explores else None
        if result is not None and result.request.config.parallelism.world_size in plan.world_sizes:
            found.setdefault(result.request.config, []).append(_Known(result, recorded.ended, index))
    middle = {}
    for config, several in found.items():
        completed = [
            (known.result.measurement.samples_per_second, known) for known in several if known.result.measurement
        ]
        completed.sort(key=lambda each: each[0])
        middle[config] = completed[len(completed) // 2][1] if completed else several[-1]
    return middle


def _result(plan: SearchPlan, recorded: RecordedTrial) -> TrialResult | None:
    """Return a recorded trial as a result; None if this version can't read its configuration or outcome."""
    try:
        config = TrainConfig.model_validate(recorded.config)
        request = request_of(
            plan, config, recorded.purpose, number=recorded.number, timeout_s=recorded.duration_s + 1.0
        )
        outcome = OUTCOMES.validate_python(recorded.outcome)
    except (ValueError, AutotuneError):
        return None
    if isinstance(outcome, Measurement) and not 0 < outcome.samples_per_second < math.inf:
        return None  # from a damaged record
    limits = request.limits.model_copy(update={"memory_bytes": recorded.memory_bytes})
    request = request.model_copy(update={"limits": limits})
    return TrialResult(request=request, outcome=outcome, duration_s=recorded.duration_s)


def _too_large(every: Sequence[_Known], budget_bytes: int) -> dict[TrainConfig, str]:
    """Return the configurations that needed more memory than a budget, with words on how that is known.

    A configuration that fitted in a later trial is left out.
    """
    fitted: dict[TrainConfig, str] = {}
    for known in every:
        measured, config = known.result.measurement, known.result.request.config
        if measured is not None and _least_bytes(measured.memory) <= budget_bytes:
            fitted[config] = max(fitted.get(config, ""), known.ended)
    found: dict[TrainConfig, str] = {}
    for known in every:
        measured, request = known.result.measurement, known.result.request
        within = request.limits.memory_bytes
        if fitted.get(request.config, "") > known.ended:
            continue
        if measured is not None and (needed := _least_bytes(measured.memory)) > budget_bytes * (1 + _MEMORY_NOISE):
            found.setdefault(request.config, f"took {show_memory(needed)} on {known.day} (record)")
        elif known.result.status is TrialStatus.OUT_OF_MEMORY and within >= budget_bytes:
            words = f"ran out of memory within {show_memory(within)} on {known.day} (record)"
            found.setdefault(request.config, words)
    return found


def _least_bytes(memory: Memory) -> int:
    """Return the bytes that a trial needs at the least: its device peak without the allocator's unused reserve.

    Under a smaller limit the allocator would reserve less.
    """
    if memory.device_bytes is None or memory.reserved_bytes is None or memory.allocated_bytes is None:
        return memory.peak_bytes if memory.is_known else 0
    return memory.device_bytes - memory.reserved_bytes + memory.allocated_bytes


def _speed(then: _Known | None, now: TrialResult | None) -> float | None:
    """Return how many times as fast the machine is now, by two trials of one configuration; None if they don't show it.

    If the trial runs into its time limit now, 1 is returned: the machine is not faster.
    """
    if then is None or now is None:
        return None
    if now.measurement is None:
        return 1.0 if now.status is TrialStatus.TIMED_OUT else None
    before = then.result.measurement
    return None if before is None else now.measurement.samples_per_second / before.samples_per_second


def _drift(readings: Sequence[tuple[Measurement, Measurement]]) -> float:
    """Return how many times as fast the machine is now, by measurements of now and then; 1 if there are none."""
    ratios = [now.samples_per_second / then.samples_per_second for now, then in readings]
    return statistics.geometric_mean(ratios) if ratios else 1.0


def _at_speed(result: TrialResult, factor: float) -> TrialResult:
    """Return a trial as it would be on a machine `factor` times as fast."""
    measured = result.measurement
    if measured is None:
        return result
    interval, tokens = measured.samples_per_second_interval, measured.tokens_per_second
    faster = {
        "step_times_s": tuple(step / factor for step in measured.step_times_s),
        "samples_per_second": measured.samples_per_second * factor,
        "samples_per_second_interval": Interval(low=interval.low * factor, high=interval.high * factor),
        "tokens_per_second": None if tokens is None else tokens * factor,
        "first_step_s": measured.first_step_s / factor,
    }
    return result.model_copy(update={"outcome": measured.model_copy(update=faster)})
