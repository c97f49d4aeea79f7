"""The storages of a full-depth micro-step, out of those of one with few layers. Pure.

The tape of a deeper model has the stretches of operators of one layer once more for each further layer, one in the
forward and one in the backward pass. A storage of the repeated layer is there once for each of them; those of layers
before and after it, and of what surrounds the layers, once. The layer that comes first in the forward pass comes last
in the backward pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.cost.profile import Excerpt, ParameterGroup, Repeat

Rows = NDArray[np.float64]

_MADE, _FREED = 0, 1


def deepened(excerpt: Excerpt) -> tuple[Rows, tuple[int, ...], list[ParameterGroup]]:
    """Return the rows of an excerpt's storages at full depth, where workspaces are made, and the parameters."""
    rows = np.array(excerpt.storages, dtype=float).reshape(-1, 5)
    workspaces = np.array(excerpt.workspaces, dtype=float)
    parameters = list(excerpt.parameters)
    ahead = [0, 0]  # by which what comes later in the forward pass has moved: operators, parameters
    end = float(excerpt.forward_end)
    for repeat in excerpt.repeats:
        moved = _moved(repeat, ahead)
        rows, workspaces = _repeated(rows, moved, end), _outside(workspaces, moved, end)
        first, length = moved.parameters
        parameters[first + length : first + length] = parameters[first : first + length] * moved.times
        end += moved.times * moved.forward[1]
        ahead = [ahead[0] + moved.times * moved.forward[1], ahead[1] + moved.times * length]
    return rows, tuple(int(w) for w in workspaces), parameters


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
    later = _outside(freed, repeat, end)
    for j in range(n + 1):
        copy = rows[in_forward].copy()
        gone = copy[:, _FREED]
        copy[:, _MADE] += j * lf
        here = gone < min(f0 + 2 * lf, end)
        behind = (gone >= b0 - lb) & (gone < b0 + 2 * lb) & (gone >= end)
        copy[:, _FREED] = np.where(
            here, gone + j * lf, np.where(behind, gone + n * lf + (n - j) * lb, later[in_forward])
        )
        found.append(copy)
    for k in range(n + 1):
        copy = rows[in_backward].copy()
        gone = copy[:, _FREED]
        copy[:, _MADE] += n * lf + k * lb
        copy[:, _FREED] = np.where(gone < b0 + 2 * lb, gone + n * lf + k * lb, later[in_backward])
        found.append(copy)
    return np.concatenate(found)


def _outside(positions: NDArray[np.float64], repeat: Repeat, end: float) -> NDArray[np.float64]:
    """Return where operators outside of the repeated layer come to be."""
    (f0, lf), (b0, lb), n = repeat.forward, repeat.backward, repeat.times
    moved: NDArray[np.float64] = positions + np.where(
        positions < f0 + lf, 0, np.where(positions < b0 + lb, n * lf, n * (lf + lb))
    )
    return moved
