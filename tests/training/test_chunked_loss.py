"""A loss worked out in chunks is the model's own, with its gradients, for every causal model that it is offered for."""

import copy

import pytest
import torch
from model_families import FAMILIES
from optimizer_steps import MODELS, assert_same_step, build, one_step, reference
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.training.facts import facts_of
from autotune.training.loss import chunk_loss, normalize_loss
from autotune.values.model import Task

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize("name", CAUSAL)
def test_loss_and_gradients_are_those_of_the_model(name):
    model = tiny(name)
    assert facts_of(model, Task.CAUSAL_LM).chunks_loss
    chunked, expected = stepped(chunk_loss(copy.deepcopy(model))), stepped(model)
    assert torch.allclose(chunked[0], expected[0], rtol=1e-5)
    assert (chunked[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


def test_under_autocast_they_differ_by_the_rounding_of_16_bits():
    model = tiny("Llama")
    chunked, expected = stepped(chunk_loss(copy.deepcopy(model)), autocast=True), stepped(model, autocast=True)
    assert torch.allclose(chunked[0], expected[0], rtol=1e-4)
    assert 0 < (chunked[1] - expected[1]).norm() < 0.02 * expected[1].norm()


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(8, 1), (2, 4)])
def test_a_step_of_the_trainer_is_that_of_the_whole_batch(micro_batch, accumulation, tmp_path):
    expected = reference(build("Llama"), "Llama")
    model = chunk_loss(normalize_loss(build("Llama")))
    assert_same_step(one_step(model, "Llama", tmp_path, micro_batch, accumulation), expected)


def test_the_trainers_count_of_labels_is_divided_by(tmp_path):
    inputs = torch.randint(3, 128, (2, 16))
    model = tiny("Llama")
    expected = model(input_ids=inputs, labels=inputs, num_items_in_batch=7).loss
    assert torch.allclose(chunk_loss(model)(input_ids=inputs, labels=inputs, num_items_in_batch=7).loss, expected)


def test_a_copy_has_its_own_head():
    copied = copy.deepcopy(chunk_loss(tiny("Llama")))
    stepped(copied)
    assert copied.get_output_embeddings().weight.grad is not None


def test_an_evaluation_has_logits():
    model, inputs = tiny("Llama"), torch.randint(3, 128, (2, 16))
    with torch.no_grad():
        expected = model.eval()(input_ids=inputs, labels=inputs)
        found = chunk_loss(model)(input_ids=inputs, labels=inputs)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


def test_a_frozen_head_has_no_gradient():
    model = chunk_loss(tiny("Llama"))
    model.get_output_embeddings().weight.requires_grad_(False)
    stepped(model)
    assert model.get_output_embeddings().weight.grad is None


@pytest.mark.parametrize("name", ["Gemma", "BART's decoder alone", "T5"])
def test_what_bends_its_logits_or_has_a_loss_of_its_own_is_left_alone(name):
    model, task = (tiny(name), Task.CAUSAL_LM) if name in FAMILIES and name != "T5" else (build(name), MODELS[name][1])
    assert not facts_of(model, task).chunks_loss


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_the_same():
    model = tiny("Llama")
    expected = stepped(copy.deepcopy(model))
    found = stepped(torch.compile(chunk_loss(model), backend="aot_eager"))
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()
