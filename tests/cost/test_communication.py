"""What is sent, how long it takes, and how much of it hides behind computing."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import make_family, make_group, make_profile, make_rates

from autotune.cost.communication import EXCHANGES, Passes, exposed_seconds, host_seconds, sequence_seconds, volume
from autotune.cost.network import Network
from autotune.cost.sharding import WAYS
from autotune.values.config import Parallelism

PSI = 1_000_000 * 2  # bytes of weights and of gradients, in 16 bits
NVLINK = Network(devices_per_node=8, link=1e9, node=1e8)
IDLE = Passes(np.zeros(1), np.zeros(1))
LONG = Passes(np.full(1, 1e6), np.full(1, 1e6))
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


def seconds(sharding: str = "none", *, passes=IDLE, accumulation: float = 1, network=NVLINK, world: int = 8, **fields):
    spread = Parallelism(world_size=world, sharding=sharding, **fields)
    return float(exposed_seconds(model(), spread, network, passes, ONE, accumulation * ONE)[0])


@pytest.mark.parametrize(
    ("sharding", "times"),
    [("none", 2), ("zero_1", 3), ("zero_2", 3), ("zero_3", 3), ("fsdp_grad_op", 2), ("fsdp_full", 3)],
)
def test_a_step_sends_so_many_times_the_weights(sharding, times):
    """arXiv:1910.02054, section 7; DeepSpeed's stages 1 and 2 reduce for all ranks, so that theirs is 3 and not 2."""
    sent = sum(volume(exchange, model(), 1_000_000) for exchange in EXCHANGES[sharding])
    assert sent == pytest.approx(times * PSI, rel=1e-3)


def test_every_way_says_what_it_sends():
    assert EXCHANGES.keys() == WAYS.keys()


def test_a_ring_sends_less_the_fewer_devices_there_are():
    (all_reduce,) = EXCHANGES["none"]
    assert [volume(all_reduce, model(), n) / PSI for n in (1, 2, 4)] == [0, 1, 1.5]


@pytest.mark.parametrize("sharding", WAYS)
def test_the_network_is_slower_than_a_node(sharding):
    assert seconds(sharding, world=16) > seconds(sharding, world=8)


def test_what_is_hidden_costs_its_first_message_only():
    assert seconds("fsdp_full", passes=LONG) < seconds("fsdp_full") / 5
    assert seconds("fsdp_full", passes=LONG) > 0


def test_weights_after_the_step_hide_behind_nothing():
    assert seconds("zero_1", passes=LONG) >= PSI * 7 / 8 / NVLINK.link


def test_on_a_cpu_nothing_is_hidden():
    gloo = Network(devices_per_node=8, link=1e9, node=1e8, on_cpu=True)
    assert seconds("fsdp_full", network=gloo, passes=LONG) == pytest.approx(seconds("fsdp_full", network=gloo))


def test_ddp_waits_for_the_last_micro_batch_while_stage_2_reduces_each():
    ddp, two = ((seconds(s, accumulation=4), seconds(s)) for s in ("none", "zero_2"))
    assert ddp[0] == pytest.approx(ddp[1])
    assert two[0] > two[1]


def test_smaller_buckets_are_more_messages():
    assert seconds(ddp_bucket_cap_mb=1) > seconds()


# Of a layer, with the share of the layers whose forward pass runs again.
PASSES = [("none", 2), ("full", 3), ("offload", 3), ("every-2nd", 2.5), ("every-4th", 2.25)]


@pytest.mark.parametrize(("checkpointing", "passes"), PASSES)
def test_tensor_parallel_reduces_hidden_states_twice_a_layer_and_pass(checkpointing, passes):
    """arXiv:1909.08053, section 3."""
    profile = model(checkpointing=checkpointing)
    spread = Parallelism(world_size=4, tensor_parallel=4)
    network = Network(devices_per_node=8, link=1e9, node=1e8)
    found = float(exposed_seconds(profile, spread, network, LONG, ONE, ONE)[0])
    each = 2 * 3 / 4 * 1e6 / 1e9 + network.channel(4, stride=1).latency_s
    assert found == pytest.approx(2 * passes * 10 * each)


@pytest.mark.parametrize(("checkpointing", "passes"), PASSES)
def test_sequence_parallel_exchanges_four_tensors_a_layer_and_pass(checkpointing, passes):
    """arXiv:2309.14509, section 3.2."""
    profile = model(checkpointing=checkpointing)
    spread = Parallelism(world_size=4, sequence_parallel=4)
    network = Network(devices_per_node=8, link=1e9, node=1e8)
    found = float(sequence_seconds(profile, spread, network, ONE)[0])
    assert found == pytest.approx(4 * passes * 10 * (3 / 4 * 1e6 / 1e9 + network.channel(4, stride=1).latency_s))


def test_those_that_share_a_sample_share_the_weights_as_well():
    shared = Parallelism(world_size=4, sharding="zero_3", sequence_parallel=4)
    without = Parallelism(world_size=4, sharding="zero_3")
    network = Network(devices_per_node=8, link=1e9, node=1e8)
    found, expected = (exposed_seconds(model(), s, network, LONG, ONE, ONE) for s in (shared, without))
    assert found == pytest.approx(expected + sequence_seconds(model(), shared, network, ONE))


def test_one_device_waits_for_nobody():
    assert seconds(world=1) == 0


def waits(offload: str, *, ranks: int = 4, per_node: int = 4, **fields) -> tuple[float, float]:
    spread = Parallelism(world_size=ranks, sharding="zero_3", offload=offload, **fields)
    return host_seconds(make_profile(), spread, make_rates(), per_node)


def test_the_optimizers_states_cost_a_step_and_weights_each_micro_batch():
    optimizer, parameters = waits("optimizer"), waits("parameters")
    assert optimizer[0] == parameters[0] > 0
    assert optimizer[1] == 0
    assert parameters[1] > 0


def test_devices_of_a_node_share_its_memory():
    assert waits("optimizer", per_node=4)[0] > waits("optimizer", per_node=1)[0]


def test_more_nodes_have_more_hosts():
    assert waits("optimizer", ranks=64, per_node=8)[0] == pytest.approx(waits("optimizer", ranks=8, per_node=8)[0] / 8)
