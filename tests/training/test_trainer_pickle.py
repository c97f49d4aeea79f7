"""A Trainer is taken apart and made anew with all that it was made of; what can't be handed over is named."""

import pickle
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from autotune.errors import InputError
from autotune.training.trainer_pickle import maker_of, pickled


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(2, width)

    def forward(self, x):
        return self.layer(x)


class Distiller(Trainer):
    """Its constructor takes what the library's doesn't know."""

    def __init__(self, teacher, *, temperature, **kwargs):
        super().__init__(**kwargs)
        self.teacher = teacher
        self.temperature = temperature
        self.watch = SimpleNamespace(trainer=self)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            wanted = self.teacher(inputs["x"]) / self.temperature
        return (model(inputs["x"]) - wanted).square().mean()


class Counting(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def collate(samples):
    return {"x": torch.stack([s["x"] for s in samples])}


def make(tmp_path, **fields):
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=3, learning_rate=0.125, hub_token="hf_0a1b2c", report_to="none",
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"x": torch.full((2,), float(i))} for i in range(8)]
    given = {"model": Net(3), "args": args, "train_dataset": rows, "data_collator": collate, "callbacks": [Counting()]}
    return Distiller(Net(3), temperature=2.0, **{**given, **fields})


def test_all_that_it_was_made_of_comes_back_and_trains_as_the_first_would_and_secrets_are_not_handed_over(tmp_path):
    trainer = make(tmp_path)
    again = pickle.loads(pickled(maker_of(trainer), "trainer"))()  # as another process makes it
    assert again is not trainer
    assert type(again) is Distiller
    assert again.args.learning_rate == 0.125
    assert again.data_collator is collate
    assert again.temperature == 2.0
    assert again.watch.trainer is again
    for ours, theirs in ((trainer.model, again.model), (trainer.teacher, again.teacher)):
        assert torch.equal(ours.layer.weight, theirs.layer.weight)
    losses = [t.train().training_loss for t in (trainer, again)]
    assert losses[0] == losses[1]
    counts = [next(c.steps for c in t.callback_handler.callbacks if isinstance(c, Counting)) for t in (trainer, again)]
    assert counts == [3, 3]
    content = pickled(maker_of(trainer), "trainer")  # which has trained
    again = pickle.loads(content)()
    assert again.optimizer is None
    assert not hasattr(again.model, "_is_accelerate_prepared")
    assert again.train().global_step == 3
    assert b"hf_0a1b2c" not in content


def test_what_a_spawned_process_has_defined_is_handed_over_with_its_code(monkeypatch):
    main = ModuleType("__mp_main__")
    exec("def build():\n    return 7", vars(main))
    with monkeypatch.context() as spawned:
        for name in ("__main__", "__mp_main__"):
            spawned.setitem(sys.modules, name, main)
        content = pickled(main.build, "make_trainer: build")
    assert pickle.loads(content)() == 7


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_what_is_generated_at_once_comes_back_by_the_one_of_its_two_arguments_that_trl_takes(tmp_path):
    args = pytest.importorskip("trl").RLOOConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=False)
    assert maker_of(make(tmp_path, args=args))().args.to_dict() == args.to_dict()


@pytest.mark.parametrize("part", ["train_dataset", "data_collator"])
def test_what_can_not_be_pickled_is_refused_with_the_way_out(tmp_path, part):
    class Locked(list):
        lock = property(lambda self: threading.Lock())

        def __reduce__(self):
            return Locked, (self.lock,)

        def __call__(self, samples):
            return samples

    with pytest.raises(InputError, match=r"trainer: Distiller can't be handed to another process.*make_trainer="):
        maker_of(make(tmp_path, **{part: Locked()}))


def test_a_function_that_can_not_be_pickled_is_named_and_something_else_than_a_trainer_refused():
    lock = threading.Lock()

    def build():
        return lock

    with pytest.raises(InputError, match=r"make_trainer: build can't be handed to another process"):
        pickled(build, "make_trainer: build")
    with pytest.raises(InputError, match=r"trainer: expected a transformers.Trainer, not dict"):
        maker_of({})
