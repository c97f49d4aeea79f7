"""The plan of a search, settled before the first trial and stored as `search.json`; its state; requests of trials.

A search that is resumed may have other limits. The new plan replaces the old one in the run directory, for good.
"""

import functools
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt

from autotune.cost.memory import states_bytes
from autotune.errors import InputError, MachineError
from autotune.planning.options import SearchOptions
from autotune.space.file import SpaceFile
from autotune.space.knobs import in_words, make_point
from autotune.space.rules import refusals
from autotune.space.space import History, SearchSpace
from autotune.units import now, show_memory
from autotune.value import sha256_of
from autotune.values import hardware as machine
from autotune.values.budget import Budget, CheckTask, Effort, LossTask
from autotune.values.config import Precision, TrainConfig
from autotune.values.problem import Fleet, Objective, Problem
from autotune.values.result import ResultData
from autotune.values.trial import Limits, Measurement, Prediction, Purpose, TrialRequest, TrialResult
from autotune.values.workload import FEW_MICRO_STEPS

_MOST_HASHED_BYTES = 64 << 20  # takes 0.1 s


class SearchPlan(Problem):
    """The problem of a search and all that is settled about how it is solved, as stored in `search.json`."""

    schema_version: Literal[2] = 2
    # By it the record knows a search, whatever its run directory is called.
    search_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    started: str = Field(default_factory=now)  # ISO 8601
    budget: Budget
    space: SpaceFile
    objective: Objective = Objective()
    earlier: ResultData | None = Field(default=None, description="answer whose winner is tried, and in the finals")
    soak: bool = Field(default=False, description="the winner must evaluate and save a checkpoint within the budget")
    loss_steps: NonNegativeInt = Field(default=0, description="optimizer steps over which losses are compared; 0: none")
    loss_insisted: bool = Field(default=False, description="the user asked: losses are compared however long it takes")
    record: bool = Field(default=False, description="the lasting record is read and written")
    report_to: tuple[str, ...] = Field(default=(), description="trackers that receive each trial")
    fleet: Fleet = Field(default=Fleet(), description="where the trials run")
    options: SearchOptions | None = Field(default=None, description="None: the plan can't be made from options")
    output: str | None = Field(default=None, description="file that the answer is written to as well")
    # Number of the next trial when the limits last changed; finals before it don't count.
    reopened_at: NonNegativeInt = 0
    files: dict[str, str] = Field(default={}, description="the files that are read, by path: digest, or size and time")
    notes: tuple[str, ...]

    def every_config(self) -> list[TrainConfig]:
        """Return the baseline and then every other legal configuration of the space."""
        space = self.search_space
        every = (config.model_copy(update=loading) for config in space.legal for loading in space.loadings)
        return list(dict.fromkeys((self.baseline, *every)))

    @property
    def against(self) -> TrainConfig | None:
        return None if self.earlier is None else self.earlier.best.config

    @property
    def world_sizes(self) -> frozenset[int]:
        named = self.space.parameters.get("parallelism.world_size")
        choices = named.choices if named is not None and named.choices != "lattice" else ()
        return frozenset({self.baseline.parallelism.world_size, *(c for c in choices if isinstance(c, int))})

    @functools.cached_property
    def search_space(self) -> SearchSpace:
        """The space bound to this plan, made once: it may be large."""
        return SearchSpace(self.space, self, effort=self.budget.effort)

    @functools.cached_property
    def affordable(self) -> list[TrainConfig]:
        """The legal configurations that aren't `too_large`."""
        return [config for config in self.search_space.legal if self.too_large(config) is None]

    def model_copy(self, **how: Any) -> Self:
        """Return a copy, which has a space of its own."""
        copied = super().model_copy(**how)
        for own in ("search_space", "affordable"):
            copied.__dict__.pop(own, None)
        return copied

    def with_earlier(self, earlier: ResultData) -> Self:
        """Return the plan of a search that also tries the winner of an earlier answer; InputError: it can't."""
        best, space = earlier.best.config, self.search_space
        other = earlier.workload.differing(self.workload)
        reason = f"it trained something else: {other}" if other else space.refusal(best)
        if reason is None and (nearest := space.config(space.choices_of(best))) != best:
            lacking = sorted(make_point(best).items() - make_point(nearest).items())
            others = ", ".join(in_words(*knob) for knob in lacking)
            reason = f"{others}: no choice of this search, by --fix, --only, --effort or --space"
        if reason is not None:
            raise InputError(f"--against: its winner can't be tried: {reason}")
        return self.model_copy(update={"earlier": earlier})

    def with_files(self) -> Self:
        """Return the plan of a search that begins, with the present state of the files of its training."""
        workload, code = self.workload, self.workload.own_code
        files = [
            None if workload.dataset is None else Path(workload.dataset),
            None if workload.model.path is None else Path(workload.model.path) / "config.json",
            None if code is None or not code.command or code.is_module else Path(code.directory) / code.command[0],
        ]
        return self.model_copy(update={"files": {str(f): _state(f) for f in files if f is not None and f.is_file()}})

    def changed_files(self) -> list[str]:
        """Return a line for each file of the training that has changed since the search began."""
        return [
            f"since the search: {file} has changed; measurements from before and after that may not compare"
            for file, state in self.files.items()
            if Path(file).is_file() and _state(Path(file)) != state
        ]

    def changed_packages(self) -> list[str]:
        """Return a line on packages with other versions than at first, if any; MachineError: it is another machine."""
        if not self.fleet.is_single:  # with several places, `backend_of` compares the machines
            return []
        then, now = self.hardware, machine.detect(self.hardware.device)
        if (then.name, then.cores) != (now.name, now.cores):
            machines = f"the search ran on {then.name} (cores: {then.cores}), this is {now.name} (cores: {now.cores})"
            raise MachineError(f"{machines}: go on where it ran")
        packages = sorted(p for p in then.versions if then.versions[p] != now.versions.get(p))
        changed = ", ".join(f"{p} {then.versions[p]} is now {now.versions.get(p, 'gone')}" for p in packages)
        return [f"since the search: {changed}"] if changed else []

    def refusal(self, config: TrainConfig) -> str | None:
        """Return the reason why a configuration can't run on the device."""
        return next(refusals(config, self.workload, self.facts, self.hardware), None)

    def too_large(self, config: TrainConfig) -> str | None:
        """Return how weights, gradients and optimizer states alone exceed the budget, without a trace, or None."""
        if self.workload.is_users_own or self.facts.experts:  # weights may be frozen, experts without gradients
            return None
        least = self.least_states(config)
        if least <= self.memory_bytes:
            return None
        has, budget = show_memory(int(least)), show_memory(self.memory_bytes)
        return f"weights, gradients and optimizer states alone take {has}; the budget is {budget}"

    def least_states(self, config: TrainConfig) -> float:
        """Return the bytes of weights, gradients and optimizer states on one device at the least, without a trace."""
        frozen, code = self.facts.frozen_parameters, self.workload.own_code
        if code is not None:  # of whose own optimizer nothing is known
            is_short = code.weights in ("bfloat16", "float16")
            precision = Precision.PURE_BF16 if is_short else config.precision
            config = config.model_copy(update={"quantization": code.quantization, "precision": precision})
            frozen = self.facts.parameters if "optim" in code.held else frozen
        return states_bytes(self.facts.parameters, config, frozen=frozen)

    def micro_steps(self, config: TrainConfig) -> int:
        """Return how many micro-steps a trial of the search runs in a step; their times tell that of the others."""
        # With these the time of one says nothing about the others.
        runs_all = config.is_balanced or self.workload.generates or self.workload.own_step is not None
        full, most = self.workload.accumulation_steps(config), FEW_MICRO_STEPS + (not config.parallelism.is_single)
        return full if runs_all else min(full, most)

    def request_of(
        self,
        config: TrainConfig,
        purpose: Purpose,
        *,
        number: int,
        timeout_s: float,
        task: CheckTask | None = None,
        prediction: Prediction | None = None,
        cold_compile: bool = False,
        to_beat: float | None = None,
        in_turn_with: tuple[int, ...] = (),
    ) -> TrialRequest:
        """Return the request for a trial of `config`, which is ended after `timeout_s`.

        `task`: of a check, beside timing steps; `cold_compile`: as in a user's first run. Below `to_beat` samples/s it
        may measure less exactly. `in_turn_with`: numbers of the trials that compute in turn with it, itself included.
        """
        is_compared = purpose in (Purpose.FINAL, Purpose.EXPLAIN)  # closely, so that it is measured more exactly
        whole = is_compared or purpose is Purpose.LOSS_CHECK
        limits = self.budget.model_dump(include=set(Limits.model_fields))
        # 0.8, 2 or 4.5 s by effort, and in finals 2, 5 or 11: hyperfine measures for 3 s at the least.
        limits["least_time_s"] = self.budget.measure_time_s / (4 if is_compared else 10)
        if task is not None:
            # A check runs all its steps. In a soak the first creates the optimizer states, and two more run with them.
            steps = max(2, task.steps) if isinstance(task, LossTask) else 2
            limits |= {"discarded_steps": 1, "discarded_s": 0.0, "measure_steps": steps}
            limits |= {"measure_time_s": 1e9, "least_time_s": 0.0, "relative_interval": 1e-12}
        limits |= self.budget.when_measured_again if is_compared else {}
        limits |= self.budget.when_in_turn if in_turn_with else {}
        if to_beat:
            limits["beaten_step_s"] = self.workload.samples_per_step(config) / to_beat
        return TrialRequest(
            number=number,
            purpose=purpose,
            config=config,
            workload=self.workload,
            device=self.hardware.device,
            accumulation_steps=self.workload.accumulation_steps(config) if whole else self.micro_steps(config),
            prediction=prediction,
            limits=Limits(memory_bytes=self.memory_bytes, timeout_s=timeout_s, **limits),
            task=task,
            cold_compile=cold_compile,
            in_turn_with=in_turn_with,
        )

    def reopened(
        self,
        results: Sequence[TrialResult],
        *,
        effort: Effort | None = None,
        max_trials: int | None = None,
        max_time_s: float | None = None,
        output: str | None = None,
    ) -> Self:
        """Return the plan with other limits, for all of the search; None: as before, or as the effort has it."""
        changes: dict[str, Any] = {} if output is None else {"output": output}
        budget = self.budget if effort is None else Budget.of(effort)
        budget = budget.limited(max_trials=max_trials, max_time_s=max_time_s)
        if budget != self.budget:
            changes |= {"budget": budget, "reopened_at": max((r.request.number for r in results), default=-1) + 1}
            asked = {"effort": effort, "max_trials": max_trials, "max_time_s": max_time_s}
            asked = {name: value for name, value in asked.items() if effort is not None or value is not None}
            if self.options is not None:
                options = self.options.model_copy(update=asked)
                changes |= {"options": options, "loss_steps": options.loss_steps()}  # the effort also decides on these
        return self.model_copy(update=changes) if changes else self

    def is_over(self, results: Sequence[TrialResult]) -> bool:
        """Return whether the search has begun its finals or checks since its limits last changed."""
        return any(r.request.purpose.closes and r.request.number >= self.reopened_at for r in results)


class SearchState:
    """The state of one search; the tuner alone changes it."""

    def __init__(self, plan: SearchPlan, results: Iterable[TrialResult] = ()) -> None:
        self.plan = plan
        self.history = History(plan.objective)  # the trials of the baseline and the search, not of finals and checks
        self.results: list[TrialResult] = []  # all, in the order in which they ended
        self.refused: dict[TrainConfig, str] = {}  # configurations refused without a trial, with the reasons
        for result in results:
            self.take_in(result)

    def trials(self, config: TrainConfig, purpose: Purpose) -> list[TrialResult]:
        return [r for r in self.results if r.request.purpose is purpose and r.request.config == config]

    def measured(self, config: TrainConfig) -> Measurement | None:
        """Return the measurement of a configuration by the search, not by finals or checks."""
        known = self.history.known(config)
        return known.measurement if known is not None else None

    def take_in(self, result: TrialResult, *, counts: bool = True) -> None:
        """Add a trial that has ended; it enters the history, so that it isn't tried again, if it `counts`."""
        self.results.append(result)
        if counts and result.request.purpose.explores:
            self.history.add(result)


def _state(file: Path) -> str:
    """Return a digest of a file, or of a large one its size and the time when it was written."""
    try:
        found = file.stat()
        if found.st_size > _MOST_HASHED_BYTES:
            return f"{found.st_size} bytes, {found.st_mtime_ns} ns"
        return sha256_of(file.read_bytes())
    except OSError as error:
        return str(error.strerror)
