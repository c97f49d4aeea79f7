"""`autotune explain`: measures how much each knob of the winner contributes to its speed.

One knob at a time is put back to the baseline's value. Such configurations are run in turn with the winner, round by
round, except those that the finals have measured beside the winner and those that are known to fail. The trials lie in
`explain/` of the run directory with numbers of their own, so that the search can still be resumed.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import InputError
from autotune.execution.runner import Runner, end_left_behind
from autotune.planning.plan import SearchPlan
from autotune.search.run import backend_of
from autotune.space.knobs import changes
from autotune.storage import trust
from autotune.storage.run_directory import EXPLAIN_FOLDER, RunDirectory, read_plan
from autotune.units import show_time
from autotune.values.config import TrainConfig
from autotune.values.problem import Leader, Note, Observer, TrialEnded, TrialStarted, ignore
from autotune.values.result import Explanation, ResultData
from autotune.values.trial import Purpose, TrialResult
from autotune.verification.attribution import explanation_of, removals


def explain(
    run_dir: str | Path, *, max_time_s: float | None = None, trust_run_dir: bool = False, observer: Observer = ignore
) -> Explanation:
    """Measure the contribution of each knob of the winner in `run_dir`, where it isn't known yet.

    `max_time_s`: a trial that is expected to end later is not begun; by default the time limit of the search.
    `trust_run_dir`: as in :func:`autotune.resume`.
    """
    with RunDirectory.existing(Path(run_dir)) as directory:
        plan = read_plan(directory.path)
        result = directory.answer_to("explain")
        if result.best.config == result.baseline.config:
            raise InputError(f"{run_dir}: nothing to explain: the baseline itself is the best")
        folder = directory.inside(EXPLAIN_FOLDER)
        if (own := folder.results()) and own[0].request.config != result.best.config:  # beside a winner of before
            (folder.path / "trials").rename(folder.path / f"trials-until-{time.strftime('%Y%m%d-%H%M%S')}")
        for text in (*directory.restore(), *folder.restore()):
            observer(Note(text=text))
        explainer = Explainer(plan, result, directory.results(), folder, observer, max_time_s=max_time_s)
        if not explainer.waiting():
            observer(Note(text="nothing has to be run: the trials so far explain the answer"))
            return explainer.explanation
        trust.check(directory.path, plan, trusted=trust_run_dir, delivers=False)
        for line in plan.changed_packages():
            observer(Note(text=line))
        end_left_behind(directory.path.resolve())
        with backend_of(plan.fleet, folder.path, planned=plan.hardware) as backend:
            return explainer.run(backend.pool)


class Explainer:
    """Runs the trials that an explanation of a result lacks, in a locked `directory`, within `max_time_s`."""

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
        self._plan, self._result, self._best, self._observer, self._clock = plan, result, result.best, observer, clock
        self._searched, self._own = searched, directory.results()
        self._limit_s = max_time_s if max_time_s is not None else plan.budget.max_time_s
        self._ends_at = clock() + self._limit_s
        # Beside the winner, in the order of the knobs: neither the finals nor a failure settle these, or an earlier,
        # interrupted run has begun to measure them.
        open_ = {t.request.config for t in self._own if t.measurement is not None}
        open_ |= {c.config for c in self.explanation.contributions if c.config is not None and not c.is_settled}
        self._wanted = [r.config for r in removals(result) if r.config is not None and r.config in open_]

    @property
    def explanation(self) -> Explanation:
        found = explanation_of(self._plan, self._result, [*self._searched, *self._own])
        assert found is not None  # the winner isn't the baseline
        return found

    def run(self, runner: Runner) -> Explanation:
        """Run the missing trials as far as the time allows, and return the explanation by all trials."""
        waiting = self.waiting()
        time_s = f"roughly {show_time(sum(map(self._expected_s, waiting)))}, at most {show_time(self._limit_s)}"
        trials = f"{len(self._wanted)} of the winner's knobs to take away, {len(waiting)} trials"
        self._observer(Note(text=f"{trials}: {time_s} (--max-time)"))
        while waiting := self.waiting():
            config, left_s = waiting[0], self._ends_at - self._clock()
            if left_s < self._expected_s(config):
                told = f"the time is spent; {len(waiting)} trials were not run: `autotune explain` goes on"
            elif self._run(config, runner, left_s, len(waiting)).measurement is None and config == self._best.config:
                told = "the winner itself failed when it was measured again, so nothing can be compared with it"
            else:
                continue
            self._observer(Note(text=told))
            break
        return self.explanation

    def waiting(self) -> list[TrainConfig]:
        """Return the configurations still to run, as often as they will: by rounds, the winner first."""
        winner, found = self._best.config, []
        for round_number in range(self._plan.budget.final_rounds if self._wanted else 0):
            for config in (winner, *self._wanted):
                own = [t for t in self._own if t.request.config == config]
                measured = sum(t.measurement is not None for t in own)
                if measured <= round_number and (config == winner or measured == len(own)):
                    found.append(config)
        return found

    def _expected_s(self, config: TrainConfig) -> float:
        """Return the seconds of the longest trial so far of `config`, or else of the winner."""
        known = [t for t in (*self._searched, *self._own) if t.request.task is None]
        own = [t.active_s for t in known if t.request.config == config]
        return max(own or [t.active_s for t in known if t.request.config == self._best.config], default=0.0)

    def _run(self, config: TrainConfig, runner: Runner, left_s: float, trials_left: int) -> TrialResult:
        budget, objective = self._plan.budget, self._plan.objective
        request = self._plan.request_of(
            config,
            Purpose.EXPLAIN,
            number=max((t.request.number for t in self._own), default=-1) + 1,
            timeout_s=budget.trial_timeout_s,  # not what is left: a cut-off trial would measure nothing
            # If the objective counts the start of a run, the first trial compiles from scratch, as in the finals.
            cold_compile=objective.run_samples is not None and all(t.request.config != config for t in self._own),
        )
        speedup = None if self._result.speedup is None else self._result.speedup.ratio
        changed, best = changes(config, self._plan), self._best
        leader: Leader | None = None
        if best.measurement is not None:
            rate = best.measurement.samples_per_second
            leader = Leader(changes=best.changes, samples_per_second=rate, speedup=speedup)
        about = {"changes": changed, "time_left_s": max(0.0, left_s), "trials_left": trials_left, "leader": leader}
        self._observer(TrialStarted(request=request, **about))
        trial = runner.run(request)
        self._own.append(trial)
        self._observer(TrialEnded(result=trial, changes=changed, leader=leader))
        return trial
