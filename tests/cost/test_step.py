"""A step of one of several devices: its computing, its optimizer's part, its waiting."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import make_family, make_group, make_profile, make_rates

from autotune.cost.network import Network
from autotune.cost.sharding import Spread
from autotune.cost.step import StepCost
from autotune.cost.time import micro_step_seconds, optimizer_seconds, step_seconds
from autotune.values.config import Parallelism

FAST = Network(devices_per_node=8, link=1e30, node=1e30)
SLOW = Network(devices_per_node=8, link=1e6, node=1e6)
CPU = Network(devices_per_node=8, link=1e30, node=1e30, on_cpu=True)
FOUR, TWO = np.array([4.0]), np.array([2.0])


def cost(network: Network = FAST, *, mixed: bool = False, **fields) -> StepCost:
    profile = make_profile(make_family(device="cuda"), layer=(make_group(1000, 1000),))
    spread = Spread(Parallelism(**fields), mixed)
    return StepCost(profile, make_rates(bandwidth=1e7), "adamw_torch_fused", spread, network)


def seconds(step: StepCost) -> float:
    return float(step.seconds(FOUR, TWO)[0])


def test_one_device_takes_what_it_took():
    step = cost(SLOW)
    assert step.seconds(FOUR, TWO) == step_seconds(step.profile, step.rates, step.optim, FOUR, TWO)
    assert step.waiting(FOUR, TWO) == 0


def test_a_slow_link_is_waited_for():
    assert seconds(cost(SLOW, world_size=4)) > seconds(cost(FAST, world_size=4))
    assert float(cost(SLOW, world_size=4).waiting(FOUR, TWO)[0]) > 0


def test_dealt_out_states_are_updated_by_all():
    whole, part = (cost(world_size=4, sharding=s) for s in ("none", "fsdp_full"))
    saved = seconds(whole) - seconds(part)
    assert saved == pytest.approx(0.75 * optimizer_seconds(whole.profile, whole.rates, whole.optim), rel=0.01)


def test_of_16_bit_weights_the_fp32_shards_are_updated():
    half, wide = (cost(world_size=4, sharding="fsdp_full", mixed=mixed) for mixed in (False, True))
    assert seconds(half) == seconds(wide)  # the hand-made model is in fp32 already
    matrix = make_group(1000, 1000, element_bytes=2)
    narrow = make_profile(make_family(device="cuda", dtype="bfloat16"), parameters=(matrix,))
    spread = Spread(Parallelism(world_size=4, sharding="fsdp_full"), mixed=True)
    of_half = StepCost(narrow, half.rates, half.optim, spread, FAST)
    assert of_half._stepping() == half._stepping()


def test_processes_of_a_cpu_share_its_cores():
    alone, two = (cost(CPU, world_size=n) for n in (1, 2))
    micro = [micro_step_seconds(c.profile, c._rates, FOUR, tf32=False, compiled=False)[0] for c in (alone, two)]
    assert micro[1] == pytest.approx(2 * micro[0], rel=0.01)


def test_offload_waits_for_the_host():
    here, there = (cost(world_size=4, sharding="zero_2", offload=kind) for kind in ("none", "optimizer"))
    assert float(there.waiting(FOUR, TWO)[0]) > float(here.waiting(FOUR, TWO)[0])
