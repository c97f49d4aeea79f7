"""Memory by component: what it sums to, and how it moves with micro-batch, accumulation and optimizer."""

import pytest
from factories import make_config, make_gpu, make_workload
from profiles import MB, line, make_family, make_group, make_model, make_profile, make_storages, parts_of

from autotune.cost.family import family_of, workspace_bytes
from autotune.cost.memory import Footprint, always_bytes, states_bytes
from autotune.cost.optimizers import OPTIMIZERS
from autotune.cost.profile import ForwardPass
from autotune.space.knobs import knobs
from autotune.units import GIB
from autotune.values.config import Parallelism
from autotune.values.estimate import Evaluation
from autotune.values.techniques import LoraAdapter

SIZES = (1, 2, 3, 8, 64, 1000)
WORKSPACES_BYTES = 2 * workspace_bytes("ampere")


def footprint(micro_batch: int, profile=None, **config) -> Footprint:
    return Footprint(make_config(micro_batch, **config), profile or make_profile(), micro_batch, 1)


def test_activations_are_those_of_the_micro_batch():
    held = parts_of(make_profile(), "adamw_torch", 30, 1)
    assert (held.moment, held.activations, held.gradients) == ("mm", 30 * MB, 0)
    assert (held.weights, held.optimizer_state) == (4 * MB, 8 * MB)
    small = parts_of(make_profile(), "adamw_torch", 1, 1)
    assert (small.moment, small.activations, small.gradients) == ("optimizer step", 0, 4 * MB)


def test_of_a_compiled_models_activations_the_budgets_share_is_kept():
    whole, half = (
        footprint(30, torch_compile_backend="inductor", activation_memory_budget=budget).stepping()
        for budget in (None, 0.5)
    )
    assert half.activations == 0.5 * whole.activations
    assert half.temporaries == whole.temporaries


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_the_peak_never_falls_with_micro_batch_or_accumulation(optim):
    once, often = ([parts_of(make_profile(), optim, size, n).allocated for size in SIZES] for n in (1, 4))
    assert (once, often) == (sorted(once), sorted(often))
    assert all(more >= less for less, more in zip(once, often, strict=True))


def test_accumulation_keeps_gradients_beside_the_activations_however_many_micro_batches_there_are():
    once, often = (parts_of(make_profile(), "sgd", 30, accumulation) for accumulation in (1, 2))
    assert often.gradients == once.gradients + 4 * MB
    assert often.activations == once.activations
    assert often.allocated == once.allocated + 4 * MB
    assert often == parts_of(make_profile(), "sgd", 30, 16)


def test_while_gradients_are_added_only_the_fresh_ones_come_on_top():
    """3 MB have been added to the earlier ones before the last MB is there."""
    both = make_storages((0, 4, 100 * MB), (2, 3, 3 * MB, 0, True), (3, 4, MB, 0, True))
    assert parts_of(make_profile(storages=both), "sgd", 1, 2).gradients == 4 * MB + 3 * MB


def test_on_a_gpu_each_weight_is_rounded_up_and_workspaces_are_taken():
    weights = (make_group(1, count=3), make_group(128), make_group(129, element_bytes=2))
    product_each_way = make_storages((0, 2, MB), workspaces=(0, 1))
    on_gpu = make_profile(make_family(device="cuda"), parameters=weights, storages=product_each_way)
    assert always_bytes(on_gpu) == WORKSPACES_BYTES + 3 * (512 - 4) + 0 + (512 - 258)
    assert parts_of(on_gpu, "sgd", 1, 1).weights == on_gpu.weights_bytes + always_bytes(on_gpu)
    convolutions_alone = make_profile(make_family(device="cuda"), parameters=weights)
    assert always_bytes(convolutions_alone) == always_bytes(on_gpu) - WORKSPACES_BYTES


@pytest.mark.parametrize(("half", "kept"), [({}, 0), ({"autocast": "bfloat16"}, 11), ({"dtype": "bfloat16"}, 11)])
def test_a_cpu_keeps_kernels_for_16_bits_alone(half, kept):
    assert always_bytes(make_profile(make_family(**half), parameters=(make_group(1, count=3),))) == kept << 20


def test_frozen_weights_have_neither_gradients_nor_states_and_paged_states_are_not_the_allocators():
    frozen = make_profile(parameters=(make_group(1000, 1000, trained=False), make_group(10)))
    held = parts_of(frozen, "adamw_torch", 1, 1)
    assert (held.weights, frozen.gradients_bytes, held.optimizer_state) == (4 * MB + 40, 40, 80)
    held, resident = (parts_of(make_profile(), optim, 1, 1) for optim in ("paged_adamw_32bit", "adamw_torch_fused"))
    assert (held.paged, held.optimizer_state) == (8 * MB, 0)
    assert (resident.paged, resident.optimizer_state) == (0, 8 * MB)


def test_full_fine_tuning_in_pure_bf16_peaks_in_the_optimizers_step_at_10_bytes_a_parameter():
    """Weights 2, gradients 2, two states of 2 each, and the list of square roots that foreach makes: 2."""
    parameters = 400 * 4096**2
    large = make_profile(
        make_family(device="cuda", dtype="bfloat16"),
        parameters=(make_group(4096, 4096, element_bytes=2, count=400),),
        storages=make_storages((0, 2, GIB, GIB / 4), workspaces=(0, 1)),
    )
    held, fused = (parts_of(large, optim, 4, 1) for optim in ("adamw_torch", "adamw_torch_fused"))
    assert held.moment == "optimizer step"
    assert held.allocated == 10 * parameters + WORKSPACES_BYTES
    assert fused.allocated == 8 * parameters + WORKSPACES_BYTES


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inputs_of_all_micro_batches_are_there_throughout_a_step(device):
    """The Trainer fetches all of them before the first runs."""
    family = make_family(device=device)
    with_inputs, without = (
        Footprint(make_config(4), make_profile(family, inputs_bytes=nbytes), 4.0, 3).phases(None)
        for nbytes in (float(MB), 0.0)
    )
    for phase in range(2):
        assert with_inputs[phase].allocated - without[phase].allocated == 4 * 3 * MB


ZERO_3 = Parallelism(world_size=2, sharding="zero_3")


@pytest.mark.parametrize(
    ("fields", "megabytes"),
    [
        ({}, 16),  # fp32 and AdamW: 4 bytes each, and two states
        ({"precision": "bf16"}, 16),  # autocast: weights are in fp32
        ({"precision": "pure_bf16"}, 8), ({"optim": "adafactor"}, 8), ({"optim": "adamw_bnb_8bit"}, 10),
        ({"optim": "paged_adamw_8bit"}, 8), ({"optim": "galore_adamw"}, 8), ({"adapter": LoraAdapter()}, 4),
        ({"adapter": LoraAdapter(), "quantization": "nf4"}, 0.5),
        ({"adapter": LoraAdapter(), "precision": "bf16", "parallelism": ZERO_3}, 1),  # frozen in 16 bits, shared
        # of several devices each has its part
        ({"parallelism": Parallelism(world_size=4, sharding="fsdp_full")}, 4),
        ({"parallelism": Parallelism(world_size=4)}, 16),
        ({"parallelism": Parallelism(world_size=4, tensor_parallel=2)}, 8),
        ({"parallelism": Parallelism(world_size=4, sharding="zero_3", offload="parameters")}, 0),
    ],
    ids=range(14),
)  # fmt: skip
def test_weights_gradients_and_states_need_no_trace(fields, megabytes):
    assert states_bytes(10**6, make_config(**fields)) == megabytes * MB
    assert states_bytes(10**6, make_config(), frozen=250_000) == 13 * MB  # frozen ones have neither gradient nor state


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_no_trace_says_less_than_the_arithmetic(optim):
    held = parts_of(make_profile(), optim, 1, 1)
    assert states_bytes(10**6, make_config(optim=optim)) <= held.allocated + held.paged


EVALUATED = make_profile(
    evaluation=ForwardPass(storages=make_storages((0, 2, 0, 2 * MB), (0, 1, 0, MB)), outputs_bytes=line(0, 2 * MB))
)


def phase(name: str, evaluation: Evaluation | None = None, **fields):
    found = footprint(4, EVALUATED, **fields).phases(evaluation)
    return next(components for components in found if components.phase == name)


def test_phases_come_in_the_order_of_a_training():
    traced, untraced = ([c.phase for c in footprint(4, p).phases(None)] for p in (EVALUATED, None))
    assert traced == ["forward and backward", "optimizer step", "evaluation", "saving"]
    assert untraced == [name for name in traced if name != "evaluation"]


def test_evaluation_holds_weights_and_states_and_no_gradients():
    assert phase("evaluation") == phase("evaluation", Evaluation(batch=8))  # the Trainer's, if nothing is said
    found = phase("evaluation", Evaluation(batch=8), optim="adamw_torch")
    assert (found.weights, found.optimizer_state, found.gradients) == (4 * MB, 8 * MB, 0)
    assert found.activations + found.temporaries == 8 * 3 * MB


def test_kept_logits_are_there_twice_while_the_last_batch_is_added():
    found = phase("evaluation", Evaluation(batch=8, kept_samples=100), optim="sgd")
    assert found.moment == "cat"
    assert found.allocated == 4 * MB + 2 * 100 * 2 * MB
    once, kept = (phase("evaluation", Evaluation(batch=8, kept_samples=n)) for n in (0, 8))
    assert kept == once  # a single batch is not copied


def test_evaluation_is_the_peak_only_if_it_is_asked_for():
    for evaluation in (None, Evaluation(batch=8, kept_samples=100)):
        peak, _ = footprint(4, EVALUATED).peak(evaluation)
        assert (peak.phase == "evaluation") == (evaluation is not None)


def test_saving_gathers_a_parameter_of_a_sharded_model():
    two = Parallelism(world_size=2, sharding="fsdp_full")
    assert phase("saving").communication == 0
    assert phase("saving", parallelism=two).communication == 4 * MB


def test_fsdp_reserves_reduced_gradients_and_gathered_units_on_streams_of_their_own():
    """As seen of seven trainings on torch's allocator, which kept 0.5 to 5.1 GiB beyond what was allocated."""
    table, layer = make_group(1000, 100, embedding=True), make_group(1000, 1000)
    profile = make_profile(
        make_family(device="cuda", autocast="bfloat16"), parameters=(table, layer), outside=(table,), layer=(layer,)
    )
    one, two = (
        footprint(30, profile, precision="bf16", parallelism=p).peak(None)[1]
        for p in (Parallelism(), Parallelism(world_size=2, sharding="fsdp_full"))
    )
    weights = 4 * 1.1 * MB
    assert two - one == pytest.approx(weights / 2 + weights)


CONFIGS = {
    "mixed": make_config(8, precision="bf16", optim="adamw_torch", attn_implementation="sdpa"),
    "checkpointed": make_config(8, precision="bf16", checkpointing="full", attn_implementation="sdpa"),
    "small": make_config(1, optim="adamw_torch", attn_implementation="sdpa"),
    "eager": make_config(64, attn_implementation="eager"),
}


def model_of(profile_of, name: str, config):
    traced = profile_of(name, **dict(family_of(config, make_gpu())))
    return make_model([traced], hardware=make_gpu(), workload=make_workload(global_batch_size=None))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in CONFIGS),
        *(pytest.param("t5", kind, marks=() if kind == "checkpointed" else pytest.mark.slow) for kind in CONFIGS),
    ],
)
def test_live_tensors_add_up_to_the_allocated_bytes(profile_of, name, kind):
    config = CONFIGS[kind]
    model = model_of(profile_of, name, config)
    memory = model.estimate(config).memory
    rows = model.alive(config)
    assert sum(row.allocated_bytes for row in rows) == pytest.approx(memory.allocated_peak_bytes, abs=len(rows))
    for kind, nbytes in memory.components.items():
        assert sum(row.allocated_bytes for row in rows if row.kind == kind) == pytest.approx(nbytes, abs=len(rows))


def test_modules_are_named_and_equal_layers_are_together(profile_of):
    rows = model_of(profile_of, "a deep llama", CONFIGS["mixed"]).alive(CONFIGS["mixed"])
    (weights,) = (r for r in rows if (r.kind, r.module) == ("weights", "model.layers.*.mlp.gate_proj"))
    assert weights.tensors == 8
    assert weights.allocated_bytes == pytest.approx(8 * 64 * 128 * 4, rel=0.01)
    saved = [r for r in rows if r.kind == "activations" and r.module.startswith("model.layers.*")]
    assert all(row.tensors % 8 == 0 for row in saved)


def test_a_knob_is_named_that_there_is(profile_of):
    known = {knob.option for knob in knobs()}
    for name, config in CONFIGS.items():
        rows = model_of(profile_of, "llama", config).alive(config)
        named = {row.knob for row in rows} - {None}
        assert {name.partition("=")[0] for name in named} <= known
        assert named
        assert any("softmax" in r.operator and r.knob == "attention" for r in rows) == (name == "eager")


def test_weights_in_four_bits_are_named_for_layers_alone(profile_of):
    config = make_config(1, adapter={"rank": 4}, attn_implementation="sdpa")
    rows = model_of(profile_of, "a deep llama", config).alive(config)
    knob_of = {row.module: row.knob for row in rows if row.kind == "weights"}
    assert knob_of["model.layers.*.mlp.gate_proj"] == "quantization=nf4"
    assert knob_of["lm_head"] == knob_of["model.embed_tokens"] == "precision=pure_bf16"


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_the_outputs_of_a_cuda_graph_stay_through_the_backward_pass(mode):
    forward = ForwardPass(storages=make_storages((0, 1, 0, 2 * MB)), outputs_bytes=line(0, 3 * MB))
    profile = make_profile(make_family(device="cuda", compiled=True), evaluation=forward)
    usual, graphs = (
        Footprint(make_config(4, torch_compile_backend="inductor", torch_compile_mode=m), profile, 4.0, 1.0)
        for m in (None, mode)
    )
    kept = 0 if mode == "max-autotune-no-cudagraphs" else 4 * 3 * MB
    assert graphs.stepping().temporaries - usual.stepping().temporaries == kept
    assert graphs.phases(None)[0].temporaries - usual.phases(None)[0].temporaries == kept
