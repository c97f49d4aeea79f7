"""Uses the lasting record in a search: earlier trials refuse configurations, propose one, and correct predictions.

The search first measures the baseline, which shows how much faster or slower the machine is now, then the winner of the
earlier searches. The cost model learns from the recorded trials, scaled to the present speed. A configuration that, so
scaled, was no faster than the present leader is not measured again. One that ran out of memory within this budget or a
larger one is refused in any case, and so is one, but for the baseline, that ran into a time limit as long as it would
have now. Finals and the answer use the trials of this search alone.
"""

import contextlib
import datetime
import math
from collections.abc import Sequence

from autotune.planning.plan import SearchPlan
from autotune.space.space import History, is_no_harder
from autotune.storage.recorded import RecordedSearch
from autotune.units import show_memory, show_rate, show_time
from autotune.values.config import TrainConfig
from autotune.values.trial import TrialResult, TrialStatus


def hopeless_after_s(plan: SearchPlan, config: TrainConfig, leader: TrialResult | None) -> float:
    """Return after how many seconds a trial of the search is ended, as it can't reach the leader any more."""
    measured = leader.measurement if leader is not None else None
    if leader is None or measured is None or config.torch_compile_backend is not None:  # compiling may take minutes
        return math.inf
    # Its steps are longer than the leader's where its micro-batch is larger.
    samples = plan.micro_steps(config) * config.per_device_train_batch_size * config.parallelism.data_parallel
    steps_s = (plan.budget.discarded_steps + 2) * samples / measured.samples_per_second
    return 15.0 + 2.5 * max(leader.duration_s, steps_s)


def cut_short(plan: SearchPlan, results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials to run again in a search that goes on: those that ended by a shorter limit than now."""
    leader = History(plan.objective).with_results(results).best()
    before = (r for r in results if r.status is TrialStatus.TIMED_OUT and r.request.number < plan.reopened_at)
    limits_s = ((r, hopeless_after_s(plan, r.request.config, leader)) for r in before if r.request.purpose.explores)
    return [r for r, limit_s in limits_s if r.request.limits.timeout_s < min(plan.budget.trial_timeout_s, limit_s)]


_MOST_LESSONS = 120  # of the latest; more would hardly change the cost model


class EarlierSearches:
    """The trials of earlier searches with the same key, the latest first, that mean something in this one."""

    def __init__(self, plan: SearchPlan, searches: Sequence[RecordedSearch] = ()) -> None:
        self._plan, self._searches = plan, searches
        self._rate_of = History(plan.objective).rate
        self._runs = [_explored(plan, search) for search in searches]
        self._latest = {config: known for run in reversed(self._runs) for config, known in run.items()}
        self._now = dict(self._latest)  # at the machine's present speed
        self.count = len(self._latest)  # of configurations that the record knows
        self._too_large = self._beyond_memory()
        self.winner: TrainConfig | None = None  # of the earlier searches, once the baseline is known
        self.note: str | None = None  # for the user, on the record, once the baseline is known

    def compare(self, history: History) -> list[TrialResult]:
        """Return the recorded trials at the machine's present speed, to learn from, once the baseline is known."""
        baseline = history.known(self._plan.baseline)
        if not self._latest or self.note is not None or baseline is None:
            return []
        for run in reversed(self._runs):
            then, now = run.get(self._plan.baseline, baseline).measurement, baseline.measurement
            factor = now.samples_per_second / then.samples_per_second if then is not None and now is not None else 1.0
            self._now |= {config: _at_speed(known, factor) for config, known in run.items()}
        self.winner = self._old_winner(history.best())
        last_day = max(map(_day, self._latest.values()))
        some = f"{self.count} configuration{'s' * (self.count > 1)}"
        self.note = f"the record knows {some} of this search, the last on {last_day}"
        if self.winner is not None and history.known(self.winner) is None:
            run = next(run for run in self._runs if self.winner in run)
            known, base = run[self.winner], run.get(self._plan.baseline)
            won = base is None or self._rate_of(known) >= self._rate_of(base)
            self.note += f"; next is {'the winner' if won else 'the fastest beside the baseline'} of {_day(known)}"
        return [result for config, result in self._now.items() if history.known(config) is None][-_MOST_LESSONS:]

    def refusal(self, config: TrainConfig, leader: TrialResult | None) -> str | None:
        """Return why the record makes a trial of `config` needless beside the present leader, or None."""
        known = self._latest.get(config)
        if (reason := self._too_hard(config, leader)) is not None or known is None or leader is None:
            return reason
        if known.status in (TrialStatus.CRASHED, TrialStatus.INVALID):
            return f"{known.status} on {_day(known)} (record)"
        if config == self._plan.baseline or not 0 < self._rate_of(self._now[config]) <= self._rate_of(leader):
            return None
        return f"gave {show_rate(self._rate_of(known))} samples/s on {_day(known)} (record)"

    def _too_hard(self, config: TrainConfig, leader: TrialResult | None) -> str | None:
        """Return how the record shows that a configuration needs too much memory or time, or None."""
        if config in self._too_large:
            return self._too_large[config]
        for other, reason in self._too_large.items():
            if is_no_harder(other, config, self._plan.workload):
                return f"a configuration no harder on memory {reason}"
        known = self._latest.get(config)
        if known is None or config == self._plan.baseline:
            return None
        limit_s = min(self._plan.budget.trial_timeout_s, hopeless_after_s(self._plan, config, leader))
        is_too_slow = known.status is TrialStatus.TIMED_OUT and known.duration_s >= limit_s
        return f"did not end within {show_time(known.duration_s)} on {_day(known)} (record)" if is_too_slow else None

    def _beyond_memory(self) -> dict[TrainConfig, str]:
        """Return the configurations that needed more memory than the budget and didn't fit later, with the reasons."""
        found: dict[TrainConfig, str] = {}
        budget_bytes = self._plan.memory_bytes
        every = [known for run in reversed(self._runs) for known in run.values()]
        for known in sorted(every, key=lambda known: known.began):
            measured, config, needed = known.measurement, known.request.config, 0
            if measured is not None and (memory := measured.memory).is_known:
                needed, reserved, allocated = memory.peak_bytes, memory.reserved_bytes, memory.allocated_bytes
                if memory.device_bytes is not None and reserved is not None and allocated is not None:
                    needed -= reserved - allocated  # under a smaller limit the allocator would reserve less
            if measured is not None and needed <= budget_bytes:
                found.pop(config, None)
            elif measured is not None and needed > budget_bytes * 1.01:  # the peaks of two runs differ by 1 %
                found[config] = f"took {show_memory(needed)} on {_day(known)} (record)"
            elif known.status is TrialStatus.OUT_OF_MEMORY and known.request.limits.memory_bytes >= budget_bytes:
                within = show_memory(known.request.limits.memory_bytes)
                found[config] = f"ran out of memory within {within} on {_day(known)} (record)"
        return found

    def _old_winner(self, leader: TrialResult | None) -> TrainConfig | None:
        """Return the fastest answer of an earlier search, other than the baseline, or one that was clearly faster."""
        space, baseline = self._plan.search_space, self._plan.baseline
        rates = {
            config: self._rate_of(result)
            for config, result in self._now.items()
            if result.measurement is not None
            and config != baseline
            and space.config(space.choices_of(config)) == config
            and space.refusal(config) is None
            and self._too_hard(config, leader) is None
        }
        if not rates:
            return None
        fastest = max(rates, key=rates.__getitem__)
        # Finals measured an earlier answer; a single trial is clearly faster beyond the 95 % interval of two processes
        # whose rates deviate by 4 %, as on a shared CPU, or by 1 %, as on a GPU.
        least = rates[fastest] / (1.12 if self._plan.hardware.is_cpu else 1.03)
        confirmed = ("faster", "no_clear_winner", "baseline_failed")
        answered = {s.best_config_id for s in self._searches if s.verdict in confirmed}
        answers = [config for config, rate in rates.items() if config.config_id in answered and rate >= least]
        return max(answers, key=rates.__getitem__, default=fastest)


def _explored(plan: SearchPlan, search: RecordedSearch) -> dict[TrainConfig, TrialResult]:
    """Return the trials of a search by configuration, of several the median; no finals, no other numbers of devices."""
    found: dict[TrainConfig, list[TrialResult]] = {}
    fails = () if any(t.measurement for t in search.trials) else (TrialStatus.CRASHED, TrialStatus.INVALID)
    for trial in search.trials:
        request = trial.request
        if trial.is_excused or trial.is_disturbed or trial.status in fails:  # not by the configuration
            continue
        if not request.purpose.explores or request.config.parallelism.world_size not in plan.world_sizes:
            continue
        with contextlib.suppress(ValueError):  # of a damaged record
            plan.workload.accumulation_steps(request.config)
            changed = {"request": request.model_copy(update={"workload": plan.workload})}
            found.setdefault(request.config, []).append(trial.model_copy(update=changed))
    middle = {}
    for config, several in found.items():
        completed = [(m.samples_per_second, n, r) for n, r in enumerate(several) if (m := r.measurement) is not None]
        middle[config] = sorted(completed)[len(completed) // 2][2] if completed else several[-1]
    return middle


def _day(result: TrialResult) -> str:
    return datetime.datetime.fromtimestamp(result.began, datetime.UTC).date().isoformat()


def _at_speed(result: TrialResult, factor: float) -> TrialResult:
    """Return a trial as it would be on a machine `factor` times as fast."""
    if (measured := result.measurement) is None:
        return result
    faster = {
        "step_times_s": tuple(step / factor for step in measured.step_times_s),
        "samples_per_second": measured.samples_per_second * factor,
        "first_step_s": measured.first_step_s / factor,
    }
    return result.model_copy(update={"outcome": measured.model_copy(update=faster)})
