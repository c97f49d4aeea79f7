"""A step of a user's own loop, run before the search: the samples that it consumes, its gradient with another split."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from factories import make_config, make_facts, make_workload
from torch import nn
from torch.nn.functional import mse_loss

from autotune.execution.describe import run_examine
from autotune.value import sha256_of, write_value
from autotune.values.trial import Description, ExamineRequest, Refusal
from autotune.values.workload import STEP_FILE, OwnStep

ROWS = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Return a function that examines what a function makes: micro-batch 8 and 4 of a global batch of 32."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(make, *, takes_accumulation=True, other=4, batch=32):
        content = cloudpickle.dumps(make)
        own = OwnStep(
            name="make",
            takes_accumulation=takes_accumulation,
            knobs={},
            directory=str(tmp_path),
            search_path=(),
            sha256=sha256_of(content),
        )
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [None, 1])
def test_samples_are_known_where_the_first_dimension_of_a_batch_is_time(examine, workers, steps):
    def make(config, accumulation_steps):
        net = nn.LSTM(4, 4)
        optimizer = torch.optim.AdamW(net.parameters())
        batches = torch.utils.data.DataLoader(
            ROWS.view(256, 4, 4).repeat(1, 5, 1),
            batch_size=config.per_device_train_batch_size,
            collate_fn=lambda samples: torch.stack(samples, 1),
            num_workers=workers,
        )
        following = iter(batches)

        def step():
            for _ in range(steps or accumulation_steps):
                batch = next(following)
                (mse_loss(net(batch)[0], batch) / (steps or accumulation_steps)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = examine(make)
    assert (found.kind == "refusal") == (steps == 1)
    if steps is None:
        assert found.facts.split_changes is None
    else:
        assert "consumed 8 or 20 samples, and 32 are a step" in found.message


def test_autocast_rounds_gradients_to_16_bits_which_is_no_other_gradient(examine):
    def make(config, accumulation_steps):
        torch.manual_seed(7)  # the two gradients are 1 % apart
        rows = torch.randn(64, 64)
        layers = [layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh())]
        net = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(net.parameters())
        batches = iter(torch.utils.data.DataLoader(rows, batch_size=config.per_device_train_batch_size))

        def step():
            for _ in range(accumulation_steps):
                batch = next(batches)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = mse_loss(net(batch), batch[:, :1]) / accumulation_steps
                loss.backward()
            optimizer.step()

        return step

    assert examine(make, batch=64) == Description(facts=make_facts())


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


def test_samples_that_differ_with_the_split_are_said_to(examine):
    found = examine(loop(loader=False))
    assert found.facts == make_facts()
    assert "could not be measured: other samples are read with another split" in found.notes[0]


def test_with_other_samples_a_wrong_scale_is_seen_all_the_same(examine):
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
    call, clip = nn.Module.__call__, nn.utils.clip_grad_norm_
    following = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    examine(loop(model=model))
    assert (nn.Module.__call__, nn.utils.clip_grad_norm_) == (call, clip)
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is following
    assert model[1].p == 0.5
