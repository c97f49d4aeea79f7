"""The benchmark against torch's allocator: rows are of its plan; what compiled models took lies in their interval."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import masking_utils

from autotune.execution import worker

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import allocator_truth as truth

MEASURED = truth.RESULTS / "allocator-truth-measured.jsonl"
COMPILED = [row for row in truth.read(MEASURED) if row["case"]["part"] == "compiled" and "memory" in row]


def test_what_was_measured_is_of_the_plan():
    assert {row["key"] for row in truth.read(MEASURED)} <= {case.key for case in truth.plan()}


@pytest.mark.parametrize("model", ["bert-base-uncased", "gpt2"])
def test_what_compiled_models_took_lies_in_the_interval(model):
    rows = [row for row in COMPILED if row["case"]["model"] == model]
    assert len(rows) > 1
    for row in rows[:2]:
        case = truth.Case.model_validate(row["case"])
        memory = truth._predicted(case, truth.hardware_of(case.capability, MEASURED))["memory"]
        for name in ("allocated", "reserved"):
            interval = memory[f"{name}_interval"]
            assert interval["low"] < row["memory"][f"{name}_bytes"] < interval["high"]


def test_kernels_that_are_not_predicted_are_told():
    row = {"attention": ["flash", "efficient"], "case": {"config": {"attn_implementation": "sdpa"}}}
    assert truth._told_kernels({**row, "predicted": {"attention": ["flash"]}}) is False
    assert truth._told_kernels({**row, "predicted": {"attention": ["efficient", "flash"]}}) is True


def test_a_trial_asks_of_masks_what_the_stand_in_can_answer(monkeypatch, tmp_path):
    """On it a sum reads as 0 and `all()` as true."""
    asked = []
    mask = SimpleNamespace(all=lambda: True, sum=lambda: 0, numel=lambda: 4)
    monkeypatch.setattr(masking_utils, "fast_all", masking_utils.fast_all)  # put back afterwards
    monkeypatch.setattr(worker, "run_trial", lambda directory: asked.append(masking_utils.fast_all(mask)))
    truth.trial(tmp_path)
    assert asked == [True]
