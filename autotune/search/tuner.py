"""The loop of a search: ask the study for a configuration, run its trial, tell the result; then finals and checks.

While a place is free, a trial begins there; the sampler decides which configuration is worth one. With several places
the baseline runs beside other trials. Finals and checks run one at a time at a single place, as their small differences
matter. Every result is on disk before the next trial starts, so that a killed search can be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import optuna
from optuna.trial import Trial

from autotune.cost.model import CostModel
from autotune.errors import EXIT_INTERRUPTED, AutotuneError
from autotune.execution.runner import Runner
from autotune.planning.plan import SearchPlan, cut_short, is_over, request_of, too_large
from autotune.search.earlier import EarlierSearches
from autotune.search.progress import Pace, leader_of
from autotune.search.sampler import CostModelSampler
from autotune.space.knobs import changes
from autotune.storage.run_directory import ANSWER_FILE, RunDirectory
from autotune.values.config import TrainConfig
from autotune.values.problem import Note, Observer, TrialEnded, TrialStarted
from autotune.values.result import ResultData
from autotune.values.time_spent import wall_s
from autotune.values.trial import Failure, Purpose, TrialRequest, TrialResult, TrialStatus
from autotune.verification import verdict
from autotune.verification.checks import Check
from autotune.verification.finals import Finals


class SearchInterrupted(AutotuneError):
    """Ctrl-C. `result` is the answer so far, also written to `path`; None if nothing was measured."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, result: ResultData | None, path: Path) -> None:
        super().__init__(f"interrupted; `autotune resume {path.parent}` goes on")
        self.result = result
        self.path = path


class Tuner:
    """One search in one run directory, which the caller has locked; its trials run in `pool`.

    Without a cost model nothing is predicted, without `earlier` no earlier search is used. `starting` are the seconds
    before the first trial, by activity, which count towards the time limit. `study` is in memory, without finals and
    checks.
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
        starting: Mapping[str, float] | None = None,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._pool = pool
        self._observer = observer
        self._starting = starting
        self._earlier = earlier or EarlierSearches(plan)
        self._sampler = CostModelSampler(plan, model, earlier=self._earlier)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(direction="maximize", sampler=self._sampler)
        self._state = self._sampler.state
        self._finals = Finals(self._state, takes_turns=pool.takes_turns)
        self._pace = Pace(self._finals, clock, sum((starting or {}).values()))
        self._running: dict[int, Trial] = {}  # by the number of the request
        self._number = -1  # of the latest trial that was begun
        self._write_after = float("-inf")

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
            else:
                self._state.take_in(result, counts=False)
        self._pace.before_s = wall_s(results)
        self._number = max((r.request.number for r in results), default=-1)
        if results:
            self._observer(Note(text=f"going on after {len(results)} finished trials"))

    def _search(self) -> None:
        if self._state.history.known(self._plan.baseline) is None:
            self._ask(Purpose.BASELINE)
        self._consult()
        goes_on = not is_over(self._plan, self._state.results)
        while goes_on or self._running:
            self._sampler.left_s = self._pace.left_s() - self._pace.reserved_s()
            while goes_on and self._pool.free() and not self._sampler.is_done(self.study) and self._pace.may_go_on():
                self._ask(Purpose.SEARCH)
            if not self._running:
                flags_alone = self._untried_flags()
                if not goes_on or flags_alone is None:
                    break
                self.study.enqueue_trial(self._sampler.space.choices_of(flags_alone))
                self._ask(Purpose.SEARCH)
            result = self._pool.wait()
            trial = self._running.pop(result.request.number)
            self._pace.running -= result.request.purpose is Purpose.SEARCH
            self._sampler.tell(self.study, trial, result)
            self._ended(result)
            self._consult()
        if goes_on and self._sampler.conclusion is not None:
            self._observer(Note(text=self._sampler.conclusion))

    def _untried_flags(self) -> TrainConfig | None:
        """Return the leader as flags alone say it, for the finals, if it is untried and there is time for it."""
        history, baseline = self._state.history, self._plan.baseline
        leaders = [config for r in history.ranking() if (config := r.request.config) != baseline]
        found = self._finals.flags_alone(leaders) if self._pace.may_go_on() else None
        return found if found is not None and history.known(found) is None else None

    def _ask(self, purpose: Purpose) -> None:
        """Begin a trial of what the study proposes; a baseline that is too large is out of memory without one."""
        trial = self.study.ask()
        config = self._sampler.suggest(trial)
        request = self._begun(config, purpose)
        reason = too_large(self._plan, config) if purpose is Purpose.BASELINE else None
        if reason is None:
            self._running[request.number] = trial
            self._pace.running += purpose is Purpose.SEARCH
            self._pool.begin(request)
            return
        failure = Failure(status=TrialStatus.OUT_OF_MEMORY, cause=f"not run: {reason}")
        result = TrialResult(request=request, outcome=failure, duration_s=0.0)
        self._directory.write_result(result)
        self._sampler.tell(self.study, trial, result)
        self._ended(result)

    def _consult(self) -> None:
        told, lessons = len(self._earlier.notes), self._earlier.compare(self._state.history)
        for text in self._earlier.notes[told:]:
            self._observer(Note(text=text))
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
            if configs:
                if not self._pace.has_time_for(configs):
                    return
                self._run(configs, Purpose.FINAL)
                continue
            check = finals.proof.next(verdict.verdict_of(finals).best) if finals.contenders() else None
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
        request = request_of(
            self._plan,
            config,
            purpose,
            number=self._number,
            timeout_s=self._pace.timeout_s(config, purpose, check),
            task=check.task if check is not None else None,
            prediction=self._sampler.prediction(config),
            cold_compile=purpose is Purpose.FINAL and not self._finals.trials(config),
            to_beat=self._pace.to_beat(purpose),
            in_turn_with=in_turn_with,
        )
        if limits is not None:
            request = request.model_copy(update={"limits": request.limits.model_copy(update=limits)})
        self._observer(
            TrialStarted(
                number=request.number,
                purpose=purpose,
                config=config,
                changes=changes(config, self._plan),
                time_left_s=max(0.0, self._pace.left_s()),
                trials_left=self._pace.trials_left(),
                prediction=request.prediction,
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
            result = result.model_copy(update={"notes": (*result.notes, *self._earlier.notes)})
            self._directory.write_answer(result)
        return result
