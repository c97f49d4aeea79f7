"""What is trained, from the user's words: task, lengths, global batch, the length of a run, recipes."""

from importlib.util import find_spec

import pytest
import torch
from conftest import write_model
from factories import make_config, make_facts
from plans import planned
from transformers import CONFIG_MAPPING, AutoModel
from vision_language import vision_language

from autotune.errors import InputError
from autotune.planning.workload import with_batch
from autotune.space.rules import refusals
from autotune.training import texts
from autotune.training.facts import facts_of
from autotune.values.config import Precision
from autotune.values.model import Task
from autotune.values.trial import Purpose
from autotune.values.workload import LengthProfile

HUGE = 9999999999999999999999999
trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl isn't installed")


SHORT, OF_WHISPER = make_facts(max_sequence_length=50), make_facts(max_target_length=448)
VERA = {"adapter": {"kind": "vera"}, "quantization": "nf4"}
OF_SOUND = {"task": Task.SPEECH_CTC, "sequence_length": 64, "tokens_per_sample": None}


@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        ({"global_batch": "any"}, {"global_batch_size": None}, "the global batch is free: throughputs of different"),
        ({"global_batch": 1048576}, {"global_batch_size": 1048576}, ""),
        ({}, {"global_batch_size": 8}, "global batch 8 samples (--global-batch)"),
        ({"model": "t5-small", "seq_len": 40}, {"target_length": 40, "task": Task.SEQ2SEQ_LM}, "target length 40 ("),
        ({"task": "sequence-classification"}, {"target_length": None, "task": "sequence-classification"}, ""),
        ({"model": "wav2vec2-base"}, OF_SOUND, "samples of 64 frames of sound (--seq-len)"),
        ({"model": "whisper-tiny"}, {"sequence_length": 1500, "target_length": 128}, "samples of 1500 frames of sound"),
        ({"model": "vit-base"}, {"image_size": 224, "shown_length": "images of 224 pixels"}, "images of 224 x 224 pix"),
        ({"model": "whisper-tiny", "target_len": 60}, {"target_length": 60}, ""),
        ({"model": "llava-1.5-7b", "images": 2}, {"sequence_length": 2 * 577 + 1 + 64, "image_size": 336},
         "2 images of 336 pixels as 576 tokens in each sample"),
    ],
    ids=str,
)  # fmt: skip
def test_lengths_task_and_batch_follow_from_model_and_options_and_defaults_are_said(options, expected, said):
    plan = planned(facts=make_facts(max_sequence_length=None), **options)
    assert {name: getattr(plan.workload, name) for name in expected} == expected
    assert any(note.startswith(said) for note in plan.notes)


@pytest.mark.parametrize("name", ["roberta", "prophetnet"])
def test_the_usual_length_is_the_longest_of_a_model_that_loses_positions_to_padding(tmp_path, name):
    config = CONFIG_MAPPING[name](max_position_embeddings=64)
    with torch.device("meta"):
        longest = facts_of(AutoModel.from_config(config), Task.MASKED_LM).max_sequence_length
    model = str(write_model(tmp_path, config.to_dict()))
    plan = planned(model=model, facts=make_facts(max_sequence_length=longest))
    assert (plan.workload.sequence_length, longest) == (62, 62)
    assert any(note == "sequence length 62, the longest that the model has (--seq-len)" for note in plan.notes)


def test_a_sample_of_the_usual_length_is_no_longer_than_the_positions_of_the_text(tmp_path):
    config = vision_language()["llava"]
    config["text_config"]["max_position_embeddings"] = 70  # 18 tokens are of an image, and 64 of a text
    assert planned(model=str(write_model(tmp_path, config))).workload.sequence_length == 70


def test_the_users_arguments_decide_on_the_global_batch_and_are_part_of_the_workload(arguments):
    path = arguments(per_device_train_batch_size=4, gradient_accumulation_steps=6, learning_rate=1e-3, bf16=True)
    plan = planned(baseline=path)
    assert (plan.workload.global_batch_size, plan.baseline.per_device_train_batch_size) == (24, 4)
    assert plan.workload.fixed_arguments == {"learning_rate": 1e-3}
    assert planned(baseline=path, global_batch=24).workload.global_batch_size == 24
    with pytest.raises(InputError, match="--global-batch 64: the baseline's is 24"):
        planned(baseline=path, global_batch=64)


def test_the_length_of_a_run_is_one_of_samples_whatever_it_was_given_in():
    assert planned().objective.run_samples is None
    assert planned(train_steps=100, global_batch=16).objective.run_samples == 1600
    assert planned(train_tokens=1e6, seq_len=100).objective.run_samples == 10_000


@pytest.mark.parametrize(
    ("batch", "devices", "nearest"), [(6, 4, "4 and 8 do"), (2, 4, "4 does"), (10, 8, "8 and 16 do")]
)
def test_a_global_batch_that_the_devices_cannot_share_is_refused_with_the_nearest(eight_cores, batch, devices, nearest):
    said = f"--global-batch {batch}: {devices} devices can't share it evenly; {nearest}"
    with pytest.raises(InputError, match=said):
        planned(devices=devices, global_batch=batch)
    assert planned(devices=3).workload.global_batch_size == 9


REFUSED = [
    ({"global_batch": HUGE}, r"--global-batch 9{25}: use at most 1048576 samples a step"),
    ({"global_batch": 1048577}, "--global-batch 1048577: use at most 1048576"),
    ({"model": "vit-base", "train_tokens": 1e6}, "--train-tokens: image-classification has no tokens; use --train"),
    ({"model": "whisper-tiny", "seq_len": 128}, "--seq-len 128: openai/whisper-tiny takes 1500 frames of sound"),
    ({"model": "wav2vec2-base", "seq_len": 5}, "--seq-len 5: facebook/wav2vec2-base hides spans of 10 frames"),
    ({"model": "llava-1.5-7b", "seq_len": 512}, "--seq-len 512: a sample's images take 578 tokens; use at least"),
    ({"images": 2}, "--images: the task causal-lm has no images beside texts"),
    ({"image_size": 448}, "--image-size: the task causal-lm has no images beside texts"),
    ({"freeze_vision": True}, "--freeze-vision: the task causal-lm has no images beside texts"),
    ({"prompt_len": 9}, "--prompt-len: needs --recipe"),
    ({"facts": SHORT}, "--seq-len 64: .*gpt2 has 50 positions; use at most that"),
    ({"facts": SHORT, "model": "t5-small", "seq_len": 32, "target_len": 300}, "--target-len 300: .* 50 positions"),
    ({"facts": OF_WHISPER, "model": "whisper-tiny", "target_len": 500}, "--target-len 500: .* 448"),
]
REFUSED_OF_RECIPES = [
    ({"recipe": "grpo", "global_batch": 12}, "--global-batch 12: is no multiple of the 8 generations"),
    ({"recipe": "kto", "global_batch": 1}, "--global-batch 1: kto compares the samples of a micro-batch; use 2"),
    ({"recipe": "grpo", "data": "x.jsonl", "prompt_len": 4}, "--prompt-len: the prompts of --data are as long"),
    ({"recipe": "dpo", "generations": 2}, "--generations: dpo generates nothing"),
    ({"recipe": "grpo", "check_loss": 20}, "--check-loss: can't be used with --recipe grpo: other completions"),
    ({"recipe": "sft", "reward": "a:b"}, "--reward: sft generates nothing"),
    ({"recipe": "grpo", "reward": "ab"}, "--reward ab: expected MODULE:FUNCTION"),
    ({"recipe": "grpo", "global_batch": "any"}, "--global-batch any: can't be used with --recipe grpo"),
    ({"recipe": "grpo", "seq_len": 9}, "--seq-len: can't be used with --recipe grpo: a recipe has --prompt-len"),
    ({"recipe": "sft", "target_len": 1}, "--target-len: can't be used with --recipe sft: a recipe has"),
    ({"recipe": "sft", "devices": 2}, "--devices: can't be used with --recipe sft: a recipe is tuned on one"),
    ({"recipe": "sft", "model": "bert-mini"}, "--recipe sft: trains decoders, and google/bert_uncased"),
    ({"recipe": "dpo", "completion_len": 1}, "--completion-len 1: TRL ends a completion"),
    ({"recipe": "sft", "prompt_len": 1000, "completion_len": 100}, "--prompt-len and --completion-len, together"),
]


@pytest.mark.parametrize(
    ("options", "said"), [*REFUSED, *(pytest.param(*row, marks=trl) for row in REFUSED_OF_RECIPES)], ids=str
)
def test_what_can_not_be_trained_is_refused(options, said):
    with pytest.raises(InputError, match=f"^{said}"):
        planned(**{"facts": make_facts(max_sequence_length=1024), **options})


@pytest.mark.parametrize(
    ("document", "options", "said"),
    [
        ({"per_device_train_batch_size": HUGE}, {}, r"the global batch \d+: use at most 1048576"),
        ({"per_device_train_batch_size": 2048, "gradient_accumulation_steps": 2048}, {}, r"the global batch \d+: use"),
        ({"per_device_train_batch_size": HUGE}, {"global_batch": "any"}, "per_device_train_batch_size: expected"),
        ({"gradient_accumulation_steps": 2}, {"global_batch": "any"}, "gradient_accumulation_steps 2 and --global"),
        pytest.param({"num_generations": 4}, {"recipe": "grpo", "generations": 8}, "num_generations 4 and", marks=trl),
        pytest.param({"max_length": 20}, {"recipe": "dpo", "prompt_len": 8}, "max_length 20 and --prompt", marks=trl),
    ],
    ids=str,
)
def test_a_baseline_that_nobody_trains_with_is_refused_in_a_moment(arguments, document, options, said):
    with pytest.raises(InputError, match=rf"args\.json: {said}"):
        planned(baseline=arguments(**document), **options)


@trl
def test_a_recipe_has_defaults_and_trls_own_baseline(arguments):
    grpo, dpo = (planned(recipe=name, global_batch=32) for name in ("grpo", "dpo"))
    recipe = grpo.workload.recipe
    assert (recipe.prompt_length, recipe.completion_length, recipe.generations) == (32, 32, 8)
    assert grpo.workload.sequence_length == 64
    assert "TRL's GRPOTrainer: prompts of 32 tokens, completions of 32, 4 prompts x 8 generations a step" in grpo.notes
    notes = []
    with_batch(grpo.workload.model_copy(update={"dataset": "x.jsonl"}), 32, notes)
    assert notes[0] == "TRL's GRPOTrainer: your prompts, completions of 32, 4 prompts x 8 generations a step"
    assert (dpo.baseline.checkpointing, dpo.baseline.precision) == ("full", Precision.BF16)
    own = planned(recipe="dpo", baseline=arguments(learning_rate=1e-5, gradient_checkpointing=False)).baseline
    assert (own.checkpointing, own.precision) == ("none", Precision.BF16)  # what isn't said is as TRL has it
    assert dpo.workload.task is Task.CAUSAL_LM
    assert planned(recipe="reward").workload.task is Task.SEQUENCE_CLASSIFICATION
    sizes = [planned(recipe="kto", global_batch=n).baseline.per_device_train_batch_size for n in (32, 121, 61)]
    assert sizes == [8, 11, 61]  # of two samples at least
    assert planned(recipe="grpo", generations=24).workload.global_batch_size == 24
    # Steps that generate are run whole, and their losses can't be compared.
    made = (p.request_of(make_config(4), Purpose.SEARCH, number=1, timeout_s=9.0) for p in (grpo, dpo))
    assert [request.accumulation_steps for request in made] == [8, 2]
    assert (grpo.loss_steps, dpo.loss_steps) == (0, dpo.budget.effort.loss_steps)


@trl
@pytest.mark.parametrize(
    ("own", "options", "lengths"),
    [
        ({"num_generations": 4, "max_completion_length": 16}, {"recipe": "grpo"}, (32, 16, 4)),
        ({"max_length": 1024}, {"recipe": "dpo"}, (32, 32, 1)),
        ({"max_length": 33}, {"recipe": "dpo"}, (16, 17, 1)),
        ({"max_length": 101}, {"recipe": "dpo", "data": __file__}, (50, 51, 1)),
        ({"max_length": 17}, {"recipe": "dpo", "prompt_len": 8, "completion_len": 9}, (8, 9, 1)),
    ],
    ids=str,
)
def test_lengths_and_generations_of_trls_arguments_are_the_recipes(arguments, monkeypatch, own, options, lengths):
    monkeypatch.setitem(texts.READERS, ".py", texts.READERS[".txt"])
    workload = planned(baseline=arguments(**own), **options).workload
    recipe = workload.recipe
    assert (recipe.prompt_length, recipe.completion_length, recipe.generations) == lengths
    assert workload.fixed_arguments == own


@trl
@pytest.mark.parametrize(
    ("recipe", "knobs", "reason"),
    [
        ("grpo", {"generation_batch_size": 12}, "12 completions at once are no multiple of 8 generations"),
        ("grpo", {"generation_batch_size": 24}, "24 completions at once don't divide the global batch of 32"),
        ("grpo", {"generation_batch_size": 32}, "32 completions at once are all of a step, as they are by default"),
        ("dpo", {"generation_batch_size": 8}, "generation_batch_size: nothing is generated here"),
        ("grpo", {"precompute_ref_log_probs": True}, "precompute_ref_log_probs: nothing here has a reference"),
        ("dpo", {"precompute_ref_log_probs": True, "adapter": {"kind": "lora"}}, "precompute_ref_log_probs: an"),
        ("kto", {"per_device_train_batch_size": 1}, "kto compares the samples of a micro-batch"),
        ("dpo", {"checkpointing": "every-2nd"}, "checkpointing every-2nd: TRL switches it off in each step"),
        ("sft", {"packing": True}, "a recipe is tuned on one device, without packing"),
        ("sft", {"train_sampling_strategy": "group_by_length"}, "grouping by length is tried with the models' own"),
        ("sft", {"precision": "fp16", "quantization": "nf4"}, "nf4: TRL trains adapters on it in bf16"),
        ("sft", {"adapter": {"kind": "bitfit"}}, "bitfit: TRL takes adapters of peft"),
        ("grpo", {**VERA, "precision": "bf16"}, "vera on nf4: TRL casts a part of its weights"),
        ("sft", VERA, "vera on nf4: TRL casts a part of its weights"),
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
    assert list(refusals(legal, *about)) == []
    assert any(found.startswith(reason) for found in refusals(config, *about)), list(refusals(config, *about))


@trl
@pytest.mark.parametrize(
    ("recipe", "knobs"), [("grpo", {"generation_batch_size"}), ("dpo", {"precompute_ref_log_probs"}), ("sft", set())]
)
def test_what_trl_offers_is_searched_where_it_does_something(recipe, knobs):
    dimensions = planned(recipe=recipe, global_batch=32).search_space.dimensions
    searched = {d.name for d in dimensions if len(d.choices) > 1}
    assert searched & {"generation_batch_size", "precompute_ref_log_probs"} == knobs
