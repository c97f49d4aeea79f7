"""Values with everything filled in, of which a test names only what it is about.

The workload is a tiny Llama at a global batch of 16, the device a CPU or an A100-like GPU; no test that uses these
builds a model or touches a device.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.execution.runner import Runner
from autotune.planning.plan import SearchPlan
from autotune.space.file import SpaceFile, load_space
from autotune.space.space import Point, SearchSpace
from autotune.training.arguments import transformers_version
from autotune.units import GIB
from autotune.value import write_value
from autotune.values.budget import Budget, Effort
from autotune.values.config import Allowance, TrainConfig
from autotune.values.hardware import Hardware, installed_versions
from autotune.values.model import ModelFacts, ModelSpec, Task
from autotune.values.problem import Change, Problem
from autotune.values.result import Basis, Contribution
from autotune.values.statistics import rate_interval
from autotune.values.techniques import Checkpointing, checkpointing_arguments
from autotune.values.trial import (
    Failure,
    Interval,
    Limits,
    Measurement,
    Memory,
    Outcome,
    Purpose,
    TrialRequest,
    TrialResult,
    TrialStatus,
)
from autotune.values.workload import Workload

VERSIONS = {"transformers": "5.23.0", "torch": "2.13.0", "bitsandbytes": "0.49.0"}


def make_spec(**fields: Any) -> ModelSpec:
    defaults = {"reference": "tiny", "name": "tiny", "source": "catalogue", "model_type": "llama", "kind": "decoder"}
    return ModelSpec(**{**defaults, "config": {}, **fields})


def make_workload(**fields: Any) -> Workload:
    defaults = {"model": make_spec(), "task": Task.CAUSAL_LM, "sequence_length": 128, "global_batch_size": 16}
    return Workload(**{**defaults, **fields})


def make_facts(**fields: Any) -> ModelFacts:
    kernels = ("sdpa", "eager", "flash_attention_2")
    defaults = {
        "task": Task.CAUSAL_LM, "parameters": 1_000_000, "attn_implementations": kernels,
        "supports_checkpointing": True, "has_dropout": False, "linear_modules": ("q_proj", "v_proj"),
    }  # fmt: skip
    return ModelFacts(**{**defaults, **fields})


def make_hardware(**fields: Any) -> Hardware:
    """A CPU."""
    defaults = {
        "kind": "cpu", "device": "cpu", "name": "a CPU", "memory_bytes": 16 * GIB, "free_bytes": 12 * GIB, "cores": 2,
        "host_memory_bytes": 16 * GIB, "cxx": "g++", "versions": VERSIONS,
    }  # fmt: skip
    return Hardware(**{**defaults, **fields})


def make_gpu(**fields: Any) -> Hardware:
    """A GPU with everything installed."""
    defaults = {
        "kind": "cuda", "device": "cuda:0", "name": "a GPU", "memory_bytes": 40 * GIB, "free_bytes": 39 * GIB,
        "capability": (8, 0), "driver": "580.1", "versions": {**VERSIONS, "flash-attn": "2.8.0", "triton": "3.7.0"},
    }  # fmt: skip
    return make_hardware(**{**defaults, **fields})


def make_config(micro_batch: int = 8, **fields: Any) -> TrainConfig:
    """The configuration that the Trainer's defaults are on a CPU."""
    defaults = {"attn_implementation": "sdpa", "dataloader_pin_memory": False}
    return TrainConfig(per_device_train_batch_size=micro_batch, **{**defaults, **fields})


def make_budget(**fields: Any) -> Budget:
    """Enough for any search of these tests."""
    defaults = {"max_trials": 200, "max_time_s": 1e6, "trial_timeout_s": 300.0}
    return Budget(**{**Budget.of(Effort.QUICK).model_dump(), **defaults, **fields})


def make_space_file(parameters: dict[str, Any], rules: Sequence[dict[str, Any]] = ()) -> SpaceFile:
    """Each parameter is a list of choices, 'lattice', or a mapping as in a file."""
    written = {n: p if isinstance(p, dict) else {"choices": p} for n, p in parameters.items()}
    document = {"name": "test", "description": "a test's", "parameters": written, "rules": list(rules)}
    return SpaceFile.model_validate(document)


def make_problem(**fields: Any) -> Problem:
    defaults = {
        "workload": make_workload(), "facts": make_facts(), "hardware": make_hardware(), "memory_bytes": 8 * GIB,
        "allowance": Allowance.METHOD, "baseline": make_config(),
    }  # fmt: skip
    return Problem(**{**defaults, **fields})


def make_plan(**fields: Any) -> SearchPlan:
    own = {name: fields.pop(name) for name in list(fields) if name not in Problem.model_fields}
    defaults = {"budget": make_budget(), "space": load_space("cpu"), "notes": ()}
    return SearchPlan(**{**make_problem(**fields).problem_fields(), **defaults, **own})


def make_space(parameters: dict[str, Any] | None = None, **fields: Any) -> SearchSpace:
    """The space of a plan; `parameters` and `rules` instead of a file."""
    rules = fields.pop("rules", ())
    if parameters is not None:
        fields["space"] = make_space_file(parameters, rules)
    return make_plan(**fields).search_space


def legal_points(space: SearchSpace) -> Iterator[Point]:
    """Yield all legal points, each judged by itself; `legal` and `loadings` say the same, and sooner."""
    return (point for point in space._grown(space.dimensions) if space.refusal(space.config(point)) is None)


def make_limits(**fields: Any) -> Limits:
    defaults = {
        "memory_bytes": 8 * GIB, "timeout_s": 60.0, "discarded_steps": 1, "measure_steps": 6, "measure_time_s": 8.0,
        "relative_interval": 0.04,
    }  # fmt: skip
    return Limits(**{**defaults, **fields})


def make_request(config: TrainConfig | None = None, **fields: Any) -> TrialRequest:
    defaults = {
        "number": 0, "purpose": Purpose.SEARCH, "config": config or make_config(), "workload": make_workload(),
        "device": "cpu", "accumulation_steps": 1, "limits": make_limits(),
    }  # fmt: skip
    return TrialRequest(**{**defaults, **fields})


def make_measurement(rate: float = 10.0, *, spread: float = 0.01, samples: int = 16, **fields: Any) -> Measurement:
    """Four steps around `rate` samples per second, `spread` apart."""
    times = tuple(samples / rate * (1 + spread * at) for at in (-1.5, -0.5, 0.5, 1.5))
    defaults: dict[str, Any] = {
        "step_times_s": times, "accumulation_steps": 1, "samples_per_second": rate,
        "samples_per_second_interval": rate_interval(times, samples), "memory": Memory(resident_bytes=GIB),
        **dict.fromkeys(("startup_s", "first_step_s", "loss"), 1.0), "data_wait_share": 0.0, "effects": {},
    }  # fmt: skip
    return Measurement(**{**defaults, **fields})


def make_failure(status: TrialStatus = TrialStatus.CRASHED, cause: str = "it broke", **fields: Any) -> Failure:
    return Failure(status=status, cause=cause, **fields)


def installed_arguments(kind: Checkpointing) -> dict[str, object]:
    """The TrainingArguments of a kind of checkpointing for the transformers that is installed."""
    return checkpointing_arguments(kind, transformers_version(make_hardware(versions=installed_versions())))


OUT_OF_MEMORY = make_failure(TrialStatus.OUT_OF_MEMORY, "no memory left")
CRASHED = make_failure()


def make_result(config: TrainConfig | None = None, outcome: Outcome | float = 10.0, **fields: Any) -> TrialResult:
    """A finished trial; a bare number is the throughput it measured."""
    duration_s, request = fields.pop("duration_s", 10.0), make_request(config, **fields)
    return TrialResult(
        request=request,
        outcome=outcome if isinstance(outcome, Measurement | Failure) else make_measurement(outcome),
        duration_s=duration_s,
        began=1e4 * request.number,  # one after the other
    )


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class StepClock:
    """A device's clock that stands still until it is told how much time has passed."""

    def __init__(self) -> None:
        self.now = 100.0
        self.settled = 0

    def mark(self) -> float:
        return self.now

    def settle(self) -> None:
        self.settled += 1

    def seconds(self, start: float, end: float) -> float:
        return end - start


class ScriptedRunner(Runner):
    """Runs trials in no time: a function says what each gives, and results lie on disk as a real runner leaves them.

    Args:
        directory: The run directory.
        outcome: From a request to its outcome, or to a throughput.
        duration_s: From a request to the time it takes.
        clock: Moved by that time, as far as the trial's limit allows.
        places: At how many trials run at once; a trial's outcome is asked for when it ends.
    """

    def __init__(
        self,
        directory: Path,
        outcome: Callable[[TrialRequest], Outcome | float],
        *,
        duration_s: Callable[[TrialRequest], float] = lambda request: 10.0,
        clock: Clock | None = None,
        places: int = 1,
    ) -> None:
        self._directory, self._outcome, self._duration_s, self._places = directory, outcome, duration_s, places
        self._clock = clock or Clock()
        self._running: list[tuple[float, int, float, bool, TrialRequest]] = []  # a heap, by end and number
        self.requests: list[TrialRequest] = []
        self.together: list[int] = []  # how many trials ran when each was begun, itself included
        self.ends: list[int] = []

    @property
    def searched(self) -> list[TrainConfig]:
        """The configurations of the baseline's trial and of the search's, in order."""
        return [r.config for r in self.requests if r.purpose.explores]

    def free(self) -> int:
        return self._places - len(self._running)

    def begin(self, request: TrialRequest) -> None:
        assert self.free()
        wanted_s, limit_s, now_s = self._duration_s(request), request.limits.timeout_s, self._clock.now_s
        running = (now_s + min(wanted_s, limit_s), request.number, now_s, wanted_s > limit_s, request)
        heapq.heappush(self._running, running)
        self.requests.append(request)
        self.together.append(len(self._running))

    def wait(self) -> TrialResult:
        ends_at, number, began, is_cut, request = heapq.heappop(self._running)
        outcome = self._outcome(request)
        if is_cut:
            outcome = make_failure(TrialStatus.TIMED_OUT, "cut short")
        self._clock.now_s = ends_at
        result = TrialResult(
            request=request,
            outcome=outcome if isinstance(outcome, Measurement | Failure) else make_measurement(outcome),
            duration_s=ends_at - began,
            began=began,
        )
        directory = self._directory / "trials" / f"{number:04d}"
        directory.mkdir(parents=True)
        write_value(result, directory / "result.json")
        self.ends.append(number)
        return result

    def run(self, request: TrialRequest) -> TrialResult:
        assert not self._running
        self.begin(request)
        return self.wait()


def product_rate(factors: dict[str, dict[Any, float]]) -> Callable[[TrialRequest], float]:
    """A throughput that is a product of one factor per knob's value: separable, so its optimum is known."""

    def rate(request: TrialRequest) -> float:
        return math.prod(table[getattr(request.config, knob)] for knob, table in factors.items())

    return rate


# A space whose throughput is separable: its optimum differs from the baseline in every knob but the attention kernel.
SEPARABLE = {
    "precision": ["fp32", "bf16", "pure_bf16"], "attn_implementation": ["sdpa", "eager"],
    "per_device_train_batch_size": {"choices": "lattice"}, "optim": ["adamw_torch_fused", "adamw_torch", "adafactor"],
}  # fmt: skip
separable_rate = product_rate(
    {
        "precision": {"fp32": 1.0, "bf16": 1.3, "pure_bf16": 1.1},
        "attn_implementation": {"sdpa": 1.0, "eager": 0.8},
        "optim": {"adamw_torch_fused": 1.0, "adamw_torch": 1.1, "adafactor": 0.9},
        "per_device_train_batch_size": {1: 5.0, 2: 7.0, 4: 8.5, 8: 10.0, 16: 11.5},
    }
)
SEPARABLE_BEST = make_config(16, precision="bf16", optim="adamw_torch")


def make_contribution(knob: str, ratio: float | None, basis: Basis = "in turn", **fields: Any) -> Contribution:
    """What putting a knob back from 'b' to 'a' tells; the interval is a tenth wide either way."""
    defaults = {
        "changes": (Change(knob=knob, before="a", after="b", allowance=Allowance.EXACT),),
        "config": make_config(),
        "interval": Interval(low=ratio * 0.9, high=ratio * 1.1) if ratio else None,
    }
    return Contribution(**{**defaults, "basis": basis, "ratio": ratio, **fields})
