"""One optimizer step gives the same loss and gradients however it is split into micro-batches, for every head.

The reference is the plain model's own loss over the whole batch, without any Trainer. Dropout is 0 throughout.
"""

import copy
import functools

import pytest
import torch
import transformers
from factories import installed_arguments
from model_families import FAMILIES
from optimizer_steps import (
    CASES,
    MODELS,
    OF_ROUTERS,
    SAMPLES,
    TOLERANCE,
    arguments_for,
    assert_same_step,
    build,
    collator_for,
    distance,
    one_step,
    reference,
    samples_for,
)
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from autotune.training.dataset import repeated
from autotune.training.facts import facts_of
from autotune.training.loss import chunk_loss, normalize_loss
from autotune.values.model import Task

SPLITS = ((8, 1), pytest.param(2, 4, marks=pytest.mark.slow), (1, 8))  # what the second shows the third shows as well


@pytest.mark.parametrize(("micro_batch", "accumulation"), SPLITS)
@pytest.mark.parametrize(("name", "chunks"), [*((name, False) for name in (*MODELS, "routed")), ("Llama", True)])
def test_every_split_gives_the_loss_and_gradients_of_the_whole_batch(name, chunks, micro_batch, accumulation, tmp_path):
    model = build(name)
    expected = reference(model, name)
    model = normalize_loss(model)
    step = one_step(chunk_loss(model) if chunks else model, name, tmp_path, micro_batch, accumulation)
    assert_same_step(step, expected, **(OF_ROUTERS if name == "routed" else {}))


@pytest.mark.parametrize("name", ["T5", "BERT classifier", "GPT-2"])
def test_without_normalize_loss_the_split_changes_the_step(name, tmp_path):
    model = build(name)
    loss, gradients = one_step(model, name, tmp_path, 2, 4)
    expected = reference(build(name), name)
    assert loss != pytest.approx(expected[0], rel=0.01)
    assert distance(gradients, expected[1]) > 0.01


@pytest.mark.parametrize("name", ["routed", "ResNet"])
def test_models_whose_step_depends_on_the_split_are_called_coupled(name, tmp_path):
    whole = one_step(normalize_loss(build(name)), name, tmp_path, 8, 1)
    split = one_step(normalize_loss(build(name)), name, tmp_path, 2, 4)
    assert distance(split[1], whole[1]) > 10 * TOLERANCE
    assert facts_of(build(name), CASES[name][1]).batch_coupled


@pytest.mark.parametrize(("micro_batch", "accumulation"), SPLITS)
@pytest.mark.parametrize("order", ["adapter first", "loss first"])
@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_it_holds_inside_an_adapter_whichever_was_put_on_first(name, order, micro_batch, accumulation, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    lora = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(build(name), lora)
    expected = reference(model, name)
    if order == "loss first":
        torch.manual_seed(2)
        model = get_peft_model(normalize_loss(build(name)), lora)
    else:
        model = normalize_loss(model)
    assert_same_step(one_step(model, name, tmp_path, micro_batch, accumulation), expected)


@pytest.mark.parametrize(("name", "chunks"), [("Llama", False), ("Llama", True), ("T5", False), ("routed", False)])
def test_a_micro_batch_without_labels_adds_nothing(name, chunks, tmp_path):
    samples = samples_for(name)
    samples[3]["labels"].fill_(-100)
    model = normalize_loss(build(name))
    step = one_step(chunk_loss(model) if chunks else model, name, tmp_path, 1, 8, samples)
    rest = [s for i, s in enumerate(samples) if i != 3]
    assert_same_step(step, one_step(normalize_loss(build(name)), name, tmp_path, 1, 7, rest))


def test_a_step_without_labels_leaves_the_gradients_at_zero(tmp_path):
    samples = samples_for("routed")
    for sample in samples:
        sample["labels"].fill_(-100)
    loss, gradients = one_step(normalize_loss(build("routed")), "routed", tmp_path, 2, 4, samples)
    assert loss == 0
    assert all(not g.any() for g in gradients.values())


def test_outside_a_trainer_the_loss_stays_as_it_was_and_a_tuple_is_scaled_like_a_named_output():
    batch = collator_for("T5")(samples_for("T5"))
    model = normalize_loss(build("T5"))
    assert torch.equal(model(**batch).loss, build("T5")(**batch).loss)
    batch["num_items_in_batch"] = 2 * batch["labels"].ne(-100).sum()
    assert torch.equal(model(**batch, return_dict=False)[0], model(**batch).loss)


def test_calling_it_twice_changes_nothing_and_a_copy_of_the_model_computes_with_its_own_weights(tmp_path):
    once = one_step(normalize_loss(build("T5")), "T5", tmp_path, 2, 4)
    twice = one_step(normalize_loss(normalize_loss(build("T5"))), "T5", tmp_path, 2, 4)
    assert once[0] == twice[0]
    assert all(torch.equal(twice[1][name], g) for name, g in once[1].items())
    model = normalize_loss(build("T5"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = collator_for("T5")(samples_for("T5"))
    assert torch.equal(other(**batch).loss, build("T5")(**batch).loss)


def test_what_is_saved_is_the_plain_model(tmp_path):
    normalize_loss(build("T5")).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.T5ForConditionalGeneration


STEPS = 4

# Each changes one knob that is exact; where not said, the whole batch at once, sdpa and the fused AdamW.
EXACT_KNOBS = {
    "split": {"micro_batch": 2}, "checkpointing": installed_arguments("full"), "attention": {"attention": "eager"},
    "optimizer": {"optim": "adamw_torch"},
}  # fmt: skip
EXACT_KNOBS["all at once"] = {name: value for knob in EXACT_KNOBS.values() for name, value in knob.items()}

# Adam divides a gradient by its size: where it is all but zero, rounding decides the direction of the step.
CURVE_TOLERANCE = 1e-5


def curve(name, directory, *, micro_batch=SAMPLES, attention="sdpa", optim="adamw_torch_fused", **arguments):
    """Return the losses of several optimizer steps, large enough ones for the loss to move."""
    model = normalize_loss(build(name))
    model.set_attn_implementation(attention)
    logged = {"max_steps": STEPS, "logging_strategy": "steps", "logging_steps": 1, "learning_rate": 1e-3}
    trainer = Trainer(
        model=model,
        args=arguments_for(directory, micro_batch, SAMPLES // micro_batch, optim=optim, **logged, **arguments),
        train_dataset=repeated(samples_for(name), STEPS * SAMPLES),
        data_collator=collator_for(name),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


plain_curve = functools.cache(curve)


@pytest.mark.parametrize("knob", EXACT_KNOBS)
@pytest.mark.parametrize("name", ["Llama", "T5", "BERT", "OPT", "ViT"])
def test_an_exact_knob_leaves_the_loss_of_every_step_as_it_was(name, knob, tmp_path, tmp_path_factory):
    expected = plain_curve(name, tmp_path_factory.getbasetemp())
    assert len(expected) == STEPS
    assert max(expected) - min(expected) > 100 * CURVE_TOLERANCE * expected[0], "nothing was learnt"
    assert curve(name, tmp_path, **EXACT_KNOBS[knob]) == pytest.approx(expected, rel=CURVE_TOLERANCE)


def test_an_optimizer_that_is_slightly_off_shows_in_the_losses(tmp_path, tmp_path_factory):
    expected = plain_curve("Llama", tmp_path_factory.getbasetemp())
    assert curve("Llama", tmp_path, adam_beta1=0.85) != pytest.approx(expected, rel=CURVE_TOLERANCE)


# The loss in chunks is the model's own, with its gradients, for every causal model that it is offered for

CAUSAL = ["GPT-2", "OPT", "BLOOM", "Pythia", "Llama", "Mistral", "Qwen", "Phi", "Mixtral", "DeepSeek", "Mamba"]


def tiny(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**FAMILIES[name], "dropout": 0.0}))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # so that what bends large logits would show
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model.train()


def stepped(model, *, autocast: bool = False):
    inputs = torch.randint(3, 128, (2, 31), generator=torch.Generator().manual_seed(0))
    labels = inputs.clone()
    labels[0, :5] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=inputs, labels=labels).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


SLOWLY = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in CAUSAL), pytest.param("Llama", True, marks=SLOWLY)]
)
def test_loss_and_gradients_are_those_of_the_model(name, compiled):
    model = tiny(name)
    assert facts_of(model, Task.CAUSAL_LM).chunks_loss
    chunked = chunk_loss(copy.deepcopy(model))
    found = stepped(torch.compile(chunked, backend="aot_eager") if compiled else chunked)
    expected = stepped(model)
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


def test_under_autocast_they_differ_by_the_rounding_of_16_bits():
    model = tiny("Llama")
    chunked, expected = stepped(chunk_loss(copy.deepcopy(model)), autocast=True), stepped(model, autocast=True)
    assert torch.allclose(chunked[0], expected[0], rtol=1e-4)
    assert 0 < (chunked[1] - expected[1]).norm() < 0.02 * expected[1].norm()


def test_the_trainers_count_of_labels_is_divided_by_and_an_evaluation_has_logits():
    model, inputs = tiny("Llama"), torch.randint(3, 128, (2, 16))
    expected = model(input_ids=inputs, labels=inputs, num_items_in_batch=7).loss
    with torch.no_grad():
        evaluated = model.eval()(input_ids=inputs, labels=inputs)
        found = chunk_loss(model)(input_ids=inputs, labels=inputs)
    assert torch.equal(found.logits, evaluated.logits)
    assert torch.equal(found.loss, evaluated.loss)
    assert torch.allclose(model.train()(input_ids=inputs, labels=inputs, num_items_in_batch=7).loss, expected)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_copy_has_its_own_head_and_a_frozen_one_no_gradient(is_trained):
    copied = copy.deepcopy(chunk_loss(tiny("Llama")))
    copied.get_output_embeddings().weight.requires_grad_(is_trained)
    stepped(copied)
    assert (copied.get_output_embeddings().weight.grad is not None) is is_trained


@pytest.mark.parametrize("name", ["Gemma", "BART's decoder alone", "T5"])
def test_what_bends_its_logits_or_has_a_loss_of_its_own_is_left_alone(name):
    model, task = (tiny(name), Task.CAUSAL_LM) if name in FAMILIES and name != "T5" else (build(name), MODELS[name][1])
    assert not facts_of(model, task).chunks_loss
