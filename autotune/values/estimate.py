"""Predictions of the cost model for a configuration: memory by component and time, with 95 % intervals."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.value import Value
from autotune.values.trial import Interval, StepParts

# fp32: on CUDA without tf32. tf32: fp32 matrices on tensor cores.
Arithmetic = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


class Timings(Value):
    """Measured times of a device's operators and optimizers, in the shapes that models have."""

    operators: dict[str, float] = Field(default_factory=dict)  # seconds of an operator, by its call
    # Seconds of a step over one parameter, by optimizer, type and shape.
    optimizers: dict[str, float] = Field(default_factory=dict)
    operator_s: float = Field(ge=0)  # seconds of Python and autograd beside each operator, views too
    micro_step_s: float = Field(ge=0)  # seconds of the Trainer for each micro-step

    def updated(self, later: "Timings") -> "Timings":
        """Return these with the operators and optimizers of `later`, which replace those of the same name."""
        both = {name: {**getattr(self, name), **getattr(later, name)} for name in ("operators", "optimizers")}
        return self.model_copy(update=both)


class Rates(Value):
    """Attainable rates of one device, by which the time model divides operations and bytes."""

    matmul_flops: dict[Arithmetic, float]  # FLOP/s of large matrix products; absent: not offered
    # Dense peak by the data sheet, for the model FLOP utilisation.
    peak_flops: dict[Arithmetic, float] = Field(default_factory=dict)
    bandwidth: float = Field(gt=0)  # bytes/s that element-wise operators attain, reads and writes added
    launch_s: float = Field(ge=0)  # least seconds of an operator, however small
    host_bandwidth: float = Field(gt=0)  # bytes/s from host to device
    source: str  # where they are from, in words
    timings: Timings | None = None  # of single operators; None: none were measured


# Phases of a training, of which the largest has the peak of memory.
PhaseName = Literal["generation", "forward and backward", "optimizer step", "evaluation", "saving"]


class Evaluation(Value):
    """How a training is evaluated."""

    batch: PositiveInt = Field(default=8, description="samples of a batch; the default is that of `TrainingArguments`")
    kept_samples: NonNegativeInt = 0  # whose logits are kept on the device, of `eval_accumulation_steps` batches or all


class Phase(Value):
    """Predicted memory of one phase of a training."""

    name: PhaseName
    operator: str  # that runs when most is allocated
    allocated_bytes: int


# Of the allocated peak: their names in words, and as fields.
_PARTS = ("weights", "gradients", "optimizer states", "activations", "temporaries", "communication")
COMPONENTS = {name: name.replace(" states", "_state") for name in _PARTS}


class MemoryBreakdown(Value):
    """Predicted memory of one device when most is allocated; the components sum to the allocated peak."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int = Field(description="kept by the forward pass for the backward pass")
    temporaries_bytes: int = Field(description="tensors that live within an operator, a layer or the optimizer's step")
    communication_bytes: int = Field(default=0, description="buffers of collectives; none on one device")
    framework_bytes: int = Field(description="outside of the allocator: CUDA context, workspaces of libraries")
    allocated_peak_bytes: int = Field(description="as torch.cuda.max_memory_allocated reports it")
    reserved_peak_bytes: int = Field(description="as torch.cuda.max_memory_reserved reports it")
    device_peak_bytes: int = Field(description="reserved and framework, as NVML reports it; CPU: the process")
    allocated_interval: Interval
    reserved_interval: Interval
    device_interval: Interval
    phase: PhaseName = Field(default="forward and backward", description="with the peak")
    phases: tuple[Phase, ...] = Field(default=(), description="in the order of a training")

    @property
    def components(self) -> dict[str, int]:
        """The bytes of each component of the allocated peak, by its name in words."""
        return {name: getattr(self, f"{field}_bytes") for name, field in COMPONENTS.items()}


class Cost(Value):
    """The predictions for one configuration beside its speed."""

    memory: MemoryBreakdown
    flops_per_step: float = Field(description="floating-point operations of the model, without recomputation")
    parts: StepParts = Field(default={}, description="shares of a step by what it is spent on")
    host_bytes: int = Field(default=0, description="host memory for the offloaded states of one device")
    notes: tuple[str, ...] = Field(default=(), description="remarks of the cost model")


class Speed(Value):
    """Predicted speed; the intervals are 95 % intervals."""

    step_time_s: float = Field(description="seconds of one optimizer step, all micro-batches")
    step_time_interval: Interval
    samples_per_second: float
    samples_per_second_interval: Interval
    tokens_per_second: float | None = Field(default=None, description="None for images")
    tokens_per_second_interval: Interval | None = None
    mfu: float | None = Field(default=None, description="needed FLOP/s over the precision's dense peak, if it is known")
    mfu_interval: Interval | None = None


class CostEstimate(Cost, Speed):
    """Predicted cost of one configuration."""
