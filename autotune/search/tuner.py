"""The conductor of a search: ask, check, run, tell; then the finalists and the answer.

Every result is on disk before the next trial starts, so a killed search goes on where it was. Called by `find` and
`resume` in `autotune.api`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from autotune.cost.model import CostModel
from autotune.errors import EXIT_INTERRUPTED, AutotuneError
from autotune.execution.runner import Runner
from autotune.planning.plan import SearchPlan, request_of
from autotune.planning.reopen import is_over, outlived
from autotune.search.guide import Guide
from autotune.search.limits import Pace
from autotune.search.progress import Teller
from autotune.search.proposals import proposals
from autotune.search.recall import Recall
from autotune.search.study import Asked, Study
from autotune.space.space import Point
from autotune.storage.run_directory import ANSWER_FILE, RunDirectory
from autotune.values.config import TrainConfig
from autotune.values.events import Note, Observer
from autotune.values.result import ResultData
from autotune.values.time_spent import wall_s
from autotune.values.trial import Purpose, TrialRequest, TrialResult
from autotune.verification import verdict
from autotune.verification.checks import Check
from autotune.verification.finals import Finals
from autotune.verification.state import SearchState

# Sampler's points in a row that are known or refused: the space is as good as exhausted.
PATIENCE_ASKS = 60


class SearchInterrupted(AutotuneError):
    """Ctrl-C; what was found until then is in `result` and in the file `path`, None if nothing was measured."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, result: ResultData | None, path: Path) -> None:
        super().__init__(f"interrupted; `autotune resume {path.parent}` goes on")
        self.result = result
        self.path = path


class Tuner:
    """One search in one run directory.

    Args:
        plan: What is searched.
        directory: Where everything is kept, locked by the caller.
        runner: What runs the trials.
        observer: Who listens.
        clock: Seconds from some moment on.
        model: Predicts; None to search without.
        recall: What earlier searches recorded; nothing by default.
        starting: Seconds that were spent before, by what for.
    """

    pace: type[Pace] = Pace

    def __init__(
        self,
        plan: SearchPlan,
        directory: RunDirectory,
        runner: Runner,
        observer: Observer,
        *,
        clock: Callable[[], float] = time.monotonic,
        model: CostModel | None = None,
        recall: Recall | None = None,
        starting: Mapping[str, float] | None = None,
    ) -> None:
        self._state = SearchState(plan)
        self._results, self._history, self._refused = self._state.results, self._state.history, self._state.refused
        self._finals = Finals(self._state)
        self._pace = self.pace(self._finals, clock)
        self._starting = starting
        self._plan = plan
        self._directory = directory
        self._runner = runner
        self._observer = observer
        self._space = plan.search_space()
        self._guide = Guide(model, plan, self._space) if model is not None else None
        self._study = Study(
            directory.path,
            self._space,
            capacity_bytes=plan.memory_bytes,
            seed=plan.workload.seed,
            objective=plan.objective,
        )
        self._recall = recall or Recall(plan)
        self._teller = Teller(self._finals, self._pace, observer)
        self._number = -1  # of the latest trial that was begun

    def run(self) -> ResultData:
        """Search to the end and return the answer, which is also written to the run directory.

        Raises:
            NothingFitsError: No configuration completed a trial within the memory budget.
            InfrastructureError: Trials can't be run, or none completed for another reason than memory.
            SearchInterrupted: Ctrl-C.
        """
        self._recover()
        try:
            self._conduct()
        except KeyboardInterrupt:
            raise SearchInterrupted(self._write(), self._directory.path / ANSWER_FILE) from None
        result = self._write()
        if result is None:
            raise verdict.nothing_found(self._plan, self._results, str(self._directory.path))
        return result

    def _conduct(self) -> None:
        """Run all trials that this search is made of."""
        self._baseline()
        self._search()
        self._measure_again()

    def _recover(self) -> None:
        """Take in what an earlier run of this search has measured."""
        results = self._directory.results()
        void = outlived(self._plan, results)
        for result in results:
            self._take_in(result, counts=result not in void)
        self._pace.add(wall_s(self._results))
        self._number = max((r.request.number for r in self._results), default=-1)
        self._study.recover([r for r in self._results if r.request.purpose.explores])
        if self._results:
            self._observer(Note(text=f"going on after {len(self._results)} finished trials"))

    def _take_in(self, result: TrialResult, *, counts: bool = True) -> None:
        self._state.take_in(result, counts=counts)
        if result.request.purpose.explores and self._guide is not None:
            self._guide.observe(result)

    def _baseline(self) -> None:
        if self._history.known(self._plan.baseline) is None:
            asked = self._study.ask(self._space.point(self._plan.baseline))
            self._study.tell(asked, self._run(self._plan.baseline, Purpose.BASELINE))
        self._consult()

    def _consult(self) -> None:
        """Ask the record anew, if the trials so far have changed what it is worth."""
        if self._recall.advance(self._history):
            self._observer(Note(text=self._recall.statements[-1]))
            if self._guide is not None:
                self._guide.observe(*self._recall.lessons(self._history))

    def _search(self) -> None:
        """Run trials until the budget ends, or nothing is left that could be worth one.

        A search that is resumed in its finals was over.
        """
        if is_over(self._plan, self._results):
            return
        for asked, config in self._open_points():
            self._study.tell(asked, self._run(config, Purpose.SEARCH))
            self._consult()

    def _open_points(self) -> Iterator[tuple[Asked, TrainConfig]]:
        """Yield points to run, each asked of the study; those known or refused are told and passed over."""
        for proposal in self._proposals():
            asked = self._study.ask(proposal)
            config = self._space.config(asked.point)
            known = self._history.known(config)
            if known is not None:
                self._study.tell(asked, known)
                continue
            if not self._is_open(config):
                self._study.refuse(asked, self._refused.get(config, "it is running"))
                continue
            if not self._pace.may_go_on():
                self._study.refuse(asked, "the budget is spent")
                return
            yield asked, config

    def _proposals(self) -> Iterator[Point | None]:
        """Yield the next proposal: the best predicted, one step from the leader, or None for the sampler's choice."""
        candidate = self._recall.candidate
        if candidate is not None and self._is_open(candidate):
            yield self._space.point(candidate)
        while self._guide is not None and (config := self._next_guided(self._guide)) is not None:
            yield self._space.point(config)
        if self._guide is not None and self._guide.knows_all and self._has_leader():
            self._say_that_nothing_is_left()
            return
        asks = 0
        while asks < PATIENCE_ASKS and not self._recall.is_enough(self._pace.searched()):
            trials = len(self._history)
            found = proposals(self._space, self._history)
            open_points = (p for p in found if self._is_open(self._space.config(p)))
            proposal = next(open_points, None)
            if proposal is None and self._history.best() is None:
                return  # nothing fits, down to the lightest
            yield proposal
            asks = 0 if len(self._history) > trials else asks + 1

    def _has_leader(self) -> bool:
        return self._history.best() is not None

    def _say_that_nothing_is_left(self) -> None:
        self._observer(Note(text="nothing left untried has a fair chance of a gain over 1 %"))

    def _next_guided(self, guide: Guide) -> TrainConfig | None:
        return guide.next(self._history, self._is_open, recalled=self._recall.counted)

    def _is_open(self, config: TrainConfig) -> bool:
        """Whether `config` is neither known nor refused; the reason of a refusal is kept."""
        if self._history.known(config) is not None:
            return False
        if config == self._recall.candidate:
            return True
        reason = self._space.refusal(config) or self._history.refusal(config) or self._recall.refusal(config)
        if reason is None and self._guide is not None:
            reason = self._guide.refusal(config)
        if reason is not None:
            self._refused[config] = reason
        return reason is None

    def _measure_again(self) -> None:
        """Measure the leaders and the baseline again, in turn; then prove the winner, or the next if it fails.

        What the finals and the checks say next is read from all that was run so far.
        """
        while (check := self._next_final(self._finals)) is not None and self._pace.left_s() >= check.expected_s:
            self._run(check.config, check.purpose, check)

    def _next_final(self, finals: Finals) -> Check | None:
        config = next(finals.schedule(), None)
        if config is None and self._pace.left_s() >= finals.round_s() + finals.proof.expected_s():
            config = next(finals.further(), None)
        if config is not None:
            return Check(config, Purpose.FINAL, None, finals.expected_s(config))
        if self._history.best() is None:
            return None
        return finals.proof.next(verdict.verdict_of(finals).best)

    def _run(self, config: TrainConfig, purpose: Purpose, check: Check | None = None) -> TrialResult:
        """Run one trial and take in its result."""
        return self._ended(self._runner.run(self._begun(config, purpose, check)))

    def _begun(self, config: TrainConfig, purpose: Purpose, check: Check | None = None) -> TrialRequest:
        """Return the request of a trial that is begun now."""
        self._number += 1
        request = request_of(
            self._plan,
            config,
            purpose,
            number=self._number,
            timeout_s=self._pace.timeout_s(config, purpose, check),
            task=check.task if check is not None else None,
            prediction=self._guide.prediction(config) if self._guide is not None else None,
            cold_compile=purpose is Purpose.FINAL and not self._finals.trials(config),
            to_beat=self._pace.to_beat(purpose),
        )
        self._teller.started(request)
        return request

    def _ended(self, result: TrialResult) -> TrialResult:
        """Take in the result of a trial, tell of it and write the answer as it stands."""
        self._take_in(result)
        self._teller.ended(result)
        self._keep_answer()
        return result

    def _keep_answer(self) -> None:
        self._write()

    def _write(self) -> ResultData | None:
        """Write the answer as it stands, if there is one."""
        spent_s = self._pace.spent_s()
        result = verdict.assemble(self._finals, spent_s, self._starting)
        if result is not None:
            result = result.model_copy(update={"notes": (*result.notes, *self._recall.statements)})
            self._directory.write_answer(result)
        return result
