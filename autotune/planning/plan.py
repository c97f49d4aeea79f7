"""The plan of a search, settled before the first trial and stored as `search.json`; its state; requests of trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt

from autotune.cost.memory import states_bytes
from autotune.errors import InputError
from autotune.planning.options import SearchOptions
from autotune.space.file import Parameter, SpaceFile, load_space
from autotune.space.history import History
from autotune.space.knobs import fixed_values, knob_named, knobs
from autotune.space.points import Scalar, fitting, make_config, make_point
from autotune.space.rules import refusals
from autotune.space.space import SearchSpace
from autotune.units import show_memory
from autotune.values.budget import Budget, CheckTask, Effort, LossTask
from autotune.values.config import Precision, TrainConfig
from autotune.values.problem import Fleet, Objective, Problem
from autotune.values.trial import Limits, Measurement, Prediction, Purpose, TrialRequest, TrialResult

SCHEMA_VERSION: Literal[2] = 2  # of `search.json`; files of the first version have no such field

# Most micro-batches per step of a search trial. Two show the memory of gradients that are held during a backward pass;
# the time of a step with more is inferred.
SEARCH_ACCUMULATION = 2

# Purposes whose trials run all micro-batches of a step.
_WHOLE_STEPS = (Purpose.FINAL, Purpose.LOSS_CHECK, Purpose.EXPLAIN)

# Purposes whose trials are compared closely, and so measured more exactly than those of the search.
_AGAIN = (Purpose.FINAL, Purpose.EXPLAIN)

# Limits that never end a check, which runs the number of steps that it asks for.
_NEVER_SURE, _NO_TIME_LIMIT_S = 1e-12, 1e9


class SearchPlan(Problem):
    """The problem of a search and all that is settled about how it is solved, as stored in `search.json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    budget: Budget
    space: SpaceFile
    objective: Objective = Objective()
    soak: bool = Field(default=False, description="the winner must evaluate and save a checkpoint within the budget")
    loss_steps: NonNegativeInt = Field(default=0, description="optimizer steps over which losses are compared; 0: none")
    loss_insisted: bool = Field(
        default=False, description="losses are compared however long it takes, as the user asked"
    )
    record: bool = Field(default=False, description="the lasting record is read and written")
    report_to: tuple[str, ...] = Field(default=(), description="trackers that receive each trial")
    fleet: Fleet = Field(default=Fleet(), description="where the trials run")
    is_shared: bool = Field(default=False, description="concurrent trials slow each other down")
    options: SearchOptions | None = Field(
        default=None, description="the user's options; None: the plan can't be made from options"
    )
    output: str | None = Field(default=None, description="file that the answer is written to as well")
    reopened_at: NonNegativeInt = Field(
        default=0, description="number of the next trial when the limits last changed; finals before it don't count"
    )
    files: dict[str, str] = Field(default={}, description="what is trained from, by path: digest, or size and time")
    notes: tuple[str, ...]

    def every_config(self) -> list[TrainConfig]:
        """Return the baseline and then every other legal configuration of the space."""
        space = self.search_space()
        every = (config.model_copy(update=loading) for config in space.legal for loading in space.loadings)
        return list(dict.fromkeys((self.baseline, *every)))

    @property
    def world_sizes(self) -> frozenset[int]:
        """The numbers of devices over which trainings are spread: that of the baseline, and those of the space."""
        named = self.space.parameters.get("parallelism.world_size")
        choices = named.choices if named is not None and named.choices != "lattice" else ()
        return frozenset({self.baseline.parallelism.world_size, *(c for c in choices if isinstance(c, int))})

    def search_space(self) -> SearchSpace:
        """Return the space bound to this plan, the same as before if this plan was asked last: it may be large."""
        if not _bound or _bound[0][0] is not self:
            _bound[:] = [(self, SearchSpace(self.space, self, effort=self.budget.effort))]
        return _bound[0][1]


_bound: list[tuple[SearchPlan, SearchSpace]] = []


def restricted(plan: SearchPlan, options: SearchOptions) -> SearchPlan:
    """Return the plan with the values of `--fix` in every configuration, and with the knobs of `--only` searched alone.

    The baseline has the fixed values too: they belong to the training, and are no part of what the search gains. Knobs
    that are named but not in the space have the choices of the spaces 'default' and 'full', at every effort.

    Raises:
        InputError: A fixed value isn't possible in this training, or nothing is left to search.
    """
    if not options.fix and not options.only:
        return plan
    fixed = fixed_values(options.fix)
    baseline = _with(plan, fixed, f"--fix {','.join(options.fix)}")
    origin, only = make_point(baseline), [knob_named(name, "--only").parameter for name in options.only]
    named = dict(plan.space.parameters)
    if plan.workload.own_step is not None:
        for name in (*fixed, *only):
            if name not in named:
                raise InputError(
                    f"{'--fix' if name in fixed else '--only'} {name}: your function isn't said to honour it"
                )
    else:
        for further in ("default", "full") if only else ():
            named |= {n: p for n, p in load_space(further).parameters.items() if n not in named and _is_among(n, only)}
    parameters = {}
    for name, parameter in named.items():
        if name not in fixed and (not only or _is_among(name, only)):
            when = {n: v for n, v in parameter.when.items() if n in named or origin.get(n) not in v}
            effort = Effort.QUICK if only else parameter.from_effort
            parameters[name] = parameter.model_copy(update={"when": when, "from_effort": effort})
        elif name in origin:
            parameters[name] = Parameter(choices=(origin[name],))
    notes = plan.notes
    if options.fix:
        notes += (f"in every configuration, the baseline too: {', '.join(options.fix)} (--fix)",)
    if options.only:
        notes += (f"only {', '.join(options.only)} searched (--only)",)
    space = plan.space.model_copy(update={"parameters": parameters})
    plan = plan.model_copy(update={"baseline": baseline, "space": space, "notes": notes})
    if only:
        _check_left(plan, only)
    return plan


def _check_left(plan: SearchPlan, only: Sequence[str]) -> None:
    """Refuse `--only` (InputError) if a named knob has no other value than the baseline's, or none that is legal."""
    space = plan.search_space()
    options = {knob.parameter: knob.option for knob in knobs()}
    for name in only:
        parameter, said = plan.space.parameters.get(name), f"--only {options[name]}"
        if parameter is None:
            raise InputError(f"{said}: no search space has values to try; --fix sets one, --space FILE has yours")
        if not any(d.name == name and len(d.choices) > 1 for d in space.dimensions):
            why = (reason for choice, reason in space.left_out.items() if choice[0] == name)
            raise InputError(f"{said}: nothing to search: {next(why, 'there is one value')}")
        other = next((n for n in parameter.when if len(plan.space.parameters[n].choices) == 1), None)
        if other is not None and make_point(plan.baseline)[other] not in parameter.when[other]:
            raise InputError(f"{said}: nothing to search: it exists only with {options[other]}; name that as well")


def _is_among(name: str, only: Sequence[str]) -> bool:
    """Whether a parameter is one of those that are searched alone; 'adapter' stands for its fields as well."""
    return name in only or (name.startswith("adapter.") and "adapter" in only)


def _with(plan: SearchPlan, fixed: dict[str, Scalar], written: str) -> TrainConfig:
    """Return the baseline with the fixed values that the user has `written`; InputError: it isn't legal."""
    baseline = make_config(fitting(fixed, make_point(plan.baseline)))
    about = (plan.workload, plan.facts, plan.hardware)
    before = refusals(plan.baseline, *about)
    for reason in refusals(baseline, *about):
        if reason not in before:
            raise InputError(f"{written}: {reason}")
    return baseline


def too_large(plan: SearchPlan, config: TrainConfig) -> str | None:
    """Return the reason if weights, gradients and optimizer states alone exceed the memory budget, or None.

    It needs no trace. Of the user's own training, which may freeze weights, nothing is known; experts that no token is
    routed to have no gradients.
    """
    if plan.workload.is_users_own or plan.facts.experts:
        return None
    least = least_states(plan, config)
    if least <= plan.memory_bytes:
        return None
    has, budget = show_memory(int(least)), show_memory(plan.memory_bytes)
    return f"weights, gradients and optimizer states alone take {has}; the budget is {budget}"


def least_states(plan: SearchPlan, config: TrainConfig) -> float:
    """Return the bytes that weights, gradients and optimizer states take on one device at least, without a trace.

    Of a user's own optimizer nothing is known.
    """
    frozen, code = plan.facts.frozen_parameters, plan.workload.own_code
    if code is not None:
        is_short = code.weights in ("bfloat16", "float16")
        made = {"quantization": code.quantization, "precision": Precision.PURE_BF16 if is_short else config.precision}
        config = config.model_copy(update=made)
        frozen = plan.facts.parameters if "optim" in code.held else frozen
    return states_bytes(plan.facts.parameters, config, frozen=frozen)


def request_of(
    plan: SearchPlan,
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

    `task` is what a check does beside timing steps; `cold_compile`: code is compiled anew, as in a user's first run.
    Below `to_beat` samples/s it may measure less exactly. `in_turn_with` are the numbers of the trials that compute in
    turn with it, itself included; if empty, it runs alone.
    """
    full = plan.workload.accumulation_steps(config)
    whole = purpose in _WHOLE_STEPS or plan.workload.runs_whole_steps(config)
    return TrialRequest(
        number=number,
        purpose=purpose,
        config=config,
        workload=plan.workload,
        device=plan.hardware.device,
        accumulation_steps=full if whole else min(full, SEARCH_ACCUMULATION),
        prediction=prediction,
        limits=_limits(plan, task, timeout_s).model_copy(
            update={
                "beaten_step_s": plan.workload.samples_per_step(config) / to_beat if to_beat else None,
                **(plan.budget.when_measured_again if purpose in _AGAIN else {}),
                **(plan.budget.when_in_turn if in_turn_with else {}),
            }
        ),
        task=task,
        cold_compile=cold_compile,
        in_turn_with=in_turn_with,
    )


def _limits(plan: SearchPlan, task: CheckTask | None, timeout_s: float) -> Limits:
    shared = plan.budget.model_dump(include=set(Limits.model_fields))
    limits = Limits(memory_bytes=plan.memory_bytes, timeout_s=timeout_s, **shared)
    if task is None:
        return limits
    # In a soak, the first step creates the optimizer states, and two more run with them.
    steps = task.steps if isinstance(task, LossTask) else 2
    fixed = {"measure_time_s": _NO_TIME_LIMIT_S, "relative_interval": _NEVER_SURE}
    return limits.model_copy(update={"discarded_steps": 1, "discarded_s": 0.0, "measure_steps": max(2, steps), **fixed})


class SearchState:
    """The state of one search; the tuner alone changes it.

    Attributes:
        results: All trials in the order they ended.
        refused: Configurations that were refused without a trial, with the reasons.
        history: The trials that explore the space: the baseline's and the search's, not finals and checks.
    """

    def __init__(
        self, plan: SearchPlan, results: Iterable[TrialResult] = (), refused: dict[TrainConfig, str] | None = None
    ) -> None:
        self.plan = plan
        self.history = History(plan.objective)
        self.results: list[TrialResult] = []
        self.refused: dict[TrainConfig, str] = {} if refused is None else refused
        for result in results:
            self.take_in(result)

    def trials(self, config: TrainConfig, purpose: Purpose) -> list[TrialResult]:
        """Return the trials of a configuration for a purpose."""
        return [r for r in self.results if r.request.purpose is purpose and r.request.config == config]

    def measured(self, config: TrainConfig) -> Measurement | None:
        """Return the measurement of a configuration by the search, not by finals or checks."""
        known = self.history.known(config)
        return known.measurement if known is not None else None

    def take_in(self, result: TrialResult, *, counts: bool = True) -> None:
        """Add a trial that has ended; `counts`: whether it enters the history, so that it isn't tried again."""
        self.results.append(result)
        if counts and result.request.purpose.explores:
            self.history.add(result)
