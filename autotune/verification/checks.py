"""Checks that a winner has to pass: a soak, and a comparison of its losses with the baseline's.

This module chooses the next trial and evaluates those that ran; the tuner runs them. Its state is the results alone, so
a stopped search continues where it was. A configuration that fails is out of the finals (see `finals`), and the next
fastest is checked in its place.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from autotune.planning.plan import SearchPlan, SearchState
from autotune.space.knobs import changes
from autotune.space.space import History
from autotune.units import show_memory, show_time
from autotune.values.budget import (
    UNEVEN_ROUTING,
    CheckTask,
    Effort,
    LossTask,
    LossVerdict,
    ProfileTask,
    Soaked,
    SoakTask,
)
from autotune.values.config import TrainConfig
from autotune.values.trial import Purpose, TrialResult
from autotune.values.workload import FEW_MICRO_STEPS
from autotune.verification.loss_check import compare

# Largest evaluation batch to try, as a multiple of the micro-batch: evaluation needs no gradients and no activations.
# But it may store the logits of a whole batch, so smaller sizes down to one sample are tried too.
EVAL_MULTIPLE = 8
LOSS_SHARE = 0.15  # of the search's time that comparing losses may take, unless the user asked for it


class Check(NamedTuple):
    """A trial to run for a check, and its expected seconds."""

    config: TrainConfig
    purpose: Purpose
    task: CheckTask
    expected_s: float


class Proof:
    """The checks of a search's winner: those still to run, and their results; later trials in `state` are included."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._plan, self._history, self._results = state, state.plan, state.history, state.results

    def next(self, winner: TrainConfig) -> Check | None:
        """Return the next trial to check `winner` with; None if it passed, failed, or can't be checked further."""
        if self.refusal(winner) is not None:
            return None
        if (soak := self._next_soak(winner)) is not None:
            return Check(winner, Purpose.SOAK, soak, self._soak_s(winner))
        if self._not_compared(winner) is None:
            for config, task, run in self._loss_runs(winner):
                if run is None:
                    return Check(config, Purpose.LOSS_CHECK, task, self._loss_run_s(config))
        return None

    def profile(self, winner: TrainConfig) -> Check | None:
        """Return a trial that tells where a step of `winner` or the baseline spends its time; None: none is left."""
        for config in dict.fromkeys((winner, self._plan.baseline)):
            is_over = self._state.measured(config) is None or self._state.trials(config, Purpose.PROFILE)
            steps = 4 * self._plan.micro_steps(config) / self._plan.workload.accumulation_steps(config)
            expected_s = self._run_s(config, steps)
            # A profile may take 2 % of the search's time.
            if self._plan.soak and not is_over and expected_s <= 0.02 * self._plan.budget.max_time_s:
                return Check(config, Purpose.PROFILE, ProfileTask(), expected_s)
        return None

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why `config` has failed a check; None: it hasn't."""
        if all(r.request.task is None for r in self._results):
            return None
        soaks = self._state.trials(config, Purpose.SOAK)
        if soaks and soaks[-1].has_failed and self._next_soak(config) is None:
            return ending(soaks[-1])
        if (verdict := self.verdict(config)) is not None:
            return None if verdict.passed else verdict.statement
        *_, (_, _, own) = self._loss_runs(config)
        return ending(own) if own is not None and config != self.reference() and own.has_failed else None

    def soaked(self, config: TrainConfig) -> Soaked | None:
        return next((r.measurement.soaked for r in self._state.trials(config, Purpose.SOAK) if r.measurement), None)

    def verdict(self, config: TrainConfig) -> LossVerdict | None:
        """Return the comparison of the losses of `config` with the reference's; None: not all loss runs completed."""
        reference = self.reference()
        if reference is None or config == reference:
            return None
        (_, task, _), *_ = runs = self._loss_runs(config)
        measured = [run.measurement for _, _, run in runs if run is not None and run.measurement is not None]
        curves = [seen.curve for seen in measured if seen.curve is not None]
        if len(curves) < len(runs):
            return None
        base, again, own = curves
        return compare(base, again, own, changes(config, self._plan), self._plan.facts, task.pass_steps)

    def reference(self) -> TrainConfig | None:
        """Return the configuration that losses are compared with: the baseline, or the largest default that fits."""
        known = self._history.known(self._plan.baseline)
        if known is not None and known.measurement is not None:
            return self._plan.baseline
        fits = largest_default(self._plan, self._history)
        return fits.request.config if fits is not None else None

    def gaps(self, winner: TrainConfig) -> tuple[str, ...]:
        """Return the checks that were left out, with the reasons, a line each."""
        lines, soaked, measured = [], self.soaked(winner), self._state.measured(winner)
        if self._plan.soak and soaked is None:
            why = self._why_not(self._state.trials(winner, Purpose.SOAK))
            lines.append(f"not checked on the longest samples: {why}")
        if measured is not None and self._plan.facts.experts and measured.memory.is_known:
            uneven_bytes = measured.memory.peak_bytes * (1 + UNEVEN_ROUTING)
            if uneven_bytes > self._plan.memory_bytes:
                more = f"{UNEVEN_ROUTING:.0%} more, {show_memory(round(uneven_bytes))} in all"
                lines.append(f"measured with even routing, as of random weights: trained weights can take {more}")
        if soaked is not None:
            own, fits = self._plan.workload.fixed_arguments.get("per_device_eval_batch_size"), soaked.eval_batch_size
            if fits is not None and own not in (None, fits):
                lines.append(f"evaluating with your batch of {own} does not fit; {fits} does")
            if soaked.metrics_failed is not None:
                lines.append(f"evaluating with your compute_metrics was not checked: {soaked.metrics_failed}")
        if winner != self.reference() and self.verdict(winner) is None:
            runs = [run for _, _, run in self._loss_runs(winner) if run is not None]
            why = self._not_compared(winner) or self._why_not(runs)
            lines.append(f"losses were not compared with the baseline's: {why}")
        return tuple(lines)

    def refusals(self) -> dict[TrainConfig, str]:
        checked = dict.fromkeys(r.request.config for r in self._results if r.request.task is not None)
        return {config: reason for config in checked if (reason := self.refusal(config)) is not None}

    def expected_s(self) -> float:
        best = self._history.best()
        if best is None:
            return 0.0
        soak_s = self._soak_s(best.request.config) if self._plan.soak else 0.0
        return soak_s + (0.0 if self._too_costly() else self._losses_s())

    def _next_soak(self, config: TrainConfig) -> SoakTask | None:
        """Return the task of the next soak: all sizes; after a failure those up to the micro-batch, then the least."""
        # Sizes descend to one, none above the user's own. A soak tries the next smaller size by itself, unless its
        # process dies or has several ranks.
        if not self._plan.soak:
            return None
        largest = config.per_device_train_batch_size * EVAL_MULTIPLE
        own = self._plan.workload.fixed_arguments.get("per_device_eval_batch_size")
        sizes = tuple(largest >> shift for shift in range(largest.bit_length()))
        if own is not None:
            sizes = (own, *(size for size in sizes if size < own))
        soaks = self._state.trials(config, Purpose.SOAK)
        least = tuple(size for size in sizes if size <= config.per_device_train_batch_size)
        ladders = list(dict.fromkeys((sizes, least, sizes[-1:])))
        if len(soaks) < len(ladders) and all(r.has_failed for r in soaks):
            return SoakTask(eval_batch_sizes=ladders[len(soaks)])
        return None

    def _loss_runs(self, winner: TrainConfig) -> list[tuple[TrainConfig, LossTask, TrialResult | None]]:
        """Return the loss runs that a comparison needs, in the order of running, with their results so far."""
        reference, steps = self.reference() or self._plan.baseline, max(1, self._plan.loss_steps)
        found = []
        for config, further in ((reference, 0), (reference, 1), (winner, 0)):
            task = LossTask.of(steps, self._plan.workload.seed + further)
            known = (r for r in self._results if r.request.task == task and r.request.config == config)
            found.append((config, task, next(known, None)))
        return found

    def _not_compared(self, winner: TrainConfig) -> str | None:
        """Return why the losses of `winner` can't, or need not, be compared, or None."""
        reference = self.reference()
        if self._plan.workload.global_batch_size is None:
            return "with a free global batch, steps are not the same"
        if self._plan.workload.own_step is not None:
            return "whether your training loop reads its data in the same order is unknown"
        if self._plan.workload.generates:
            return "other completions have other losses"
        if not self._plan.loss_steps:
            return f"--check-loss {Effort.STANDARD.loss_steps} does it"
        if reference is None:
            return "neither the baseline nor it with a smaller micro-batch completed a trial"
        if winner == reference:
            return "it is the baseline itself"
        if self._too_costly():
            whole = show_time(self._losses_s())
            return f"that takes {whole} of {show_time(self._plan.budget.max_time_s)} (--check-loss insists)"
        for config, _, run in self._loss_runs(winner):
            if run is not None and (run.measurement is None or run.measurement.curve is None):
                whose = "its own trial" if config == winner else f"trial {run.request.number} of the baseline"
                return f"{whose} {run.status}"
        return None

    def _too_costly(self) -> bool:
        """Whether a comparison that the user didn't ask for would take too long; one that has begun goes on."""
        has_begun = any(r.request.purpose is Purpose.LOSS_CHECK for r in self._results)
        is_wanted = has_begun or self._plan.loss_insisted
        return not is_wanted and self._losses_s() > LOSS_SHARE * self._plan.budget.max_time_s

    def _why_not(self, trials: Sequence[TrialResult]) -> str:
        failed = next((r for r in reversed(trials) if r.measurement is None), None)
        return ending(failed) if failed is not None else "too little time was left, or the search was stopped"

    def _losses_s(self) -> float:
        reference, best = self.reference(), self._history.best()
        is_wanted = self._plan.loss_steps and not self._plan.workload.generates
        if not is_wanted or reference is None or best is None or best.request.config == reference:
            return 0.0
        return 2 * self._loss_run_s(reference) + self._loss_run_s(best.request.config)

    def _loss_run_s(self, config: TrainConfig) -> float:
        # Dropout is then measured in eight draws without gradients, each a third of a step.
        return self._run_s(config, self._plan.loss_steps + 1 + 3 * self._plan.facts.has_dropout)

    def _soak_s(self, config: TrainConfig) -> float:
        full = self._plan.workload.accumulation_steps(config)
        # Two further steps, and in evaluation two batches of 8, 4, 2 ... times the micro-batch at a third of the time.
        micro_steps = 2 * min(full, FEW_MICRO_STEPS) + 2 * 2 * EVAL_MULTIPLE / 3
        return self._run_s(config, micro_steps / full)

    def _run_s(self, config: TrainConfig, steps: float) -> float:
        """Return the expected seconds of a trial of so many steps after its first; 0 if `config` was never measured."""
        measured = self._state.measured(config)
        if measured is None:
            return 0.0
        return measured.startup_s + measured.first_step_s + steps * statistics.fmean(measured.step_times_s) + 3.0


def largest_default(plan: SearchPlan, history: History) -> TrialResult | None:
    """Return the completed trial with the largest micro-batch that differs from the baseline in it alone."""
    size = "per_device_train_batch_size"
    same = [r for r in history.ranking() if {c.knob for c in changes(r.request.config, plan)} == {size}]
    return max(same, key=lambda r: r.request.config.per_device_train_batch_size, default=None)


def ending(result: TrialResult) -> str:
    """Return purpose, number, status and cause of a failed trial: 'soak, trial 12: out of memory: while saving ...'."""
    cause = result.outcome.cause if result.outcome.kind == "failure" else ""
    return f"{result.request.purpose}, trial {result.request.number}: {result.status}{': ' + cause if cause else ''}"
