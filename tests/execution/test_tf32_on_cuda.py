"""On a device that has TF32: what is said of it is what a trial's process does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from benches import Bench
from factories import make_facts
from own_trainings import SCRIPT, write

from autotune.training.arguments import effective_tf32, plan
from autotune.training.baseline import baseline_config
from autotune.values.hardware import TF32_VARIABLE, detect
from autotune.values.model import Task
from autotune.values.trial import DescribeRequest, TrialStatus
from autotune.values.workload import OwnCode, Workload

pytestmark = pytest.mark.cuda

GIB = 1 << 30


@pytest.fixture(scope="module")
def cuda_with_tf32(model, tmp_path_factory):
    """Trials in an environment as images of vendors have it."""
    made = Bench(model, tmp_path_factory.mktemp("run"), device="cuda:0")
    with made.runner:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(TF32_VARIABLE, "1")
            made.runner.start()
        yield made


def effects(bench: Any, **config: Any) -> dict[str, str]:
    result = bench.run(config=config, limits={"memory_bytes": 4 * GIB})
    assert result.status is TrialStatus.COMPLETED, result.outcome
    return result.outcome.effects


COMPILED = {"torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    ("precision", "tf32"), [("fp32", False), ("fp32", True), ("bf16", False), ("pure_bf16", False)]
)
def test_a_compiled_trial_has_tf32_on_whatever_was_asked_for(cuda, precision, tf32):
    assert effects(cuda, **COMPILED, precision=precision, tf32=tf32)["tf32"] == "tf32"


@pytest.mark.parametrize("tf32", [False, True])
def test_a_compiled_trial_in_fp16_has_tf32_as_it_was_asked_for(cuda, tf32):
    assert (effects(cuda, **COMPILED, precision="fp16", tf32=tf32)["tf32"] == "tf32") == tf32


def test_a_process_that_begins_with_tf32_is_the_baselines(cuda_with_tf32, monkeypatch):
    monkeypatch.setenv(TF32_VARIABLE, "1")
    baseline = baseline_config(None, 8, make_facts(), detect("cuda:0"))
    assert baseline.tf32
    for config in ({}, {"precision": "bf16"}, COMPILED):
        assert effects(cuda_with_tf32, tf32=baseline.tf32, **config)["tf32"] == "tf32"


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16", "torch_compile_mode": "max-autotune"},
        {"precision": "pure_bf16", "torch_compile_mode": "max-autotune-no-cudagraphs"},
        {"precision": "fp32", "torch_compile_mode": "max-autotune"},
        {"precision": "fp32", "torch_compile_mode": "max-autotune", "tf32": True},
        {"precision": "fp16", "torch_compile_mode": "max-autotune"},
    ],
    ids=str,
)
def test_inductors_autotuning_can_ask_for_the_precision_of_products(cuda, config, tmp_path):
    """It asks by torch's older interface, which raises after the newer was used alone."""
    request = cuda.request(config={"torch_compile_backend": "inductor", **config})
    hardware = detect("cuda:0")
    tuned = plan(request.config, request.workload, hardware).tuned
    code = f"""
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments({str(tmp_path)!r}, **{tuned!r})
Trainer(torch.nn.Linear(2, 2), arguments)
print(torch.get_float32_matmul_precision(), tf32 := torch.backends.cuda.matmul.fp32_precision == "tf32")
raise SystemExit(tf32 != {effective_tf32(request.config, hardware)})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("prologue", "arguments", "is_on", "is_held"),
    [
        ("", (), False, False),
        ("", ("--tf32", "True"), True, False),
        ("", ("--torch_compile", "True"), False, False),
        ("import torch; torch.backends.cuda.matmul.allow_tf32 = True", (), True, True),
        ("import torch; torch.set_float32_matmul_precision('high')", ("--tf32", "False"), True, True),
        ("import torch; torch.backends.fp32_precision = 'tf32'", (), True, True),
    ],
)
def test_a_scripts_own_tf32_is_that_of_the_baseline_and_stays(cuda, tmp_path, prologue, arguments, is_on, is_held):
    path = write(tmp_path, f"{prologue}\n{SCRIPT}")
    command = (path.name, "--output_dir", "out", *arguments)
    code = OwnCode(kind="script", shown=path.name, command=command, directory=str(tmp_path))
    workload = Workload(model=cuda._model, task=Task.OWN, sequence_length=1, global_batch_size=None, own_code=code)
    found = cuda.runner.describe(DescribeRequest(workload=workload)).own
    assert bool(found.arguments.get("tf32")) == is_on
    assert ("tf32" in found.held) == is_held


def test_attention_after_rotary_positions_is_told_as_it_ran(cuda):
    assert effects(cuda, precision="bf16")["attn_implementation"] == "sdpa (flash)"


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_adapters_on_packed_weights_train_in_pure_bf16(cuda, quantization):
    seen = effects(cuda, adapter={"rank": 8}, quantization=quantization, precision="pure_bf16")
    assert seen["precision"].endswith("layer outputs bfloat16")
