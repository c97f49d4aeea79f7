"""What decides which operators a micro-step runs. Values only, without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.adapter_config import AnyAdapter
from autotune.architecture import Task
from autotune.checkpointing import KINDS, Checkpointing
from autotune.config import Precision, Quantization, TrainConfig, Workload
from autotune.hardware import Hardware
from autotune.values import Value


class Family(Value):
    """Configurations whose micro-steps run the same operators: all but micro-batch, accumulation and optimizer."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="of the weights")
    autocast: Literal["bfloat16", "float16"] | None = None
    checkpointing: Checkpointing = "none"
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    experts_per_token: int | None = None
    expert_capacity: int | None = None
    adapter: AnyAdapter | None = None
    quantization: Quantization | None = None

    @property
    def checkpointed_every(self) -> int:
        """Every so manieth layer is checkpointed, 1 where none is."""
        return 1 if self.checkpointing == "none" else KINDS[self.checkpointing].every


class Shape(Value):
    """Sizes of the inputs of one sample."""

    task: Task
    length: int = Field(description="tokens; images have the size of the config")
    target_length: int | None = None
    padded: bool = Field(default=False, description="whether batches hold padding")


def family_of(config: TrainConfig, hardware: Hardware) -> Family:
    """Return the family of a configuration on a device."""
    autocast: dict[Precision, Literal["bfloat16", "float16"]] = {
        Precision.BF16: "bfloat16",
        Precision.FP16: "float16",
    }
    return Family(
        device="cpu" if hardware.is_cpu else "cuda",
        dtype="bfloat16" if config.precision is Precision.PURE_BF16 else "float32",
        autocast=autocast.get(config.precision),
        checkpointing=config.checkpointing,
        attn_implementation=config.attn_implementation,
        experts_implementation=config.experts_implementation,
        experts_per_token=config.experts_per_token,
        expert_capacity=config.expert_capacity,
        adapter=config.adapter,
        quantization=config.quantization,
    )


def shape_of(workload: Workload) -> Shape:
    """Return the inputs at the peak: the longest samples."""
    lengths = workload.lengths
    return Shape(
        task=workload.task,
        length=lengths.maximum if lengths is not None else workload.sequence_length,
        target_length=workload.target_length,
        padded=lengths is not None and lengths.minimum < lengths.maximum,
    )
