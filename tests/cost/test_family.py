"""What decides which operators run: configurations of one family differ in nothing but sizes and the optimizer."""

import pytest
from factories import make_config, make_gpu, make_hardware, make_workload

from autotune.cost.family import family_of, shape_of
from autotune.cost.sharding import buckets_of
from autotune.values.config import Parallelism
from autotune.values.model import Task
from autotune.values.techniques import LoraAdapter
from autotune.values.workload import LengthProfile

LENGTHS = LengthProfile(samples=100, mean=20.0, minimum=5, median=18, p95=40, maximum=60)


@pytest.mark.parametrize(
    ("precision", "sharding", "dtype", "autocast"),
    [
        ("fp32", "none", "float32", None),
        ("bf16", "none", "float32", "bfloat16"),
        ("fp16", "none", "float32", "float16"),
        ("pure_bf16", "none", "bfloat16", None),
        ("bf16", "fsdp_full", "bfloat16", None),  # weights are gathered in 16 bits, without autocast
        ("bf16", "zero_2", "bfloat16", None),  # a model in 16 bits, without autocast
        ("fp32", "zero_3", "float32", None),
        ("pure_bf16", "fsdp_full", "bfloat16", None),
    ],
)
def test_precision_and_who_shards_decide_the_types(precision, sharding, dtype, autocast):
    spread = Parallelism(world_size=2, sharding=sharding)
    family = family_of(make_config(precision=precision, parallelism=spread), make_gpu())
    assert (family.dtype, family.autocast) == (dtype, autocast)


def test_only_degrees_that_split_the_model_make_another_family():
    alone, spread = (
        family_of(make_config(parallelism=Parallelism(**fields)), make_gpu())
        for fields in ({}, {"world_size": 8, "sharding": "fsdp_full"})
    )
    assert alone == spread
    shared = Parallelism(world_size=8, sharding="zero_3", sequence_parallel=4)
    assert family_of(make_config(parallelism=shared), make_gpu()).sequence_parallel == 4
    split = Parallelism(world_size=8, tensor_parallel=2)
    assert family_of(make_config(parallelism=split), make_gpu()).tensor_parallel == 2


@pytest.mark.parametrize(
    ("fields", "is_another"),
    [
        ({"micro_batch": 1}, False), ({"optim": "adafactor"}, False), ({"tf32": True}, False),
        ({"dataloader_num_workers": 2}, False), ({"checkpointing": "full"}, True),
        ({"attn_implementation": "eager"}, True), ({"adapter": LoraAdapter(rank=4)}, True),
    ],
)  # fmt: skip
def test_what_runs_the_same_operators_is_one_family(fields, is_another):
    assert (family_of(make_config(**fields), make_gpu()) != family_of(make_config(), make_gpu())) == is_another


def test_devices_and_ranks_of_adapters_make_families():
    assert [family_of(make_config(), device).device for device in (make_hardware(), make_gpu())] == ["cpu", "cuda"]
    small, large = (family_of(make_config(adapter=LoraAdapter(rank=r)), make_gpu()) for r in (4, 8))
    assert small != large


def test_inputs_are_those_of_the_workload_and_of_real_data_those_of_the_longest_sample():
    shape = shape_of(make_workload(task=Task.SEQ2SEQ_LM, sequence_length=128, target_length=32))
    assert (shape.task, shape.length, shape.target_length, shape.padded) == (Task.SEQ2SEQ_LM, 128, 32, False)
    shape = shape_of(make_workload(sequence_length=128, lengths=LENGTHS))
    assert (shape.length, shape.padded) == (60, True)
    equal = LENGTHS.model_copy(update={"mean": 60.0, "minimum": 60, "median": 60, "p95": 60})
    assert not shape_of(make_workload(lengths=equal)).padded


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_users_own_argument_decides_whether_ddp_looks_for_unused_parameters(checkpointing, said):
    workload = make_workload(fixed_arguments={"ddp_find_unused_parameters": said})
    config = make_config(parallelism=Parallelism(world_size=2), checkpointing=checkpointing)
    family = family_of(config, make_gpu(), workload)
    assert family.clones_outputs is said
    assert buckets_of(config, family).rebuilt is not said
