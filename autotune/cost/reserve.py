"""What torch's caching allocator holds during a training, by a replay into its rules (`allocator`). Pure.

What is replayed is the micro-step of the full-depth model, storage by storage, between the optimizer's steps: the
blocks that stay unused, and those that are larger than what was asked for, depend on the order.

The storages at full depth follow from those of the excerpt, whose model has few layers (`deepened`). The tape of a
deeper model has the operators of one layer once more for each further layer, one stretch in the forward and one in the
backward pass. A storage of the repeated layer is there once for each of them; those of layers before and after it, and
of what surrounds the layers, once. The layer that comes first in the forward pass comes last in the backward pass.
Whether a storage ends with its layer or with something that comes once, as the cast weights that autocast holds until
the end of the forward pass, is decided by the corresponding storage of the layer before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.cost.allocator import Block, CachingAllocator
from autotune.cost.family import Generation, workspace_bytes
from autotune.cost.optimizers import Optimizer, is_paged, loop_copies, optimizer, state_sizes
from autotune.cost.profile import Excerpt, ParameterGroup, Repeat

# In the second step optimizer states are there; what a third brings is little.
STEPS = 3

Rows = NDArray[np.float64]

_MADE, _FREED = 0, 1


class Held(NamedTuple):
    """Peaks of what an allocator has given out, whole blocks, and of what it holds; bytes."""

    micro_steps: int
    optimizer_steps: int
    reserved: int

    @property
    def allocated(self) -> int:
        """Bytes that are given out at the most."""
        return max(self.micro_steps, self.optimizer_steps)

    @property
    def unused(self) -> int:
        """Bytes that are reserved at the most beyond those that are allocated at the most."""
        return self.reserved - self.allocated


def held_bytes(
    excerpt: Excerpt,
    optim: str,
    micro_batch: float,
    *,
    accumulated: bool,
    keeps_gradients: bool = False,
    generation: Generation = "ampere",
    expandable: bool = False,
) -> Held:
    """Return what is allocated and reserved at the most.

    Args:
        excerpt: Of the family.
        optim: The optimizer.
        micro_batch: Samples.
        accumulated: Whether a step has more than one micro-batch.
        keeps_gradients: Whether gradients are set to zero and not freed between steps, as before torch 2.0.
        generation: Of the device.
        expandable: Whether the allocator's segments are.
    """
    run = _Run(excerpt, optim, micro_batch, workspace_bytes(generation), expandable=expandable)
    micro_steps = optimizer_steps = 0
    for step in range(STEPS):
        for micro in range(2 if accumulated else 1):
            run.micro_step(first=micro == 0 and (step == 0 or not keeps_gradients))
        micro_steps = max(micro_steps, run.allocator.take_peak())
        run.optimizer_step()
        optimizer_steps = max(optimizer_steps, run.allocator.take_peak())
        if not keeps_gradients:
            run.free_gradients()
    return Held(micro_steps, optimizer_steps, run.allocator.peak_reserved)


class _Run:
    """A training run, as the allocator sees it."""

    def __init__(self, excerpt: Excerpt, optim: str, micro_batch: float, workspace: int, *, expandable: bool) -> None:
        self.allocator = CachingAllocator(expandable=expandable)
        self._optim = optim
        self._row: Optimizer = optimizer(optim)
        rows, workspaces, parameters, _, _ = deepened(excerpt)
        trained = [g for g in parameters if g.trained]
        # The Trainer's groups: matrices, which decay, and the rest; each is stepped by itself.
        self._groups = [[g for g in trained if (len(g.shape) > 1) == matrix] for matrix in (True, False)]
        self._gradients: list[Block] = []
        self._states: list[Block] = []
        self._sizes = (rows[:, 2] + rows[:, 3] * micro_batch).tolist()
        self._is_gradient = (rows[:, 4] > 0).tolist()
        self._order = _order(rows, workspaces)
        self._workspace, self._has_workspaces = workspace, False
        for group in parameters:
            self.allocator.allocate(group.elements * group.element_bytes)

    def micro_step(self, *, first: bool) -> None:
        """Run forward and backward; gradients stay, or are added to those that are there."""
        live: dict[int, Block] = {}
        for index, makes in self._order:
            if index < 0:
                if not self._has_workspaces:
                    self.allocator.allocate(self._workspace)
            elif makes:
                live[index] = self.allocator.allocate(self._sizes[index])
            elif first and self._is_gradient[index]:
                self._gradients.append(live.pop(index))
            else:
                self.allocator.release(live.pop(index))
        self._has_workspaces = True

    def optimizer_step(self) -> None:
        """Make the states, once, and take what a step takes in addition."""
        is_first = not self._states
        for trained in self._groups:
            if is_first:
                self._states += [self.allocator.allocate(size) for size in self._state_sizes(trained)]
            if self._row.temporaries == "foreach":
                copies = trained * self._row.copies
                self._free([self.allocator.allocate(g.elements * g.element_bytes) for g in copies])
            elif self._row.temporaries != "none":
                self._loop(trained)

    def free_gradients(self) -> None:
        """Set all gradients to None."""
        self._free(self._gradients)
        self._gradients = []

    def _loop(self, trained: Sequence[ParameterGroup]) -> None:
        before: list[Block] = []
        for group in trained:
            copies, width = loop_copies(self._optim, group)
            blocks = [self.allocator.allocate(group.elements * width) for _ in range(copies)]
            self._free(before)
            before = blocks[-1:]
            self._free(blocks[:-1])
        self._free(before)

    def _state_sizes(self, trained: Sequence[ParameterGroup]) -> list[float]:
        found: list[float] = []
        for group in trained:
            sizes, scales = state_sizes(self._optim, group)
            found += scales if is_paged(self._optim, group) else sizes + scales
        return found

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.allocator.release(block)


def _order(rows: Rows, workspaces: Sequence[int]) -> list[tuple[int, bool]]:
    """Return (storage, whether it is made) in time; what ends before an operator makes room for its results.

    A workspace is -1.
    """
    count, taken = len(rows), np.array(workspaces, dtype=float)
    index = np.arange(count)
    when = np.concatenate([rows[:, 1], rows[:, 0], taken])
    makes = np.concatenate([np.zeros(count), np.ones(count), np.full(len(taken), 2)])
    which = np.concatenate([index, index, np.full(len(taken), -1)])
    # A storage may end before the operator after the one that made it, never before it is made.
    order = np.lexsort((which, makes, when))
    return [(int(which[i]), bool(makes[i])) for i in order]


class FullDepth(NamedTuple):
    """An excerpt at the model's full depth; rows as its storages, with the position of the origin behind."""

    rows: Rows
    workspaces: tuple[int, ...]
    parameters: list[ParameterGroup]
    names: list[str]
    forward_end: int


def deepened(excerpt: Excerpt) -> FullDepth:
    """Return an excerpt at full depth."""
    storages = np.array(excerpt.storages, dtype=float).reshape(-1, 5)
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
