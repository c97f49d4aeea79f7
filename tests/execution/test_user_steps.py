"""Trials of a user's own loop: real processes under the same guard, clock and limits as any trial."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from planted import planted

from autotune.value import sha256_of
from autotune.values.model import ModelSpec, Task
from autotune.values.trial import Measurement, TrialResult, TrialStatus
from autotune.values.workload import STEP_FILE, OwnStep

MIB = 1 << 20


@pytest.fixture
def run_own(bench, tmp_path) -> Callable[..., TrialResult]:
    """Return a function that runs a trial of what a function makes."""

    def run(make: Any, *, takes_accumulation: bool = False, batch: int = 8, known: str | None = None, **fields: Any):
        content = make if isinstance(make, bytes) else cloudpickle.dumps(make)
        own = OwnStep(
            name="make",
            takes_accumulation=takes_accumulation,
            knobs={},
            directory=str(tmp_path),
            search_path=(str(tmp_path),),
            sha256=sha256_of(content) if known is None else known,
        )
        folder = bench.run_directory / "data"
        folder.mkdir(exist_ok=True)
        (folder / STEP_FILE).write_bytes(content)
        spec = ModelSpec(reference="make", name="make", source="own", model_type="own", kind="own", config={})
        workload = {"model": spec, "task": Task.OWN, "global_batch_size": batch, "own_step": own}
        return bench.run(workload=workload, **fields)

    return run


def cause_of(result: TrialResult) -> str:
    assert result.outcome.kind == "failure"
    return result.outcome.cause


def make_linear(config, accumulation_steps):
    """A loop as anybody writes it, which counts what it is asked to do."""
    import torch

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(config.per_device_train_batch_size, 64)
    print("accumulating", accumulation_steps, "times", config.per_device_train_batch_size)

    def step():
        for _ in range(accumulation_steps):
            loss = model(batch).square().mean() / accumulation_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.fixture(scope="module", autouse=True)
def by_value():
    """The trial's process doesn't know this module: pickle its functions whole, as those of a user's __main__."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def test_a_loop_is_measured_with_all_its_micro_batches(bench, run_own):
    result = run_own(make_linear, takes_accumulation=True)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    measured = result.outcome
    assert isinstance(measured, Measurement)
    assert measured.accumulation_steps == 4
    assert "accumulating 4 times 2" in (bench.directory(result) / "log.txt").read_text()
    assert measured.samples_per_second == pytest.approx(8 * len(measured.step_times_s) / sum(measured.step_times_s))
    assert math.isfinite(measured.loss)
    assert measured.data_wait_share is None
    assert measured.tokens_per_second is None
    assert measured.memory.resident_bytes < 100 * MIB
    assert measured.phases.measured_s > 0


def test_a_loop_without_a_loss_is_measured(run_own):
    result = run_own(lambda config: lambda: None)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.loss is None


def test_a_loss_that_is_no_number_is_invalid(run_own):
    result = run_own(lambda config: lambda: float("nan"))
    assert result.status is TrialStatus.INVALID
    assert cause_of(result) == "the loss became nan: not trainable like this"


def test_a_loop_runs_out_of_memory(run_own):
    def hoards(config):
        import torch

        kept = []
        return lambda: kept.append(torch.ones(16 << 20))  # 64 MiB a step

    result = run_own(hoards, limits={"memory_bytes": 100 * MIB})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert result.outcome.memory.resident_bytes < 150 * MIB


def test_a_loop_that_never_returns_is_ended(run_own):
    def hangs(config):
        import time

        return lambda: time.sleep(3600)

    assert run_own(hangs, limits={"timeout_s": 1}).status is TrialStatus.TIMED_OUT


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("no bf16 here"), TrialStatus.INVALID, "make refuses it: no bf16 here"),
        (RuntimeError("shapes differ"), TrialStatus.CRASHED, "RuntimeError: shapes differ"),
    ],
)
def test_a_function_that_raises(run_own, error, status, said):
    def raises(config):
        raise error

    result = run_own(raises)
    assert (result.status, cause_of(result)) == (status, said)


def test_a_step_that_raises_has_crashed(run_own):
    def raises():
        raise ValueError("a bad batch")

    result = run_own(lambda config: raises)
    assert (result.status, cause_of(result)) == (TrialStatus.CRASHED, "ValueError: a bad batch")


def test_what_is_no_step_is_said_to_be_none(run_own):
    result = run_own(lambda config: 42)
    assert result.status is TrialStatus.INVALID
    assert cause_of(result) == "make returned int; it has to return a function that does one optimizer step"

    def generator(config):
        def step():
            yield

        return step

    assert "whose call does nothing" in cause_of(run_own(generator))


def test_what_cant_be_loaded_is_said(run_own):
    result = run_own(b"no pickle")
    assert result.status is TrialStatus.INVALID
    assert cause_of(result).startswith("make can't be loaded in a trial: ")


def test_a_loop_with_accelerate(run_own):
    def make(config, accumulation_steps):
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps, mixed_precision="bf16")
        model = torch.nn.Linear(64, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        batch = torch.ones(config.per_device_train_batch_size, 64)

        def step():
            for _ in range(accumulation_steps):
                with accelerator.accumulate(model):
                    loss = model(batch).float().square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        return step

    result = run_own(make, takes_accumulation=True)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert 0 < result.outcome.loss < 10


def test_modules_and_files_beside_the_users_script_are_found(bench, run_own, tmp_path: Path):
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "settings.txt").write_text("ok")

    def make(config):
        from pathlib import Path

        import beside

        print(beside.WIDTH, Path("settings.txt").read_text())
        return lambda: None

    result = run_own(make)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert "3 ok" in (bench.directory(result) / "log.txt").read_text()


def test_a_data_loader_worker_that_dies_is_the_cause(run_own):
    def make(config):
        import os

        from torch.utils.data import DataLoader, Dataset

        class Deadly(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                os._exit(7)

        return lambda: next(iter(DataLoader(Deadly(), num_workers=1)))

    result = run_own(make)
    assert result.status is TrialStatus.CRASHED
    assert "DataLoader worker" in cause_of(result)
    assert "exited unexpectedly" in cause_of(result)


def test_a_function_that_was_exchanged_is_not_loaded(run_own, tmp_path):
    result = run_own(planted(tmp_path / "ran"), known="0" * 64)
    assert result.status is TrialStatus.INVALID
    assert "own-step.pkl is not what the search was begun with" in cause_of(result)
    assert not (tmp_path / "ran").exists()
