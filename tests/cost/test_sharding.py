"""What one of several devices holds: published figures of ZeRO and FairScale, and what the libraries' code says."""

from __future__ import annotations

import pytest
from profiles import MB, make_family, make_group, make_profile, make_storages

from autotune.cost.memory import components
from autotune.cost.sharding import WAYS, Share, Spread, share_of
from autotune.training.arguments import ZERO_BUCKET_ELEMENTS
from autotune.units import GIB
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


def states(share: Share) -> float:
    """Bytes of weights, gradients and optimizer states: what ZeRO's authors call model states."""
    return share.weights + share.gradients + share.states


@pytest.mark.parametrize(("sharding", "published"), [("zero_1", 31.4), ("zero_2", 16.6), ("zero_3", 1.9)])
def test_120_gb_of_states_over_64_devices(sharding, published):
    """arXiv:1910.02054, figure 1: 7.5 billion parameters, mixed-precision Adam; 120 GB where nothing is dealt out."""
    model = of_size(7.5e9)
    assert states(share_of(model, "adamw_torch_fused", spread(sharding), accumulated=False)) / GB == pytest.approx(
        published, rel=0.02
    )
    alone = share_of(model, "adamw_torch_fused", spread(sharding, 1), accumulated=False)
    assert states(alone) / GB == pytest.approx(120, rel=0.01)


@pytest.mark.parametrize(("sharding", "times"), [("zero_1", 4), ("zero_2", 8)])
def test_with_many_devices_states_alone_save_4_times_and_with_gradients_8_times(sharding, times):
    model = of_size(1e9)
    alone, many = (
        states(share_of(model, "adamw_torch_fused", spread(sharding, n), accumulated=False)) for n in (1, 4096)
    )
    assert alone / many == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize("sharding", ["zero_2", "fsdp_grad_op"])
def test_fairscale_on_8_a100s_saves_over_55_percent_and_up_to_15_gib(sharding):
    """Lightning's figures of sharded training: states and gradients dealt out, weights in fp32 on every device."""
    whole, sharded = (peak(1.2e9, way) for way in ("none", sharding))
    assert 1 - sharded / whole > 0.55
    assert (whole - sharded) / GIB == pytest.approx(15, rel=0.1)
    # "1.2B became 2B parameters on the same hardware"
    assert peak(2e9, sharding) < whole


def peak(parameters: float, sharding: str) -> float:
    model = of_size(parameters, element_bytes=4)
    share = share_of(model, "adamw_torch_fused", spread(sharding, 8, mixed=False), accumulated=False)
    return components(model, "adamw_torch_fused", 1, 1, share).allocated


@pytest.mark.parametrize("sharding", WAYS)
def test_more_devices_never_hold_more(sharding):
    model = of_size(1e9)
    peaks = [
        components(model, "adamw_torch", 1, 1, share_of(model, "adamw_torch", spread(sharding, n), accumulated=False))
        for n in (2, 4, 8, 64)
    ]
    allocated = [p.allocated for p in peaks]
    assert allocated == sorted(allocated, reverse=True)


def test_ddp_keeps_everything_and_a_copy_of_the_gradients_in_its_buckets():
    model = of_size(1e8, element_bytes=4)
    share = share_of(model, "adamw_torch_fused", spread(ranks=2, mixed=False), accumulated=False)
    assert share.weights == model.weights_bytes
    assert share.forward_buffers == share.step_buffers == model.gradients_bytes


@pytest.mark.parametrize(("ranks", "mixed"), [(2, False), (4, True)])
def test_fsdp_peaks_at_10_bytes_a_parameter_over_the_devices_and_at_20_with_fp32_shards(ranks, mixed):
    """Measured: Mistral-7B, foreach AdamW, two A100s in pure bf16 and four by the Trainer's bf16 flag: 36.23 GB."""
    mistral = of_size(7.2417e9, layers=32)
    share = share_of(mistral, "adamw_torch", spread("fsdp_full", ranks, mixed=mixed), accumulated=False)
    assert components(mistral, "adamw_torch", ranks, 1, share).allocated / GB == pytest.approx(36.23, rel=0.005)


def test_fsdp_that_accumulates_holds_whole_gradients_until_the_last_micro_batch():
    model = of_size(1e9)
    once, often = (
        share_of(model, "adamw_torch_fused", spread("fsdp_full", 8), accumulated=some) for some in (False, True)
    )
    assert once.gradient_share == pytest.approx(2 / 8)  # fp32 shards of 16-bit gradients
    assert (often.gradient_share, often.accumulated) == (1.0, model.gradients_bytes)


def test_grad_op_gathers_the_whole_model_and_full_two_layers_of_it():
    model = of_size(1e9, layers=10)
    ways = ("fsdp_grad_op", "fsdp_full")
    grad_op, full = (share_of(model, "sgd", spread(way, 8, mixed=False), accumulated=False) for way in ways)
    layer = model.weights_bytes / 10
    assert grad_op.forward_buffers == pytest.approx(10 * layer)
    assert full.backward_buffers == pytest.approx((2 + 2) * layer)  # weights, and gradients on their way


def test_embeddings_are_not_gathered_with_the_head_unless_they_are_tied():
    table, head = make_group(100, 8, embedding=True), make_group(100, 8)
    layer = (make_group(8, 8),)
    for outside in ((table, head), (table,)):
        model = make_profile(parameters=(*layer, *outside), layer=layer, outside=outside)
        share = share_of(model, "sgd", spread("fsdp_full", 2, mixed=False), accumulated=False)
        assert share.forward_buffers == 4 * (800 + 64)


def test_uneven_rows_are_the_first_ranks():
    model = make_profile(parameters=(make_group(10, 3),))
    share = share_of(model, "sgd", spread("fsdp_full", 4, mixed=False), accumulated=False)
    assert share.weights == 4 * 3 * 3  # three of ten rows


def test_packed_weights_stay_packed_beside_fp32_shards():
    packed, adapter = make_group(64, 64, element_bytes=0.5, trained=False), make_group(64, 4)
    model = make_profile(parameters=(packed, adapter))
    share = share_of(model, "sgd", spread("fsdp_full", 2), accumulated=False)
    assert share.weights == 64 * 64 / 2 / 2 + 4 * 64 * 4 / 2


def test_deepspeed_has_messages_of_gradients_and_stage_3_leaves_a_billion_weights_gathered():
    model = of_size(7e9)
    two, three = (share_of(model, "adamw_torch_fused", spread(s, 8), accumulated=False) for s in ("zero_2", "zero_3"))
    assert (two.forward_buffers, two.backward_buffers) == (0, 2 * 2 * ZERO_BUCKET_ELEMENTS)
    assert three.backward_buffers == pytest.approx(2 * ZERO_BUCKET_ELEMENTS + 2e9, rel=0.001)


def test_offloaded_optimizer_states_are_the_hosts():
    model = of_size(1e9)
    here, there = (
        share_of(model, "adamw_torch_fused", spread("zero_2", 4, offload=kind), accumulated=False)
        for kind in ("none", "optimizer")
    )
    assert (there.states, there.gradients, there.stepping) == (0, 0, 0)
    assert there.weights == here.weights
    assert there.host == pytest.approx(16e9 / 4, rel=0.01)  # fp32 weights, two states, gradients


def test_offloaded_parameters_leave_only_what_is_gathered():
    model = of_size(1e9)
    for sharding in ("zero_3", "fsdp_full"):
        share = share_of(model, "adamw_torch_fused", spread(sharding, 4, offload="parameters"), accumulated=False)
        assert (share.weights, share.states) == (0, 0)
        assert share.backward_buffers > 0
        assert share.host >= 16e9 / 4 * 0.99


def test_gradients_on_their_way_are_there_in_the_backward_pass_only():
    activations, gradient = (0, 3, 0, MB), (2, 3, 1, 0, True)
    matrix = make_group(100, 100)
    model = make_profile(parameters=(matrix,), layer=(matrix,), storages=make_storages(activations, gradient))
    share = share_of(model, "sgd", spread("fsdp_full", 2, mixed=False), accumulated=False)
    assert share.backward_buffers > share.forward_buffers
    assert components(model, "sgd", 50, 1, share).communication == share.backward_buffers
    early = make_profile(parameters=(matrix,), layer=(matrix,), storages=make_storages(activations))
    assert components(early, "sgd", 50, 1, share).communication == share.forward_buffers


def test_a_frozen_layer_sends_no_gradients():
    frozen = make_group(100, 100, trained=False)
    model = make_profile(parameters=(frozen, make_group(4)), layer=(frozen,))
    share = share_of(model, "sgd", spread("fsdp_full", 2, mixed=False), accumulated=False)
    assert share.backward_buffers == 2 * 40_000
