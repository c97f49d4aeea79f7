"""Operators on the meta device: equal ones run once, and a tape is the same as if each had run."""

import pytest
import torch
from profiles import make_family

from autotune.cost import meta, tape
from autotune.cost.family import Shape
from autotune.cost.profiler import profile
from autotune.values.model import Task


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.setattr(meta, "_RESULTS", {})


class _Counted:
    """An operator that counts its calls."""

    def __init__(self, operator):
        self._operator, self._schema, self.calls = operator, operator._schema, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._operator(*args, **kwargs)


def test_an_equal_operator_is_not_run_again():
    add = _Counted(torch.ops.aten.add.Tensor)
    one, other = torch.empty(3, 5, device="meta"), torch.empty(5, device="meta")
    first, second = meta.run_once(add, (one, other), {}), meta.run_once(add, (one, other), {})
    assert add.calls == 1
    assert (second.shape, second.stride(), second.dtype) == (first.shape, first.stride(), first.dtype)
    assert second.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert meta.run_once(add, (one.bfloat16(), other.bfloat16()), {}).dtype is torch.bfloat16
    assert meta.run_once(add, (one.t().contiguous().t(), other), {}).stride() == (1, 3)
    assert add.calls == 3


def test_kinds_of_numbers_are_told_apart():
    whole = torch.empty(3, dtype=torch.long, device="meta")
    multiply = torch.ops.aten.mul.Tensor
    kinds = [meta.run_once(multiply, (whole, number), {}).dtype for number in (1, 1.0, True)]
    assert kinds == [torch.int64, torch.float32, torch.int64]


def test_views_changes_in_place_and_tensors_with_values_are_always_run():
    empty, real = torch.empty(4, 6, device="meta"), torch.ones(4, 6)
    for operator, args in (
        (torch.ops.aten.view.default, (empty, [24])),
        (torch.ops.aten.mul_.Tensor, (empty, 2.0)),
        (torch.ops.aten.add.Tensor, (real, real)),
    ):
        counted = _Counted(operator)
        for _ in range(2):
            meta.run_once(counted, args, {})
        assert counted.calls == 2
    assert torch.equal(meta.run_once(torch.ops.aten.add.Tensor, (real, real), {}), 2 * real)


@pytest.mark.parametrize(
    ("name", "task", "changes"),
    [
        ("llama", Task.CAUSAL_LM, {"autocast": "bfloat16", "checkpointing": "full"}),
        ("bert", Task.SEQUENCE_CLASSIFICATION, {"autocast": "float16"}),
        ("switch", Task.SEQ2SEQ_LM, {}),
    ],
)
def test_a_profile_is_the_same_as_if_every_operator_had_run(spec_of, monkeypatch, name, task, changes):
    family = make_family(device="cuda", attn_implementation="eager", **changes)
    spec, shape = spec_of(name), Shape(task=task, length=16, target_length=16)
    found = profile(spec, family, shape)
    monkeypatch.setattr(tape, "run_once", lambda func, args, kwargs: func(*args, **kwargs))
    assert found == profile(spec, family, shape)
