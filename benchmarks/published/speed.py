"""From a published row to the seconds of its optimizer step, measured and predicted; and what is known of its device.

Rows whose throughput is of a whole training step, with lengths that are stated; not parts of a step, padded data, or
arithmetic that isn't predicted. What is predicted is what `autotune estimate` shows of a device by its data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost.communication import network_of
from autotune.cost.profile import Profile
from autotune.cost.rates import sheet_rates
from autotune.cost.time import StepCost
from autotune.values.catalogue import Gpu, hypothetical
from published.rows import NotPredicted, Row
from published.setups import Setup, read

# Devices as their sources write them, where the table of GPUs has another name.
_DEVICES = {
    "V100 (memory size not stated; 16 per node)": "v100-32gb",
    "H100": "h100-80gb",
    "A6000 Ada 48GB": "rtx-6000-ada",
    "A5000 24GB": "rtx-a5000",
    "A100 40GB SXM": "a100-40gb",
    "RTX 4070Ti SUPER 16GB": "rtx-4070-ti-super",
}
# Devices of a node, where they are on several: DGX-2 has 16, all others 8.
_NODE = {"deepspeed_autotune": 16}

# FSDP with mixed precision computes with 16-bit weights, in Composer under autocast as well.
_SHARDED_IN_BF16 = {"llmfoundry": "weights loaded bfloat16 + bf16 autocast", "torchao": "bf16", "torchtitan": "bf16"}


@dataclass(frozen=True)
class Timed:
    """Seconds of an optimizer step of a row, predicted and measured."""

    row: Row
    setup: Setup
    seconds: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.seconds / self.measured - 1

    @property
    def log_factor(self) -> float:
        """The logarithm of measured over predicted seconds, as `Observation.log_time`."""
        return float(np.log(self.measured / self.seconds))


def timed(row: Row, traced: Callable[[Setup], Profile]) -> Timed:
    """Return the seconds of a row's step.

    Raises:
        NotPredicted: Its time isn't stated, or what was run can't be told or isn't predicted.
    """
    _check(row)
    setup = read(_as_read(row))
    measured = _measured_seconds(row, setup)
    seconds = step_cost(row, setup, traced(setup)).seconds(*_sizes(setup))[0]
    return Timed(row, setup, float(seconds), measured)


def step_cost(row: Row, setup: Setup, profile: Profile) -> StepCost:
    """Return what decides the seconds of a row's step, by the data sheet of its device."""
    gpu: Gpu = setup.gpu
    rates = sheet_rates(gpu)
    world = setup.spread.parallelism.world_size
    nodes = max(1, world // _NODE.get(row.group, 8))
    network = network_of(hypothetical(gpu), world, nodes=nodes, host_bandwidth=rates.host_bandwidth)
    compiled = row.compile is True or row.compile == "torch.compile"
    return StepCost(
        profile, rates, setup.optim, setup.spread, network, tf32="tf32" in row.precision.lower(), compiled=compiled
    )


def _sizes(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    return np.array([float(setup.micro_batch)]), np.array([float(setup.accumulation)])


def _measured_seconds(row: Row, setup: Setup) -> float:
    """Return the seconds of an optimizer step as its source states them."""
    samples = setup.micro_batch * setup.accumulation
    world = setup.spread.parallelism.world_size
    if row.throughput:
        if "tokens/s" in row.throughput_unit:  # of one device, where there are several
            return samples * setup.shape.length / row.throughput
        return samples * (world if "global" in row.throughput_unit else 1) / row.throughput
    if row.time and row.time_unit == "s for 1024 samples":
        return row.time * samples * world / 1024
    if row.time and row.time_unit == "ms per step":
        return row.time / 1e3
    raise NotPredicted("no time of a step")


def _check(row: Row) -> None:
    """Refuse what isn't a whole step of known sizes, and what isn't predicted."""
    if not (row.n_gpus and row.ran and (row.throughput or row.time)):
        raise NotPredicted("no time of a step")
    if row.group == "litgpt_resource":
        raise NotPredicted("padded to the longest of a batch, lengths not stated")
    if row.seq_len is None or row.micro_batch is None:
        raise NotPredicted("sequence length or micro-batch not stated")
    if "internal" in row.throughput_unit:
        raise NotPredicted("not the time of a whole step")
    if not row.precision:
        raise NotPredicted("precision not stated")
    text = f"{row.precision} {row.quant}".lower()
    if re.search(r"float8|fp8|mxfp8|int8 weight|rowwise", text):
        raise NotPredicted("arithmetic in 8 bits")
    if row.compile not in (None, False, True, "eager", "torch.compile"):
        raise NotPredicted("compiled in a way that isn't predicted")
    if re.search(r"selective|layer", str(row.grad_ckpt).lower()):
        raise NotPredicted("checkpointing by operator or by layer")
    if re.search(r"\b(CP|TP)\b|TP\d|CP \d", row.distributed):
        raise NotPredicted("spread in a way that isn't modelled: " + row.distributed)
    if "4-bit" in row.optimizer or "lpmm" in row.optimizer:
        raise NotPredicted("optimizer not modelled: 4-bit states")


def _as_read(row: Row) -> Row:
    """Return a row in the words that `setups` reads."""
    changed: dict[str, Any] = {
        "gpu": _DEVICES.get(row.gpu) or _DEVICES.get(re.sub(r"^\d+x | \(.*", "", row.gpu), row.gpu)
    }
    if row.distributed.startswith("FSDP2"):
        changed["distributed"] = "FSDP FULL_SHARD"
    if row.group in _SHARDED_IN_BF16 and (row.n_gpus or 1) > 1:
        changed["precision"] = _SHARDED_IN_BF16[row.group]
    if row.group == "deepspeed_autotune" and "vanilla" in row.distributed and row.precision == "fp16":
        changed["precision"] = "fp16 amp, fp32 weights"
    return row.model_copy(update=changed)
