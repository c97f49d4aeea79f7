"""`autotune explain`: measures how much each knob of the winner contributes to its speed.

One knob at a time is put back to the baseline's value. Such configurations are run in turn with the winner, round by
round, except those that the finals have measured beside the winner and those that are known to fail. The trials lie in
`explain/` of the run directory with numbers of their own, so that the search can still be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import InputError
from autotune.execution.runner import LocalRunner, Runner
from autotune.planning.plan import SearchPlan, differences, request_of
from autotune.search.run import backend_of
from autotune.space.knobs import changes
from autotune.storage import trust
from autotune.storage.run_directory import ANSWER_FILE, RunDirectory, read_plan, read_result, restore
from autotune.units import show_time
from autotune.values import hardware as machine
from autotune.values.config import TrainConfig
from autotune.values.problem import Leader, Note, Observer, TrialEnded, TrialStarted, ignore
from autotune.values.result import Explanation, ResultData
from autotune.values.trial import Purpose, TrialResult
from autotune.verification.attribution import explanation_of, removals


def explain(
    run_dir: str | Path, *, max_time_s: float | None = None, trust_run_dir: bool = False, observer: Observer = ignore
) -> Explanation:
    """Measure the contribution of each knob of the winner in `run_dir`, where it isn't known yet.

    Args:
        run_dir: Run directory of a search that has an answer.
        max_time_s: Seconds for all trials: one that is expected to end later is not begun. By default the time limit
            of the search.
        trust_run_dir: As in :func:`autotune.resume`.
        observer: Called with each :data:`autotune.values.problem.Event`.

    Raises:
        RunDirectoryError: There is no search in `run_dir`, one is running, or it would run what isn't trusted.
        InputError: It has no answer yet, or the answer is the baseline.
        MachineError: The search was done on another machine.
        InfrastructureError: Trials can't be run.
    """
    directory = RunDirectory.existing(Path(run_dir))
    with directory:
        plan = read_plan(directory.path)
        result = answer_in(directory)
        if result is None:
            raise InputError(f"{run_dir}: nothing to explain: no trial has completed (`autotune resume` goes on)")
        if result.best.config == result.baseline.config:
            raise InputError(f"{run_dir}: nothing to explain: the baseline itself is the best")
        folder = directory.explaining()
        for text in (*restore(directory.path), *restore(folder.path)):
            observer(Note(text=text))
        explainer = Explainer(plan, result, directory.results(), folder, observer, max_time_s=max_time_s)
        if not explainer.waiting():
            observer(Note(text="nothing has to be run: the trials so far explain the answer"))
            return explainer.explanation
        trust.check(directory.path, plan, trusted=trust_run_dir, delivers=False)
        if plan.fleet.is_single:  # with several places, `backend_of` compares the machines
            for line in differences(plan.hardware, machine.detect(plan.hardware.device)):
                observer(Note(text=line))
        with LocalRunner(directory.path, plan.hardware):
            pass  # ends processes that a killed search has left behind
        with backend_of(plan.fleet, folder.path, planned=plan.hardware) as backend:
            return explainer.run(backend.pool)


def answer_in(directory: RunDirectory) -> ResultData | None:
    """Return the answer in a run directory; None if no trial has completed.

    Raises:
        InputError: The file of the answer can't be read.
    """
    path = directory.path / ANSWER_FILE
    return read_result(path) if path.exists() else None


def refusals(plan: SearchPlan, result: ResultData) -> dict[TrainConfig, str]:
    """Return the configurations without one of the winner's knobs that can't be run, with the reasons."""
    space = plan.search_space
    reasons = ((r.config, space.refusal(r.config)) for r in removals(result) if r.config is not None)
    return {config: reason for config, reason in reasons if reason is not None}


class Explainer:
    """Runs the trials that an explanation of a search's result lacks.

    They are written to `directory`, which no other process may use meanwhile, and have `max_time_s` together, by
    default as long as the search.
    """

    def __init__(
        self,
        plan: SearchPlan,
        result: ResultData,
        searched: Sequence[TrialResult],
        directory: RunDirectory,
        observer: Observer,
        *,
        max_time_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._result = result
        self._searched = list(searched)
        self._own = directory.results()
        self._observer = observer
        self._clock = clock
        self._limit_s = max_time_s if max_time_s is not None else plan.budget.max_time_s
        self._started = clock()
        self._refused = refusals(plan, result)
        self._wanted = self._missing()

    @property
    def explanation(self) -> Explanation:
        """The explanation by all trials so far."""
        found = explanation_of(self._result, [*self._searched, *self._own], self._refused)
        assert found is not None  # the winner isn't the baseline
        return found

    def _missing(self) -> list[TrainConfig]:
        """Return the configurations to measure beside the winner, in the order of the knobs.

        These are the ones that neither the finals nor a failure settle, and those that an earlier, interrupted run has
        begun to measure.
        """
        begun = dict.fromkeys(t.request.config for t in self._own if t.measurement is not None)
        left = {c.config: None for c in self.explanation.contributions if c.config is not None and not c.is_settled}
        known = [r.config for r in removals(self._result) if r.config is not None]
        return [config for config in known if config in left or config in begun]

    def run(self, runner: Runner) -> Explanation:
        """Run the missing trials as far as the time allows, and return the explanation by all trials."""
        waiting = self.waiting()
        whole_s = sum(self._expected_s(config) for config in waiting)
        self._say(
            f"{len(self._wanted)} of the winner's knobs to take away, {len(waiting)} trials: roughly "
            f"{show_time(whole_s)}, at most {show_time(self._limit_s)} (--max-time)"
        )
        while waiting := self.waiting():
            config = waiting[0]
            if self._left_s() < self._expected_s(config):
                self._say(f"the time is spent; {len(waiting)} trials were not run: `autotune explain` goes on")
                break
            if self._run(config, runner).measurement is None and config == self._result.best.config:
                self._say("the winner itself failed when it was measured again, so nothing can be compared with it")
                break
        return self.explanation

    def _say(self, text: str) -> None:
        self._observer(Note(text=text))

    def waiting(self) -> list[TrainConfig]:
        """Return the configurations that are still to run, each as often as it will run.

        They come round by round and the winner first; others that have failed are left out.
        """
        winner, found = self._result.best.config, []
        for round_number in range(self._plan.budget.final_rounds if self._wanted else 0):
            for config in (winner, *self._wanted):
                own = [t for t in self._own if t.request.config == config]
                measured = sum(t.measurement is not None for t in own)
                if measured <= round_number and (config == winner or measured == len(own)):
                    found.append(config)
        return found

    def _left_s(self) -> float:
        return self._limit_s - (self._clock() - self._started)

    def _expected_s(self, config: TrainConfig) -> float:
        """Return the expected seconds of a trial: the longest so far of `config`, or else of the winner."""
        known = [*self._searched, *self._own]
        for whose in (config, self._result.best.config):
            durations = [t.duration_s for t in known if t.request.config == whose and t.request.task is None]
            if durations:
                return max(durations)
        return 0.0

    def _run(self, config: TrainConfig, runner: Runner) -> TrialResult:
        request = request_of(
            self._plan,
            config,
            Purpose.EXPLAIN,
            number=max((t.request.number for t in self._own), default=-1) + 1,
            timeout_s=self._plan.budget.trial_timeout_s,  # not what is left: a cut-off trial would measure nothing
            # If the objective counts the start of a run, the first trial compiles from scratch, as in the finals.
            cold_compile=self._plan.objective.run_samples is not None
            and all(t.request.config != config for t in self._own),
        )
        changed = changes(config, self._plan)
        self._observer(
            TrialStarted(
                number=request.number,
                purpose=Purpose.EXPLAIN,
                config=config,
                changes=changed,
                time_left_s=max(0.0, self._left_s()),
                trials_left=len(self.waiting()),
                leader=self._leader(),
            )
        )
        trial = runner.run(request)
        self._own.append(trial)
        self._observer(TrialEnded(result=trial, changes=changed, leader=self._leader()))
        return trial

    def _leader(self) -> Leader | None:
        best, proven = self._result.best, self._result.speedup
        if best.measurement is None:
            return None
        speedup = None if proven is None else proven.ratio
        return Leader(changes=best.changes, samples_per_second=best.measurement.samples_per_second, speedup=speedup)
