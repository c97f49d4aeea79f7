"""What one of several devices holds, and waits for: published figures of ZeRO and FairScale, and what libraries do."""

from dataclasses import replace

import numpy as np
import pytest
from factories import make_hardware
from profiles import MB, make_family, make_group, make_profile, make_rates, make_storages, parts_of

from autotune.cost.sharding import (
    ADAPTER_GB_S,
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_SHARE,
    WAYS,
    Network,
    Share,
    Spread,
    exposed_seconds,
    host_seconds,
    layer_seconds,
    network_of,
    share_of,
)
from autotune.training.arguments import ZERO_BUCKET_ELEMENTS
from autotune.units import GIB
from autotune.values.catalogue import gpu_named
from autotune.values.config import Parallelism

GB = 1e9


def spread(sharding: str = "none", ranks: int = 64, *, mixed: bool = True, **fields) -> Spread:
    return Spread(Parallelism(world_size=ranks, sharding=sharding, **fields), mixed=mixed)


def of_size(parameters: float, *, layers: int = 40, element_bytes: float = 2, **fields):
    """A model of equal square matrices, one a layer, as the 16 bits of mixed precision see it."""
    side = round((parameters / layers) ** 0.5)
    matrix = make_group(side, side, element_bytes=element_bytes)
    return make_profile(
        make_family(device="cuda", dtype="bfloat16"),
        parameters=(matrix.model_copy(update={"count": layers}),),
        layer=(matrix,),
        layers=layers,
        storages=make_storages((0, 2, 0, MB)),
        **fields,
    )


def share(model, *args, optim: str = "adamw_torch_fused", accumulated: bool = False, **fields) -> Share:
    """What one device holds of a model; the rest is of `spread`."""
    return share_of(model, optim, spread(*args, **fields), accumulated=accumulated)


def states(share: Share) -> float:
    """Bytes of weights, gradients and optimizer states between micro-batches: model states, as ZeRO's authors say."""
    return share.weights + share.accumulated + share.states


@pytest.mark.parametrize(("sharding", "published"), [("zero_1", 31.4), ("zero_2", 16.6), ("zero_3", 1.9)])
def test_120_gb_of_states_over_64_devices(sharding, published):
    """arXiv:1910.02054, figure 1: 7.5 billion parameters, mixed-precision Adam; 120 GB where nothing is dealt out."""
    model = of_size(7.5e9)
    assert states(share(model, sharding)) / GB == pytest.approx(published, rel=0.02)
    assert states(share(model, sharding, 1)) / GB == pytest.approx(120, rel=0.01)


@pytest.mark.parametrize("sharding", ["zero_2", "fsdp_grad_op"])
def test_fairscale_on_8_a100s_saves_over_55_percent_and_up_to_15_gib(sharding):
    """Lightning's figures of sharded training: states and gradients dealt out, weights in fp32 on every device."""

    def peak(parameters: float, sharding: str) -> float:
        model = of_size(parameters, element_bytes=4)
        held = share(model, sharding, 8, mixed=False)
        return parts_of(model, "adamw_torch_fused", 1, 1, held).allocated

    whole, sharded = (peak(1.2e9, way) for way in ("none", sharding))
    assert 1 - sharded / whole > 0.55
    assert (whole - sharded) / GIB == pytest.approx(15, rel=0.1)
    # "1.2B became 2B parameters on the same hardware"
    assert peak(2e9, sharding) < whole


@pytest.mark.parametrize("sharding", WAYS)
def test_more_devices_never_hold_more(sharding):
    model = of_size(1e9)
    held = [share(model, sharding, n, optim="adamw_torch") for n in (2, 4, 8, 64)]
    peaks = [parts_of(model, "adamw_torch", 1, 1, one).allocated for one in held]
    assert peaks == sorted(peaks, reverse=True)


def test_ddp_keeps_everything_and_a_copy_of_the_gradients_in_its_buckets():
    model = of_size(1e8, element_bytes=4)
    found = share(model, "none", 2, mixed=False)
    assert found.weights == model.weights_bytes
    assert found.forward_buffers == found.step_buffers == model.gradients_bytes


@pytest.mark.parametrize(("ranks", "mixed"), [(2, False), (4, True)])
def test_fsdp_peaks_at_10_bytes_a_parameter_over_the_devices_and_at_20_with_fp32_shards(ranks, mixed):
    """Measured: Mistral-7B, foreach AdamW, two A100s in pure bf16 and four by the Trainer's bf16 flag: 36.23 GB."""
    mistral = of_size(7.2417e9, layers=32)
    held = share(mistral, "fsdp_full", ranks, mixed=mixed, optim="adamw_torch")
    assert parts_of(mistral, "adamw_torch", ranks, 1, held).allocated / GB == pytest.approx(36.23, rel=0.005)


def test_fsdp_that_accumulates_holds_whole_gradients_until_the_last_micro_batch():
    model = of_size(1e9)
    once, often = (share(model, "fsdp_full", 8, accumulated=some) for some in (False, True))
    assert once.gradient_share == pytest.approx(2 / 8)  # fp32 shards of 16-bit gradients
    assert (often.gradient_share, often.accumulated) == (1.0, model.gradients_bytes)


def test_grad_op_gathers_the_whole_model_and_full_two_layers_of_it():
    model = of_size(1e9, layers=10)
    grad_op, full = (share(model, way, 8, mixed=False) for way in ("fsdp_grad_op", "fsdp_full"))
    layer = model.weights_bytes / 10
    assert grad_op.forward_buffers == pytest.approx((10 + 1) * layer)  # the message of the last one is still there
    assert grad_op.loss_buffers == pytest.approx(10 * layer)
    assert full.backward_buffers == pytest.approx((2 + 2) * layer)  # weights, and gradients on their way


def test_the_unit_of_the_head_is_given_back_when_its_backward_pass_ends_unless_embeddings_are_in_it():
    """In bytes of fp32: a table or a head of 3,200, a layer of 256."""
    table, head, layer = make_group(100, 8, embedding=True), make_group(100, 8), (make_group(8, 8),)

    def held(*outside, accumulated):
        model = make_profile(parameters=(*layer, *outside), layer=layer, outside=outside)
        found = share(model, "fsdp_full", 2, mixed=False, accumulated=accumulated)
        return found.forward_buffers, found.loss_buffers, found.backward_buffers

    # In the forward pass a message too, of the unit that came last: the head, or with tied weights a layer.
    assert held(table, head, accumulated=False) == (2 * 3200, 3200, 2 * 256 + 256 + 3200)  # the head's are sent
    assert held(table, accumulated=False) == (3200 + 256, 3200, 3200 + 2 * 256 + 2 * 256)
    # Beside whole gradients of earlier micro-batches a layer's own are added to them.
    assert held(table, head, accumulated=True) == (2 * 3200, 3200, 2 * 256 + 3200)
    assert held(table, accumulated=True) == (3200 + 256, 3200, 3200 + 2 * 256)


def test_shards_are_of_the_first_ranks_rows_and_packed_weights_stay_packed():
    uneven, packed = make_group(10, 3), make_group(64, 64, element_bytes=0.5, trained=False)
    model = make_profile(parameters=(uneven, packed))
    assert share(model, "fsdp_full", 4).weights == 4 * 3 * 3 + 64 * 64 / 2 / 4  # three of ten rows


def test_deepspeed_has_messages_of_gradients_and_stage_3_leaves_a_billion_weights_gathered():
    model = of_size(7e9)
    two, three = (share(model, sharding, 8) for sharding in ("zero_2", "zero_3"))
    assert (two.forward_buffers, two.backward_buffers) == (0, 2 * 2 * ZERO_BUCKET_ELEMENTS)
    assert three.backward_buffers == pytest.approx(2 * ZERO_BUCKET_ELEMENTS + 2e9, rel=0.001)


@pytest.mark.parametrize(("sharding", "gradients"), [("none", 8 + 4), ("zero_1", 8 + 4), ("zero_2", 4 + 8)])
def test_zero_2_has_a_later_micro_batchs_gradients_until_they_are_reduced(sharding, gradients):
    matrix, rows = make_group(1000, 1000), ((2, 3, 4 * MB, 0, True), (3, 4, 4 * MB, 0, True))
    two = {"parameters": (matrix.model_copy(update={"count": 2}),), "layer": (matrix,)}
    model = make_profile(make_family(device="cuda"), storages=make_storages((0, 2, 0, MB), *rows), **two)
    held = share(model, sharding, 2, mixed=False, accumulated=True)
    assert parts_of(model, "sgd", 1, 2, held).gradients == gradients * MB


@pytest.mark.parametrize(
    ("sharding", "offload"), [("zero_2", "optimizer"), ("zero_3", "parameters"), ("fsdp_full", "parameters")]
)
def test_offloaded_states_are_the_hosts_and_offloaded_weights_are_only_gathered(sharding, offload):
    here, there = (share(of_size(1e9), sharding, 4, offload=kind) for kind in ("none", offload))
    assert (there.states, there.gradients, there.stepping) == (0, 0, 0)
    assert there.weights == (here.weights if offload == "optimizer" else 0)
    assert there.backward_buffers == here.backward_buffers > 0
    assert there.host >= 16e9 / 4 * 0.99  # fp32 weights, two states, gradients
    assert offload == "parameters" or there.host < 16e9 / 4 * 1.01


def test_gradients_on_their_way_are_there_in_the_backward_pass_only():
    activations, gradient = (0, 3, 0, MB), (2, 3, 1, 0, True)
    matrix = make_group(100, 100)
    late, early = (
        make_profile(parameters=(matrix,), layer=(matrix,), storages=make_storages(*rows))
        for rows in ((activations, gradient), (activations,))
    )
    held = share(late, "fsdp_full", 2, mixed=False)
    assert held.backward_buffers > held.forward_buffers
    assert parts_of(late, "sgd", 50, 1, held).communication == held.backward_buffers
    assert parts_of(early, "sgd", 50, 1, held).communication == held.forward_buffers
    frozen = matrix.model_copy(update={"trained": False})
    model = make_profile(parameters=(frozen, make_group(4)), layer=(frozen,))
    assert share(model, "fsdp_full", 2, mixed=False).backward_buffers == 2 * 40_000  # of its weights alone


# What is sent, how long it takes, and how much of it hides behind computing

PSI = 1_000_000 * 2  # bytes of weights and of gradients, in 16 bits
NVLINK = Network(devices_per_node=8, link=1e9, node=1e8)
IDLE, LONG = np.zeros(1), np.full(1, 3e6)  # seconds of a micro-batch
ONE = np.ones(1)


def sent_model(**fields):
    matrix = make_group(1000, 100, element_bytes=2)
    return make_profile(
        make_family(dtype="bfloat16", **fields),
        parameters=(matrix.model_copy(update={"count": 10}),),
        layer=(matrix,),
        layers=10,
        hidden_bytes=1e6,
        keys_bytes=5e5,
    )


def seconds(sharding: str = "none", *, micro=IDLE, accumulation: float = 1, network=NVLINK, world: int = 8, **fields):
    spread = Parallelism(world_size=world, sharding=sharding, **fields)
    return float(exposed_seconds(sent_model(), spread, network, micro, ONE, accumulation * ONE)[0])


@pytest.mark.parametrize(
    ("sharding", "times"),
    [("none", 2), ("zero_1", 3), ("zero_2", 3), ("zero_3", 3), ("fsdp_grad_op", 2), ("fsdp_full", 3)],
)
def test_a_step_sends_so_many_times_the_weights(sharding, times):
    """arXiv:1910.02054, section 7; DeepSpeed's stages 1 and 2 reduce for all ranks, so that theirs is 3 and not 2."""
    one_node = Network(devices_per_node=10**6, link=1.0, node=1.0)  # where bytes are seconds
    assert seconds(sharding, network=one_node, world=10**6) == pytest.approx(times * PSI, rel=1e-3)
    two = seconds(sharding, network=one_node, world=2)
    assert two == pytest.approx(times * PSI / 2, rel=1e-3)  # a ring sends the less the fewer devices there are


def test_a_replica_on_each_node_gathers_weights_inside_and_sends_its_share_of_the_gradients_outside():
    inside, outside = NVLINK.link, NVLINK.node / 8  # eight groups of two share a node's adapters
    expected = 3 * PSI * 7 / 8 / inside + 2 * PSI / 8 / 2 / outside
    found = seconds("fsdp_full", world=16, replicas=2)
    assert found == pytest.approx(expected, abs=4 * 12 * 70e-6)  # and the messages' own time
    assert found < seconds("fsdp_full", world=16)


@pytest.mark.parametrize("sharding", WAYS)
def test_the_network_is_slower_than_a_node(sharding):
    assert seconds(sharding, world=16) > seconds(sharding, world=8)


def test_nothing_hides_on_a_cpu_but_ddps_gradients_and_weights_after_the_step_nowhere():
    assert seconds("zero_1", micro=LONG) >= PSI * 7 / 8 / NVLINK.link
    gloo = replace(NVLINK, on_cpu=True)
    assert seconds("zero_3", network=gloo, micro=LONG) == pytest.approx(seconds("zero_3", network=gloo))
    one_bucket, slow = {"network": gloo}, replace(gloo, link=1e6)  # the last, which nothing hides
    assert seconds("none", **one_bucket, micro=LONG) == pytest.approx(seconds("none", **one_bucket))
    assert seconds("none", network=slow, micro=LONG, ddp_bucket_cap_mb=1) < seconds("none", network=slow) / 1.5


def test_gloo_gathers_at_a_third_of_the_rate_at_which_it_reduces():
    gloo = replace(NVLINK, on_cpu=True, link=1e6, node=1e6)
    reducing, gathering = 2 * PSI * 7 / 8 / gloo.link, PSI * 7 / 8 / gloo.link
    assert seconds("zero_1", network=gloo) == pytest.approx(reducing + 3 * gathering, rel=1e-3)


def test_ddp_waits_for_the_last_micro_batch_while_stage_2_reduces_each():
    ddp, two = ((seconds(s, accumulation=4), seconds(s)) for s in ("none", "zero_2"))
    assert ddp[0] == pytest.approx(ddp[1])
    assert two[0] > two[1]


# Two all-reduces, each twice through the link (arXiv:1909.08053, section 3); four tensors (arXiv:2309.14509, 3.2).
@pytest.mark.parametrize(("way", "count", "factor"), [("tensor_parallel", 2, 2), ("sequence_parallel", 4, 1)])
@pytest.mark.parametrize(
    ("checkpointing", "passes"), [("none", 2), ("full", 3), ("offload", 3), ("every-2nd", 2.5), ("every-4th", 2.25)]
)
def test_hidden_states_are_exchanged_in_each_layer_and_pass(way, count, factor, checkpointing, passes):
    profile, spread = sent_model(checkpointing=checkpointing), Parallelism(world_size=4, **{way: 4})
    each = factor * 3 / 4 * 1e6 / 1e9 + NVLINK.channel(4, stride=1)[1]
    assert float(layer_seconds(profile, spread, NVLINK, ONE)[0]) == pytest.approx(count * passes * 10 * each)


def test_a_ring_gathers_keys_and_values_in_each_pass_and_hands_on_their_gradients_in_fp32():
    ring = Parallelism(world_size=4, sharding="fsdp_full", sequence_parallel=4)
    latency_s = NVLINK.channel(4, stride=1)[1]
    for checkpointing, passes in (("none", 2), ("full", 3)):
        gathered, sent = 3 * 5e5 / 1e9 + latency_s, 2 * 5e5 / 1e9 + latency_s
        found = layer_seconds(sent_model(checkpointing=checkpointing), ring, NVLINK, ONE)
        assert float(found[0]) == pytest.approx(10 * (passes * gathered + 4 * sent))


def test_ddp_sends_buffers_once_a_step_unless_it_is_told_not_to():
    with_buffers = sent_model().model_copy(update={"buffers_bytes": 10**9})
    spreads = [Parallelism(world_size=2, ddp_broadcast_buffers=sends) for sends in (None, True, False)]
    usual, sent, kept = (float(exposed_seconds(with_buffers, s, NVLINK, LONG, ONE, 4 * ONE)[0]) for s in spreads)
    assert usual == sent == pytest.approx(kept + 1 + NVLINK.channel(2, stride=1)[1])


def test_those_that_share_a_sample_share_the_weights_as_well():
    shared = Parallelism(world_size=4, sharding="zero_3", sequence_parallel=4)
    without = Parallelism(world_size=4, sharding="zero_3")
    found, expected = (exposed_seconds(sent_model(), s, NVLINK, LONG, ONE, ONE) for s in (shared, without))
    assert found == pytest.approx(expected + layer_seconds(sent_model(), shared, NVLINK, ONE))


@pytest.mark.parametrize("sharding", ["zero_3", "fsdp_full"])
@pytest.mark.parametrize("accumulation", [1, 8])
def test_no_step_is_shorter_than_its_messages(sharding, accumulation):
    slow, times = Network(devices_per_node=8, link=1e6, node=1e6), 3 * accumulation
    times -= (accumulation - 1) * (sharding == "fsdp_full")  # which reduces in the last micro-batch
    for micro in np.geomspace(0.1, 100, 30):
        waits = seconds(sharding, micro=np.full(1, micro), accumulation=accumulation, network=slow)
        assert accumulation * micro + waits >= times * PSI * 7 / 8 / slow.link


def test_fsdp_sends_its_weights_up_in_fp32_as_often_as_it_gathers_them():
    ways = (spread(way, 8, offload="parameters") for way in ("fsdp_full", "fsdp_grad_op", "zero_3"))
    full, kept, zero = (host_seconds(sent_model(), way, make_rates(), 8)[1] for way in ways)
    assert (full, kept) == pytest.approx((2 * zero, zero))


def test_offloaded_states_cost_a_step_and_offloaded_weights_each_micro_batch():
    spreads = (spread("zero_3", 4, offload=kind) for kind in ("optimizer", "parameters"))
    optimizer, parameters = (host_seconds(make_profile(), one, make_rates(), 4) for one in spreads)
    assert optimizer[0] == parameters[0] > 0
    assert optimizer[1] == 0 < parameters[1]


H100 = gpu_named("h100-80gb").hardware()


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
    assert network.channel(members, stride=stride)[0] == pytest.approx(expected)


def test_a_measured_network_goes_before_what_was_said_also_between_processors():
    measured = H100.model_copy(update={"network_gb_s": 7.0})
    assert network_of(measured, 16, nodes=2, gb_s=50, host_bandwidth=5e10).channel(16, stride=1)[0] == 7e9
    cores = network_of(make_hardware(network_gb_s=0.1), 4, nodes=2, host_bandwidth=1e10)
    assert cores.channel(4, stride=1)[0] == cores.channel(2, stride=2)[0] == 1e8
    assert cores.channel(2, stride=1)[0] > 1e8


def test_a_device_that_the_table_lacks_has_the_link_to_its_host_and_a_cpu_its_cores():
    unknown = H100.model_copy(update={"name": "Some GPU"})
    assert network_of(unknown, 2, host_bandwidth=1e10).link == 1e10 * PCIE_SHARE
    cores = network_of(make_hardware(), 2, host_bandwidth=1e10)
    assert cores.on_cpu
    assert cores.channel(2, stride=1)[0] < 1e10
