"""Throughput of the DeepSpeed autotuner's tables: the best micro-batch of each ZeRO stage on 16 V100s, November 2021.

The cost model's step for today's libraries, and what DeepSpeed did otherwise then (microsoft/DeepSpeed at that time,
`zero/stage2.py` and `zero/partition_parameters.py`): stage 2 reduced each rank's share of the gradients to its owner,
one after the other, by a ring that such a message doesn't fill; stage 3 gathered and reduced one weight at a time, as
lists of tensors that torch copies piece by piece. Nothing is fitted. Called by `ranking`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autotune.cost.attainable import table_rates
from autotune.cost.network import Channel, network_of
from autotune.cost.profile import Profile, total_bytes
from autotune.cost.time import StepCost
from autotune.values.catalogue.gpus import Gpu, gpu_named, hypothetical
from autotune.values.estimate import Rates
from published.rows import NotPredicted, Row
from published.setups import Setup, read

# The tables' machine has 16 of them in a node, so it is a DGX-2, whose V100s have 32 GB; speed doesn't depend on that.
_GPU = "v100-32gb"

# Bytes that NCCL passes on at a time: 512 KiB (a buffer of 4 MiB in 8 steps) in each of a V100's 12 channels over
# NVSwitch (`NCCL_BUFFSIZE`, `NCCL_STEPS`; two channels a link).
_CHUNK = 12 * (512 << 10)

# Smaller weights are not dealt out by stage 3 (`param_persistence_threshold`).
_PERSISTENT_ELEMENTS = 100_000

Pair = tuple[float, float]  # predicted and measured samples per second


def stages_of(rows: Sequence[Row], traced: Callable[[Setup], Profile]) -> dict[str, dict[str, Pair]]:
    """Return predicted and measured rates of each model's stages, by model and stage."""
    tables: dict[str, dict[str, Pair]] = defaultdict(dict)
    for row in rows:
        stage = re.match(r"ZeRO-(\d) best found by autotuner", row.distributed)
        if row.group != "deepspeed_autotune" or stage is None or not row.throughput:
            continue
        try:
            setup = read(row.model_copy(update={"gpu": _GPU}))
        except NotPredicted:
            continue
        rate = row.n_gpus * setup.micro_batch / seconds(setup, traced(setup))
        tables[row.model][f"ZeRO-{stage.group(1)}"] = (rate, row.throughput)
    return dict(tables)


def seconds(setup: Setup, profile: Profile) -> float:
    """Return the seconds of a step."""
    gpu = gpu_named(_GPU)
    rates = _rates(gpu)
    world = setup.spread.parallelism.world_size
    network = network_of(hypothetical(gpu), world, host_bandwidth=rates.host_bandwidth)
    mixed = profile.family.dtype != "float32"
    cost = StepCost(profile, rates, setup.optim, replace(setup.spread, mixed=mixed), network)
    step = cost.seconds(np.array([float(setup.micro_batch)]), np.array([float(setup.accumulation)]))[0]
    return float(step) + _then(setup, profile, network.channel(world, stride=1), rates)


def _rates(gpu: Gpu) -> Rates:
    return table_rates(gpu.peak_flops, gpu.bandwidth, gpu.capability, name=gpu.name)


def _then(setup: Setup, profile: Profile, channel: Channel, rates: Rates) -> float:
    """Return the seconds that DeepSpeed took beyond what it takes today."""
    ranks, sharding = setup.spread.parallelism.data_parallel, setup.spread.parallelism.sharding
    if sharding == "zero_2":
        return ranks * _reduce(total_bytes(profile.parameters, trained=True) / ranks, ranks, channel)
    if sharding == "zero_3":
        large = sum(g.count for g in profile.parameters if g.elements > _PERSISTENT_ELEMENTS)
        return 3 * large * (ranks * rates.launch_s + channel.latency_s)  # two gathers and a reduction of each
    return 0.0


def _reduce(size: float, ranks: int, channel: Channel) -> float:
    """Return the seconds of a reduction to one rank by a ring: each chunk goes through all ranks in turn."""
    chunks = max(1, math.ceil(size / _CHUNK))
    return (ranks - 1 + chunks) * size / chunks / channel.bandwidth
