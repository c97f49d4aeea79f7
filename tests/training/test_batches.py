"""How samples become batches: orders that stand for training, padding, and packing that changes nothing."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers
from factories import make_config, make_workload
from optimizer_steps import GPT2, LLAMA, arguments_for, assert_same_step, plain, step_taken
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from autotune.training.dataset import padded_batch, positioned_batch, row_order
from autotune.training.facts import PACKED
from autotune.training.loss import normalize_loss

SIZES = {**plain(LLAMA), "vocab_size": 64, "num_key_value_heads": 4}
EXPERTS = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FURTHER = {
    "glm": {"head_dim": 8, "partial_rotary_factor": 0.5},
    **{name: {"head_dim": 8} for name in ("gemma", "gemma3_text", "qwen3")},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    **dict.fromkeys(("mixtral", "olmoe"), EXPERTS),
    **{name: {**EXPERTS, **LATENT} for name in ("deepseek_v2", "deepseek_v3")},
}
LENGTHS = np.random.default_rng(0).integers(2, 100, 400)


def tiny(model_type):
    torch.manual_seed(0)
    figures = GPT2 if model_type == "gpt2" else {**SIZES, **FURTHER.get(model_type, {})}
    config = CONFIG_MAPPING[model_type](**figures, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.train()


def samples(*lengths):
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (length,), generator=random) for length in lengths]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def order(strategy, *, rows=400, devices=1):
    config = make_config(4, train_sampling_strategy=strategy, parallelism={"world_size": devices})
    return row_order(LENGTHS, make_workload(global_batch_size=16, seed=1), config, longest_first=16, rows=rows)


def padded(rows):
    """Return the mean longest sample of the micro-batches."""
    return LENGTHS[rows[: len(rows) // 4 * 4]].reshape(-1, 4).max(axis=1).mean()


def test_positions_are_those_within_the_sample():
    batch = positioned_batch(samples(3, 3))
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 3)


@pytest.mark.parametrize("model_type", sorted(PACKED))
def test_samples_of_a_packed_row_do_not_see_each_other(model_type):
    model = tiny(model_type).eval()
    rows = samples(5, 9, 3)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row["input_ids"][None]).logits[0] for row in rows])
        packed = model(**transformers.DataCollatorWithFlattening()(rows)).logits[0]
    assert torch.allclose(packed, alone, atol=1e-4)


def step_of(rows, directory, micro_batch, collator=None, **arguments):
    made = arguments_for(directory, micro_batch, len(rows) // micro_batch, **arguments)
    return step_taken(normalize_loss(tiny("llama")), made, rows, collator or partial(padded_batch, pad_id=0))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_packed_step_is_the_padded_one(accumulation, tmp_path):
    collators = (None, transformers.DataCollatorWithFlattening())
    padded, packed = (step_of(samples(5, 14, 3, 9), tmp_path, 4 // accumulation, collator) for collator in collators)
    assert_same_step(padded, packed)


def test_a_step_padded_to_a_multiple_is_the_same_step(tmp_path):
    further = partial(padded_batch, pad_id=0, multiple=16)
    assert further(samples(5, 14, 3))["input_ids"].shape == (3, 16)
    assert_same_step(*(step_of(samples(5, 14, 3, 9), tmp_path, 2, collator) for collator in (None, further)))


@pytest.mark.parametrize("accumulation", [2, 4])
def test_a_step_of_balanced_micro_batches_is_that_of_random_ones(accumulation, tmp_path):
    rows = samples(5, 14, 3, 9, 60, 6, 4, 22)
    random, balanced = (
        step_of(rows, tmp_path, 8 // accumulation, train_sampling_strategy=strategy)
        for strategy in ("random", "batch_rebalance")
    )
    assert_same_step(random, balanced)


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length", "batch_rebalance"])
def test_the_longest_rows_come_first_and_again_when_there_are_optimizer_states(strategy):
    rows = order(strategy)
    assert sorted(LENGTHS[rows[:16]]) == sorted(LENGTHS)[-16:]
    assert (rows[:16] == rows[16:32]).all()
    assert (np.sort(LENGTHS[rows[32:48]]) != np.sort(LENGTHS[rows[:16]])).any()


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_all_rows_follow_and_then_again_without_the_longest_before_them(strategy):
    for one_pass in order(strategy, rows=832)[32:].reshape(2, 400):
        assert sorted(one_pass) == list(range(400))


@pytest.mark.parametrize("devices", [1, 2])
def test_micro_batches_by_length_are_those_of_the_trainers_sampler(devices):
    from transformers.trainer_pt_utils import get_length_grouped_indices

    drawn = np.random.default_rng(1).permutation(400)
    generator, per_step = torch.Generator().manual_seed(1), 16 // devices  # of a device
    theirs = drawn[get_length_grouped_indices(LENGTHS[drawn].tolist(), per_step, generator=generator)]
    ours = order("group_by_length", rows=10**6, devices=devices)[32:]
    assert {tuple(batch) for batch in ours.reshape(-1, 4)} == {tuple(batch) for batch in theirs.reshape(-1, 4)}


def test_grouping_by_length_saves_padding_by_an_order_that_depends_on_the_seed_alone():
    assert padded(order("group_by_length")[32:]) < 0.8 * padded(order("random")[32:])
    assert (order("group_by_length") == order("group_by_length")).all()


@pytest.mark.parametrize("strategy", ["sequential", "group_by_length"])
@pytest.mark.parametrize("micro_batches", [8, 16, 32])
def test_a_few_micro_batches_stand_for_all(strategy, micro_batches):
    rows = order(strategy, rows=10**6)[32:]
    assert padded(rows[: 4 * micro_batches]) == pytest.approx(padded(rows), rel=0.12)
