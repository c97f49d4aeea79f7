"""`autotune explain`: runs what is missing to say what each knob of a winner brought, and says it.

The knobs are taken from the winner one at a time. What the finals have measured beside the winner, and what is known to
fail, is not run again; the rest is, in turn with the winner, round by round. The trials lie in `explain/` of the run
directory, with numbers of their own, so that the search in it can still be gone on with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autotune.errors import InputError, MachineError
from autotune.execution.runner import LocalRunner, Runner
from autotune.planning.plan import SearchPlan, request_of
from autotune.search.progress import standing_of_answer
from autotune.search.run import backend_of
from autotune.space.knobs import changes
from autotune.storage import trust
from autotune.storage.results import read_result
from autotune.storage.run_directory import ANSWER_FILE, RunDirectory, read_plan
from autotune.units import show_time
from autotune.values import hardware as machine
from autotune.values.config import TrainConfig
from autotune.values.events import Note, Observer, Standing, TrialEnded, TrialStarted, ignore
from autotune.values.explanation import Explanation
from autotune.values.hardware import Hardware
from autotune.values.result import ResultData
from autotune.values.trial import Purpose, TrialResult
from autotune.verification.attribution import explanation_of, removals


def explain(
    run_dir: str | Path, *, max_time_s: float | None = None, trust_run_dir: bool = False, observer: Observer = ignore
) -> Explanation:
    """Measure what each knob of the winner in `run_dir` brought, as far as that isn't known.

    Args:
        run_dir: Of a search that has an answer.
        max_time_s: No trial is begun that wouldn't end before; by default the time limit of the search.
        trust_run_dir: As of :func:`autotune.resume`.
        observer: Called with each :data:`autotune.values.events.Event`.

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
        explainer = Explainer(plan, result, directory.results(), folder, observer, max_time_s=max_time_s)
        if not explainer.waiting():
            observer(Note(text="nothing has to be run: what was measured tells all that can be told"))
            return explainer.explanation
        trust.check(directory.path, plan, trusted=trust_run_dir, delivers=False)
        if plan.fleet.is_single:  # of others, what brings them about looks at the machines
            for line in differences(plan.hardware, machine.detect(plan.hardware.device)):
                observer(Note(text=line))
        with LocalRunner(directory.path, plan.hardware):
            pass  # ends what a search that was killed here has left running
        with backend_of(plan.fleet, folder.path, planned=plan.hardware) as backend:
            return explainer.run(backend.pool)


def answer_in(directory: RunDirectory) -> ResultData | None:
    """Return the answer as it stands in a run directory; None while nothing has completed.

    Raises:
        InputError: It can't be read.
    """
    path = directory.path / ANSWER_FILE
    return read_result(path) if path.exists() else None


def refusals(plan: SearchPlan, result: ResultData) -> dict[TrainConfig, str]:
    """Return which of the winner's knobs can't be taken away, by the configuration that would be left, and why."""
    space = plan.search_space()
    reasons = ((r.config, space.refusal(r.config)) for r in removals(result) if r.config is not None)
    return {config: reason for config, reason in reasons if reason is not None}


def differences(then: Hardware, now: Hardware) -> list[str]:
    """Return in what the machine differs from that of the search, a line each.

    Raises:
        MachineError: It is another one: what would be measured wouldn't be about the winner.
    """
    if (then.name, then.cores) != (now.name, now.cores):
        raise MachineError(
            f"the search ran on {then.name} (cores: {then.cores}), this is {now.name} (cores: {now.cores}): explain it "
            "where it ran"
        )
    packages = sorted(p for p in then.versions if then.versions[p] != now.versions.get(p))
    changed = ", ".join(f"{p} {then.versions[p]} is now {now.versions.get(p, 'gone')}" for p in packages)
    return [f"since the search: {changed}"] if changed else []


class Explainer:
    """Runs the trials that an explanation lacks.

    Args:
        plan: The search.
        result: Its answer.
        searched: Its trials.
        directory: Where the trials lie; no other process uses it meanwhile.
        observer: Is called with each event.
        max_time_s: What they may take together; the search's limit by default.
        clock: Seconds from some moment on.
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
        """What is known by now."""
        found = explanation_of(self._result, [*self._searched, *self._own], self._refused)
        assert found is not None  # the winner isn't the baseline
        return found

    def _missing(self) -> list[TrainConfig]:
        """Return what has to be measured beside the winner: what neither the finals nor a failure tell of.

        What earlier, stopped rounds have begun with is gone on with.
        """
        begun = dict.fromkeys(t.request.config for t in self._own if t.measurement is not None)
        left = {c.config: None for c in self.explanation.contributions if c.config is not None and not c.is_settled}
        known = [r.config for r in removals(self._result) if r.config is not None]
        return [config for config in known if config in left or config in begun]

    def waiting(self) -> list[TrainConfig]:
        """Return what is still to be run, in order."""
        return list(self._schedule())

    def run(self, runner: Runner) -> Explanation:
        """Run what is missing, as far as the time allows, and return what is known then."""
        waiting = self.waiting()
        whole_s = sum(self._expected_s(config) for config in waiting)
        self._say(
            f"{len(self._wanted)} of the winner's knobs to take away, {len(waiting)} trials: roughly "
            f"{show_time(whole_s)}, at most {show_time(self._limit_s)} (--max-time)"
        )
        while (config := next(self._schedule(), None)) is not None:
            if self._left_s() < self._expected_s(config):
                left = len(self.waiting())
                self._say(f"the time is spent; {left} trials were not run: `autotune explain` goes on")
                break
            if self._run(config, runner).measurement is None and config == self._result.best.config:
                self._say("the winner itself failed when measured again: there is nothing to hold it to")
                break
        return self.explanation

    def _say(self, text: str) -> None:
        self._observer(Note(text=text))

    def _schedule(self) -> Iterator[TrainConfig]:
        """Yield what is still to be run, round by round, the winner first; another that failed isn't run again."""
        if not self._wanted:
            return
        winner = self._result.best.config
        for round_number in range(self._plan.budget.final_rounds):
            for config in (winner, *self._wanted):
                own = [t for t in self._own if t.request.config == config]
                measured = sum(t.measurement is not None for t in own)
                if measured <= round_number and (config == winner or measured == len(own)):
                    yield config

    def _left_s(self) -> float:
        return self._limit_s - (self._clock() - self._started)

    def _expected_s(self, config: TrainConfig) -> float:
        """Return what a trial of `config` should take: as its longest so far, or as the winner's."""
        known = [*self._searched, *self._own]
        for whose in (config, self._result.best.config):
            durations = [t.duration_s for t in known if t.request.config == whose and t.request.task is None]
            if durations:
                return max(durations)
        return 0.0

    def _run(self, config: TrainConfig, runner: Runner) -> TrialResult:
        """Run one trial and take in its result."""
        request = request_of(
            self._plan,
            config,
            Purpose.EXPLAIN,
            number=max((t.request.number for t in self._own), default=-1) + 1,
            timeout_s=self._plan.budget.trial_timeout_s,  # one that is cut short by what is left would tell nothing
            # Where a run's start counts, it is measured with nothing compiled before, as in the finals.
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
                standing=self._standing(),
            )
        )
        trial = runner.run(request)
        self._own.append(trial)
        best = self._result.best.measurement
        rate = best.samples_per_second if best is not None else None
        self._observer(
            TrialEnded(result=trial, changes=changed, best_samples_per_second=rate, standing=self._standing())
        )
        return trial

    def _standing(self) -> Standing:
        return standing_of_answer(self._result, self._own, len(self._refused))
