"""Checkpointing of a traced model is that of the library."""

from autotune.cost.family import Family, Shape
from autotune.cost.trace import micro_step
from autotune.training.build import build_model
from autotune.training.heads import default_task
from autotune.training.resolve import resolve
from autotune.values.model import Task

MIXED = Family(device="cuda", dtype="float32", autocast="bfloat16", attn_implementation="sdpa")


def test_checkpointing_is_switched_on_and_off(spec_of):
    llama = build_model(spec_of("llama"), Task.CAUSAL_LM, dtype="float32", attn_implementation="sdpa", device="meta")
    shape = Shape(task=Task.CAUSAL_LM, length=16)
    assert micro_step(llama, MIXED.model_copy(update={"checkpointing": "full"}), shape, 2).recomputed.any()
    assert not micro_step(llama, MIXED, shape, 2).recomputed.any()


def test_under_checkpointing_the_output_of_frozen_embeddings_is_a_leaf_that_stays():
    """transformers has it require gradients, for those of the layers to come through."""
    spec = resolve("distilgpt2")
    task = default_task(spec)
    model = build_model(spec, task, dtype="float32", attn_implementation="sdpa", device="meta")
    model.requires_grad_(False)
    model.transformer.h[0].attn.c_attn.weight.requires_grad_()
    family = Family(device="cuda", dtype="float32", attn_implementation="sdpa", checkpointing="full")
    tape = micro_step(model, family, Shape(task=task, length=32), 2)
    (freed,) = (row[1] for row in tape.storages if row[0] == tape.names.index("embedding"))
    assert freed > tape.forward_end
