"""A training that was spread otherwise than asked for is found out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import make_config
from torch import nn

from autotune.errors import NoEffectError
from autotune.execution import model_effects
from autotune.values.config import Parallelism


class DeepSpeedEngine:
    """As much of DeepSpeed's as is looked at."""

    def __init__(self, stage: int, held: int, *, optimizer_at: str = "none", sharing: int = 1) -> None:
        self.module = nn.Linear(100, 100, bias=False)
        self.optimizer = SimpleNamespace(single_partition_of_fp32_groups=[torch.empty(held)])
        self._stage, self._at, self.sequence_parallel_size = stage, optimizer_at, sharing

    def zero_optimization_stage(self) -> int:
        return self._stage

    def zero_offload_optimizer(self) -> Any:
        return None if self._at == "none" else SimpleNamespace(device=self._at)

    def zero_offload_param(self) -> Any:
        return None


@pytest.fixture
def seen(monkeypatch):
    """Return a function that says what is seen of a training of two ranks, or of as many as ran."""

    def look(wrapper: Any, *, world_size: int = 2, ran: int = 2, known: int | None = None, **spread: Any) -> str:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ran > 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ran)
        trainer = SimpleNamespace(
            model_wrapped=wrapper, args=SimpleNamespace(world_size=ran if known is None else known)
        )
        config = make_config(parallelism=Parallelism(world_size=world_size, **spread))
        return model_effects.parallelism(config, trainer, wrapper)

    return look


def test_one_device_is_one_device(seen):
    assert seen(nn.Linear(1, 1), world_size=1, ran=1) == "one device"


@pytest.mark.parametrize(("ran", "known"), [(1, 1), (2, 1), (4, 4)])
def test_ranks_that_are_not_there_or_not_known_are_missed(seen, ran, known):
    with pytest.raises(NoEffectError, match=f"2 devices were asked for, but {ran} ranks ran"):
        seen(nn.Linear(1, 1), ran=ran, known=known)


def test_copies_that_nobody_keeps_alike_are_found(seen):
    with pytest.raises(NoEffectError, match="2 copies were to be kept alike by DDP, but the model is a Linear"):
        seen(nn.Linear(1, 1))


def test_fsdp_that_became_something_else_is_found(seen):
    with pytest.raises(NoEffectError, match="fsdp_full was asked for, but the model is wrapped as Linear"):
        seen(nn.Linear(1, 1), sharding="fsdp_full")


def test_deepspeed_is_looked_at(seen):
    assert seen(DeepSpeedEngine(2, 5000), sharding="zero_2") == "DeepSpeed ZeRO-2 over 2"
    both = seen(DeepSpeedEngine(2, 5000, sharing=2), sharding="zero_2", sequence_parallel=2)
    assert both == "DeepSpeed ZeRO-2 over 2, sequence parallel 2"
    offloaded = seen(DeepSpeedEngine(1, 5000, optimizer_at="cpu"), sharding="zero_1", offload="optimizer")
    assert offloaded == "DeepSpeed ZeRO-1 over 2, optimizer offloaded to the host"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (nn.Linear(1, 1), "but the model is wrapped as Linear"),
        (DeepSpeedEngine(1, 5000), "but the stage is 1"),
        (
            DeepSpeedEngine(2, 5000, optimizer_at="cpu"),
            r"offloaded to \('none', 'none'\), but are to \('cpu', 'none'\)",
        ),
        (DeepSpeedEngine(2, 5000, sharing=2), "sequence parallel 1 was asked for, but it is 2"),
        (DeepSpeedEngine(2, 10_000), "2 ranks were to split it, but this one holds 100%"),
    ],
)
def test_deepspeed_that_does_something_else_is_found(seen, engine, said):
    with pytest.raises(NoEffectError, match=said):
        seen(engine, sharding="zero_2")


def test_tensor_parallel_without_shared_matrices_is_found(seen):
    model = nn.Linear(1, 1)
    with pytest.raises(NoEffectError, match="tensor parallel 2 was asked for, but it is None"):
        seen(model, tensor_parallel=2)
    model._tp_size = 2
    with pytest.raises(NoEffectError, match="this one holds 100%"):
        seen(model, tensor_parallel=2)


def test_the_optimizer_is_looked_for_inside_all_wrappers():
    inner = SimpleNamespace(name="inner")
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))
    assert model_effects.inner_optimizer(wrapped) is inner
