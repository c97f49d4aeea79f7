"""The search space of one problem: which points exist, which are legal, and which its trials rule out.

A :class:`SearchSpace` binds a space file to a :class:`Problem` and an effort. It leaves out choices that can't be legal
and records the reasons. A :class:`History` rules out configurations without a cost model: one that ran out of memory
those that surely need as much, and steps that don't wait for data other ways of loading them.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from autotune.space import knobs, rules
from autotune.space.file import SpaceFile
from autotune.space.knobs import MICRO_BATCH
from autotune.space.parallel_rules import Rule
from autotune.values.budget import Effort
from autotune.values.config import Allowance, Scalar, TrainConfig
from autotune.values.problem import Objective, Problem
from autotune.values.trial import TrialResult, TrialStatus
from autotune.values.workload import Workload

Point = dict[str, Scalar]

# Knobs of loading data and of the host's waits, without influence on device memory, and their values in comparisons.
LOADING = {
    "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_pin_memory": False,
    "non_blocking": False, "logging_nan_inf_filter": True,
}  # fmt: skip

# Knobs of the baseline that go with another of its knobs, by the value of that without which they do nothing.
_IDLE = {
    ("torch_compile_backend", None): ("torch_compile_mode", "activation_memory_budget"),
    ("dataloader_num_workers", 0): ("dataloader_prefetch_factor",),
}

# Parameters that decide whether others are legal: precision for 16-bit kernels, compiling for fp8, the number of
# devices for sharding and micro-batches, sharding for optimizers and checkpointing, tensor parallelism for sharding the
# remaining devices.
_COMPANIONS = (
    "precision", "torch_compile_backend", "parallelism.world_size", "parallelism.sharding",
    "parallelism.tensor_parallel",
)  # fmt: skip


class Dimension(NamedTuple):
    """One parameter with its possible choices, in the order of trying."""

    name: str
    choices: tuple[Scalar, ...]
    when: dict[str, tuple[Scalar, ...]]


class SearchSpace:
    """The points that may be tried.

    The baseline's values are always choices; parameters for longer efforts keep them. `left_out` holds the reasons for
    the choices that were left out, by parameter and value.
    """

    def __init__(self, file: SpaceFile, problem: Problem, *, effort: Effort) -> None:
        self.file = file
        self.baseline = problem.baseline
        self._problem = problem
        self._origin = knobs.make_point(problem.baseline)
        # Configurations by the values of an adapter's knobs and the parallel ones, the rest being the baseline's.
        self._nested: dict[tuple[tuple[str, Scalar], ...], TrainConfig] = {}
        self.left_out: dict[tuple[str, Scalar], str] = {}
        order = list(Effort)
        self.dimensions = tuple(
            self._dimension(name)
            for name, parameter in file.parameters.items()
            if order.index(parameter.from_effort) <= order.index(effort)
        )

    def _dimension(self, name: str) -> Dimension:
        """Return the dimension `name` with the choices that can be legal; record why the others can't."""
        parameter = self.file.parameters[name]
        is_lattice = parameter.choices == "lattice"
        written = micro_batches(self._problem.workload.global_batch_size) if is_lattice else parameter.choices
        own = self._origin.get(name)
        wanted = list(written)
        if name in self._origin and own not in wanted:
            wanted.insert(0, own)
        for value in wanted if not parameter.when else ():
            if value != own and (reason := self._never_legal(name, value)) is not None:
                self.left_out[name, value] = reason
        choices = tuple(value for value in wanted if (name, value) not in self.left_out)
        return Dimension(name=name, choices=choices, when=parameter.when)

    def _never_legal(self, name: str, value: Scalar) -> str | None:
        """Return why `value` is illegal whatever the other parameters are, at the baseline; None: it can be legal.

        All combinations of the `_COMPANIONS` are tried: at an fp32 baseline a kernel that needs 16 bits is illegal, and
        legal beside bf16. The file's rules on several parameters and reasons against the baseline itself don't count.
        """
        reasons: list[str] = []
        for others, excused in self._surroundings:
            if name in others and others[name] != self._origin[name]:
                continue
            point = {**others, name: value}
            config = self.config(point if name == MICRO_BATCH else self._dividing(point))
            found = [r for r in self._reasons(config, alone=True) if r not in excused]
            if not found:
                return None
            reasons = reasons or found
        return next(iter(reasons), None)

    @functools.cached_property
    def _surroundings(self) -> list[tuple[Point, list[str]]]:
        """The combinations of the `_COMPANIONS` as legal as the baseline, the first, with the reasons against each."""
        choices = []
        for name in _COMPANIONS:
            written = self.file.parameters.get(name)
            others = written.choices if written is not None and written.choices != "lattice" else ()
            choices.append([self._origin[name], *(c for c in others if c != self._origin[name])])
        excused = list(self._illegal(self.baseline))
        found = []
        for chosen in itertools.product(*choices):
            point = self._dividing(dict(zip(_COMPANIONS, chosen, strict=True)))
            reasons = list(self._illegal(self.config(point)))
            if set(reasons) <= set(excused):
                found.append((point, reasons))
        return found

    def _dividing(self, point: Point) -> Point:
        """Return `point`, with a micro-batch of 1 where its own doesn't divide the global batch on all its devices."""
        try:
            self._problem.workload.accumulation_steps(self.config(point))
        except ValueError:
            return {**point, MICRO_BATCH: 1}
        return point

    def config(self, point: Point) -> TrainConfig:
        """Return the configuration at `point`; parameters that it doesn't name have the baseline's value."""
        nested = tuple(item for item in point.items() if knobs.is_nested(item[0]))
        if nested not in self._nested:
            self._nested[nested] = knobs.make_config(knobs.fitting(dict(nested), self._origin))
        plain = {name: knobs.valid(name, value) for name, value in point.items() if not knobs.is_nested(name)}
        for (name, value), idle in _IDLE.items():
            if name in plain and plain[name] == value != self._origin[name]:
                plain = dict.fromkeys(idle) | plain
        return self._nested[nested].model_copy(update=plain)

    def complete(self, point: Point) -> Point:
        """Return the parameters that exist at `point`, by default with the baseline's value or the first choice."""
        whole: Point = {}
        for dimension in self.dimensions:
            if self.is_active(dimension, whole):
                default = self._origin.get(dimension.name, dimension.choices[0])
                whole[dimension.name] = point.get(dimension.name, default)
        return whole

    def choices_of(self, config: TrainConfig) -> Point:
        """Return the values of `config` that are choices of the space, by parameter."""
        whole, choices = self.complete(knobs.make_point(config)), {d.name: d.choices for d in self.dimensions}
        return {name: value for name, value in whole.items() if value in choices[name]}

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why `config` may not be tried: a rule of legality, the space's own rules, or the allowance."""
        return next(self._reasons(config), None)

    def _illegal(self, config: TrainConfig, among: Iterable[Rule] | None = None) -> Iterator[str]:
        of = self._problem
        found = rules.refusals(config, of.workload, of.facts, of.hardware, among)
        return (reason for reason in found if reason not in self._own_ways)

    @functools.cached_property
    def _own_ways(self) -> set[str]:
        """The reasons against the sampling and the code of the baseline, which is the user's and does train."""
        of = self._problem
        return set(rules.refusals(self.baseline, of.workload, of.facts, of.hardware, rules.OF_OWN_WAYS))

    def _reasons(
        self, config: TrainConfig, *, alone: bool = False, among: Iterable[Rule] | None = None
    ) -> Iterator[str]:
        """Yield all reasons; `alone`: only the file's rules on one parameter; `among`: only these rules of legality."""
        yield from self._illegal(config, among)
        point = knobs.make_point(config) if self.file.rules else {}
        for rule in self.file.rules:
            counts = not alone or len(rule.forbid) == 1
            if counts and all(point.get(name) in values for name, values in rule.forbid.items()):
                yield rule.reason
        allowed = self._problem.allowance
        if allowed is not Allowance.METHOD and not allowed.admits(needed := knobs.allowance_of(config, self._problem)):
            beyond = f"changes the {needed} of the training, which --allow {allowed} does not admit"
            split = config.per_device_train_batch_size != self.baseline.per_device_train_batch_size
            why = self._problem.facts.split_changes
            yield f"{beyond}: {why}" if split and why else beyond

    def is_active(self, dimension: Dimension, point: Point) -> bool:
        exists = knobs.has_field(point.get("adapter", self._origin["adapter"]), dimension.name)
        return exists and all(point.get(n, self._origin.get(n)) in values for n, values in dimension.when.items())

    @functools.cached_property
    def judged(self) -> tuple[list[TrainConfig], Counter[str]]:
        """The legal configurations that load data as the baseline does, and numbers of the others by their reasons.

        With each of the `loadings` a configuration is another one of the space, which is legal if this one is.
        """
        legal: list[TrainConfig] = []
        refused: Counter[str] = Counter()
        dimensions = self._split[0]
        is_free = not any(MICRO_BATCH in d.when or (d.when and d.name == MICRO_BATCH) for d in dimensions)
        sizes = next((d for d in dimensions if d.name == MICRO_BATCH and is_free), None)
        for point in self._grown([d for d in dimensions if d is not sizes]):
            config = self.config(point)
            choices = [config.per_device_train_batch_size] if sizes is None else sizes.choices
            if (reason := next(self._illegal(config, rules.OF_THE_REST), None)) is not None:
                refused[reason] += len(choices)
                continue
            for size in choices:
                each = config.model_copy(update={MICRO_BATCH: size})
                if (reason := next(self._reasons(each, among=rules.OF_MICRO_BATCHES), None)) is None:
                    legal.append(each)
                else:
                    refused[reason] += 1
        return legal, refused

    @property
    def legal(self) -> list[TrainConfig]:
        return self.judged[0]

    @functools.cached_property
    def loadings(self) -> list[Point]:
        """The legal ways of loading data, as values of knobs; they change neither memory nor which others are legal.

        Where a rule or a condition joins them with other knobs, none is listed, and `judged` counts all configurations.
        """
        excused = set(self._reasons(self.baseline))
        found = []
        for point in self._grown(self._split[1]):
            config = self.config(point)
            if excused.issuperset(self._reasons(config)):
                found.append({name: value for name, value in knobs.make_point(config).items() if name in LOADING})
        return found

    @functools.cached_property
    def _split(self) -> tuple[list[Dimension], list[Dimension]]:
        """The dimensions, and apart from them those of loading data if nothing joins the two."""
        split: tuple[list[Dimension], list[Dimension]] = [], []
        for dimension in self.dimensions:
            split[dimension.name in LOADING].append(dimension)
        conditions = [{d.name, *d.when} for d in self.dimensions] + [set(rule.forbid) for rule in self.file.rules]
        if any(names & LOADING.keys() and names - LOADING.keys() for names in conditions):
            return list(self.dimensions), []
        return split

    def _grown(self, dimensions: Sequence[Dimension]) -> Iterator[Point]:
        """Yield each combination of choices of the dimensions, legal or not."""
        if not dimensions:
            yield {}
            return
        *others, last = dimensions
        for point in self._grown(others):
            if self.is_active(last, point):
                yield from ({**point, last.name: value} for value in last.choices)
            else:
                yield point


class History:
    """The finished trials of a search, by configuration; the objective is by default the rate of the steady state."""

    def __init__(self, objective: Objective | None = None) -> None:
        self._objective = objective or Objective()
        self.results: list[TrialResult] = []  # all trials in the order they ended
        self._by_config: dict[TrainConfig, TrialResult] = {}
        self.shortages: list[TrialResult] = []  # those that ran out of memory
        self._ranking: list[TrialResult] | None = None

    def add(self, result: TrialResult) -> None:
        config = result.request.config
        self.results.append(result)
        self._by_config[config] = result
        self._ranking = None
        if result.status is TrialStatus.OUT_OF_MEMORY and not result.is_excused:
            self.shortages.append(result)

    def with_results(self, results: Iterable[TrialResult]) -> "History":
        other = History(self._objective)
        for result in (*self.results, *results):
            other.add(result)
        return other

    def known(self, config: TrainConfig) -> TrialResult | None:
        """Return the latest trial of `config`, if it has run."""
        return self._by_config.get(config)

    def best(self) -> TrialResult | None:
        return next(iter(self.ranking()), None)

    def ranking(self) -> list[TrialResult]:
        """Return the latest completed trial of each configuration, the fastest first."""
        if self._ranking is None:
            self._ranking = sorted((r for r in self._by_config.values() if r.measurement), key=self.rate, reverse=True)
        return self._ranking

    def rate(self, result: TrialResult) -> float:
        return self._objective.rate(result.measurement) if result.measurement else 0.0

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why the trials rule `config` out: one no harder ran out of memory, or loading otherwise can't pay."""
        for result in self.shortages:
            if is_no_harder(result.request.config, config, result.request.workload):
                return f"trial {result.request.number}, no harder on memory, ran out of it"
        first, leader = next(iter(self.results), None), self.best()
        usual = [r.request.config for r in (first, leader) if r is not None]
        if not usual or any(loading_of(config) == loading_of(known) for known in usual):
            return None
        if leader is None or leader.measurement is None:
            return "nothing measured says that a step waits for its data"
        share, theirs = leader.measurement.data_wait_share, loading_of(leader.request.config)
        loads = any(getattr(config, name) != value for name, value in theirs.items() if name.startswith("dataloader_"))
        # Least share of a step spent waiting for data for which other ways of loading data are tried.
        if loads and share is not None and share < 0.01:
            return f"a step of the leader waits for data {share:.1%} of its time: loading them otherwise can't pay"
        if config.model_copy(update=theirs) != leader.request.config:
            return "another way of loading data is tried with the leader alone"
        return None


def loading_of(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LOADING}


def is_no_harder(easy: TrainConfig, hard: TrainConfig, workload: Workload) -> bool:
    """Return whether `easy` surely needs no more memory than `hard`: a partial order, False where not comparable."""
    if easy.per_device_train_batch_size > hard.per_device_train_batch_size:
        return False
    lightest_first = ("offload", "full", "every-2nd", "every-4th", "none")  # activations on the device
    if lightest_first.index(easy.checkpointing) > lightest_first.index(hard.checkpointing):
        return False
    lighter = {  # optimizers whose states and temporaries are surely no larger; others are not compared
        "adamw_torch": ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"),
        "adamw_torch_fused": ("adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"),
    }
    if easy.optim != hard.optim and easy.optim not in lighter.get(hard.optim, ()):
        return False
    if easy.is_balanced != hard.is_balanced:
        return False
    # Another order of the samples needs no other memory, as trials start with the longest in any case.
    rest = {"per_device_train_batch_size": 1, "checkpointing": "none", "optim": "", "tf32": False, **LOADING}
    rest["train_sampling_strategy"] = "random"
    if easy.model_copy(update=rest) != hard.model_copy(update=rest):
        return False
    # A large micro-batch without accumulation may need less than a small one with it, whose gradients stay meanwhile.
    return workload.accumulation_steps(easy) == 1 or workload.accumulation_steps(hard) > 1


def micro_batches(global_batch: int | None) -> tuple[int, ...]:
    """Return the lattice of micro-batches in ascending order.

    For a given global batch: its divisors that are multiples of 8, and 4, 2, 1; other divisors only where they are
    larger than all of these (15: 1, 3, 5, 15). For a free one: multiples of 8 up to 64, then of 64, which keep tensor
    cores busy (NVIDIA's matrix-multiplication guide).
    """
    if global_batch is None:
        return (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192, 256, 384, 512, 768, 1024)
    up_to_root = [d for d in range(1, math.isqrt(global_batch) + 1) if global_batch % d == 0]
    divisors = sorted({*up_to_root, *(global_batch // d for d in up_to_root)})
    lattice = [d for d in divisors if d % 8 == 0 or d in (1, 2, 4)]
    return tuple(lattice + [d for d in divisors if d > lattice[-1]])
