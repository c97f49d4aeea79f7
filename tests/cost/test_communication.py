"""What is sent, how long it takes, and how much of it hides behind computing."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_hardware
from profiles import make_family, make_group, make_profile, make_rates

from autotune.cost.communication import (
    ADAPTER_GB_S,
    EXCHANGES,
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_SHARE,
    Network,
    exposed_seconds,
    host_seconds,
    layer_seconds,
    network_of,
    volume,
)
from autotune.cost.sharding import WAYS
from autotune.values.catalogue import gpu_named, hypothetical
from autotune.values.config import Parallelism

PSI = 1_000_000 * 2  # bytes of weights and of gradients, in 16 bits
NVLINK = Network(devices_per_node=8, link=1e9, node=1e8)
IDLE, LONG = np.zeros(1), np.full(1, 3e6)  # seconds of a micro-batch
ONE = np.ones(1)


def model(**fields):
    matrix = make_group(1000, 100, element_bytes=2)
    return make_profile(
        make_family(dtype="bfloat16", **fields),
        parameters=(matrix.model_copy(update={"count": 10}),),
        layer=(matrix,),
        layers=10,
        hidden_bytes=1e6,
    )


def seconds(sharding: str = "none", *, micro=IDLE, accumulation: float = 1, network=NVLINK, world: int = 8, **fields):
    spread = Parallelism(world_size=world, sharding=sharding, **fields)
    return float(exposed_seconds(model(), spread, network, micro, ONE, accumulation * ONE)[0])


@pytest.mark.parametrize(
    ("sharding", "times"),
    [("none", 2), ("zero_1", 3), ("zero_2", 3), ("zero_3", 3), ("fsdp_grad_op", 2), ("fsdp_full", 3)],
)
def test_a_step_sends_so_many_times_the_weights(sharding, times):
    """arXiv:1910.02054, section 7; DeepSpeed's stages 1 and 2 reduce for all ranks, so that theirs is 3 and not 2."""
    sent = sum(volume(exchange, model(), 1_000_000) for exchange in EXCHANGES[sharding])
    assert sent == pytest.approx(times * PSI, rel=1e-3)


def test_every_way_says_what_it_sends_and_a_ring_less_the_fewer_devices_there_are():
    assert EXCHANGES.keys() == WAYS.keys()
    (all_reduce,) = EXCHANGES["none"]
    assert [volume(all_reduce, model(), n) / PSI for n in (1, 2, 4)] == [0, 1, 1.5]


@pytest.mark.parametrize("sharding", WAYS)
def test_the_network_is_slower_than_a_node(sharding):
    assert seconds(sharding, world=16) > seconds(sharding, world=8)


def test_weights_after_the_step_hide_behind_nothing():
    assert seconds("zero_1", micro=LONG) >= PSI * 7 / 8 / NVLINK.link


def test_on_a_cpu_nothing_is_hidden():
    gloo = Network(devices_per_node=8, link=1e9, node=1e8, on_cpu=True)
    assert seconds("fsdp_full", network=gloo, micro=LONG) == pytest.approx(seconds("fsdp_full", network=gloo))


def test_ddp_waits_for_the_last_micro_batch_while_stage_2_reduces_each():
    ddp, two = ((seconds(s, accumulation=4), seconds(s)) for s in ("none", "zero_2"))
    assert ddp[0] == pytest.approx(ddp[1])
    assert two[0] > two[1]


# Of a layer, with the share of the layers whose forward pass runs again.
PASSES = [("none", 2), ("full", 3), ("offload", 3), ("every-2nd", 2.5), ("every-4th", 2.25)]


# Two all-reduces, each twice through the link (arXiv:1909.08053, section 3); four tensors (arXiv:2309.14509, 3.2).
@pytest.mark.parametrize(("way", "times"), [("tensor_parallel", (2, 2)), ("sequence_parallel", (4, 1))])
@pytest.mark.parametrize(("checkpointing", "passes"), PASSES)
def test_hidden_states_are_exchanged_in_each_layer_and_pass(way, times, checkpointing, passes):
    profile, spread = model(checkpointing=checkpointing), Parallelism(world_size=4, **{way: 4})
    count, factor = times
    each = factor * 3 / 4 * 1e6 / 1e9 + NVLINK.channel(4, stride=1).latency_s
    assert float(layer_seconds(profile, spread, NVLINK, ONE)[0]) == pytest.approx(count * passes * 10 * each)


def test_those_that_share_a_sample_share_the_weights_as_well():
    shared = Parallelism(world_size=4, sharding="zero_3", sequence_parallel=4)
    without = Parallelism(world_size=4, sharding="zero_3")
    found, expected = (exposed_seconds(model(), s, NVLINK, LONG, ONE, ONE) for s in (shared, without))
    assert found == pytest.approx(expected + layer_seconds(model(), shared, NVLINK, ONE))


def waits(offload: str, *, ranks: int = 4, per_node: int = 4, **fields) -> tuple[float, float]:
    spread = Parallelism(world_size=ranks, sharding="zero_3", offload=offload, **fields)
    return host_seconds(make_profile(), spread, make_rates(), per_node)


def test_the_optimizers_states_cost_a_step_and_weights_each_micro_batch():
    optimizer, parameters = waits("optimizer"), waits("parameters")
    assert optimizer[0] == parameters[0] > 0
    assert optimizer[1] == 0
    assert parameters[1] > 0


H100 = hypothetical(gpu_named("h100-80gb"))


@pytest.mark.parametrize(
    ("members", "stride", "gb_s", "expected"),
    [
        (8, 1, None, 450e9 * NVLINK_SHARE),  # in one node a device's own link
        (4, 2, None, 450e9 * NVLINK_SHARE),
        (64, 1, None, 8 * ADAPTER_GB_S * 1e9 * NETWORK_SHARE),  # all devices of all nodes share a node's adapters
        (64, 1, 50, 50e9 * NETWORK_SHARE),
        (8, 8, 400, 50e9 * NETWORK_SHARE),  # beside tensor parallel 8 each data-parallel group has an eighth of them
    ],
)
def test_a_group_has_the_slowest_link_between_its_ranks(members, stride, gb_s, expected):
    network = network_of(H100, 64, nodes=8, gb_s=gb_s, host_bandwidth=5e10)
    assert network.channel(members, stride=stride).bandwidth == pytest.approx(expected)


def test_a_device_that_the_table_lacks_has_the_link_to_its_host_and_a_cpu_its_cores():
    unknown = H100.model_copy(update={"name": "Some GPU"})
    assert network_of(unknown, 2, host_bandwidth=1e10).link == 1e10 * PCIE_SHARE
    channel = network_of(make_hardware(), 2, host_bandwidth=1e10).channel(2, stride=1)
    assert not channel.overlaps
    assert channel.bandwidth < 1e10
