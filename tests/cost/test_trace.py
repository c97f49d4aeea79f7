"""One micro-step: what it is fed with, what its loss is, and that it leaves the model as it was."""

import pytest
import torch
from profiles import make_family
from tapes import live

from autotune.cost.family import Shape
from autotune.cost.profiler import profile
from autotune.cost.trace import evaluation_step, make_inputs, micro_step
from autotune.training.build import build_config, build_model
from autotune.training.resolve import default_task, resolve
from autotune.values.model import Task

MIXED, PLAIN = make_family(device="cuda", autocast="bfloat16"), make_family()
SHAPE = Shape(task=Task.CAUSAL_LM, length=16)
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def llama(spec_of):
    return build_model(spec_of("llama"), Task.CAUSAL_LM, dtype="float32", attn_implementation="sdpa", device="meta")


@pytest.mark.parametrize(
    ("name", "fields", "sizes"),
    [
        ("llama", {}, {"input_ids": (3, 64), "attention_mask": (3, 64), "labels": (3, 64)}),
        ("bert", {"task": Task.MASKED_LM}, {"labels": (3, 64)}),
        ("bert", {}, {"labels": (3,)}),
        ("t5", {"target_length": 16}, {"labels": (3, 16)}),
        ("t5", {}, {"labels": (3, 64)}),
        ("vit", {}, {"pixel_values": (3, 3, 32, 32), "labels": (3,)}),
        ("whisper", {"target_length": 16}, {"input_features": (3, 8, 128), "labels": (3, 16)}),
    ],
)
def test_inputs_have_the_sizes_that_a_trials_data_have(spec_of, name, fields, sizes):
    shape = Shape(**{"task": default_task(spec_of(name)), "length": 64, **fields})
    made = make_inputs(build_config(spec_of(name), shape.task), shape, 3)
    assert all(tensor.is_meta for tensor in made.values())
    found = {name: tuple(tensor.shape) for name, tensor in made.items()}
    assert found.items() >= sizes.items()
    assert name in ("bert", "t5") or found == sizes


def test_labels_of_ctc_are_values_that_the_library_can_look_at(spec_of):
    config = build_config(spec_of("wav2vec2"), Task.SPEECH_CTC)
    made = make_inputs(config, Shape(task=Task.SPEECH_CTC, length=64), 3)
    assert made["input_values"].is_meta
    assert made["input_values"].shape == (3, 63 * 320 + 400)
    assert made["labels"].shape == (3, 16)
    assert (made["labels"] != config.pad_token_id).all()


@pytest.mark.parametrize("name", ["xlm", "flaubert", "sew-d"])
def test_a_model_that_looks_at_lengths_or_makes_tensors_of_numbers_is_traced(spec_of, name):
    shape = Shape(task=default_task(spec_of(name)), length=64)
    assert profile(spec_of(name), make_family(attn_implementation=None), shape).trained_elements > 10_000


def test_steps_are_independent(llama):
    first, _, again = (micro_step(llama, *how) for how in ((MIXED, SHAPE, 2), (PLAIN, SHAPE, 4), (MIXED, SHAPE, 2)))
    assert first.names == again.names
    assert (live(first) == live(again)).all()
    assert {p.grad.dtype for p in llama.parameters()} == {torch.float32}  # nothing is left of other types


def test_mixed_precision_gives_logits_in_fp32(llama):
    """accelerate converts every output of the forward pass: the logits are there in both types."""
    plain, mixed = (micro_step(llama, family, SHAPE, 2) for family in (PLAIN, MIXED))
    logits = 2 * 16 * 512
    assert {4.0 * logits} == sizes(plain, logits)
    assert {2.0 * logits, 4.0 * logits} == sizes(mixed, logits)


def sizes(tape, elements: int) -> set[float]:
    """Sizes of the storages of the forward pass that are as large as so many elements."""
    forward = tape.storages[tape.storages[:, 0] < tape.forward_end, 2]
    return set(forward.tolist()) & {2.0 * elements, 4.0 * elements}


def test_an_evaluation_keeps_logits_and_makes_no_gradient(llama):
    tape, step = evaluation_step(llama, MIXED, SHAPE, 2), micro_step(llama, MIXED, SHAPE, 2)
    assert tape.outputs_bytes == 2 * 16 * 512 * 4  # logits in fp32
    assert not tape.storages[:, 3].any()
    assert live(tape).sum(axis=1).max() < live(step).sum(axis=1).max()
    assert llama.training


def test_storages_say_which_module_and_operator_made_them(llama):
    tape = micro_step(llama, PLAIN, SHAPE, 2)
    assert len(tape.origins) == len(tape.storages)
    head = [at for at, (module, _) in enumerate(tape.origins) if module == "lm_head"]
    made = tape.storages[head, 0]
    assert (made < tape.forward_end).any()
    assert (made >= tape.forward_end).any()  # gradients are of the module whose operators they are the backward pass of
    assert {module for module, _ in tape.origins} <= {name for name, _ in llama.named_modules()}


def test_inputs_of_images_are_their_numbers_in_fp32_and_a_label(spec_of):
    config = build_config(spec_of("vit"), Task.IMAGE_CLASSIFICATION)
    made = make_inputs(config, Shape(task=Task.IMAGE_CLASSIFICATION, length=1), 1)
    assert {name: tensor.nbytes for name, tensor in made.items()} == {"pixel_values": 3 * 32 * 32 * 4, "labels": 8}
    config.problem_type, config.num_labels = "multi_label_classification", 5
    assert make_inputs(config, Shape(task=Task.IMAGE_CLASSIFICATION, length=1), 3)["labels"].shape == (3, 5)


def test_checkpointing_is_switched_on_and_off(llama):
    again = micro_step(llama, MIXED.model_copy(update={"checkpointing": "full"}), SHAPE, 2)
    made = [at for (at, *_), (module, _) in zip(again.storages, again.origins, strict=True) if module == GATE]
    assert any(again.recomputed[int(at)] for at in made)  # what is computed again belongs to its module
    assert not micro_step(llama, MIXED, SHAPE, 2).recomputed.any()


def test_under_checkpointing_the_output_of_frozen_embeddings_is_a_leaf_that_stays():
    """transformers has it require gradients, for those of the layers to come through."""
    spec = resolve("distilgpt2")
    task = default_task(spec)
    model = build_model(spec, task, dtype="float32", attn_implementation="sdpa", device="meta")
    model.requires_grad_(False)
    model.transformer.h[0].attn.c_attn.weight.requires_grad_()
    tape = micro_step(model, make_family(device="cuda", checkpointing="full"), Shape(task=task, length=32), 2)
    (freed,) = (row[1] for row in tape.storages if row[0] == tape.names.index("embedding"))
    assert freed > tape.forward_end
