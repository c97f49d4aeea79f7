"""What is alive at the peak is all that is allocated, each part by its module, with an option that would shrink it."""

from __future__ import annotations

import dataclasses

import pytest
from factories import make_config, make_gpu, make_workload
from profiles import make_model

from autotune.space.knobs import knobs
from autotune.values.estimate import Evaluation

CONFIGS = {
    "mixed": make_config(8, precision="bf16", optim="adamw_torch", attn_implementation="sdpa"),
    "checkpointed": make_config(8, precision="bf16", checkpointing="full", attn_implementation="sdpa"),
    "small": make_config(1, optim="adamw_torch", attn_implementation="sdpa"),
    "eager": make_config(64, attn_implementation="eager"),
}


def model_of(profile_of, name: str, config, **fields):
    family = {
        "device": "cuda",
        "dtype": "float32",
        "autocast": "bfloat16" if str(config.precision) == "bf16" else None,
        "checkpointing": config.checkpointing,
        "attn_implementation": config.attn_implementation,
        "adapter": config.adapter,
    }
    traced = profile_of(name, **family)
    return dataclasses.replace(
        make_model([traced], hardware=make_gpu(), workload=make_workload(global_batch_size=None)), **fields
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in CONFIGS),
        *(pytest.param("t5", kind, marks=() if kind == "checkpointed" else pytest.mark.slow) for kind in CONFIGS),
    ],
)
def test_all_that_is_alive_is_what_is_allocated(profile_of, name, kind):
    config = CONFIGS[kind]
    model = model_of(profile_of, name, config)
    memory = model.estimate(config).memory
    rows = model.alive(config)
    assert sum(row.allocated_bytes for row in rows) == pytest.approx(memory.allocated_peak_bytes, abs=len(rows))
    for kind, nbytes in memory.components.items():
        assert sum(row.allocated_bytes for row in rows if row.kind == kind) == pytest.approx(nbytes, abs=len(rows))


def test_modules_are_named_and_equal_layers_are_together(profile_of):
    rows = model_of(profile_of, "a deep llama", CONFIGS["mixed"]).alive(CONFIGS["mixed"])
    (weights,) = (r for r in rows if (r.kind, r.module) == ("weights", "model.layers.*.mlp.gate_proj"))
    assert weights.tensors == 8
    assert weights.allocated_bytes == pytest.approx(8 * 64 * 128 * 4, rel=0.01)
    saved = [r for r in rows if r.kind == "activations" and r.module.startswith("model.layers.*")]
    assert all(row.tensors % 8 == 0 for row in saved)


def test_the_logits_are_found(profile_of):
    rows = model_of(profile_of, "llama", CONFIGS["mixed"]).alive(CONFIGS["mixed"])
    assert any(row.module == "lm_head" and row.kind == "activations" for row in rows)


def test_a_knob_is_named_that_there_is(profile_of):
    known = {knob.option for knob in knobs()}
    for config in CONFIGS.values():
        named = {row.knob for row in model_of(profile_of, "llama", config).alive(config)} - {None}
        assert {name.partition("=")[0] for name in named} <= known
        assert named


def test_weights_in_four_bits_are_named_for_layers_alone(profile_of):
    config = make_config(1, adapter={"rank": 4}, attn_implementation="sdpa")
    rows = model_of(profile_of, "a deep llama", config).alive(config)
    knob_of = {row.module: row.knob for row in rows if row.kind == "weights"}
    assert knob_of["model.layers.*.mlp.gate_proj"] == "quantization=nf4"
    assert knob_of["lm_head"] == knob_of["model.embed_tokens"] == "precision=pure_bf16"


def test_scores_of_eager_attention_are_shrunk_by_another_attention(profile_of):
    rows = model_of(profile_of, "llama", CONFIGS["eager"]).alive(CONFIGS["eager"])
    assert any("softmax" in row.operator and row.knob == "attention" for row in rows)


def test_the_largest_phase_is_named(profile_of):
    small = CONFIGS["small"]
    memory = model_of(profile_of, "llama", small, evaluation=Evaluation(batch=512)).estimate(small).memory
    largest = max(memory.phases, key=lambda phase: phase.allocated_bytes)
    assert memory.phase == largest.name == "evaluation"
    assert memory.allocated_peak_bytes == largest.allocated_bytes
