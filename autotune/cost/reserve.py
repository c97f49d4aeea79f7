"""What torch's caching allocator holds during a training, by a replay into its rules (`allocator`). Pure.

What is replayed is the micro-step of the full-depth model, storage by storage, between the optimizer's steps, and an
evaluation after them: the blocks that stay unused, and those that are larger than what was asked for, depend on the
order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autotune.cost.allocator import Block, CachingAllocator
from autotune.cost.family import Generation, workspace_bytes
from autotune.cost.optimizers import Optimizer, is_paged, loop_copies, optimizer, state_sizes
from autotune.cost.profile import ForwardPass, ParameterGroup, Profile, Vector
from autotune.values.estimate import Evaluation

# In the second step optimizer states are there; what a third brings is little.
STEPS = 3

# Threads that fill the device that most have of a generation: T4, A100, A40, H100.
_THREADS = {"turing": 40 * 1024, "ampere": 108 * 2048, "small_ampere": 84 * 1536, "hopper": 132 * 2048}

_UNPACKED = 2  # bytes of an element that isn't quantized, the fewest

_BROADCAST_BYTES = 250 << 20  # `broadcast_bucket_size` of DistributedDataParallel


class Buckets(NamedTuple):
    """How DDP groups gradients to send them: torch/csrc/distributed/c10d/reducer.cpp."""

    first_bytes: int  # a bucket is full at so many; of the first parameters
    others_bytes: int
    rebuilt: bool  # one that holds all gives way to these before the second step


class Held(NamedTuple):
    """Peaks of what an allocator has given out, whole blocks, and of what it holds; bytes."""

    micro_steps: int
    optimizer_steps: int
    evaluation: int  # 0: none was replayed
    reserved: int

    @property
    def allocated(self) -> int:
        """Bytes that are given out at the most."""
        return max(self.micro_steps, self.optimizer_steps, self.evaluation)

    @property
    def unused(self) -> int:
        """Bytes that are reserved at the most beyond those that are allocated at the most."""
        return self.reserved - self.allocated


@functools.lru_cache(maxsize=1024)
def held_bytes(
    profile: Profile,
    optim: str,
    micro_batch: float,
    *,
    accumulated: bool,
    keeps_gradients: bool = False,
    expandable: bool = False,
    buckets: Buckets | None = None,
    evaluation: Evaluation | None = None,
) -> Held:
    """Return what is allocated and reserved at the most.

    Args:
        profile: Of the family.
        optim: The optimizer.
        micro_batch: Samples.
        accumulated: Whether a step has more than one micro-batch.
        keeps_gradients: Whether gradients are set to zero and not freed between steps, as before torch 2.0.
        expandable: Whether the allocator's segments are.
        buckets: Of DDP; None: there is one device.
        evaluation: How the training is evaluated after its steps; None: it isn't.
    """
    run = _Run(profile, optim, micro_batch, expandable=expandable)
    if buckets is not None:
        run.wrap(buckets)
    micro_steps = optimizer_steps = 0
    for step in range(STEPS):
        if buckets is not None and buckets.rebuilt and step == 1:
            run.rebuild_buckets(buckets)
        for micro in range(2 if accumulated else 1):
            run.micro_step(first=micro == 0 and (step == 0 or not keeps_gradients))
        micro_steps = max(micro_steps, run.allocator.take_peak())
        run.optimizer_step()
        optimizer_steps = max(optimizer_steps, run.allocator.take_peak())
        if not keeps_gradients:
            run.free_gradients()
    evaluating = 0
    if evaluation is not None and profile.evaluation is not None:
        run.allocator.take_peak()
        run.evaluate(evaluation, profile.evaluation)
        evaluating = run.allocator.take_peak()
    return Held(micro_steps, optimizer_steps, evaluating, run.allocator.peak_reserved)


class _Run:
    """A training run, as the allocator sees it."""

    def __init__(self, profile: Profile, optim: str, micro_batch: float, *, expandable: bool) -> None:
        self.allocator = CachingAllocator(expandable=expandable)
        self._optim = optim
        self._row: Optimizer = optimizer(optim)
        self._generation: Generation = profile.family.generation
        parameters = profile.made
        trained = [g for g in parameters if g.trained]
        # The Trainer's groups: matrices, which decay, and the rest; each is stepped by itself.
        self._groups = [[g for g in trained if (len(g.shape) > 1) == matrix] for matrix in (True, False)]
        self._largest = sorted(set(trained), key=lambda g: -g.elements * g.element_bytes)
        self._gradients: list[Block] = []
        self._states: list[Block] = []
        self._buckets: list[Block] = []
        rows, self._sizes = self._sized(profile.storages.rows, micro_batch)
        self._is_gradient = (rows[:, 4] > 0).tolist()
        self._order = _order(rows, profile.storages.workspaces)
        self._workspace, self._has_workspaces = workspace_bytes(self._generation), False
        self._weights = [group.elements * group.element_bytes for group in parameters]
        self._trained = [g.elements * g.element_bytes for g in trained]
        self._pack([group for group in parameters if group.element_bytes < _UNPACKED])
        for group, size in zip(parameters, self._weights, strict=True):
            if group.element_bytes >= _UNPACKED:
                self.allocator.allocate(size)
        if self._row.from_start:
            self._make_states(self._groups[0] + self._groups[1])
        self.allocator.return_unused()  # as a trial does before its first step, from which on peaks count
        self.allocator.take_peak()
        self.allocator.peak_reserved = self.allocator.reserved

    def _sized(self, rows: Vector, samples: float) -> tuple[Vector, list[float]]:
        """Return the storages that take anything, and their bytes."""
        sizes = rows[:, 2] + rows[:, 3] * samples
        for at in np.flatnonzero(rows[:, 5]):
            sizes[at] = sum_bytes(int(sizes[at]), int(rows[at, 5]), self._generation)
        takes = (rows[:, 5] == 0) | (sizes > 0)  # a sum whose blocks share nothing takes nothing
        return rows[takes], sizes[takes].tolist()

    def _pack(self, quantized: Sequence[ParameterGroup]) -> None:
        """Quantize one weight after the other: in fp32 first, for 8 bits then in 16 (`Int8Params._quantize`)."""
        for group in quantized:
            widths = (4, 2) if group.element_bytes >= 1 else (4,)
            before = [self.allocator.allocate(group.elements * width) for width in widths]
            self.allocator.allocate(group.elements * group.element_bytes)
            self._free(before[::-1])

    def wrap(self, buckets: Buckets) -> None:
        """Broadcast the weights in flat copies, of which there are two at a time, and make the first buckets."""
        sent: list[Block] = []
        for size in grouped(self._weights, _BROADCAST_BYTES, _BROADCAST_BYTES):
            self._free(sent[:-1])
            sent = [*sent[-1:], self.allocator.allocate(size)]
        self._free(sent)
        whole = [sum(self._trained)] if buckets.rebuilt else grouped(self._trained, *buckets[:2])[::-1]
        self._buckets = [self.allocator.allocate(size) for size in whole]

    def rebuild_buckets(self, buckets: Buckets) -> None:
        """Group the gradients in the order in which they get ready: about that of the parameters, reversed.

        NCCL's watchdog holds what was sent until it looks next, every 100 ms, so the old bucket may still be there.
        """
        before = self._buckets
        self._buckets = [self.allocator.allocate(size) for size in grouped(self._trained[::-1], *buckets[:2])]
        self._free(before)

    def micro_step(self, *, first: bool) -> None:
        """Run forward and backward; gradients stay, or are added to those that are there."""
        live: dict[int, Block] = {}
        for index, makes in self._order:
            if index < 0:
                if not self._has_workspaces:
                    self.allocator.allocate(self._workspace)
            elif makes:
                live[index] = self.allocator.allocate(self._sizes[index])
            elif self._is_gradient[index] and (first or self._row.in_backward):
                self._gradients.append(live.pop(index))
                if self._row.in_backward:
                    self._update_before(self._row.in_backward)
            else:
                self.allocator.release(live.pop(index))
        self._has_workspaces = True
        if self._row.in_backward:
            self._update_before(1)

    def _update_before(self, at_once: int) -> None:
        """Update weights and free their gradients, the oldest first, until fewer than so many are there."""
        while len(self._gradients) >= at_once:
            block = self._gradients.pop(0)
            self._loop([g for g in self._largest if g.elements * g.element_bytes <= block.size][:1])
            self.allocator.release(block)

    def optimizer_step(self) -> None:
        """Make the states, once, and take what a step takes in addition."""
        is_first = not self._states
        for trained in self._groups:
            self._make_states(trained if is_first else [])
            if self._row.temporaries == "foreach":
                copies = trained * self._row.copies
                self._free([self.allocator.allocate(g.elements * g.element_bytes) for g in copies])
            elif self._row.temporaries != "none" and not self._row.in_backward:
                self._loop(trained)

    def _make_states(self, trained: Sequence[ParameterGroup]) -> None:
        for group in trained:
            sizes, scales = state_sizes(self._optim, group)
            sizes = scales if is_paged(self._optim, group) else sizes + scales
            self._states += [self.allocator.allocate(size) for size in sizes]

    def evaluate(self, how: Evaluation, forward: ForwardPass) -> None:
        """Run the batches of an evaluation: `Trainer.evaluation_loop`.

        Where logits are kept, those of a batch are joined to those of all before in a new tensor (`EvalLoopContainer`),
        and are there themselves until the next batch's come. Of the passes only the first two and the last of a whole
        batch are run.
        """
        rows, sizes = self._sized(forward.storages.rows, how.batch)
        order, samples = _order(rows, ()), how.kept_samples or 2 * how.batch
        kept: list[Block] = []
        for batch, done in enumerate(range(0, samples, how.batch)):
            if batch < 2 or batch == samples // how.batch - 1:
                inputs = forward.inputs_bytes * how.batch
                live = {-1: self.allocator.allocate(inputs)} if inputs else {}
                for index, makes in order:
                    if makes:
                        live[index] = self.allocator.allocate(sizes[index])
                    else:
                        self.allocator.release(live.pop(index))
                self._free(live.values())
            if how.kept_samples:
                size = min(how.batch, samples - done)
                logits = self.allocator.allocate(forward.outputs_bytes.at(size))
                self._free(kept[1:])  # of the batch before
                joined = [self.allocator.allocate(forward.outputs_bytes.at(done + size))] if batch else []
                self._free(kept[:1])
                kept = [*joined, logits]
        self._free(kept)

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

    def _free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.allocator.release(block)


@functools.cache
def sum_bytes(rows: int, columns: int, generation: Generation) -> int:
    """Return the scratch memory of a sum over the rows of a matrix: `setReduceConfig` in aten's native/cuda/Reduce.cuh.

    A block sums up 32 times 4 columns. Several share them where a thread of one would have 256 rows or more.
    """
    vector = math.gcd(columns, 4)
    most, wide = 512 // vector, columns // vector
    width = min(_power(wide, most), 32)
    height = min(_power(rows, most), most // width)
    width = min(_power(wide, most), most // height)
    each, blocks, room = -(-rows // height), -(-wide // width), _THREADS[generation] // (width * height)
    if each < 256 or blocks > room:
        return 0
    sharing = max(min(-(-room // blocks), -(-each // 16)), -(-each // 256))
    return 4 * columns * sharing * width * vector if sharing > 1 else 0


def _power(size: int, most: int) -> int:
    """Return the largest power of two that is no more than `size` and `most`."""
    return 1 << (min(size, most).bit_length() - 1)


def grouped(sizes: Sequence[float], first: int, others: int) -> list[float]:
    """Return the sizes of groups of neighbours, each of which is full at a limit: the first one's, or the others'."""
    found = [0.0]
    for size in sizes:
        if found[-1] >= (first if len(found) == 1 else others):
            found.append(0.0)
        found[-1] += size
    return found


def _order(rows: Vector, workspaces: Sequence[int]) -> list[tuple[int, bool]]:
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
