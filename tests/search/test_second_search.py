"""Two searches for the same thing, with real trials: what the second takes from the record of the first."""

import json

import pytest

import autotune
from autotune.storage.record import VARIABLE
from autotune.tuning_result import TuningResult
from autotune.values.config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _record(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, f"sqlite:///{tmp_path / 'record.db'}")


def explored(result: TuningResult) -> list[TrainConfig]:
    return [t.config for t in result.trials if t.purpose is not None and t.purpose.explores]


def test_it_measures_the_baseline_and_the_old_winner_and_ends_if_that_holds(tiny_llama, tmp_path):
    slow = tmp_path / "one-by-one.json"  # a baseline that something is sure to beat
    slow.write_text(json.dumps({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}))

    def find(run: str, **fields) -> TuningResult:
        return autotune.find(
            str(tiny_llama), effort="quick", device="cpu", seq_len=32, max_trials=3, baseline=slow,
            run_dir=tmp_path / run, **fields,
        )  # fmt: skip

    first = find("first")
    assert first.verdict == "faster"
    assert not [note for note in first.notes if "record" in note]
    second = find("second", seed=7)
    assert explored(second)[0] == first.baseline.config
    assert explored(second)[1] in explored(first)[1:]
    (told,) = [note for note in second.notes if "(record) gives" in note]
    if "is not measured again" in told:  # as it does unless the machine is busy
        assert not set(explored(first)) & set(explored(second)[2:])
    else:
        assert len(explored(second)) > 2
