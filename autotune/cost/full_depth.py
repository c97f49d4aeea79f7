"""An excerpt at the model's full depth: each storage of the repeated layer once for each of them. Pure.

The excerpt's model has few layers. The tape of a deeper model has the operators of one layer once more for each further
layer, one stretch in the forward and one in the backward pass. A storage of the repeated layer is there once for each
of them; those of layers before and after it, and of what surrounds the layers, once. The layer that comes first in the
forward pass comes last in the backward pass. Whether a storage ends with its layer or with something that comes once,
as the cast weights that autocast holds until the end of the forward pass, is decided by the corresponding storage of
the layer before.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.cost.profile import Excerpt, ParameterGroup, Repeat

Rows = NDArray[np.float64]

_MADE, _FREED = 0, 1


class FullDepth(NamedTuple):
    """An excerpt at the model's full depth; rows as its storages, with the position of the origin behind."""

    rows: Rows
    workspaces: tuple[int, ...]
    parameters: list[ParameterGroup]
    names: list[str]
    forward_end: int


def deepened(excerpt: Excerpt) -> FullDepth:
    """Return an excerpt at full depth."""
    storages = np.array(excerpt.storages, dtype=float).reshape(-1, 6)
    rows = np.column_stack([storages, excerpt.origin or np.zeros(len(storages))])
    workspaces = np.array(excerpt.workspaces, dtype=float)
    parameters, names = list(excerpt.parameters), list(excerpt.names) or [""] * len(excerpt.parameters)
    ahead = [0, 0]  # by which what comes later in the forward pass has moved: operators, parameters
    end = float(excerpt.forward_end)
    for repeat in excerpt.repeats:
        moved = _moved(repeat, ahead)
        rows, workspaces = _repeated(rows, moved, end), _outside(workspaces, moved, end)
        first, length = moved.parameters
        layer = slice(first, first + length)
        parameters[first + length : first + length] = parameters[layer] * moved.times
        names[first + length : first + length] = names[layer] * moved.times
        end += moved.times * moved.forward[1]
        ahead = [ahead[0] + moved.times * moved.forward[1], ahead[1] + moved.times * length]
    return FullDepth(rows, tuple(int(w) for w in workspaces), parameters, names, int(end))


def _moved(repeat: Repeat, ahead: list[int]) -> Repeat:
    """Return a stack's stretches where those of the stacks before it have been repeated.

    A stack that comes later in the forward pass comes earlier in the backward pass.
    """
    operators, parameters = ahead
    return repeat.model_copy(
        update={
            "forward": (repeat.forward[0] + operators, repeat.forward[1]),
            "backward": (repeat.backward[0] + operators, repeat.backward[1]),
            "parameters": (repeat.parameters[0] + parameters, repeat.parameters[1]),
        }
    )


def _repeated(rows: Rows, repeat: Repeat, end: float) -> Rows:
    """Return the rows with those of the repeated layer `times` more; `end` is that of the forward pass."""
    (f0, lf), (b0, lb), n = repeat.forward, repeat.backward, repeat.times
    made, freed = rows[:, _MADE], rows[:, _FREED]
    in_forward, in_backward = (made >= f0) & (made < f0 + lf), (made >= b0) & (made < b0 + lb)
    once = rows[~(in_forward | in_backward)].copy()
    before = once[:, _MADE] < f0
    once[:, _FREED] = np.where(
        once[:, _FREED] < end,
        np.where(before & (once[:, _FREED] < f0 + lf), once[:, _FREED], once[:, _FREED] + n * lf),
        np.where(
            once[:, _FREED] >= np.where(before, b0, b0 + lb), once[:, _FREED] + n * (lf + lb), once[:, _FREED] + n * lf
        ),
    )
    once[:, _MADE] = _outside(once[:, _MADE], repeat, end)
    found = [once]
    ends = _outside(freed, repeat, end)
    stays = _ends_with_layer(rows, lf)[in_forward]
    for j in range(n + 1):
        copy = rows[in_forward].copy()
        by_layer = np.where(copy[:, _FREED] < end, copy[:, _FREED] + j * lf, copy[:, _FREED] + n * lf + (n - j) * lb)
        copy[:, _MADE] += j * lf
        copy[:, _FREED] = np.where(stays, by_layer, ends[in_forward])
        found.append(copy)
    stays = _ends_with_layer(rows, lb)[in_backward]
    for k in range(n + 1):
        copy = rows[in_backward].copy()
        copy[:, _MADE] += n * lf + k * lb
        copy[:, _FREED] = np.where(stays, copy[:, _FREED] + n * lf + k * lb, ends[in_backward])
        found.append(copy)
    repeated = np.concatenate(found)
    repeated[:, _FREED] = np.maximum(repeated[:, _FREED], repeated[:, _MADE] + 1)
    return repeated


def _ends_with_layer(rows: Rows, length: int) -> NDArray[np.bool_]:
    """Return of each storage whether the one made `length` operators earlier ends elsewhere, or isn't there."""
    seen: Counter[float] = Counter()
    keys = []
    for position in rows[:, _MADE].tolist():  # an operator may make several
        keys.append((position, seen[position]))
        seen[position] += 1
    ends = dict(zip(keys, rows[:, _FREED].tolist(), strict=True))
    likes = [ends.get((position - length, which)) for position, which in keys]
    pairs = zip(rows[:, _FREED].tolist(), likes, strict=True)
    return np.array([like != end for end, like in pairs], dtype=bool)


def _outside(positions: NDArray[np.float64], repeat: Repeat, end: float) -> NDArray[np.float64]:
    """Return where operators outside of the repeated layer come to be."""
    (f0, lf), (b0, lb), n = repeat.forward, repeat.backward, repeat.times
    moved: NDArray[np.float64] = positions + np.where(
        positions < f0 + lf, 0, np.where(positions < b0 + lb, n * lf, n * (lf + lb))
    )
    return moved
