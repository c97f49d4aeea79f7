"""Passes without gradients of TRL's Trainers: their memory on top of the policy's activations, and their work."""

import functools
from itertools import product

import pytest

from autotune.cost.family import Family, Shape
from autotune.cost.memory import components
from autotune.cost.profiler import profile
from autotune.cost.reserve import held_bytes
from autotune.values.model import Task
from autotune.values.workload import RECIPES

LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def traced(spec_of):
    """Return a function that traces a recipe of a tiny model."""

    @functools.cache
    def of(name, whole, fields):
        kind, spec = RECIPES[name], spec_of("a deep llama")
        if kind.task is not Task.CAUSAL_LM:
            spec = spec.model_copy(update={"config": {**spec.config, "num_labels": 1}})
        family = Family(**{"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", **dict(fields)})
        shape = Shape(task=kind.task, length=64, recipe=name, completion=32)
        return profile(spec, family, shape, parameters=-1 if whole else None)

    def made(name, *, whole=False, adapter=False, **fields):
        lora = {"adapter": Family(device="cpu", dtype="float32", adapter=LORA).adapter} if adapter else {}
        return of(name, whole, tuple({**fields, **lora}.items()))

    return made


def peak(found, samples=8, accumulation=2):
    return components(found, "adamw_torch", samples, accumulation).allocated


PLAIN, CHECKPOINTED, ADAPTER = {}, {"checkpointing": "full", "autocast": "bfloat16"}, {"adapter": True}
PAIRS = [
    ("cuda", "dpo", PLAIN), ("cpu", "rloo", PLAIN), ("cuda", "reward", CHECKPOINTED), ("cpu", "dpo", CHECKPOINTED),
    ("cuda", "rloo", ADAPTER), ("cpu", "reward", ADAPTER),
]  # fmt: skip
OTHERS = [case for case in product(("cpu", "cuda"), ("dpo", "reward", "rloo"), (PLAIN, CHECKPOINTED, ADAPTER))
          if case not in PAIRS]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "name", "fields"), [*PAIRS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)], ids=str
)
def test_few_layers_give_what_the_whole_model_does(traced, device, name, fields):
    few, whole = (traced(name, whole=whole, device=device, **fields) for whole in (False, True))
    assert len(few.excerpt.parameters) < len(whole.excerpt.parameters)
    assert peak(few) == pytest.approx(peak(whole), rel=1e-6)
    assert few.needed_flops.per_sample == pytest.approx(whole.needed_flops.per_sample)
    if device == "cuda":
        found = [held_bytes(p.excerpt, "adamw_torch", 8, accumulated=True) for p in (few, whole)]
        assert found[0].micro_steps == found[1].micro_steps
        assert found[0].reserved == pytest.approx(found[1].reserved, rel=0.02)


def test_a_reference_is_a_second_copy_of_the_weights(traced):
    assert traced("dpo").weights_bytes == pytest.approx(2 * traced("sft").weights_bytes, rel=1e-3)
    assert traced("dpo").gradients_bytes == traced("sft").gradients_bytes


@pytest.mark.parametrize("fields", [{"adapter": True}, {"precompute_ref_log_probs": True}], ids=str)
def test_no_copy_is_kept_of_an_adapters_base_or_of_a_reference_that_ran_before(traced, fields):
    once = {k: v for k, v in fields.items() if k == "adapter"}
    assert traced("dpo", **fields).weights_bytes == traced("sft", **once).weights_bytes


def test_the_reference_takes_its_time_whenever_it_runs(traced):
    with_it, before = traced("dpo"), traced("dpo", precompute_ref_log_probs=True)
    assert with_it.work == before.work
    # Of a pair: forward and backward of two rows, and their forward pass once more, a third of it (of attention 1/3.5).
    assert with_it.needed_flops.per_sample == pytest.approx(2 * 4 / 3 * traced("sft").needed_flops.per_sample, rel=0.01)


def test_the_reference_runs_while_the_policys_activations_are_there(traced):
    dpo = traced("dpo", checkpointing="full")
    beside = [point for point in dpo.peaks_first if point.operator.startswith("reference: ")]
    assert beside
    saved = 8 * 2 * 64 * 64 * 4  # the inputs of each layer: 16 rows of 64 tokens, 64 numbers wide, in fp32
    assert all(point.activations.at(8) >= saved for point in beside)


def test_completions_are_generated_beside_their_keys_and_values(traced):
    how = traced("grpo").generation
    assert how.cache_bytes == 2 * 8 * 2 * 16 * 4  # 8 layers of 2 heads, 16 numbers wide, in fp32
    all_at_once, in_parts = (
        components(traced("grpo", checkpointing="full"), "adamw_torch", 1, 4096, generated=count)
        for count in (None, 1024)
    )
    assert (all_at_once.phase, all_at_once.gradients) == ("generation", 0.0)
    assert (all_at_once.moment, all_at_once.activations) == ("prompts", 4096 * 32 * how.cache_bytes)
    assert in_parts.allocated < all_at_once.allocated
