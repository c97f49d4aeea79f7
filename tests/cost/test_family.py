"""What decides which operators run: configurations of one family differ in nothing but sizes and the optimizer."""

import pytest
from factories import make_config, make_gpu, make_hardware, make_workload

from autotune.cost.family import family_of, shape_of
from autotune.cost.sharding import buckets_of
from autotune.values.config import Parallelism
from autotune.values.model import Task
from autotune.values.techniques import LoraAdapter
from autotune.values.workload import LengthProfile, Recipe

LENGTHS = LengthProfile(samples=100, mean=20.0, minimum=5, median=18, p95=40, maximum=60)


@pytest.mark.parametrize(
    ("precision", "sharding", "dtype", "autocast"),
    [
        ("fp32", "none", "float32", None), ("bf16", "none", "float32", "bfloat16"),
        ("fp16", "none", "float32", "float16"), ("pure_bf16", "none", "bfloat16", None),
        ("bf16", "fsdp_full", "bfloat16", None),  # weights are gathered in 16 bits, without autocast
        ("bf16", "zero_2", "bfloat16", None),  # a model in 16 bits, without autocast
        ("fp32", "zero_3", "float32", None), ("pure_bf16", "fsdp_full", "bfloat16", None),
    ],
)  # fmt: skip
def test_precision_and_who_shards_decide_the_types(precision, sharding, dtype, autocast):
    spread = Parallelism(world_size=2, sharding=sharding)
    family = family_of(make_config(precision=precision, parallelism=spread), make_gpu())
    assert (family.dtype, family.autocast) == (dtype, autocast)


def test_frozen_weights_in_bf16_are_under_autocast_beside_an_adapter_which_is_in_fp32():
    sharded = Parallelism(world_size=2, sharding="fsdp_full")
    ways = [{}, {"adapter": {}}, {"adapter": {"kind": "bitfit"}}, {"adapter": {}, "parallelism": sharded}]
    families = [family_of(make_config(precision="pure_bf16", **way), make_gpu()) for way in ways]
    assert [(f.dtype, f.autocast) for f in families] == [("bfloat16", half) for half in (None, "bfloat16", None, None)]


SHARDED, SPLIT = Parallelism(world_size=8, sharding="fsdp_full"), Parallelism(world_size=8, tensor_parallel=2)
SHARED = Parallelism(world_size=8, sharding="zero_3", sequence_parallel=4)
LORA = LoraAdapter(rank=4)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"micro_batch": 1, "optim": "adafactor", "tf32": True, "dataloader_num_workers": 2}, {}),
        ({"checkpointing": "full"}, {"checkpointing": "full"}),
        ({"attn_implementation": "eager"}, {"attn_implementation": "eager"}), ({"adapter": LORA}, {"adapter": LORA}),
        ({"parallelism": SHARDED}, {}), ({"parallelism": SHARED}, {"sequence_parallel": 4}),
        ({"parallelism": SPLIT}, {"tensor_parallel": 2, "clones_outputs": True}),
    ],
    ids=range(7),
)  # fmt: skip
def test_a_family_is_of_the_knobs_that_change_operators(fields, changes):
    usual = family_of(make_config(), make_gpu())
    assert family_of(make_config(**fields), make_gpu()) == usual.model_copy(update=changes)


SFT = Recipe(name="sft", prompt_length=8, completion_length=8)
INDUCTOR = {"torch_compile_backend": "inductor"}


@pytest.mark.parametrize(
    ("fields", "is_traced"),
    [
        ({}, True), ({"adapter": LORA}, True), ({"checkpointing": "every-2nd"}, True),
        ({"torch_compile_mode": "reduce-overhead"}, True), ({"torch_compile_backend": "aot_eager"}, False),
        ({"checkpointing": "offload"}, False), ({"adapter": LORA, "quantization": "nf4"}, False),
        ({"parallelism": SHARDED}, False), ({"activation_memory_budget": 0.5}, False),
    ],
    ids=str,
)  # fmt: skip
def test_inductors_programs_are_traced_on_one_gpu_where_nothing_bypasses_them(fields, is_traced):
    config = make_config(**{**INDUCTOR, **fields})
    family = family_of(config, make_gpu())
    assert family.compiled is is_traced
    assert family.as_written == family_of(config.model_copy(update={"torch_compile_backend": None}), make_gpu())
    assert not family_of(config, make_hardware()).compiled
    assert not family_of(config, make_gpu(), make_workload(recipe=SFT)).compiled


def test_inputs_are_those_of_the_workload_and_of_real_data_those_of_the_longest_sample():
    shape = shape_of(make_workload(task=Task.SEQ2SEQ_LM, sequence_length=128, target_length=32))
    assert (shape.task, shape.length, shape.target_length, shape.padded) == (Task.SEQ2SEQ_LM, 128, 32, False)
    shape = shape_of(make_workload(sequence_length=128, lengths=LENGTHS))
    assert (shape.length, shape.padded) == (60, True)
    equal = LENGTHS.model_copy(update={"mean": 60.0, "minimum": 60, "median": 60, "p95": 60})
    assert not shape_of(make_workload(lengths=equal)).padded


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_ddp_copies_outputs_where_it_looks_for_unused_parameters_in_each_step(checkpointing, said):
    spread = Parallelism(world_size=2, ddp_find_unused_parameters=said)
    config = make_config(parallelism=spread, checkpointing=checkpointing)
    family = family_of(config, make_gpu(), make_workload())
    assert family.clones_outputs is said
    assert buckets_of(config, family).rebuilt is not said
    static = make_workload(fixed_arguments={"ddp_static_graph": True})
    assert not family_of(config, make_gpu(), static).clones_outputs
