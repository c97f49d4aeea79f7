"""Quick searches for real models on the CPU, minutes each: `pytest -m slow`; the last run stands in docs/log.md."""

import pytest

import autotune

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TINY_MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def assert_sound(result):
    """The answer is at least as fast as the baseline, both measured again, or honestly the baseline itself."""
    assert result.best.confirmed
    assert result.baseline.confirmed
    if result.verdict == "faster":
        assert result.speedup.interval.low > 1
    else:
        assert result.verdict == "no clear winner"
        assert result.best.config == result.baseline.config


@pytest.mark.parametrize("model", ["t5-small", "gpt2", "bert-base-uncased", "resnet-18", "vit-small"])
def test_a_quick_search_ends_within_five_minutes_with_a_sound_answer(model, tmp_path):
    result = autotune.find(model, effort="quick", device="cpu", run_dir=tmp_path / "run")
    assert_sound(result)
    assert result.search_time_s < 300


def test_experts_from_a_local_directory(tmp_path):
    from conftest import write_model

    directory = write_model(tmp_path / "tiny-mixtral", TINY_MIXTRAL)
    assert_sound(autotune.find(str(directory), effort="quick", device="cpu", run_dir=tmp_path / "run"))
