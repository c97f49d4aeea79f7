"""What torch's caching allocator holds during a training, by replaying it into its rules.

What is replayed is the micro-step of the full-depth model, storage by storage (`deepened`), between the optimizer's
steps: the blocks that stay unused, and those that are larger than what was asked for, depend on the order. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autotune.cost.allocator import Block, CachingAllocator
from autotune.cost.deepened import Rows, deepened
from autotune.cost.generation import Generation, workspace_bytes
from autotune.cost.optimizers import Optimizer, is_paged, loop_copies, optimizer, state_sizes
from autotune.cost.profile import Excerpt, ParameterGroup

# In the second step optimizer states are there; what a third brings is little.
STEPS = 3


class Held(NamedTuple):
    """Peaks of what an allocator has given out, whole blocks, and of what it holds; bytes."""

    allocated: int
    reserved: int


def held_bytes(
    excerpt: Excerpt,
    optim: str,
    micro_batch: int,
    *,
    accumulated: bool,
    keeps_gradients: bool = False,
    generation: Generation = "ampere",
) -> Held:
    """Return what is allocated and reserved at the most.

    Args:
        excerpt: Of the family.
        optim: The optimizer.
        micro_batch: Samples.
        accumulated: Whether a step has more than one micro-batch.
        keeps_gradients: Whether gradients are set to zero and not freed between steps, as before torch 2.0.
        generation: Of the device.
    """
    run = _Run(excerpt, optim, micro_batch, workspace_bytes(generation))
    for step in range(STEPS):
        for micro in range(2 if accumulated else 1):
            run.micro_step(first=micro == 0 and (step == 0 or not keeps_gradients))
        run.optimizer_step()
        if not keeps_gradients:
            run.free_gradients()
    return Held(run.allocator.peak_allocated, run.allocator.peak_reserved)


def unused_bytes(
    excerpt: Excerpt, optim: str, micro_batch: int, *, accumulated: bool, keeps_gradients: bool = False
) -> int:
    """Return the bytes that are reserved at the most beyond those that are allocated at the most."""
    held = held_bytes(excerpt, optim, micro_batch, accumulated=accumulated, keeps_gradients=keeps_gradients)
    return held.reserved - held.allocated


class _Run:
    """A training run, as the allocator sees it."""

    def __init__(self, excerpt: Excerpt, optim: str, micro_batch: int, workspace: int) -> None:
        self.allocator = CachingAllocator()
        self._optim = optim
        self._row: Optimizer = optimizer(optim)
        rows, workspaces, parameters = deepened(excerpt)
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
        """Make the states, once, and what a step takes beside them."""
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
