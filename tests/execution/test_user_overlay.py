"""A user's code takes what is laid over its arguments, wherever it sets them, and is left when it has trained."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from own_trainings import MODULE, write
from planted import planted
from torch import nn
from transformers import Trainer, TrainingArguments

from autotune.errors import InputError
from autotune.execution.user_code import CodeError, Overlay, harness, overlaid, reach, strayed, theirs
from autotune.value import sha256_of
from autotune.values.workload import OwnCode

pytestmark = pytest.mark.usefixtures("one_thread", "in_place")


@pytest.fixture
def in_place(tmp_path, monkeypatch):
    """The process's own directory, arguments and module path come back after a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])


def overlay(fit=lambda model: model, made=lambda trainer: None, **arguments):
    return Overlay(lambda _: arguments, fit, made)


def script_of(tmp_path, text, *arguments):
    path = write(tmp_path, text)
    return OwnCode(kind="script", shown="train.py", command=(path.name, *arguments), directory=str(tmp_path))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}


def trainer_of(args):
    rows = [{"x": torch.ones(2), "labels": torch.tensor(0)}] * 8
    return Trainer(model=Tiny(), args=args, train_dataset=rows)


@dataclasses.dataclass
class Eager(TrainingArguments):
    """Decides for itself what it was not told, as trl's configs do."""

    def __post_init__(self):
        self.bf16 = True
        super().__post_init__()
        self.per_device_train_batch_size = 32


def test_arguments_take_what_is_laid_over_them_and_remember_their_own():
    with overlaid(overlay(per_device_train_batch_size=2, bf16=True)):
        args = TrainingArguments("out", per_device_train_batch_size=16, learning_rate=0.5, use_cpu=True)
    assert (args.per_device_train_batch_size, args.mixed_precision, args.learning_rate) == (2, "bf16", 0.5)
    assert theirs(args) == {"per_device_train_batch_size": 16, "bf16": False}
    assert TrainingArguments("out", use_cpu=True).per_device_train_batch_size == 8


def test_what_code_sets_after_its_arguments_were_made_is_laid_over_again_when_it_makes_its_trainer():
    with overlaid(overlay(per_device_train_batch_size=4, bf16=False)):
        args = Eager("out", use_cpu=True)
        args.gradient_accumulation_steps = 3
        assert args.per_device_train_batch_size == 32
        trainer = trainer_of(args)
        assert (trainer.args.per_device_train_batch_size, trainer.args.mixed_precision) == (4, "no")
        assert trainer.args.gradient_accumulation_steps == 3
        assert strayed(args) == []
        args.per_device_train_batch_size = 5
        assert strayed(args) == ["per_device_train_batch_size"]


def test_code_that_has_evaluation_data_only_if_it_is_to_evaluate_keeps_them():
    with overlaid(Overlay(harness)):
        args = TrainingArguments("out", eval_strategy="steps", eval_steps=2, use_cpu=True)
        rows = [{"x": torch.ones(2), "labels": torch.tensor(0)}] * 2 if args.eval_strategy != "no" else None
        trainer = Trainer(model=Tiny(), args=args, train_dataset=[1], eval_dataset=rows)
    assert trainer.eval_dataset == rows
    assert trainer.args.eval_strategy == "no"
    assert strayed(args) == []


def test_a_model_is_fitted_whether_it_is_given_or_made_on_demand():
    fitted = []

    def fit(model):
        fitted.append(type(model))
        return model

    with overlaid(overlay(fit=fit)):
        trainer_of(TrainingArguments("out", use_cpu=True))
        Trainer(model_init=lambda: Tiny(), args=TrainingArguments("out", use_cpu=True), train_dataset=[1])
    assert fitted == [Tiny, Tiny]


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "linear"])
def test_a_schedule_that_waits_for_evaluations_is_not_waited_for(schedule):
    with overlaid(Overlay(harness)):
        args = TrainingArguments("out", use_cpu=True, lr_scheduler_type=schedule, eval_strategy="epoch")
    assert args.lr_scheduler_type == ("linear" if schedule == "linear" else "constant")


TRAINS = (
    MODULE
    + """
if __name__ == "__main__":
    from pathlib import Path

    args = TrainingArguments("out", use_cpu=True, report_to="none", max_steps=2, remove_unused_columns=False)
    trainer = NetTrainer(model=Net(), args=args, train_dataset=Rows())
    try:
        trainer.train()
    except Exception:
        Path("handled").touch()
    Path("after").touch()
"""
)


def test_code_runs_up_to_its_training_which_gets_a_trainer_that_trains(tmp_path):
    steps = []

    def on_train(trainer, train):
        train()
        steps.append(trainer.state.global_step)
        return "measured"

    assert reach(script_of(tmp_path, TRAINS), tmp_path, on_train) == "measured"
    assert steps == [2]
    assert not (tmp_path / "after").exists()
    assert Trainer.train.__module__.startswith("transformers")


def test_what_fails_while_training_is_measured_does_not_reach_the_handlers_of_the_code(tmp_path):
    def on_train(trainer, train):
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        reach(script_of(tmp_path, TRAINS), tmp_path, on_train)
    assert not (tmp_path / "handled").exists()


def test_code_that_catches_everything_trains_no_second_time(tmp_path):
    again = TRAINS.replace("except Exception:", "except BaseException:") + "    trainer.train()\n"
    calls = []
    assert reach(script_of(tmp_path, again), tmp_path, lambda trainer, train: calls.append(1)) is None
    assert calls == [1]


def test_a_script_sees_its_own_arguments_directory_and_modules(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    told = (
        "import sys, os, pathlib, beside\n"
        "pathlib.Path('told').write_text(f'{sys.argv} {os.getcwd()} {beside.VALUE} {__name__}')\n"
    )
    with pytest.raises(CodeError, match=r"train.py: it ended without having called Trainer.train.*find\(step="):
        reach(script_of(tmp_path, told, "--a", "1"), tmp_path, lambda trainer, train: None)
    assert (tmp_path / "told").read_text() == f"['train.py', '--a', '1'] {tmp_path} 7 __main__"


def test_pickled_code_that_makes_no_trainer_is_refused(tmp_path):
    import cloudpickle

    (tmp_path / "own-code.pkl").write_bytes(cloudpickle.dumps(lambda: 3))
    known = sha256_of((tmp_path / "own-code.pkl").read_bytes())
    code = OwnCode(kind="pickle", shown="make_trainer build", directory=str(tmp_path), sha256=known)
    with pytest.raises(InputError, match=r"make_trainer build returned int; expected a transformers.Trainer"):
        reach(code, tmp_path, lambda trainer, train: None)


@pytest.mark.parametrize("known", ["", "0" * 64])
def test_pickled_code_that_was_exchanged_is_not_loaded(tmp_path, known):
    (tmp_path / "own-code.pkl").write_bytes(planted(tmp_path / "ran"))
    code = OwnCode(kind="pickle", shown="make_trainer build", directory=str(tmp_path), sha256=known)
    with pytest.raises(InputError, match=r"own-code\.pkl is not what the search was begun with"):
        reach(code, tmp_path, lambda trainer, train: None)
    assert not (tmp_path / "ran").exists()
