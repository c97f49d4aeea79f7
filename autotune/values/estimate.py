"""What the cost model says of a configuration before it runs: memory by component, and time, with their intervals."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.value import Value
from autotune.values.trial import Interval

# fp32: on CUDA without tf32. tf32: fp32 matrices on tensor cores.
Arithmetic = Literal["fp32", "tf32", "fp16", "bf16"]


class Rates(Value):
    """Attainable rates of one device: what the time model divides by."""

    matmul_flops: dict[Arithmetic, float] = Field(description="FLOP/s of large matrix products; absent: not offered")
    peak_flops: dict[Arithmetic, float] = Field(
        default_factory=dict, description="dense peak by the data sheet, for the model FLOP utilisation"
    )
    bandwidth: float = Field(gt=0, description="bytes/s that element-wise operators attain, read and written")
    launch_s: float = Field(ge=0, description="seconds an operator takes at the least, however small")
    host_bandwidth: float = Field(gt=0, description="bytes/s from host to device")
    source: Literal["table", "measured"]


TracedBy = Literal["meta", "fake", "run"]


class MemoryBreakdown(Value):
    """Predicted memory of one device at the moment when most is allocated; the components sum to the peak."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int = Field(description="kept by the forward pass for the backward pass")
    temporaries_bytes: int = Field(description="alive inside an operator, a layer or the optimizer's step")
    communication_bytes: int = Field(default=0, description="buffers of collectives; none on one device")
    framework_bytes: int = Field(description="beyond the allocator: context, libraries' workspaces")
    allocated_peak_bytes: int = Field(description="what torch.cuda.max_memory_allocated would say")
    reserved_peak_bytes: int = Field(description="what torch.cuda.max_memory_reserved would say")
    device_peak_bytes: int = Field(description="what NVML would say: reserved and framework; on the CPU the process")
    allocated_interval: Interval
    reserved_interval: Interval
    device_interval: Interval

    @property
    def components(self) -> dict[str, int]:
        """The bytes of each component of the allocated peak, by its name in words."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "optimizer states": self.optimizer_state_bytes,
            "activations": self.activations_bytes,
            "temporaries": self.temporaries_bytes,
            "communication": self.communication_bytes,
        }


class CostEstimate(Value):
    """Predicted cost of one configuration; the intervals hold the truth in about 19 of 20 cases."""

    memory: MemoryBreakdown
    step_time_s: float = Field(description="one optimizer step, all micro-batches")
    step_time_interval: Interval
    samples_per_second: float
    samples_per_second_interval: Interval
    tokens_per_second: float | None = Field(default=None, description="None for images")
    flops_per_step: float = Field(description="floating-point operations that the model needs, recomputation left out")
    mfu: float | None = Field(default=None, description="model FLOP/s over the device's dense peak, None if unknown")
    traced_by: TracedBy = Field(description="how the model's operators were found out")
    communication_s: float = Field(
        default=0.0, description="of the step, waiting for other devices or for the host's memory"
    )
    host_bytes: int = Field(default=0, description="of the host's memory that one device's offloaded states take")
    notes: tuple[str, ...] = ()
