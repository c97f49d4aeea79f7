"""How fast a device really computes and moves bytes: what the time model divides by. Values only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.values import Value

# fp32: on CUDA without tf32. tf32: fp32 matrices on tensor cores.
Arithmetic = Literal["fp32", "tf32", "fp16", "bf16"]


class Rates(Value):
    """Attainable rates of one device."""

    matmul_flops: dict[Arithmetic, float] = Field(description="FLOP/s of large matrix products; absent: not offered")
    peak_flops: dict[Arithmetic, float] = Field(
        default_factory=dict, description="dense peak by the data sheet, for the model FLOP utilisation"
    )
    bandwidth: float = Field(gt=0, description="bytes/s that element-wise operators attain, read and written")
    launch_s: float = Field(ge=0, description="seconds an operator takes at the least, however small")
    host_bandwidth: float = Field(gt=0, description="bytes/s from host to device")
    source: Literal["table", "measured"]
