"""The loop of a search: ask the study for a configuration, run its trial, tell the result; then finals and checks.

While a place is free, a trial begins there; the sampler decides which configuration is worth one. With several places
the baseline runs beside other trials. Finals and checks run one at a time at a single place, as their small differences
matter. Every result is on disk before the next trial starts, so that a killed search can be resumed.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import optuna
from optuna.trial import Trial

from autotune.cost.model import CostModel
from autotune.errors import EXIT_INTERRUPTED, AutotuneError, InputError, resuming
from autotune.execution.runner import Runner
from autotune.planning.plan import SearchPlan
from autotune.search.candidates import ProgramTracer
from autotune.search.earlier import EarlierSearches, cut_short, hopeless_after_s
from autotune.search.sampler import CostModelSampler
from autotune.space.knobs import changes
from autotune.storage.run_directory import ANSWER_FILE, RunDirectory
from autotune.values.config import TrainConfig
from autotune.values.problem import Leader, Note, Observer, TrialEnded, TrialStarted
from autotune.values.result import ResultData
from autotune.values.time_spent import wall_s
from autotune.values.trial import Failure, Purpose, TrialRequest, TrialResult, TrialStatus
from autotune.verification import verdict
from autotune.verification.checks import Check
from autotune.verification.finals import FINALIST_SHARE, Finals

# The least that a trial in turn with others measures, as a share of what one alone does in a search.
_LEAST_IN_TURN = 0.25


class SearchInterrupted(AutotuneError):
    """Ctrl-C. `result` is the answer so far, also written to `path`; None if nothing was measured."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, result: ResultData | None, path: Path) -> None:
        super().__init__(f"interrupted; {resuming(path.parent)} goes on")
        self.result, self.path = result, path


class Pace:
    """The time and the trials that a search has left, which began `starting_s` before this was made.

    It sets the time limit of a trial and how exactly it has to measure; the sampler decides on configurations.
    """

    def __init__(self, finals: Finals, clock: Callable[[], float], starting_s: float = 0.0) -> None:
        self._finals, self._plan, self._history = finals, finals.plan, finals.history
        self._clock, self._started, self.starting_s = clock, clock(), starting_s
        self.before_s = 0.0  # taken by earlier runs of this search
        self.running = 0  # trials of the search that have begun and not ended

    def spent_s(self) -> float:
        """Return the seconds that the search has taken since its first trial was chosen."""
        return self.before_s + self._clock() - self._started

    def left_s(self) -> float:
        """Return the seconds until trials have to end: the time limit less start, trials and the end of the command."""
        limit_s = self._plan.budget.max_time_s
        closing_s = min(2.0, 0.05 * limit_s)  # for writing the answer and ending all processes
        return limit_s - closing_s - self.starting_s - self.spent_s()

    def searched(self) -> int:
        return sum(r.request.purpose is Purpose.SEARCH for r in self._finals.state.results)

    def trials_left(self) -> int:
        return self._plan.budget.max_trials - self.searched() - self.running

    def may_go_on(self) -> bool:
        """Whether another trial fits the budget, with time reserved for the finalists."""
        return self.trials_left() > 0 and self.left_s() > self.reserved_s() + self._typical_s()

    def reserved_s(self) -> float:
        """Return the seconds to keep for finals and checks: as many as they are expected to take, at most half of all.

        None are kept if the rest would not suffice for a first trial: an unconfirmed answer is better than none.
        """
        reserved_s = min(self._finals.expected_s() + self._finals.proof.expected_s(), self._plan.budget.max_time_s / 2)
        if not self.searched() and self.left_s() <= reserved_s + self._typical_s():
            return 0.0
        return reserved_s

    def timeout_s(self, config: TrainConfig, purpose: Purpose, check: Check | None) -> float:
        """Return a trial's time limit: the usual one, within what is left; in the search also what may still win."""
        usual_s = self._plan.budget.trial_timeout_s
        if check is not None:
            usual_s = max(usual_s, 2 * check.expected_s)
        if purpose is Purpose.SOAK and (measured := self._finals.state.measured(config)) and measured.memory.is_known:
            # A checkpoint is no larger than the peak of the training. A network's disk may be so slow: 100 MB/s.
            usual_s += measured.memory.peak_bytes / 100e6
        if purpose is Purpose.BASELINE and self.left_s() < 1.5 * usual_s:  # too little would be left for another trial
            usual_s = self.left_s()
        limit_s = min(usual_s, self.left_s())
        if purpose is Purpose.SEARCH:
            limit_s = min(limit_s, self.left_s() - self.reserved_s())
            limit_s = min(limit_s, hopeless_after_s(self._plan, config, self._history.best()))
        return max(1.0, limit_s)

    def has_time_for(self, configs: Sequence[TrainConfig]) -> bool:
        """Whether final trials of `configs` fit what is left: in turn at least a quarter as long as alone."""
        needed_s = self._least_s(configs, _LEAST_IN_TURN) if len(configs) > 1 else self._finals.expected_s(configs)
        return self.left_s() >= needed_s

    def _least_s(self, configs: Sequence[TrainConfig], factor: float = 1.0) -> float:
        """Return the seconds of trials in turn that are measured `factor` times as long as one that runs alone."""
        measured_s = factor * self._plan.budget.measure_time_s
        return sum(self._finals.setup_s(config) + measured_s for config in configs)

    def choose_finalists(self) -> None:
        """Leave as many finalists as there is time for, with the checks; those whose finals have begun stay."""
        finals, rounds = self._finals, self._plan.budget.final_rounds
        while finals.finalists > 1:
            contenders, configs = finals.contenders(), finals.next_trials()
            alone_s = sum(max(0, rounds - finals.rounds(c)) * finals.expected_s([c]) for c in contenders)
            needed_s = self._least_s(configs) if len(configs) > 1 else alone_s
            if self.left_s() >= needed_s + finals.proof.expected_s():
                return
            finals.finalists -= 1
            if any(map(finals.trials, set(contenders).difference(finals.contenders()))):
                finals.finalists += 1
                return

    def limits_in_turn(self, configs: Sequence[TrainConfig]) -> dict[str, float]:
        """Return the limits of trials that run in turn: they measure long, unless the checks need the time."""
        budget, finals = self._plan.budget, self._finals
        for_each_s = (self.left_s() - finals.proof.expected_s() - sum(map(finals.setup_s, configs))) / len(configs)
        longest_s = budget.when_in_turn["measure_time_s"]
        timeout_s = max(1.0, min(len(configs) * budget.trial_timeout_s, self.left_s()))
        least_s = _LEAST_IN_TURN * budget.measure_time_s
        return {"measure_time_s": min(longest_s, max(least_s, for_each_s)), "timeout_s": timeout_s}

    def to_beat(self, purpose: Purpose) -> float | None:
        """Return the samples/s below which a trial can't become a finalist, so that it may measure less exactly.

        None if every rate has to be exact: in finals, before a trial has completed, and for a run of given length.
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
        decision = verdict.verdict_of(finals)
        config, proven = decision.best, decision.speedup
    measured, base = finals.measurement(config), finals.measurement(plan.baseline)
    if measured is None:
        return None
    speedup = proven.ratio if proven is not None else None
    if proven is None and config != plan.baseline and base is not None:
        corrections, rate = finals.corrections(), plan.objective.rate  # single trials are noisy
        expected, reference = rate(measured) * corrections.get(config, 1.0), rate(base)
        speedup = expected / (reference * corrections.get(plan.baseline, 1.0))
    return Leader(changes=changes(config, plan), samples_per_second=measured.samples_per_second, speedup=speedup)


class Tuner:
    """One search in one run directory, which the caller has locked; its trials run in `pool`.

    Without a cost model nothing is predicted, without `earlier` no earlier search is used, without `trace` compiled
    configurations are predicted by a rule of thumb. `starting`: seconds before the first trial, by activity. `study` is
    in memory, without finals and checks.
    """

    def __init__(
        self,
        plan: SearchPlan,
        directory: RunDirectory,
        pool: Runner,
        observer: Observer,
        *,
        clock: Callable[[], float] = time.monotonic,
        model: CostModel | None = None,
        earlier: EarlierSearches | None = None,
        trace: ProgramTracer | None = None,
        starting: Mapping[str, float] | None = None,
    ) -> None:
        self._plan, self._directory, self._pool = plan, directory, pool
        self._observer, self._starting = observer, Counter(starting)
        self._earlier = earlier or EarlierSearches(plan)
        self._sampler = CostModelSampler(plan, model, earlier=self._earlier, trace=trace)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(direction="maximize", sampler=self._sampler)
        self._state = self._sampler.state
        self._finals = Finals(self._state, takes_turns=pool.takes_turns)
        self._pace = Pace(self._finals, clock, self._starting.total())
        self._running: dict[int, Trial] = {}  # by the number of the request
        self._number = -1  # of the latest trial that was begun
        self._write_after = float("-inf")
        self._untried: str | None = None

    def run(self) -> ResultData:
        """Search to the end and return the answer, which is also written to the run directory.

        NothingFitsError: no configuration completed a trial within the memory budget. NothingPassedError: all that did
        failed in finals or checks. InfrastructureError: trials can't be run, or none completed for another reason than
        memory. SearchInterrupted: Ctrl-C.
        """
        self._recover()
        try:
            self._search()
            self._measure_again()
        except AutotuneError:
            self._write()
            raise
        except KeyboardInterrupt:
            raise SearchInterrupted(self._write(), self._directory.path / ANSWER_FILE) from None
        result = self._write()
        if result is None:
            raise verdict.nothing_found(self._plan, self._state.results, str(self._directory.path))
        return result

    def _recover(self) -> None:
        results = self._directory.results()
        void = cut_short(self._plan, results)
        for result in results:
            if result.request.purpose.explores and result not in void and not result.is_excused:
                self._sampler.add(self.study, result)
            elif result.request.purpose.explores or not result.is_excused:  # an excused final or check runs again
                self._state.take_in(result, counts=False)
        self._pace.before_s = wall_s(results)
        with contextlib.suppress(InputError):  # an answer that can't be read is written anew
            if (answer := self._directory.answer()) is not None and answer.spent is not None:
                self._starting.update(answer.spent.starting)
                self._pace.starting_s = self._starting.total()
        self._number = max((r.request.number for r in results), default=-1)
        if results:
            self._observer(Note(text=f"going on after {len(results)} finished trial{'s' * (len(results) > 1)}"))

    def _search(self) -> None:
        if self._state.history.known(self._plan.baseline) is None:
            self._ask(Purpose.BASELINE)
        self._consult()
        goes_on = not self._plan.is_over(self._state.results)
        while goes_on or self._running:
            self._sampler.left_s = self._pace.left_s() - self._pace.reserved_s()
            while goes_on and self._pool.free() and not self._sampler.is_done(self.study) and self._pace.may_go_on():
                self._ask(Purpose.SEARCH)
            if not self._running:
                # The leader as flags alone say it runs as well, for the finals, if there is time.
                leaders = [c for r in self._state.history.ranking() if (c := r.request.config) != self._plan.baseline]
                flags_alone = self._finals.flags_alone(leaders) if self._pace.may_go_on() else None
                if not goes_on or flags_alone is None or self._state.history.known(flags_alone) is not None:
                    break
                self.study.enqueue_trial(self._sampler.space.choices_of(flags_alone))
                self._ask(Purpose.SEARCH)
            result = self._pool.wait()
            trial = self._running.pop(result.request.number)
            self._pace.running -= result.request.purpose is Purpose.SEARCH
            self._sampler.tell(self.study, trial, result)
            self._ended(result)
            self._consult()
        if self._sampler.is_done(self.study):
            self._untried = self._sampler.conclusion
        else:
            most = self._plan.budget.max_trials
            ended = f"all {most} trials have run" if self._pace.trials_left() <= 0 else "the time before finals is up"
            self._untried = f"{ended} {self._sampler.left_out()}"
        if self._untried is not None:
            self._observer(Note(text=self._untried))

    def _ask(self, purpose: Purpose) -> None:
        """Begin the trial that the study proposes; a baseline that is too large runs out of memory without one."""
        trial = self.study.ask()
        config = self._sampler.suggest(trial)
        request = self._begun(config, purpose)
        reason = self._plan.too_large(config) if purpose is Purpose.BASELINE else None
        if reason is None:
            self._running[request.number] = trial
            self._pace.running += purpose is Purpose.SEARCH
            self._pool.begin(request)
            return
        failure = Failure(status=TrialStatus.OUT_OF_MEMORY, cause=f"not run: {reason}")
        result = TrialResult(request=request, outcome=failure, duration_s=0.0, began=time.time())
        self._directory.write_result(result)
        self._sampler.tell(self.study, trial, result)
        self._ended(result)

    def _consult(self) -> None:
        told, lessons = self._earlier.note, self._earlier.compare(self._state.history)
        if self._earlier.note is not None and told is None:
            self._observer(Note(text=self._earlier.note))
        if lessons:
            self._sampler.observe(*lessons)

    def _measure_again(self) -> None:
        self._pace.choose_finalists()
        finals = self._finals
        while True:
            configs, further = finals.next_trials(), finals.further()
            # A further round is begun only if it leaves time for the checks.
            if not configs and self._pace.left_s() >= finals.expected_s(further) + finals.proof.expected_s():
                configs = further
            if configs and self._pace.has_time_for(configs):
                self._run(configs, Purpose.FINAL)
                continue
            if not finals.contenders():
                return
            best = verdict.verdict_of(finals).best
            check = finals.proof.next(best) or finals.proof.profile(best)
            if check is None or self._pace.left_s() < check.expected_s:
                return
            self._run([check.config], check.purpose, check)

    def _run(self, configs: Sequence[TrainConfig], purpose: Purpose, check: Check | None = None) -> None:
        """Run trials and add their results; several are all alive at once and compute in turn."""
        numbers, limits = tuple[int, ...](), None
        if len(configs) > 1:
            numbers = tuple(range(self._number + 1, self._number + 1 + len(configs)))
            limits = self._pace.limits_in_turn(configs)
        requests = [self._begun(config, purpose, check, in_turn_with=numbers, limits=limits) for config in configs]
        results = self._pool.run_in_turn(requests) if numbers else [self._pool.run(requests[0])]
        for result in results:
            self._state.take_in(result)
        for result in results:
            self._ended(result)

    def _begun(
        self,
        config: TrainConfig,
        purpose: Purpose,
        check: Check | None = None,
        *,
        in_turn_with: tuple[int, ...] = (),
        limits: Mapping[str, float] | None = None,
    ) -> TrialRequest:
        """Return the request of the next trial, after reporting that it begins; `limits` replace the usual ones."""
        self._number += 1
        cold = purpose is Purpose.FINAL and self._plan.objective.run_samples is not None  # compiling counts in the rate
        request = self._plan.request_of(
            config,
            purpose,
            number=self._number,
            timeout_s=self._pace.timeout_s(config, purpose, check),
            task=check.task if check is not None else None,
            prediction=self._sampler.prediction(config),
            cold_compile=cold and not self._finals.trials(config),
            to_beat=self._pace.to_beat(purpose),
            in_turn_with=in_turn_with,
        )
        if limits is not None:
            request = request.model_copy(update={"limits": request.limits.model_copy(update=limits)})
        self._observer(
            TrialStarted(
                request=request,
                changes=changes(config, self._plan),
                time_left_s=max(0.0, self._pace.left_s()),
                trials_left=self._pace.trials_left(),
                leader=leader_of(self._finals),
            )
        )
        return request

    def _ended(self, result: TrialResult) -> None:
        """Report a trial that has ended, and write the answer so far, for at most a tenth of others' time."""
        changed = changes(result.request.config, self._plan)
        self._observer(TrialEnded(result=result, changes=changed, leader=leader_of(self._finals)))
        began = time.perf_counter()
        if not self._running or began >= self._write_after:
            self._write()
            self._write_after = began + 10 * (time.perf_counter() - began)

    def _write(self) -> ResultData | None:
        result = verdict.assemble(self._finals, self._pace.spent_s(), self._starting)
        if result is None:  # nothing that was refused meanwhile is handed out
            (self._directory.path / ANSWER_FILE).unlink(missing_ok=True)
        else:
            notes = (*result.notes, *filter(None, [self._earlier.note]))
            result = result.model_copy(update={"notes": notes, "untried": self._untried})
            self._directory.write_answer(result)
        return result
