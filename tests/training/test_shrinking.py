"""Which models are probed at two shallow depths, and why others aren't; models are built on the meta device."""

import pytest

from autotune.training.build import build_config, build_model
from autotune.training.depth import LEAST_LAYERS, MOST_SHARE, probe_depths, shallower
from autotune.values.model import ModelSpec, ProbeDepths, Task

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
LLAMA = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 24}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "vocab_size": 64, "num_layers": 24}
TASKS = {"t5": Task.SEQ2SEQ_LM, "bert": Task.MASKED_LM, "swin": Task.IMAGE_CLASSIFICATION}


def parameters(spec: ModelSpec, task: Task, depths: dict[str, int]) -> int:
    config = shallower(build_config(spec, task), depths)
    return sum(p.numel() for p in build_model(spec, task, dtype="float32", device="meta", config=config).parameters())


def found(model_type: str, config: dict, *, wrong_by: int = 0) -> ProbeDepths | str:
    spec = ModelSpec(
        reference=model_type, name=model_type, source="catalogue", model_type=model_type, kind="decoder", config=config
    )
    task = TASKS.get(model_type, Task.CAUSAL_LM)
    return probe_depths(spec, task, parameters(spec, task, {}) + wrong_by)


@pytest.mark.parametrize(
    ("model_type", "config", "shown"),
    [
        ("llama", LLAMA, "1 and 5 of 24 layers"),
        ("llama", {**LLAMA, "num_hidden_layers": LEAST_LAYERS}, "1 and 2 of 12 layers"),
        ("bert", {**SIZES, "num_hidden_layers": 24}, "1 and 5 of 24 layers"),
        ("t5", {**T5, "num_decoder_layers": 24}, "1 + 1 and 5 + 5 of 24 + 24 layers"),
        # Every sixth layer looks at the whole sequence: groups of six repeat.
        ("gemma3_text", {**LLAMA, "head_dim": 16, "num_hidden_layers": 72}, "6 and 12 of 72 layers"),
    ],
)
def test_equal_layers_are_probed_at_two_depths(model_type, config, shown):
    depths = found(model_type, config)
    assert str(depths) == shown
    assert depths.share(depths.low) + depths.share(depths.high) <= MOST_SHARE
    for field, full in depths.full.items():
        assert depths.high[field] + (depths.high[field] - depths.low[field]) * depths.beyond == full


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("llama", {**LLAMA, "num_hidden_layers": 6}, "6 layers are too few: two probes pay from 12 on"),
        ("t5", {**T5, "num_decoder_layers": 12}, r"its stacks of layers differ in depth \(24 and 12\)"),
        ("gemma3_text", {**LLAMA, "head_dim": 16}, "its layers repeat only after 6: two probes would cost most"),
        ("swin", {"embed_dim": 16, "image_size": 32}, "4 layers are too few"),
    ],
)
def test_others_are_not_with_the_reason(model_type, config, reason):
    import re

    assert re.match(reason, found(model_type, config))


def test_layers_that_differ_in_size_are_seen_by_the_parameters():
    assert found("llama", LLAMA, wrong_by=64) == "its layers differ in size"
