"""Seconds of an optimizer step, from a family's profile and a device's rates. Pure arithmetic on arrays.

Each operator takes what its arithmetic or its bytes take, whichever is more, and never less than a launch. On the CPU
these add up. A GPU computes while the host goes on to the next launch, so a micro-step takes the device's sum or the
host's, whichever is more. The optimizer's step moves weights, gradients and states; what else a step needs is added.

Not covered: contention, caches, kernels that are far from the attainable rates. What is measured corrects it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.cost.kinds import CONTRACTION, TRANSFER
from autotune.cost.optimizers import optimizer, state_bytes
from autotune.cost.profile import Profile
from autotune.values.config import Precision
from autotune.values.estimate import Arithmetic, Rates

# A compiled model runs chains of element-wise operators as one: of the bytes of all of them about this share is left.
# Published: Llama-2-1B, micro-batch 4, 6,200 against 9,000 tokens/s (torchao's low-bit optimizers table).
COMPILED_SHARE = 0.4

# What the Trainer itself does around a micro-step, on the host: seconds.
TRAINER_S = 1.5e-3


def step_seconds(
    profile: Profile,
    rates: Rates,
    optim: str,
    micro_batches: NDArray[np.float64],
    accumulation: NDArray[np.float64],
    *,
    tf32: bool = False,
    compiled: bool = False,
) -> NDArray[np.float64]:
    """Return the seconds of a step for each micro-batch with its accumulation.

    Args:
        profile: Of the family.
        rates: Of the device.
        optim: The optimizer.
        micro_batches: Samples.
        accumulation: Micro-batches of a step.
        tf32: Whether fp32 contractions use tensor cores.
        compiled: Whether element-wise operators are fused.
    """
    micro = micro_step_seconds(profile, rates, micro_batches, tf32=tf32, compiled=compiled)
    adding = 3.0 * profile.gradients_bytes / rates.bandwidth  # read both, write one
    return accumulation * micro + (accumulation - 1) * adding + optimizer_seconds(profile, rates, optim)


def micro_step_seconds(
    profile: Profile, rates: Rates, micro_batches: NDArray[np.float64], *, tf32: bool, compiled: bool
) -> NDArray[np.float64]:
    """Return the seconds of a forward and backward pass for each micro-batch."""
    work = profile.work_arrays()
    ones = np.stack([np.ones_like(micro_batches), micro_batches])
    flops, moved = work["flops"] @ ones, work["moved"] @ ones
    contraction = work["kind"] == CONTRACTION
    speed = np.where(
        work["half"] > 0, _rate(profile, rates, half=True, tf32=tf32), _rate(profile, rates, half=False, tf32=tf32)
    )
    computing = np.where(contraction[:, None], flops / speed[:, None], 0.0)
    transfer = work["kind"] == TRANSFER
    share = np.where(contraction | transfer, 1.0, COMPILED_SHARE if compiled else 1.0)
    moving = moved * share[:, None] / np.where(transfer, rates.host_bandwidth, rates.bandwidth)[:, None]
    busy = np.maximum(computing, moving)
    count = work["count"]
    launches = float(count.sum()) * (COMPILED_SHARE if compiled else 1.0) * rates.launch_s
    total: NDArray[np.float64] = count @ busy
    if profile.family.device == "cpu":
        return total + launches + TRAINER_S
    return np.maximum(total, launches) + TRAINER_S


def optimizer_seconds(profile: Profile, rates: Rates, optim: str) -> float:
    """Return the seconds of an optimizer step, the clipping of gradients included."""
    row = optimizer(optim)
    states = sum(state_bytes(optim, profile.parameters))
    trained = profile.gradients_bytes
    clipping = 3.0 * trained  # the norm reads them, scaling reads and writes
    fused = 3.0 * trained + 2.0 * states  # weights read and written, gradients read, states read and written
    on_cpu = profile.family.device == "cpu"
    factor = row.cpu_cost if on_cpu else row.passes
    tensors = sum(g.count for g in profile.parameters if g.trained)
    kernels = tensors * (row.kernels if on_cpu or row.temporaries in ("loop", "adafactor") else 0.2)
    return (clipping + factor * fused) / rates.bandwidth + kernels * rates.launch_s


def _rate(profile: Profile, rates: Rates, *, half: bool, tf32: bool) -> float:
    """Return the FLOP/s of contractions."""
    wanted: Arithmetic = "fp32"
    if half:
        wanted = "fp16" if "float16" in (profile.family.autocast, profile.family.dtype) else "bf16"
    elif tf32:
        wanted = "tf32"
    return rates.matmul_flops.get(wanted) or rates.matmul_flops["fp32"]


def dense_peak(rates: Rates, precision: Precision, *, tf32: bool) -> float | None:
    """Return the data sheet's peak that the model FLOP utilisation of a precision is a share of, if it has one."""
    names: dict[Precision, Arithmetic] = {Precision.FP32: "tf32" if tf32 else "fp32", Precision.FP16: "fp16"}
    return rates.peak_flops.get(names.get(precision, "bf16"))
