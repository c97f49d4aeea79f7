"""The table of compiler backends holds what accelerate takes."""

import pytest
from accelerate.utils import DynamoBackend

from autotune.values.compilers import BACKENDS, Mode


def test_every_backend_that_accelerate_takes_has_a_row():
    assert {b.value.lower() for b in DynamoBackend} - {"no"} <= BACKENDS.keys()


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_what_does_not_train_says_why(name):
    row = BACKENDS[name]
    assert bool(row.reason) == (row.use not in ("training", "debugging"))


def test_modes_are_inductors():
    import typing

    from torch._inductor import list_mode_options

    assert set(typing.get_args(Mode)) <= set(list_mode_options())


def test_what_trains_is_known_to_torch():
    import torch

    known = torch._dynamo.list_backends(exclude_tags=())
    assert {name for name, row in BACKENDS.items() if row.use in ("training", "debugging")} <= set(known)
