"""Every family that is promised, and configs that the catalogue doesn't know, each searched once: `pytest -m slow`.

The models are tiny; a search is its baseline, a trial of a small space and the finals.
"""

import json
import math
import os
import re
import subprocess
import sys

import pytest
from conftest import write_model
from model_families import FAMILIES, STRANGERS
from vision_language import edge, vision_language

import autotune
from autotune.errors import AutotuneError
from autotune.training.build import build_model
from autotune.values.trial import Purpose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OWN_LENGTHS = {"whisper", *vision_language()}

SPACE = """
description: what takes least time to trace
parameters:
  precision: {choices: [bf16, fp32]}
  checkpointing: {choices: [none, full]}
  per_device_train_batch_size: {choices: lattice}
"""


def search(directory, config):
    model = write_model(directory / "model", config)
    (directory / "space.yaml").write_text(SPACE)
    return autotune.find(
        str(model), effort="quick", device="cpu", seq_len=None if config["model_type"] in OWN_LENGTHS else 16,
        image_size=edge(config["model_type"]),
        target_len=8 if config["model_type"] == "whisper" else None, global_batch=4, max_trials=1,
        space=directory / "space.yaml", run_dir=directory / "run",
    )  # fmt: skip


def assert_tuned(result):
    assert result.baseline.measurement is not None
    assert result.best.measurement.samples_per_second > 0
    assert all("\n" not in trial.cause for trial in result.trials if trial.cause)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_searched(family, tmp_path):
    assert_tuned(search(tmp_path, FAMILIES[family]))


@pytest.mark.parametrize("model_type", vision_language())
def test_every_vision_language_family_is_estimated_searched_and_exported(model_type, tmp_path):
    config = vision_language(wide=4, vocabulary=16000)[model_type]
    result = search(tmp_path, config)
    assert_tuned(result)
    model = build_model(result.workload.model, result.workload.task, dtype="float32", device="cpu")
    model.save_pretrained(tmp_path / "model")
    result.export("python", tmp_path / "exported")
    script = [sys.executable, "train.py", "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(script, cwd=tmp_path / "exported", env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    loss = json.loads(ran.stdout.splitlines()[-1])["loss"]
    assert math.isfinite(loss)
    shares = {}
    for row in result.trials:
        if row.number is not None and row.purpose in (Purpose.BASELINE, Purpose.SEARCH):
            predicted = autotune.estimate(config=row.config, workload=result.workload, device="cpu").memory
            shares[row.config.precision, row.config.checkpointing] = row.peak_bytes / predicted.device_peak_bytes
    print(model_type, shares, loss)
    assert all(0.95 <= share <= 1.05 for share in shares.values())


@pytest.mark.parametrize("model_type", STRANGERS)
def test_a_stranger_is_tuned_or_refused_in_one_line(model_type, tmp_path):
    config, refusal = STRANGERS[model_type]
    config = {"model_type": model_type, **config}
    if refusal is None:
        assert_tuned(search(tmp_path, config))
        return
    with pytest.raises(AutotuneError) as caught:
        search(tmp_path, config)
    assert re.search(refusal, str(caught.value))
    assert "\n" not in str(caught.value)
