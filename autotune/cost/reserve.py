"""How much torch's caching allocator reserves beyond what is allocated, by replaying a training run into its rules.

What is replayed is an excerpt: the same model with few layers. The blocks that stay unused come from the loss and from
what one layer makes and frees, so they hardly depend on the depth. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.cost.allocator import Block, CachingAllocator
from autotune.cost.optimizers import Optimizer, optimizer, state_bytes
from autotune.cost.profile import Excerpt

# In the second step optimizer states are there; what a third brings is little.
STEPS = 3


def unused_bytes(
    excerpt: Excerpt, optim: str, micro_batch: int, *, accumulated: bool, keeps_gradients: bool = False
) -> int:
    """Return the bytes that are reserved at the most beyond those that are allocated at the most.

    Args:
        excerpt: Of the family.
        optim: The optimizer.
        micro_batch: Samples.
        accumulated: Whether a step has more than one micro-batch.
        keeps_gradients: Whether gradients are set to zero and not freed between steps, as before torch 2.0.
    """
    run = _Run(excerpt, optim, micro_batch)
    for step in range(STEPS):
        for micro in range(2 if accumulated else 1):
            run.micro_step(first=micro == 0 and (step == 0 or not keeps_gradients))
        run.optimizer_step()
        if not keeps_gradients:
            run.free_gradients()
    return run.allocator.peak_reserved - run.allocator.peak_allocated


class _Run:
    """A training run, as the allocator sees it."""

    def __init__(self, excerpt: Excerpt, optim: str, micro_batch: int) -> None:
        self.allocator = CachingAllocator()
        self._optim = optim
        self._row: Optimizer = optimizer(optim)
        self._trained = [g for g in excerpt.parameters if g.trained]
        self._gradients: list[Block] = []
        self._states: list[Block] = []
        self._sizes = [constant + slope * micro_batch for _, _, constant, slope, _ in excerpt.storages]
        self._is_gradient = [row[4] for row in excerpt.storages]
        self._order = _order(excerpt)
        for group in excerpt.parameters:
            self.allocator.allocate(group.elements * group.element_bytes)

    def micro_step(self, *, first: bool) -> None:
        """Run forward and backward; gradients stay, or are added to those that are there."""
        live: dict[int, Block] = {}
        for index, makes in self._order:
            if makes:
                live[index] = self.allocator.allocate(self._sizes[index])
            elif first and self._is_gradient[index]:
                self._gradients.append(live.pop(index))
            else:
                self.allocator.release(live.pop(index))

    def optimizer_step(self) -> None:
        """Make the states, once, and what a step takes beside them."""
        if not self._states:
            for size in self._state_sizes():
                self._states.append(self.allocator.allocate(size))
        if self._row.temporaries == "foreach":
            copies = self._trained * self._row.copies
            blocks = [self.allocator.allocate(g.elements * g.element_bytes) for g in copies]
            self._free(blocks)
        elif self._row.temporaries != "none":
            self._loop(4.0 if self._row.temporaries == "adafactor" else None)

    def free_gradients(self) -> None:
        """Set all gradients to None."""
        self._free(self._gradients)
        self._gradients = []

    def _loop(self, width: float | None) -> None:
        before: list[Block] = []
        for group in self._trained:
            size = group.elements * (width or group.element_bytes)
            blocks = [self.allocator.allocate(size), self.allocator.allocate(size)]
            self._free(before)
            before = blocks[1:]
            self._free(blocks[:1])
        self._free(before)

    def _state_sizes(self) -> list[float]:
        sizes: list[float] = []
        for group in self._trained:
            resident, _ = state_bytes(self._optim, [group])
            parts = max(1, self._row.states)
            sizes += [resident / parts] * parts if resident else []
        return sizes

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.allocator.release(block)


def _order(excerpt: Excerpt) -> list[tuple[int, bool]]:
    """Return (storage, whether it is made) in time; what ends before an operator makes room for its results."""
    made = np.array([row[0] for row in excerpt.storages])
    freed = np.array([row[1] for row in excerpt.storages])
    index = np.arange(len(made))
    when = np.concatenate([freed, made])
    makes = np.concatenate([np.zeros_like(index), np.ones_like(index)])
    # A storage may end before the operator after the one that made it, never before it is made.
    order = np.lexsort((np.concatenate([index, index]), makes, when))
    return [(int(index[i % len(index)]), bool(makes[i])) for i in order]
