"""Trainings of the user's own, traced as they are on the meta device."""

import pytest
import torch
from own_modules import TaughtLlama
from own_trainings import quiet_arguments
from profiles import make_family
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

from autotune.cost import profiler
from autotune.cost.family import Shape
from autotune.cost.own_training import OwnTraining
from autotune.cost.profile import ACTIVATION
from autotune.errors import InputError
from autotune.training.build import build_model
from autotune.values.model import ModelSpec, Task

SPEC = ModelSpec(reference="own", name="Net", source="own", model_type="Net", kind="own", config={})
WIDTH, ROWS = 16, 32


class Net(nn.Module):
    def __init__(self, middle=None):
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(WIDTH, WIDTH), middle or nn.ReLU(), nn.Linear(WIDTH, 4)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(10))

    def forward(self, x):
        return {"logits": self.out(self.middle(self.first(x)))}


class NetTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = nn.functional.cross_entropy(model(inputs["x"])["logits"], inputs.pop("labels"))
        self.seen = float(loss)
        return loss


def batch_of(samples):
    return {"x": torch.zeros(samples, ROWS, WIDTH), "labels": torch.zeros(samples, 4, dtype=torch.long)}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.fixture
def traced(tmp_path):
    def trace(middle=None, *, kind=NetTrainer, prepare=lambda trainer: None, **family):
        trainer = kind(Net(middle), quiet_arguments(tmp_path), train_dataset=[1])
        prepare(trainer)
        own = OwnTraining(trainer, batch_of)
        assert {p.device.type for p in trainer.model.parameters()} == {"cpu"}
        assert {p.device.type for p in own.model.parameters()} == {"meta"}
        shape = Shape(task=Task.OWN, length=1)
        return profiler.profile(SPEC, make_family(attn_implementation=None, **family), shape, own=own)

    return trace


def activations(profile, samples=8):
    lines = profile.storages.alive[:, ACTIVATION]
    return float((lines[:, 0] + lines[:, 1] * samples).max())


def test_module_and_loss_are_traced_as_they_are(traced):
    found = traced()
    saved = 4 * 8 * (WIDTH * ROWS + ROWS * 4)  # of 8 samples: the result of relu, and log-probabilities
    assert saved <= activations(found) < saved + 64
    assert {(group.shape, group.trained, group.count) for group in found.parameters} == {
        ((WIDTH, WIDTH), True, 1), ((WIDTH,), True, 1), ((4, WIDTH), True, 1), ((4,), True, 1),
        ((WIDTH, WIDTH), False, 1), ((WIDTH,), False, 1),  # spare ones, which get no gradient
    }  # fmt: skip
    assert found.buffers_bytes == 40
    assert found.evaluation is None
    products = 2 * WIDTH * (WIDTH + 4) * ROWS  # forward; to the weights; and to the input of the second
    assert found.needed(8, 8) == 8 * (2 * products + 2 * WIDTH * 4 * ROWS)


def test_a_batch_whose_labels_the_loss_takes_out_serves_every_family(tmp_path):
    own = OwnTraining(NetTrainer(Net(), quiet_arguments(tmp_path), train_dataset=[1]), batch_of)
    for autocast in (None, "bfloat16"):
        family = make_family(attn_implementation=None, autocast=autocast)
        assert profiler.profile(SPEC, family, Shape(task=Task.OWN, length=1), own=own).storages.rows.size


def test_what_the_trainer_holds_beside_the_model_takes_memory(traced):
    def teach(trainer):
        trainer.teacher = Net()
        trainer.weights = torch.zeros(1000)

    alone, taught = traced(), traced(prepare=teach)
    weights = sum(parameter.nbytes for parameter in Net().parameters())
    assert taught.buffers_bytes - alone.buffers_bytes == weights + 40 + 4000


def test_autocast_holds_inside_of_the_model_alone(traced):
    half, full = traced(autocast="bfloat16", device="cuda"), traced(device="cuda")
    assert {w.width for w in full.work} == {4}
    assert {w.width for w in half.work if "addmm" in w.call} == {2}
    assert {w.width for w in half.work if "log_softmax.int" in w.call or "nll_loss" in w.call} == {4}


def test_what_the_module_checkpoints_runs_again_as_the_device_would(traced):
    def wide(x):
        return torch.cat([x.sigmoid().tanh() for _ in range(8)], -1).sum(-1, keepdim=True) * x

    plain = traced(Function(wide), autocast="bfloat16")
    again = traced(Function(lambda x: checkpoint(wide, x, use_reentrant=False)), autocast="bfloat16")
    assert activations(again) < 0.5 * activations(plain)
    assert sum(w.count for w in again.work) > sum(w.count for w in plain.work)


@pytest.mark.parametrize(
    ("function", "device"),
    [
        (lambda x: x * x.argmax().item(), "cpu"), (lambda x: x if x.mean().item() > 0 else x.exp(), "cpu"),
        (lambda x: x + x.gt(0).nonzero().sum(), "cuda"), (lambda x: x + x.masked_select(x > 0).sum(), "cuda"),
        (lambda x: x + x[x > 0].sum(), "cuda"), (lambda x: checkpoint(torch.tanh, x, use_reentrant=True), "cpu"),
    ],
)  # fmt: skip
def test_where_values_decide_there_is_no_prediction(traced, function, device):
    with pytest.raises(InputError, match="Net: can't be traced, so there is no prediction: "):
        traced(Function(function), device=device)


def test_cudnns_recurrent_layers_are_refused(traced):
    layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
    middle = Function(lambda x: layer.to(x.device)(x)[0])
    with pytest.raises(InputError, match="the memory that cuDNN's recurrent layers take isn't known"):
        traced(middle, device="cuda")


@pytest.mark.parametrize("family", [{}, {"autocast": "bfloat16", "checkpointing": "full"}])
def test_a_loss_of_ones_own_around_a_model_of_the_library_is_traced_layer_by_layer(spec_of, tmp_path, family):
    spec, task, length = spec_of("llama"), Task.CAUSAL_LM, 32
    student, teacher = (build_model(spec, task, dtype="float32", device="cpu") for _ in range(2))
    trainer = TaughtLlama(student, quiet_arguments(tmp_path), train_dataset=[1])
    trainer.teacher = teacher

    def texts(samples):
        ids = torch.ones(samples, length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}

    own = OwnTraining(trainer, texts)
    asked = spec, make_family(**family), Shape(task=task, length=length)
    parameters = sum(parameter.numel() for parameter in student.parameters())
    taught = profiler.profile(*asked, parameters=parameters, own=own)
    whole = profiler.profile(*asked, parameters=-1, own=own)
    alone = profiler.profile(*asked, parameters=parameters)
    weights = sum(tensor.nbytes for tensor in (*teacher.parameters(), *teacher.buffers()))
    assert taught.buffers_bytes - alone.buffers_bytes == weights
    assert activations(taught) == activations(whole) > activations(alone)
    assert taught.trained_elements == parameters
    assert taught.needed(8, 8) == pytest.approx(alone.needed(8, 8) * 4 / 3, rel=0.01)  # a teacher's forward pass
