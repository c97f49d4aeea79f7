"""Random weights: drawn in blocks, drawn whole under DeepSpeed, and quantized layer by layer."""

import json

import pytest
import torch
import transformers
from factories import make_spec
from optimizer_steps import GPT2
from tapes import live
from tiny_models import SIZES, T5, TINY
from transformers import BitsAndBytesConfig

from autotune.cost.tape import Recorder
from autotune.training.adapters import adapter_arguments, put_on, quantization_arguments
from autotune.training.build import build_config, build_model
from autotune.training.random_weights import quantization_of, quantize, quantized_layers, quick_weights, whole_weights
from autotune.training.resolve import HEADS
from autotune.values.config import Precision
from autotune.values.model import Task
from autotune.values.techniques import ADAPTERS, is_new_weight

LARGE = (450, 700)
DRAWN = {
    "normal": (lambda: torch.empty(LARGE).normal_(0.5, 0.02), 0.5, 0.02),
    "named": (lambda: torch.empty(LARGE).normal_(mean=-1.0, std=2.0), -1.0, 2.0),
    "half named": (lambda: torch.empty(LARGE).normal_(std=0.5), 0.0, 0.5),
    "uniform": (lambda: torch.empty(LARGE).uniform_(-0.1, 0.3), 0.1, 0.4 / 12**0.5),
    "a layer": (lambda: torch.nn.Linear(700, 450).weight.detach(), 0.0, (3 * 700) ** -0.5),
    "bf16": (lambda: torch.nn.init.normal_(torch.empty(LARGE, dtype=torch.bfloat16), std=0.02), 0.0, 0.02),
    "half a tensor": (lambda: torch.zeros(450, 1400)[:, :700].normal_(), 0.0, 1.0),
}


@pytest.mark.parametrize("name", DRAWN)
def test_large_tensors_have_the_distribution_that_was_asked_for_and_rows_that_differ(name):
    draw, mean, deviation = DRAWN[name]
    torch.manual_seed(0)
    with quick_weights():
        drawn = draw().float()
    assert drawn.mean().item() == pytest.approx(mean, abs=0.03 * deviation)
    assert drawn.std().item() == pytest.approx(deviation, rel=0.02)
    assert len(torch.unique(drawn, dim=0)) == len(drawn)
    assert name != "uniform" or -0.1 <= drawn.min() <= drawn.max() <= 0.3


def test_equal_seeds_give_equal_weights_and_small_tensors_and_generators_are_torchs_own():
    def drawn():
        torch.manual_seed(1)
        by_generator = torch.empty(LARGE).normal_(generator=torch.Generator().manual_seed(3))
        return [torch.empty(10).normal_(), by_generator, torch.empty(LARGE).normal_()]

    with quick_weights():
        one, again = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[:2], drawn()[:2], strict=True))


def test_torch_is_as_before_afterwards_even_after_an_error():
    with pytest.raises(ZeroDivisionError), quick_weights():
        raise ZeroDivisionError
    assert not {"normal_", "uniform_"} & vars(torch.Tensor).keys()


def test_transformers_knows_of_deepspeed_again_afterwards():
    from transformers.integrations import deepspeed

    configuration = type("Configuration", (), {"is_zero3": lambda self: True})()
    deepspeed.set_hf_deepspeed_config(configuration)
    try:
        assert deepspeed.is_deepspeed_zero3_enabled()
        with whole_weights():
            assert not deepspeed.is_deepspeed_zero3_enabled()
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()


MODELS = {
    "llama": (Task.CAUSAL_LM, TINY["llama"]), "t5": (Task.SEQ2SEQ_LM, T5),
    "bert": (Task.SEQUENCE_CLASSIFICATION, SIZES), "gpt2": (Task.CAUSAL_LM, GPT2),
}  # fmt: skip


def spec_of(name):
    task, figures = MODELS[name]
    return make_spec(name=name, model_type=name, config=figures), task


def build(name, quantization, precision=Precision.FP32):
    spec, task = spec_of(name)
    torch.manual_seed(0)
    arguments = quantization and quantization_arguments(quantization, precision, task)
    return build_model(spec, task, dtype="float32", attn_implementation=None, device="cpu", quantization=arguments)


def kinds_of_layers(model):
    return {name: quantization_of(layer) for name, layer in quantized_layers(model)}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_are_those_that_a_loaded_model_has(name, tmp_path):
    _, task = spec_of(name)
    build(name, None).save_pretrained(tmp_path)
    arguments = quantization_arguments("nf4", Precision.BF16, task)
    head = getattr(transformers, HEADS[task][0])
    loaded = head.from_pretrained(tmp_path, dtype="float32", quantization_config=BitsAndBytesConfig(**arguments))
    built = build(name, "nf4", Precision.BF16)
    assert kinds_of_layers(built) == kinds_of_layers(loaded) != {}
    shapes = {n: (p.shape, p.dtype) for n, p in built.named_parameters()}
    assert shapes == {n: (p.shape, p.dtype) for n, p in loaded.named_parameters()}
    ours, theirs = (dict(quantized_layers(model)) for model in (built, loaded))
    first = next(iter(ours))
    assert ours[first].compute_dtype is theirs[first].compute_dtype is torch.bfloat16
    assert ours[first].weight.quant_state.dtype is theirs[first].weight.quant_state.dtype
    assert (built.is_quantized, built.is_loaded_in_4bit) == (loaded.is_quantized, loaded.is_loaded_in_4bit)
    assert json.loads(built.config.to_json_string(use_diff=False))["quantization_config"]["load_in_4bit"]


@pytest.mark.parametrize("quantization", ["int8", "nf4", "nf4-double", "fp4", "fp4-double"])
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_there_and_finite(name, quantization):
    model = build(name, quantization)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert not [n for n, t in tensors if t.is_meta]
    assert all(torch.isfinite(t).all() for _, t in tensors if t.is_floating_point())
    assert set(kinds_of_layers(model).values()) == {quantization}
    assert all(not layer.bias.any() for _, layer in quantized_layers(model) if layer.bias is not None)
    if name == "t5":  # tied weights stay tied
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model.encoder.embed_tokens.weight is model.shared.weight


def test_the_whole_model_is_never_held_in_32_bits():
    spec, task = spec_of("llama")
    config = build_config(spec, task)
    config.num_hidden_layers = 16
    model = build_model(spec, task, dtype="float32", attn_implementation=None, device="meta", config=config)
    with Recorder([*model.parameters(), *model.buffers()]) as recorder:
        quantize(model, quantization_arguments("nf4", Precision.FP32, task), "cpu")
    recorder.end_of_forward()
    whole = 4 * sum(layer.in_features * layer.out_features for _, layer in quantized_layers(model))
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    on_meta = whole  # the layers before they are filled: they have sizes too, but take nothing
    assert live(recorder.tape()).sum(axis=1).max() < on_meta + kept + whole / 4


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind not in ("loha", "lokr", "bitfit")])
def test_adapters_are_trained_on_packed_weights_which_stay_as_they_are(kind, quantization):
    model = build("llama", quantization)
    _, layer = next(quantized_layers(model))
    before = layer.weight.detach().clone()
    model = put_on(model, adapter_arguments(ADAPTERS[kind](), Task.CAUSAL_LM))
    ids = torch.randint(3, 96, (2, 6))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(is_new_weight(n) and p.grad is not None for n, p in trained.items())
    assert torch.equal(layer.weight, before)
