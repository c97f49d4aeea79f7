"""From options to the workload of a recipe: what TRL forbids is refused before anything is run."""

from __future__ import annotations

import pytest
from factories import make_config, make_facts
from plans import outlined, planned

from autotune.errors import InputError
from autotune.planning.options import SearchOptions, options_of
from autotune.planning.plan import request_of
from autotune.space.rules import refusals
from autotune.values.budget import DEFAULT_LOSS_STEPS
from autotune.values.config import Precision
from autotune.values.model import Task
from autotune.values.trial import Purpose
from autotune.values.workload import LengthProfile

pytest.importorskip("trl")


def test_defaults_are_said():
    found = outlined(recipe="grpo", global_batch=16)
    recipe = found.workload.recipe
    assert (recipe.prompt_length, recipe.completion_length, recipe.generations) == (32, 32, 8)
    assert found.workload.sequence_length == 64
    assert "TRL's GRPOTrainer: prompts of 32 tokens, completions of 32, 2 prompts x 8 generations a step" in found.notes
    assert any(note.startswith("not tried: generating with vLLM (use_vllm), as it ") for note in found.notes)


def test_a_reward_model_has_another_head():
    assert outlined(recipe="reward").workload.task is Task.SEQUENCE_CLASSIFICATION
    assert outlined(recipe="dpo").workload.task is Task.CAUSAL_LM


def test_the_baseline_is_trls_own():
    plan = planned(recipe="dpo")
    assert (plan.baseline.checkpointing, plan.baseline.precision) == ("full", Precision.BF16)
    assert plan.loss_steps == DEFAULT_LOSS_STEPS[plan.budget.effort]


def test_generating_steps_are_run_whole_and_their_losses_not_compared():
    grpo, dpo = (planned(recipe=name, global_batch=32) for name in ("grpo", "dpo"))
    steps = [
        request_of(plan, make_config(4), Purpose.SEARCH, number=1, timeout_s=9.0).accumulation_steps
        for plan in (grpo, dpo)
    ]
    assert steps == [8, 2]
    assert grpo.loss_steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "grpo", "global_batch": 12}, "--global-batch 12: is no multiple of the 8 generations"),
        ({"recipe": "grpo", "generations": 1}, "--generations 1: TRL compares"),
        ({"recipe": "dpo", "generations": 2}, "--generations: dpo generates nothing"),
        ({"recipe": "grpo", "check_loss": 20}, "--check-loss: can't be used with --recipe grpo: other completions"),
        ({"recipe": "sft", "reward": "a:b"}, "--reward: sft generates nothing"),
        ({"recipe": "grpo", "reward": "ab"}, "--reward ab: expected MODULE:FUNCTION"),
        ({"recipe": "grpo", "global_batch": "any"}, "--global-batch any: can't be used with --recipe grpo"),
        ({"recipe": "grpo", "seq_len": 9}, "--seq-len: can't be used with --recipe grpo: a recipe has --prompt-len"),
        (
            {"recipe": "sft", "devices": 2},
            "--devices: can't be used with --recipe sft: a recipe is tuned on one device",
        ),
        (
            {"recipe": "sft", "model": "bert-mini"},
            "--recipe sft: trains decoders, and google/bert_uncased",
        ),
        ({"recipe": "dpo", "completion_len": 1}, "--completion-len 1: TRL ends a completion"),
        ({"prompt_len": 9}, "--prompt-len: needs --recipe"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(InputError) as refused:
        outlined(**options)
    assert str(refused.value).startswith(message)


def test_an_unknown_recipe_is_refused():
    with pytest.raises(InputError, match="--recipe ppo: "):
        options_of(SearchOptions, {"model": "gpt2", "recipe": "ppo"})


def test_prompt_and_completion_have_to_fit_the_model():
    with pytest.raises(InputError, match="--prompt-len and --completion-len, together 1100: "):
        planned(facts=make_facts(max_sequence_length=1024), recipe="sft", prompt_len=1000, completion_len=100)


@pytest.mark.parametrize(
    ("recipe", "knobs", "reason"),
    [
        ("grpo", {"generation_batch_size": 12}, "12 completions at once are no multiple of 8 generations"),
        ("grpo", {"generation_batch_size": 24}, "24 completions at once don't divide the global batch of 32"),
        ("grpo", {"generation_batch_size": 32}, "32 completions at once are all of a step, as they are by default"),
        ("dpo", {"generation_batch_size": 8}, "generation_batch_size: nothing is generated here"),
        ("grpo", {"precompute_ref_log_probs": True}, "precompute_ref_log_probs: nothing here has a reference"),
        (
            "dpo",
            {"precompute_ref_log_probs": True, "adapter": {"kind": "lora"}},
            "precompute_ref_log_probs: an adapter's own base is the reference",
        ),
        ("kto", {"per_device_train_batch_size": 1}, "kto compares the samples of a micro-batch"),
        ("dpo", {"checkpointing": "every-2nd"}, "checkpointing every-2nd: TRL switches it off in each step"),
        ("sft", {"packing": True}, "a recipe is tuned on one device, without packing"),
        ("sft", {"train_sampling_strategy": "group_by_length"}, "grouping by length is tried with the models' own"),
        ("sft", {"adapter": {"kind": "bitfit"}}, "bitfit: TRL takes adapters of peft"),
        (None, {"generation_batch_size": 8}, "generation_batch_size: nothing is generated here"),
    ],
    ids=str,
)
def test_what_trl_forbids_is_refused_without_a_trial(recipe, knobs, reason):
    plan = planned(recipe=recipe, global_batch=32)
    before = {"per_device_train_batch_size": 8, "attn_implementation": plan.baseline.attn_implementation}
    legal = type(plan.baseline)(**before)
    config = type(plan.baseline)(**{**before, **knobs})
    lengths = LengthProfile(samples=9, mean=20.0, minimum=4, median=20, p95=60, maximum=64)
    about = (plan.workload.model_copy(update={"lengths": lengths}), plan.facts, plan.hardware)
    assert refusals(legal, *about) == []
    assert any(found.startswith(reason) for found in refusals(config, *about)), refusals(config, *about)


@pytest.mark.parametrize(
    ("recipe", "knobs"), [("grpo", {"generation_batch_size"}), ("dpo", {"precompute_ref_log_probs"}), ("sft", set())]
)
def test_what_trl_offers_is_searched_where_it_does_something(recipe, knobs):
    dimensions = planned(recipe=recipe, global_batch=32).search_space().dimensions
    searched = {dimension.name for dimension in dimensions if len(dimension.choices) > 1}
    assert searched & {"generation_batch_size", "precompute_ref_log_probs"} == knobs
