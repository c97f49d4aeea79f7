"""The Optuna study: persistent in the run directory, fed with every trial. The only module that imports optuna.

A point that nobody proposed is asked of TPE, which learns from completed and pruned trials. So a trial that ran out of
memory is told as pruned with a positive constraint, and a trial that failed otherwise as failed; so is what was
refused without running: it was not measured.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import LOCK_FILE_SUFFIX
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.space.space import Point, SearchSpace
from autotune.values.budget import Objective
from autotune.values.trial import TrialResult, TrialStatus

STUDY_FILE = "study.log"
STUDY_NAME = "autotune"

_NUMBER = "trial"  # our number, as an attribute of Optuna's trial
_STATUS = "status"
_MEMORY = "memory"  # the constraint

# A trial that ran out of memory needed more than the capacity, though the peak that was seen may lie below it.
_BEYOND_CAPACITY = 0.01


class Asked(NamedTuple):
    """An open trial of the study and its point."""

    trial: Trial
    point: Point


class Study:
    """Proposes points and learns from what they gave.

    Args:
        directory: Where `study.log` (a journal) lives; an existing study is continued.
        space: The points that exist.
        capacity_bytes: The memory budget that constraints are relative to.
        seed: Of the sampler.
        objective: What is maximised; the steady state's throughput by default.
    """

    def __init__(
        self,
        directory: Path,
        space: SearchSpace,
        *,
        capacity_bytes: int,
        seed: int,
        objective: Objective | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._capacity_bytes = capacity_bytes
        self._objective = objective or Objective()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                # Where a trial runs, another is no use: only where several do at once does that say anything.
                seed=seed,
                multivariate=True,
                group=True,
                n_startup_trials=6,
                constant_liar=True,
            )
        self._study = optuna.create_study(
            study_name=STUDY_NAME,
            storage=_storage(directory / STUDY_FILE),
            direction="maximize",
            sampler=sampler,
            load_if_exists=True,
        )

    def recover(self, results: list[TrialResult]) -> None:
        """Bring the study in line with the result files, which outrank it.

        What a killed search left running is told as failed, and a result that the study doesn't know is added.
        """
        known = {t.user_attrs.get(_NUMBER) for t in self._trials() if t.state.is_finished()}
        for _ in self._trials(TrialState.WAITING):
            self._study.ask()  # what waits can't be told: this sets it running
        for trial in self._trials(TrialState.RUNNING):
            self._study.tell(trial.number, state=TrialState.FAIL)
        for result in results:
            if result.request.number not in known:
                self._study.add_trial(self._frozen(result))

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def ask(self, proposal: Point | None = None) -> Asked:
        """Open a trial of the study at `proposal`, or where the sampler chooses, known and illegal points included."""
        if proposal is not None:
            self._study.enqueue_trial(self._params(proposal))
        trial = self._study.ask()
        point: Point = {}
        for dimension in self._space.dimensions:
            if self._space.is_active(dimension, point):
                point[dimension.name] = trial.suggest_categorical(dimension.name, list(dimension.choices))
        return Asked(trial, point)

    def tell(self, asked: Asked, result: TrialResult) -> None:
        """Close a trial of the study with what was measured, now or before."""
        asked.trial.set_user_attr(_NUMBER, result.request.number)
        asked.trial.set_user_attr(_STATUS, str(result.status))
        for name, value in self._constraints(result).items():
            asked.trial.set_constraint(name, value)
        self._study.tell(asked.trial, values=self._value(result), state=_state(result.status))

    def _value(self, result: TrialResult) -> float | None:
        return self._objective.rate(result.measurement) if result.measurement else None

    def refuse(self, asked: Asked, reason: str) -> None:
        """Close a trial of the study that was refused without running."""
        asked.trial.set_user_attr(_STATUS, f"refused: {reason}")
        self._study.tell(asked.trial, state=TrialState.FAIL)

    def _params(self, point: Point) -> Point:
        """Return the part of `point` that the study has dimensions for."""
        whole = self._space.complete(point)
        choices = {d.name: d.choices for d in self._space.dimensions}
        return {name: value for name, value in whole.items() if value in choices[name]}

    def _frozen(self, result: TrialResult) -> FrozenTrial:
        params = self._params(self._space.point(result.request.config))
        choices = {d.name: CategoricalDistribution(list(d.choices)) for d in self._space.dimensions}
        return optuna.create_trial(
            state=_state(result.status),
            value=self._value(result),
            params=params,
            distributions={name: choices[name] for name in params},
            user_attrs={_NUMBER: result.request.number, _STATUS: str(result.status)},
            constraints=self._constraints(result),
        )

    def _constraints(self, result: TrialResult) -> dict[str, float]:
        """Return memory beyond the capacity as a share of it, where it is known: positive means too much."""
        if result.status is TrialStatus.OUT_OF_MEMORY:
            return {_MEMORY: _BEYOND_CAPACITY}
        if result.measurement is None:
            return {}
        return {_MEMORY: result.measurement.memory.peak_bytes / self._capacity_bytes - 1}


def _storage(path: Path) -> JournalStorage:
    """Return the journal in `path`: a line for each change, some ten times as fast as a database.

    What a killed search or a power cut left is made good, since the result files tell it all again: half a line at the
    end is cut off, a lock is taken away (the run directory has one of its own), and what can't be read is put aside.
    """
    path.with_name(f"{path.name}{LOCK_FILE_SUFFIX}").unlink(missing_ok=True)
    if path.exists():
        written = path.read_bytes()
        if written and not written.endswith(b"\n"):
            path.write_bytes(written[: written.rfind(b"\n") + 1])
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except Exception:  # whatever it makes of lines that aren't its own, a failed assertion among them
        path.replace(path.with_suffix(".broken"))
        return JournalStorage(JournalFileBackend(str(path)))


def _state(status: TrialStatus) -> TrialState:
    if status is TrialStatus.COMPLETED:
        return TrialState.COMPLETE
    return TrialState.PRUNED if status is TrialStatus.OUT_OF_MEMORY else TrialState.FAIL
