"""Quick searches for real models on the CPU, minutes each: `pytest -m slow`; the last run stands in docs/log.md."""

import subprocess
import sys
import time

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
        assert result.verdict in ("no clear winner", "couldn't tell")
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


STEPS = """
import time

def make(config):
    def step():
        time.sleep({seconds} * ({factor} if config.precision == "bf16" else 1))
    return step
"""

COMMAND = """
import autotune
from loop import make
autotune.find(step=make, knobs={{"precision": ["fp32", "bf16"], "tf32": [False, True]}}, device="cpu",
              max_time={limit_s}, run_dir="run")
"""


@pytest.mark.parametrize(
    ("step_s", "limit_s", "factor"), [(0.1, 20.0, 3), (2.0, 30.0, 3), (10.0, 60.0, 3), (0.1, 40.0, 36_000)]
)
def test_no_search_outlasts_its_time_by_more_than_a_step(step_s, limit_s, factor, tmp_path):
    """bf16 takes `factor` times as long, in the last case for ever."""
    (tmp_path / "loop.py").write_text(STEPS.format(seconds=step_s, factor=factor))
    (tmp_path / "program.py").write_text(COMMAND.format(limit_s=limit_s))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert took_s <= limit_s + max(5.0, step_s)
    result = autotune.load(tmp_path / "run" / "best-config.json")
    assert result.baseline.measurement is not None
