"""The passes without gradients of TRL's Trainers, and its head: memory and work are those of TRL itself."""

import contextlib
import functools
from itertools import product

import numpy as np
import pytest
import torch
from profiles import make_family, parts_of
from tapes import live, tape_of
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, MambaConfig

from autotune.cost.family import Shape
from autotune.cost.post_training import cached_elements, caches_of, log_probs_head
from autotune.cost.profile import ACTIVATION, CONTRACTION
from autotune.cost.profiler import profile
from autotune.cost.reserve import held_bytes
from autotune.training.build import build_model
from autotune.values.model import Task
from autotune.values.techniques import LoraAdapter
from autotune.values.workload import RECIPES

LORA = LoraAdapter(rank=4)


@pytest.fixture(scope="module")
def traced(spec_of):
    """Return a function that traces a recipe of a tiny model."""

    @functools.cache
    def of(name, whole, beta, fields):
        kind, spec = RECIPES[name], spec_of("a deep llama")
        if kind.task is not Task.CAUSAL_LM:
            spec = spec.model_copy(update={"config": {**spec.config, "num_labels": 1}})
        shape = Shape(task=kind.task, length=64, recipe=name, beta=beta, completion=32)
        return profile(spec, make_family(**dict(fields)), shape, parameters=-1 if whole else None)

    return lambda name, *, whole=False, beta=None, **fields: of(name, whole, beta, tuple(fields.items()))


def peak(found, samples=8, accumulation=2):
    return parts_of(found, "adamw_torch", samples, accumulation).allocated


PLAIN, CHECKPOINTED, ADAPTER = {}, {"checkpointing": "full", "autocast": "bfloat16"}, {"adapter": LORA}
PAIRS = [("cpu", "dpo", CHECKPOINTED), ("cuda", "rloo", ADAPTER), ("cuda", "reward", PLAIN)]
CASES = product(("cpu", "cuda"), ("dpo", "reward", "rloo"), (PLAIN, CHECKPOINTED, ADAPTER))


@pytest.mark.parametrize(
    ("device", "name", "fields"),
    [pytest.param(*case, marks=() if case in PAIRS else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_few_layers_give_the_memory_and_work_of_the_whole_model(traced, device, name, fields):
    few, whole = (traced(name, whole=whole, device=device, **fields) for whole in (False, True))
    assert peak(few) == pytest.approx(peak(whole), rel=1e-6)
    assert few.needed_flops.per_sample == pytest.approx(whole.needed_flops.per_sample)
    if device == "cuda":
        found = [held_bytes(p, "adamw_torch", 8, accumulated=True) for p in (few, whole)]
        assert found[0].micro_steps == found[1].micro_steps
        assert found[0].reserved == pytest.approx(found[1].reserved, rel=0.02)


def test_a_reference_is_a_second_copy_of_the_weights(traced):
    assert traced("dpo").weights_bytes == pytest.approx(2 * traced("sft").weights_bytes, rel=1e-3)
    assert traced("dpo").gradients_bytes == traced("sft").gradients_bytes
    assert traced("grpo", beta=0.1).weights_bytes == traced("dpo").weights_bytes
    assert traced("rloo", beta=0.0).weights_bytes == traced("grpo").weights_bytes


def test_no_copy_is_kept_of_an_adapters_base_or_of_a_reference_that_ran_before(traced):
    assert traced("dpo", adapter=LORA).weights_bytes == traced("sft", adapter=LORA).weights_bytes
    assert traced("dpo", precompute_ref_log_probs=True).weights_bytes == traced("sft").weights_bytes


def test_the_reference_takes_its_time_whenever_it_runs(traced):
    with_it, before = traced("dpo"), traced("dpo", precompute_ref_log_probs=True)
    assert with_it.work == before.work
    # Of a pair: forward and backward of two rows, and their forward pass once more, a third of it (of attention 1/3.5).
    assert with_it.needed_flops.per_sample == pytest.approx(2 * 4 / 3 * traced("sft").needed_flops.per_sample, rel=0.01)


def test_the_reference_runs_while_the_policys_activations_are_there(traced):
    dpo = traced("dpo", checkpointing="full")
    storages = dpo.storages
    reference = [at for at, (module, _) in enumerate(storages.origins) if module.startswith("reference")]
    moments = storages.rows[np.isin(storages.rows[:, 6], reference), 0].astype(int)
    saved = 8 * 2 * 64 * 64 * 4  # the inputs of each layer: 16 rows of 64 tokens, 64 numbers wide, in fp32
    assert (storages.alive[moments, ACTIVATION] @ [1, 8] >= saved).all()


def test_completions_are_generated_beside_their_keys_and_values(traced):
    how = traced("grpo").generation
    assert (how.cache_bytes, how.caches) == (2 * 2 * 16 * 4, ((8, 64),))  # of 2 heads, 16 numbers wide, in fp32
    all_at_once, in_parts = (
        parts_of(traced("grpo", checkpointing="full"), "adamw_torch", 1, 4096, generated=count)
        for count in (None, 1024)
    )
    assert (all_at_once.phase, all_at_once.gradients) == ("generation", 0.0)
    assert (all_at_once.moment, all_at_once.activations) == ("prompts", 4096 * 32 * 8 * how.cache_bytes)
    assert in_parts.allocated < all_at_once.allocated


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        ("llama", {}), ("mistral", {"sliding_window": 8}), ("gemma2", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)  # fmt: skip
def test_layers_cache_as_many_tokens_as_in_transformers(model_type, changed):
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, **changed)
    cache, tokens = DynamicCache(config=config), 24
    for count in (16, *[1] * (tokens - 16)):
        for layer in range(4):
            cache.update(torch.zeros(1, 2, count, 16), torch.zeros(1, 2, count, 16), layer)
    kept = sum(part.untyped_storage().nbytes() for layer in cache.layers for part in (layer.keys, layer.values))
    assert kept == 2 * 2 * 16 * 4 * sum(layers * min(tokens, most) for layers, most in caches_of(config, 64))


ROWS, LENGTH = 4, 32


def taped(model, head):
    """Return the tape of a forward and backward pass of a model with a head."""
    ids = torch.zeros((ROWS, LENGTH), dtype=torch.long, device=model.device)

    def loss(recorder):
        with head(recorder):
            return model(input_ids=ids, labels=ids)["loss"]

    return tape_of(loss, *model.parameters(), *model.buffers(), ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_takes_the_memory_and_the_work_of_trls(spec_of, dtype):
    utils = pytest.importorskip("trl.trainer.utils")
    spec = spec_of("llama")
    ours, theirs = (build_model(spec, Task.CAUSAL_LM, dtype=dtype, device="cpu") for _ in range(2))
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")

    @contextlib.contextmanager
    def with_theirs(recorder):
        utils.add_fused_lm_head(theirs, outputs=outputs)
        inner = theirs.forward
        theirs.forward = lambda **given: {"loss": inner(**given, fused_lm_head=True).log_probs.sum()}
        yield

    how = {"on_cuda": False, "dtype": getattr(torch, dtype), "scored": LENGTH}
    one, other = taped(ours, lambda recorder: log_probs_head(ours, recorder, **how)), taped(theirs, with_theirs)
    # A buffer of TRL's is 32,768 words wide whatever the vocabulary; pages that nothing is written to aren't there.
    unused = ROWS * (LENGTH - 1) * (32768 - 512) * (4 if dtype == "float32" else 2)
    assert live(one).sum(axis=1).max() == pytest.approx(live(other).sum(axis=1).max() - unused, rel=0.02)
    uncounted = 2 * 2 * ROWS * (LENGTH - 1) * 64 * 512  # torch's counter of FLOP doesn't know `addmm_`
    products = [tape.flops[tape.kinds == CONTRACTION].sum() for tape in (one, other)]
    assert products[0] == pytest.approx(products[1] + uncounted, rel=1e-6)


def test_on_cuda_only_completions_are_scored_and_in_place(spec_of):
    def peak(scored):
        model = build_model(spec_of("llama"), Task.CAUSAL_LM, dtype="float32", device="meta")
        how = {"on_cuda": True, "dtype": torch.float32, "scored": scored}
        return live(taped(model, lambda recorder: log_probs_head(model, recorder, **how))).sum(axis=1).max()

    tile = ROWS * 8 * 32768 * 4
    assert peak(16) - peak(8) == pytest.approx(tile, rel=0.05)


DEEPSEEK = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DENSE = {"first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("llama", {"num_key_value_heads": 2}), ("llama", {"head_dim": 32}), ("deepseek_v3", {**DEEPSEEK, **DENSE})],
)
def test_a_cache_is_as_wide_as_a_real_one(kind, fields):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **{**sizes, "num_attention_heads": 4, "num_key_value_heads": 4, **fields})
    cache = AutoModelForCausalLM.from_config(config)(torch.ones((1, 8), dtype=torch.long)).past_key_values
    layer = cache.layers[0]
    assert cached_elements(config) == (layer.keys.numel() + layer.values.numel()) / 8
    assert cached_elements(MambaConfig()) == 0  # has no attention
