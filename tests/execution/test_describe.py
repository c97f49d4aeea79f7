"""A Trainer of TRL's that is about to train is described; others in `test_trial`."""

from types import SimpleNamespace

import pytest
from factories import make_workload
from torch import nn
from torch.utils.data import Subset
from transformers import Trainer

from autotune.cost.family import shape_of
from autotune.errors import InputError
from autotune.execution.describe import Training, _launched
from autotune.values.model import Task
from autotune.values.workload import OwnCode


def training(kind):
    """Return a training by a Trainer of this kind, with the attributes that are looked at."""
    made = object.__new__(Training)
    made.trainer, made.task, made.lengths, made.is_of_library = object.__new__(kind), Task.CAUSAL_LM, [1], True
    made.trainer.train_dataset, made.has_column, made.packs = [{"input_ids": [1]}], True, False
    return made


def test_checkpointing_of_some_layers_is_barred_where_trl_switches_it_off_and_on():
    trl = pytest.importorskip("trl")

    def values(kind):
        return {bar.value for bar in training(type("Mine", (kind,), {}))._barred() if bar.knob == "checkpointing"}

    assert values(trl.DPOTrainer) >= {"every-2nd", "every-4th"}
    assert values(trl.SFTTrainer) == values(Trainer) == set()


@pytest.mark.parametrize(("module", "is_held"), [("sentence_transformers.base.trainer", False), ("train", True)])
def test_optimizer_and_precision_stay_where_the_code_chooses_them_and_not_a_library(module, is_held):
    kind = type("Mine", (Trainer,), {"get_optimizer_cls_and_kwargs": lambda *args: None})
    kind.get_optimizer_cls_and_kwargs.__module__ = module
    made = training(kind)
    made.model = made.base = made.trainer.model = nn.Linear(1, 1)
    made.model._is_accelerate_prepared = True
    made.trainer.accelerator = SimpleNamespace(_models=[] if is_held else [made.model])  # it has evaluated
    made.weights, made.batches = "float32", None
    made.trainer.optimizer = made.trainer.optimizer_cls_and_kwargs = made.trainer.data_collator = None
    assert [knob in made._held() for knob in ("optim", "precision")] == [is_held] * 2


@pytest.mark.parametrize("rows", [None, []])
def test_a_trainer_without_samples_is_refused(rows):
    made = training(Trainer)
    made.name, made.trainer.args, made.trainer.train_dataset = "Trainer", SimpleNamespace(), rows
    with pytest.raises(InputError, match="your Trainer has no train_dataset, or an empty one"):
        made._check()


class Endless:
    """A map-style dataset that makes its samples: any number beyond the last one, too."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"input_ids": [index]}


def test_batches_of_like_lengths_are_barred_where_reading_the_lengths_would_not_end():
    plain = training(Trainer)
    assert "train_sampling_strategy" not in {bar.knob for bar in plain._barred()}
    for dataset, is_barred in ((Endless(), True), (Subset(Endless(), [0]), False)):
        plain.trainer.train_dataset = dataset
        assert any("raises no IndexError" in bar.reason for bar in plain._barred()) is is_barred


@pytest.mark.parametrize(
    ("written", "precision", "sharding"),
    [
        ({"bf16": False, "fp16": False, "fsdp": None}, "bf16", "launched"),
        ({"bf16": False, "fp16": True, "fsdp": "full_shard"}, "fp16", "own"),
    ],
)
def test_the_settings_of_a_launcher_hold_where_the_code_says_nothing(written, precision, sharding):
    found = _launched(
        {**written, "fsdp_config": {"of": "own"}}, {"bf16": True, "fsdp": True, "fsdp_config": {"of": "launched"}}
    )
    assert [name for name in ("bf16", "fp16") if found[name]] == [precision]
    assert found["fsdp"]
    assert found["fsdp_config"]["of"] == sharding


@pytest.mark.parametrize(
    ("kind", "fields", "recipe"),
    [
        ("DPOTrainer", {}, "dpo"),
        ("DPOTrainer", {"precompute_ref_log_probs": True}, None),
        ("SFTTrainer", {"loss_type": "nll"}, "sft"),
        ("SFTTrainer", {"loss_type": "dft"}, None),
        ("GRPOTrainer", {}, None),
        ("GKDTrainer", {"loss_type": "nll"}, None),
    ],
    ids=str,
)
def test_a_trainer_of_trls_is_predicted_with_its_own_passes_and_reference(kind, fields, recipe):
    members = {"__module__": "trl.trainer", "args": SimpleNamespace(**fields), "compute_loss_func": None}
    made = training(type(kind, (type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer"}),), members))
    assert (made._recipe(), made._has_own_loss()) == (recipe, kind == "GKDTrainer")
    code = OwnCode(kind="script", shown="train.py", directory="/", recipe=recipe)
    assert shape_of(make_workload(own_code=code)).recipe == recipe
