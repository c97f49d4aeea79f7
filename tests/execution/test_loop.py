"""A user's own loop: one step is looked at before the search, and its trials are real processes as any trial's."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from factories import make_config, make_facts, make_workload
from own_trainings import looked_at, planted
from torch import nn
from torch.nn.functional import mse_loss

from autotune.errors import InputError
from autotune.value import sha256_of
from autotune.values.config import Parallelism
from autotune.values.model import ModelSpec, Task
from autotune.values.trial import Description, ExamineRequest, Refusal, TrialResult, TrialStatus
from autotune.values.workload import STEP_FILE, OwnStep

MIB = 1 << 20
ROWS = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


def written(make: Any, run_directory: Path, directory: Path, takes_accumulation: bool, known: str | None = None):
    """Write a function, or bytes, where a search has it; `known`: the digest that the search was begun with."""
    content = make if isinstance(make, bytes) else cloudpickle.dumps(make)
    (run_directory / "data").mkdir(exist_ok=True)
    (run_directory / "data" / STEP_FILE).write_bytes(content)
    where = {"directory": str(directory), "search_path": (str(directory),), "sha256": known or sha256_of(content)}
    return OwnStep(name="make", takes_accumulation=takes_accumulation, knobs={}, **where)


@pytest.fixture
def run_own(bench, tmp_path) -> Callable[..., TrialResult]:
    """Return a function that runs a trial of a function's loop: a global batch of 8, micro-batches of 2."""

    def run(make: Any, *, takes_accumulation: bool = False, known: str | None = None, **fields: Any):
        own = written(make, bench.run_directory, tmp_path, takes_accumulation, known)
        spec = ModelSpec(reference="make", name="make", source="own", model_type="own", kind="own", config={})
        workload = {"model": spec, "task": Task.OWN, "global_batch_size": 8, "own_step": own}
        return bench.run(workload=workload, **fields)

    return run


def loop(*, micro_steps=None, loader=True, reduction="mean", divides=True, clips=False, model=None, returned=None):
    """Return a loop as people write them; `micro_steps` instead of those that it is asked for."""

    def make(config, accumulation_steps=1):
        net = model or nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16))
        optimizer = torch.optim.AdamW(net.parameters())
        size, steps = config.per_device_train_batch_size, micro_steps or accumulation_steps
        print("accumulating", steps, "times", size)
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


@pytest.fixture(scope="module", autouse=True)
def by_value():
    """The trial's process doesn't know this module: pickle its functions whole, as those of a user's __main__."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def test_a_loop_is_measured_with_all_its_micro_batches(bench, run_own):
    result = run_own(loop(), takes_accumulation=True)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    measured = result.outcome
    assert measured.accumulation_steps == 4
    assert "accumulating 4 times 2" in bench.log(result)
    assert measured.samples_per_second == pytest.approx(8 * len(measured.step_times_s) / sum(measured.step_times_s))
    assert math.isfinite(measured.loss)
    assert measured.data_wait_share is None
    assert measured.memory.resident_bytes < 100 * MIB
    assert measured.phases.measured_s > 0


def test_a_loop_runs_out_of_memory(run_own):
    def hoards(config):
        kept = []
        return lambda: kept.append(torch.ones(16 << 20))  # 64 MiB a step

    result = run_own(hoards, limits={"memory_bytes": 100 * MIB})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert result.outcome.memory.resident_bytes < 150 * MIB


def yielding():
    yield


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda config: lambda: float("nan"), "the loss became nan: not trainable like this"),
        (lambda config: int("no bf16 here"), "make refuses it: invalid literal for int() with base 10: 'no bf16 here'"),
        (lambda config: {}["shapes"], "KeyError: 'shapes'"),
        (lambda config: exit("no data"), "SystemExit: no data"),
        (lambda config: 42, "make returned int; it has to return a function that does one optimizer step"),
        (lambda config: yielding, "the step made a generator or coroutine, which does nothing"),
        (lambda config: lambda: yielding(), "the step made a generator or coroutine, which does nothing"),
        (lambda config: iter(range(3)).__next__, "its data end after 3 steps: have the step begin them again"),
        (b"no pickle", "make can't be loaded in a trial: "),
    ],
    ids=["NaN", "refuses", "fails", "exits", "no function", "generator", "one in it", "data that end", "no pickle"],
)
def test_a_function_that_makes_no_training_is_told(run_own, make, said):
    result = run_own(make)
    assert result.status == ("crashed" if said.startswith(("KeyError", "SystemExit")) else "invalid")
    assert result.outcome.cause.startswith(said)


TWO = {"parallelism": Parallelism(world_size=2)}
PIPELINE = {"parallelism": Parallelism(world_size=2, model_parallel=2)}


def pipeline(*, divides=True, short=0, fails=False):
    """Return a loop whose two ranks each have a stage; the schedule is a knob of its own."""

    def make(config, accumulation_steps, schedule="gpipe"):
        from torch import distributed
        from torch.distributed import pipelining

        rank, size = distributed.get_rank(), config.per_device_train_batch_size
        if fails and rank:
            raise KeyError("shapes")
        stage = pipelining.PipelineStage(nn.Linear(16, 16), rank, 2, torch.device("cpu"))
        kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
        steps = accumulation_steps - short
        run = kind(stage, n_microbatches=steps, loss_fn=mse_loss, scale_grads=divides)
        optimizer = torch.optim.AdamW(stage.submod.parameters())
        batch = ROWS[: size * steps]
        print(type(run).__name__, "of", steps)

        def step():
            losses = []
            run.step(*([] if rank else [batch]), **({"target": batch, "losses": losses} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
            return float(torch.stack(losses).mean()) if losses else None

        return step

    return make


def test_the_ranks_of_a_loop_share_the_global_batch_or_each_of_its_samples(bench, run_own):
    shared = run_own(loop(), takes_accumulation=True, config=TWO)
    assert shared.outcome.accumulation_steps == 2
    assert "accumulating 2 times 2" in (bench.directory(shared) / "log-1.txt").read_text()
    knobs = {**PIPELINE, "own": {"schedule": "1f1b"}}
    staged = run_own(pipeline(), takes_accumulation=True, config=knobs)
    assert staged.status is TrialStatus.COMPLETED, staged.outcome
    assert "Schedule1F1B of 4" in bench.log(staged)
    times = staged.outcome.step_times_s
    assert staged.outcome.samples_per_second == pytest.approx(8 * len(times) / sum(times))
    assert staged.outcome.loss > 0  # the last stage's


def test_a_rank_that_a_loop_fails_on_ends_the_trial_with_its_cause(run_own):
    failed = run_own(pipeline(fails=True), takes_accumulation=True, config=PIPELINE)
    assert failed.outcome.cause == "rank 1: KeyError: 'shapes'"


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (loop(), TWO, ()),
        (pipeline(), PIPELINE, ()),
        (loop(micro_steps=1), TWO, "consumed 4 samples, and 8 are a step (2 x 4)"),
        (pipeline(short=1), PIPELINE, "consumed 12 samples, and 16 are a step (4 x 4)"),
        (pipeline(divides=False), PIPELINE, "50% apart"),
        (pipeline(fails=True), PIPELINE, "could not be looked at"),
    ],
    ids=["data parallel", "pipeline", "short", "short pipeline", "not divided", "fails"],
)
def test_a_step_of_several_ranks_is_examined_by_all_of_them(bench, tmp_path, make, config, said):
    own = written(make, bench.run_directory, tmp_path, True)
    workload = make_workload(global_batch_size=16).model_copy(update={"own_step": own})
    request = ExamineRequest(workload=workload, facts=make_facts(), config=make_config(4, **config), other=2)
    if not said:
        assert bench.runner.describe(request) == Description(facts=make_facts())
    elif "consumed" in said:
        with pytest.raises(InputError, match=re.escape(said)):
            bench.runner.describe(request)
    else:
        assert said in bench.runner.describe(request).notes[0]


def test_a_loop_with_accelerate(run_own):
    def make(config, accumulation_steps):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps, mixed_precision="bf16")
        model = nn.Linear(64, 64)
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


def test_modules_and_files_beside_the_users_script_are_found(bench, run_own, tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")

    def make(config):
        import beside

        print(beside.WIDTH, Path("beside.py").read_text())
        return lambda: None

    result = run_own(make)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert "3 WIDTH" in bench.log(result)


def test_a_function_that_was_exchanged_is_not_loaded(run_own, tmp_path):
    result = run_own(planted(tmp_path / "ran"), known="0" * 64)
    assert result.status is TrialStatus.INVALID
    assert "own-step.pkl is not what the search was begun with" in result.outcome.cause
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Return a function that examines a function's loop: micro-batches of 8 and 4, a global batch of 32."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(make, *, takes_accumulation=True, other=4, batch=32):
        own = written(make, tmp_path, tmp_path, takes_accumulation)
        workload = make_workload(global_batch_size=batch).model_copy(update={"own_step": own})
        request = ExamineRequest(workload=workload, facts=make_facts(), config=make_config(8), other=other)
        return looked_at(request, tmp_path / "examine")

    return run


def twice(tells):
    """Return a loop whose model sees each sample twice, which its step tells or doesn't."""

    def make(config, accumulation_steps):
        net, size = nn.Linear(16, 16), config.per_device_train_batch_size
        optimizer = torch.optim.SGD(net.parameters())

        def step(samples=None):
            for _ in range(accumulation_steps):
                loss = (net(torch.ones(size, 16)) - net(torch.zeros(size, 16))).square().mean() / accumulation_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss, size * accumulation_steps) if tells else loss

        return step

    return make


def time_first(micro_steps=None):
    """Return a loop whose batches have time as their first dimension."""

    def make(config, accumulation_steps):
        net, steps = nn.LSTM(4, 4), micro_steps or accumulation_steps
        optimizer = torch.optim.AdamW(net.parameters())
        batches = iter(ROWS.view(256, 4, 4).repeat(1, 5, 1).split(config.per_device_train_batch_size))

        def step():
            for _ in range(steps):
                batch = next(batches).transpose(0, 1)
                (mse_loss(net(batch)[0], batch) / steps).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def stepping_each_time(config, accumulation_steps):
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


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (loop(), {}),
        (loop(reduction="sum", divides=False), {}),
        (twice(tells=True), {}),
        # no other split is tried, and without a global batch there is nothing to count
        (loop(divides=False), {"other": None}),
        (loop(micro_steps=1), {"other": None, "batch": None}),
    ],
    ids=["mean", "sum", "told", "one split", "any batch"],
)
def test_a_loop_that_keeps_to_the_global_batch_is_left_alone(examine, make, asked):
    assert examine(make, **asked) == Description(facts=make_facts())


IGNORED = "a step of make consumed 8 samples, and 32 are a step (4 x 8): have make take accumulation_steps"


@pytest.mark.parametrize(
    ("make", "asked", "said"),
    [
        (loop(micro_steps=1), {"takes_accumulation": False}, IGNORED),
        (loop(micro_steps=1, loader=False), {"takes_accumulation": False}, IGNORED),
        (loop(micro_steps=1), {"other": None}, "consumed 8 samples"),
        # right at the baseline's micro-batch and wrong at the other
        (loop(micro_steps=4), {}, "with a micro-batch of 4 a step of make consumed 16 samples, and 32 are a step"),
        (time_first(1), {}, "consumed 8 samples, and 32 are a step"),
        (twice(tells=False), {}, "consumed 64 samples, and 32 are a step"),
        (loop(returned=31), {}, "consumed 31 samples"),
    ],
    ids=["loader", "no loader", "one split", "micro-batch", "time first", "twice", "as it says itself"],
)
def test_a_step_of_other_samples_than_the_global_batch_is_refused_with_what_it_consumed(examine, make, asked, said):
    refused = examine(make, **asked)
    assert isinstance(refused, Refusal)
    assert refused.error == "InputError"
    assert said in refused.message


@pytest.mark.parametrize(
    ("make", "figures"),
    [
        (loop(divides=False), ("in 4 micro-batches of 8 and", "50% apart")),
        (loop(divides=False, clips=True), ("in 4 micro-batches of 8 and", "50% apart")),
        (stepping_each_time, ()),
    ],
    ids=["not divided", "clipped", "stepping each time"],
)
def test_a_gradient_that_changes_with_the_split_is_told_with_the_figures(examine, make, figures):
    found = examine(make)
    assert found.facts.split_changes is not None
    assert all(figure in found.facts.split_changes for figure in figures)
    assert "tried with --allow method alone" in found.notes[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda config, accumulation_steps: lambda: None, "no optimizer of torch's made a step"),
        (lambda config, accumulation_steps: 1 / 0, "the step failed (ZeroDivisionError"),
        (time_first(), ""),
        (loop(loader=False), "could not be measured: other samples are read with another split"),
    ],
    ids=["no step", "fails", "time first", "other samples"],
)
def test_an_unknown_gradient_is_said_and_nothing_of_torch_stays_changed(examine, make, said):
    before = nn.Module.__call__, nn.utils.clip_grad_norm_
    found = examine(make)
    assert found.facts == make_facts()
    assert said in " ".join(found.notes)
    assert (nn.Module.__call__, nn.utils.clip_grad_norm_) == before


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_with_other_samples_a_wrong_scale_is_seen_all_the_same(examine, reduction):
    torch.manual_seed(0)
    net = nn.Linear(16, 16)
    found = examine(loop(loader=False, divides=False, reduction=reduction, model=net))
    assert (found.facts.split_changes is None) == (reduction == "sum")
