"""What a step waits for the host."""

from __future__ import annotations

import pytest
from profiles import make_profile, make_rates

from autotune.cost.offload import host_seconds
from autotune.values.config import Parallelism


def waits(offload: str, *, ranks: int = 4, per_node: int = 4, **fields) -> tuple[float, float]:
    spread = Parallelism(world_size=ranks, sharding="zero_3", offload=offload, **fields)
    return host_seconds(make_profile(), spread, make_rates(), per_node)


def test_the_optimizers_states_cost_a_step_and_weights_each_micro_batch():
    optimizer, parameters = waits("optimizer"), waits("parameters")
    assert optimizer[0] == parameters[0] > 0
    assert optimizer[1] == 0
    assert parameters[1] > 0


def test_nvme_is_slower():
    assert waits("optimizer", offload_to="nvme")[0] > waits("optimizer")[0]
    assert waits("parameters", offload_to="nvme")[1] > waits("parameters")[1]


def test_devices_of_a_node_share_its_memory():
    assert waits("optimizer", per_node=4)[0] > waits("optimizer", per_node=1)[0]


def test_more_nodes_have_more_hosts():
    assert waits("optimizer", ranks=64, per_node=8)[0] == pytest.approx(waits("optimizer", ranks=8, per_node=8)[0] / 8)
