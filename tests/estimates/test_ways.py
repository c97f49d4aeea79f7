"""Which ways there are to share several devices, and what they are called."""

import pytest
from factories import make_facts

from autotune.estimates.ways import shown, ways
from autotune.values.config import Parallelism

FACTS = make_facts(layers=12, tensor_parallel_heads=8)


def found(devices: int = 64, per_node: int = 8, facts=FACTS, **point) -> tuple[Parallelism, ...]:
    return ways(devices, per_node, facts, {f"parallelism.{name}": value for name, value in point.items()})


def test_degrees_multiply_to_the_devices():
    for way in found():
        assert way.sharding_ranks * way.tensor_parallel == 64


def test_no_way_comes_twice():
    assert len(set(found())) == len(found())


def test_every_sharding_and_offload_is_there():
    assert {way.sharding for way in found()} == {"none", "zero_1", "zero_2", "zero_3", "fsdp_grad_op", "fsdp_full"}
    assert {(w.sharding, w.offload) for w in found() if w.offload != "none"} >= {("zero_2", "optimizer")}


def test_tensor_parallel_stays_inside_a_node_and_divides_the_heads():
    assert {way.tensor_parallel for way in found()} == {1, 2, 4, 8}
    assert {way.tensor_parallel for way in found(per_node=2)} == {1, 2}
    assert {way.tensor_parallel for way in found(facts=make_facts(layers=12, tensor_parallel_heads=6))} == {1, 2}
    assert {way.tensor_parallel for way in found(facts=make_facts(layers=12))} == {1}


def test_sequence_parallel_stays_inside_a_node_and_beside_zero():
    shared = [way for way in found() if way.sequence_parallel > 1]
    assert {way.sequence_parallel for way in shared} == {2, 4, 8}
    assert {way.sharding for way in shared} == {"zero_2", "zero_3"}
    assert {way.data_parallel for way in shared} == {32, 16, 8}


def test_what_is_given_is_kept():
    assert {way.sharding for way in found(sharding="zero_2")} == {"zero_2"}
    assert {way.tensor_parallel for way in found(tensor_parallel=4)} == {4}
    assert {way.ddp_bucket_cap_mb for way in found(ddp_bucket_cap_mb=50)} == {50}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "ddp"),
        ({"sharding": "zero_1"}, "zero_1"),
        ({"sharding": "fsdp_full", "tensor_parallel": 8}, "fsdp_full, TP 8"),
        ({"tensor_parallel": 8}, "TP 8, DP 8"),
        ({"sharding": "zero_3", "sequence_parallel": 8}, "zero_3, SP 8"),
        ({"sharding": "zero_3", "offload": "parameters"}, "zero_3, weights on cpu"),
    ],
)
def test_a_way_in_a_few_words(fields, words):
    assert shown(Parallelism(world_size=64, **fields)) == words
