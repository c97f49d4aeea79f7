"""A user's own loop: one step is looked at before the search, and its trials are real processes as any trial's."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from factories import make_config, make_facts, make_workload
from planted import planted
from torch import nn
from torch.nn.functional import mse_loss

from autotune.execution.describe import run_examine
from autotune.value import sha256_of, write_value
from autotune.values.model import ModelSpec, Task
from autotune.values.trial import Description, ExamineRequest, Measurement, Refusal, TrialResult, TrialStatus
from autotune.values.workload import STEP_FILE, OwnStep

MIB = 1 << 20
ROWS = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


def own_step(content: bytes, directory: Path, takes_accumulation: bool) -> OwnStep:
    where = {"directory": str(directory), "search_path": (str(directory),), "sha256": sha256_of(content)}
    return OwnStep(name="make", takes_accumulation=takes_accumulation, knobs={}, **where)


@pytest.fixture
def run_own(bench, tmp_path) -> Callable[..., TrialResult]:
    """Return a function that runs a trial of what a function makes."""

    def run(make: Any, *, takes_accumulation: bool = False, batch: int = 8, known: str | None = None, **fields: Any):
        content = make if isinstance(make, bytes) else cloudpickle.dumps(make)
        own = own_step(content, tmp_path, takes_accumulation)
        own = own if known is None else own.model_copy(update={"sha256": known})
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


def test_a_loop_runs_out_of_memory(run_own):
    def hoards(config):
        import torch

        kept = []
        return lambda: kept.append(torch.ones(16 << 20))  # 64 MiB a step

    result = run_own(hoards, limits={"memory_bytes": 100 * MIB})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert result.outcome.memory.resident_bytes < 150 * MIB


def raising(error):
    def make(config):
        raise error

    return make


def generator(config):
    def step():
        yield

    return step


@pytest.mark.parametrize(
    ("make", "status", "said"),
    [
        (lambda config: lambda: float("nan"), "invalid", "the loss became nan: not trainable like this"),
        (raising(ValueError("no bf16 here")), "invalid", "make refuses it: no bf16 here"),
        (raising(RuntimeError("shapes differ")), "crashed", "RuntimeError: shapes differ"),
        (lambda config: 42, "invalid", "make returned int; it has to return a function that does one optimizer step"),
        (generator, "invalid", "make returned a generator or coroutine, whose call does nothing"),
        (b"no pickle", "invalid", "make can't be loaded in a trial: "),
    ],
    ids=["NaN", "refuses", "fails", "no function", "generator", "no pickle"],
)
def test_a_function_that_makes_no_training_is_told(run_own, make, status, said):
    result = run_own(make)
    assert result.status == status
    assert cause_of(result).startswith(said)


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


def test_a_function_that_was_exchanged_is_not_loaded(run_own, tmp_path):
    result = run_own(planted(tmp_path / "ran"), known="0" * 64)
    assert result.status is TrialStatus.INVALID
    assert "own-step.pkl is not what the search was begun with" in cause_of(result)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Return a function that examines what a function makes: micro-batch 8 and 4 of a global batch of 32."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(make, *, takes_accumulation=True, other=4, batch=32):
        content = cloudpickle.dumps(make)
        own = own_step(content, tmp_path, takes_accumulation)
        workload = make_workload(global_batch_size=batch).model_copy(update={"own_step": own})
        for name in ("data", "examine"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "data" / STEP_FILE).write_bytes(content)
        request = ExamineRequest(workload=workload, facts=make_facts(), config=make_config(8), other=other)
        write_value(request, tmp_path / "examine" / "request.json")
        run_examine(tmp_path / "examine")
        text = (tmp_path / "examine" / "description.json").read_text()
        return Description.model_validate_json(text) if '"description"' in text else Refusal.model_validate_json(text)

    return run


def loop(*, micro_steps=None, loader=True, reduction="mean", divides=True, clips=False, model=None, returned=None):
    """Return a loop as people write them; `micro_steps` instead of those that it is asked for."""

    def make(config, accumulation_steps=1):
        net = model or nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16))
        optimizer = torch.optim.AdamW(net.parameters())
        size, steps = config.per_device_train_batch_size, micro_steps or accumulation_steps
        batches = iter(torch.utils.data.DataLoader(ROWS, batch_size=size, shuffle=True))
        drawn = torch.Generator().manual_seed(size)  # other samples with another split

        def step():
            for _ in range(steps):
                batch = next(batches) if loader else torch.randn(size, 16, generator=drawn)
                loss = mse_loss(net(batch), batch, reduction=reduction)
                (loss / steps if divides else loss).backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return loss if returned is None else (loss, returned)

        return step

    return make


def test_a_loop_that_keeps_to_the_global_batch_is_left_alone(examine):
    assert examine(loop()) == Description(facts=make_facts())
    assert examine(loop(reduction="sum", divides=False)) == Description(facts=make_facts())


@pytest.mark.parametrize("steps", [None, 1])
def test_samples_are_known_where_the_first_dimension_of_a_batch_is_time(examine, steps):
    def make(config, accumulation_steps):
        net = nn.LSTM(4, 4)
        optimizer = torch.optim.AdamW(net.parameters())
        batches = iter(ROWS.view(256, 4, 4).repeat(1, 5, 1).split(config.per_device_train_batch_size))

        def step():
            for _ in range(steps or accumulation_steps):
                batch = next(batches).transpose(0, 1)
                (mse_loss(net(batch)[0], batch) / (steps or accumulation_steps)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = examine(make)
    if steps is None:
        assert found.facts.split_changes is None
    else:
        assert "consumed 8 samples, and 32 are a step" in found.message


@pytest.mark.parametrize("loader", [True, False])
def test_a_step_that_ignores_accumulation_is_refused_with_what_it_consumed(examine, loader):
    refused = examine(loop(micro_steps=1, loader=loader), takes_accumulation=False)
    assert (refused.kind, refused.error) == ("refusal", "InputError")
    assert "a step of make consumed 8 samples, and 32 are a step (4 x 8): have make take accumulation_steps" in (
        refused.message
    )


def test_a_step_that_ignores_the_micro_batch_is_refused(examine):
    """Right at the baseline's micro-batch and wrong at the other."""
    refused = examine(loop(micro_steps=4))
    assert "with a micro-batch of 4 a step of make consumed 16 samples, and 32 are a step (8 x 4)" in refused.message


def test_what_a_step_says_itself_is_what_counts(examine):
    twice = nn.Sequential(nn.Linear(16, 16))

    def make(config, accumulation_steps):
        optimizer = torch.optim.SGD(twice.parameters())
        size = config.per_device_train_batch_size

        def step(samples=None):
            for _ in range(accumulation_steps):
                one, other = torch.ones(size, 16), torch.zeros(size, 16)
                loss = (twice(one) - twice(other)).square().mean() / accumulation_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss, size * accumulation_steps) if make.tells else loss

        return step

    make.tells = False
    assert "consumed 64 samples, and 32 are a step" in examine(make).message
    make.tells = True
    assert examine(make) == Description(facts=make_facts())
    assert "consumed 31 samples" in examine(loop(returned=31)).message


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_that_is_not_divided_is_told_with_the_figures(examine, clips):
    found = examine(loop(divides=False, clips=clips))
    assert "in 4 micro-batches of 8 and" in found.facts.split_changes
    assert "50% apart" in found.facts.split_changes
    assert "tried with --allow method alone" in found.notes[0]


def test_an_optimizer_step_after_each_micro_batch_is_another_gradient(examine):
    def make(config, accumulation_steps):
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(ROWS.split(config.per_device_train_batch_size))

        def step():
            for _ in range(accumulation_steps):
                optimizer.zero_grad()
                batch = next(batches)
                mse_loss(model(batch), batch).backward()
                optimizer.step()

        return step

    assert examine(make).facts.split_changes is not None


def test_with_other_samples_a_wrong_scale_is_seen_all_the_same(examine):
    found = examine(loop(loader=False))
    assert found.facts == make_facts()
    assert "could not be measured: other samples are read with another split" in found.notes[0]
    torch.manual_seed(0)
    found = examine(loop(loader=False, divides=False, reduction="sum", model=nn.Linear(16, 16)))
    assert found.facts.split_changes is None
    doubled = examine(loop(loader=False, divides=False, model=nn.Linear(16, 16)))
    assert doubled.facts.split_changes is not None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda config, accumulation_steps: lambda: None, "no optimizer of torch's made a step"),
        (lambda config, accumulation_steps: 1 / 0, "the step failed (ZeroDivisionError"),
    ],
)
def test_what_cant_be_seen_is_said(examine, make, said):
    found = examine(make)
    assert found.facts == make_facts()
    assert said in found.notes[0]


def test_where_no_other_split_is_tried_the_samples_are_counted(examine):
    assert examine(loop(divides=False), other=None) == Description(facts=make_facts())
    assert examine(loop(micro_steps=1), other=None).kind == "refusal"
    assert examine(loop(micro_steps=1), other=None, batch=None) == Description(facts=make_facts())


def test_nothing_of_torch_stays_changed(examine):
    before = nn.Module.__call__, nn.utils.clip_grad_norm_
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    examine(loop(model=model))
    assert (nn.Module.__call__, nn.utils.clip_grad_norm_) == before
    assert model[1].p == 0.5
