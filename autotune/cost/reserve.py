"""The memory that torch's caching allocator holds during a training, by a replay into its rules. Pure.

Micro-steps of the full-depth model are replayed storage by storage, then the optimizer's steps and an evaluation. The
rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings: sizes rounded up to 512 bytes; blocks
up to 1 MiB cut out of segments of 2 MiB, below 10 MiB out of 20 MiB, larger ones out of a segment of their own rounded
up to 2 MiB; the smallest free block that is large enough is taken and the rest of it split off; neighbours are joined
when freed; segments are never given back. One stream, and a device that is never full. Expandable segments are one for
small blocks and one for large ones, which grow at their end by 2 or 20 MiB where no free block is large enough.

Of free blocks alike the one with the lowest address is taken. Whether a new segment lies above or below those before is
the driver's choice, so both are replayed and the larger reserved memory counts: mT5-small needs a sixth more in one of
the two. Of 11 trainings of an H200 that tell them apart, seven were nearer to falling addresses.
"""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autotune.cost.family import Generation, sum_bytes, workspace_bytes
from autotune.cost.optimizers import optimizer
from autotune.cost.profile import ForwardPass, ParameterGroup, Profile, Storages
from autotune.values.estimate import Evaluation

_MIN_BLOCK, _SMALL_SIZE, _SMALL_BUFFER, _LARGE_BUFFER = 512, 1 << 20, 2 << 20, 20 << 20


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment."""

    size: int
    segment_size: int
    small: bool
    address: int
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """Allocates and frees; counts what is allocated and reserved. `expandable`: whether segments are.

    `falling`: a new segment lies below those before.
    """

    def __init__(self, *, expandable: bool = False, falling: bool = False) -> None:
        self._expandable, self._falling = expandable, falling
        self._last: list[Block | None] = [None, None]  # of each expandable segment
        # By size, then by address, of which no two are alike.
        self._pools: tuple[list[tuple[int, int, Block]], ...] = ([], [])
        self._taken = 0  # of the addresses, by segments
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0

    def allocate(self, nbytes: float) -> Block:
        size = max(_MIN_BLOCK, -(-int(nbytes) // _MIN_BLOCK) * _MIN_BLOCK)
        small = size <= _SMALL_SIZE
        pool = self._pools[small]
        position = bisect.bisect_left(pool, (size,))
        # The end of an expandable segment could grow, and is the last to be taken.
        if position + 1 < len(pool) and pool[position][2] is self._last[small]:
            position += 1
        block = pool.pop(position)[2] if position < len(pool) else self._reserved(size, small)
        rest = block.size - size
        if rest >= _MIN_BLOCK and (small or self._expandable or rest > _SMALL_SIZE):
            other = Block(rest, block.segment_size, small, block.address + size, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            elif self._expandable:
                self._last[small] = other
            block.after, block.size = other, size
            self._insert(other)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _reserved(self, size: int, small: bool) -> Block:
        """Return a new segment, or the last block of an expandable one made as large as `size`."""
        step, last = _SMALL_BUFFER if small else _LARGE_BUFFER, self._last[small]
        free = last if last is not None and last.free else None
        if self._expandable:
            more = -(-(size - (free.size if free else 0)) // step) * step
        else:  # one of 10 MiB and more is rounded up to 2 MiB
            more = step if small or size < 10 << 20 else -(-size // (2 << 20)) * (2 << 20)
        self.reserved += more
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if not self._expandable:
            self._taken += more
            return Block(more, more, small, -self._taken if self._falling else self._taken - more)
        if free is not None:
            self._remove(free)
            free.size += more
            return free
        block = Block(more, segment_size=0, small=small, address=last.address + last.size if last else 0, before=last)
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    def take_peak(self) -> int:
        """Return the most that was allocated since this was last asked."""
        peak, self.peak_allocated = self.peak_allocated, self.allocated
        return peak

    def release(self, *blocks: Block) -> None:
        """Give blocks back; they stay reserved."""
        for block in blocks:
            self.allocated -= block.size
            block.free = True
            before, after = block.before, block.after
            if before is not None and before.free:
                self._remove(before)
                block.size += before.size
                block.address, block.before = before.address, before.before
                if block.before is not None:
                    block.before.after = block
            if after is not None and after.free:
                self._remove(after)
                block.size += after.size
                block.after = after.after
                if block.after is not None:
                    block.after.before = block
                if self._last[block.small] is after:
                    self._last[block.small] = block
            self._insert(block)

    def return_unused(self) -> None:
        """Give back segments that are wholly free, as `torch.cuda.empty_cache` does."""
        for pool in self._pools:
            for entry in [entry for entry in pool if entry[2].size == entry[2].segment_size]:
                pool.remove(entry)
                self.reserved -= entry[2].segment_size

    def _insert(self, block: Block) -> None:
        bisect.insort(self._pools[block.small], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._pools[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]


class Buckets(NamedTuple):
    """How DDP groups gradients to send them: torch/csrc/distributed/c10d/reducer.cpp."""

    first_bytes: int  # a bucket is full at so many; of the first parameters
    others_bytes: int
    rebuilt: bool  # one that holds all gives way to these before the second step


class Held(NamedTuple):
    """Bytes at the peaks of an allocator: of the blocks that it has given out, and of all that it holds."""

    micro_steps: int
    optimizer_steps: int
    evaluation: int  # 0: none was replayed
    reserved: int

    @property
    def allocated(self) -> int:
        return max(self.micro_steps, self.optimizer_steps, self.evaluation)

    @property
    def unused(self) -> int:
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
    """Return an allocator's peaks, of two replays the larger; `accumulated`: a step has more than one micro-batch.

    `keeps_gradients`: they are set to zero and not freed between steps, as before torch 2.0. Without `buckets` there is
    one device, without an `evaluation` none comes after the steps.
    """
    found: list[Held] = []
    for falling in (False,) if expandable else (False, True):
        allocator = CachingAllocator(expandable=expandable, falling=falling)
        run = _Run(allocator, profile, optim, micro_batch, buckets)
        micro_steps = optimizer_steps = evaluating = 0
        for step in range(3):  # from the second on optimizer states are there; a third brings little
            if buckets is not None and buckets.rebuilt and step == 1:
                run.rebuild_buckets(buckets)
            for micro in range(2 if accumulated else 1):
                run.micro_step(first=micro == 0 and (step == 0 or not keeps_gradients))
            micro_steps = max(micro_steps, allocator.take_peak())
            run.optimizer_step()
            optimizer_steps = max(optimizer_steps, allocator.take_peak())
            if not keeps_gradients:
                allocator.release(*run.gradients)
                run.gradients = []
        if evaluation is not None and profile.evaluation is not None:
            allocator.take_peak()
            run.evaluate(evaluation, profile.evaluation)
            evaluating = allocator.take_peak()
        found.append(Held(micro_steps, optimizer_steps, evaluating, allocator.peak_reserved))
    return max(found, key=lambda held: held.reserved)


class _Run:  # a training, as the allocator sees it
    def __init__(
        self, allocator: CachingAllocator, profile: Profile, optim: str, micro_batch: float, buckets: Buckets | None
    ) -> None:
        self.allocator = allocator
        self.gradients: list[Block] = []
        self._optim, self._row = optim, optimizer(optim)
        self._generation: Generation = profile.family.generation
        made = profile.made
        trained = [g for g in made if g.trained]
        # The Trainer's groups: matrices, which decay, and the rest; each is stepped by itself.
        self._groups = [[g for g in trained if (len(g.shape) > 1) == matrix] for matrix in (True, False)]
        self._largest = sorted(set(trained), key=lambda g: -g.nbytes)
        self._states, self._buckets = list[Block](), list[Block]()
        self._events, self._sizes, self._is_gradient = _events(profile.storages, micro_batch, self._generation)
        self._has_workspaces = False
        self._trained = [g.nbytes for g in trained]
        for group in made:
            if group.element_bytes < 2:  # packed one by one: in fp32 first, for 8 bits then in 16
                widths = (4, 2) if group.element_bytes >= 1 else (4,)  # `Int8Params._quantize`
                before = [self.allocator.allocate(group.elements * width) for width in widths]
                self.allocator.allocate(group.nbytes)
                self.allocator.release(*before[::-1])
        for group in made:
            if group.element_bytes >= 2:
                self.allocator.allocate(group.nbytes)
        if self._row.from_start:
            self._make_states(self._groups[0] + self._groups[1])
        self.allocator.return_unused()  # as a trial does before its first step, from which on peaks count
        self.allocator.take_peak()
        self.allocator.peak_reserved = self.allocator.reserved
        if buckets is None:
            return
        sent: list[Block] = []  # flat copies of the weights that DDP broadcasts, two at a time
        weights = [g.nbytes for g in made]
        for size in grouped(weights, 250 << 20, 250 << 20):  # `broadcast_bucket_size` of DistributedDataParallel
            self.allocator.release(*sent[:-1])
            sent = [*sent[-1:], self.allocator.allocate(size)]
        self.allocator.release(*sent)
        whole = [sum(self._trained)] if buckets.rebuilt else grouped(self._trained, *buckets[:2])[::-1]
        self._buckets = [self.allocator.allocate(size) for size in whole]

    def rebuild_buckets(self, buckets: Buckets) -> None:
        """Group the gradients in the order in which they get ready: about that of the parameters, reversed."""
        before = self._buckets  # there until NCCL's watchdog looks next, every 100 ms
        self._buckets = [self.allocator.allocate(size) for size in grouped(self._trained[::-1], *buckets[:2])]
        self.allocator.release(*before)

    def micro_step(self, *, first: bool) -> None:
        """Run forward and backward; gradients stay, or are added to those that are there."""
        live: dict[int, Block] = {}
        for index, makes in self._events:
            if index < 0:
                if not self._has_workspaces:
                    self.allocator.allocate(workspace_bytes(self._generation))
            elif makes:
                live[index] = self.allocator.allocate(self._sizes[index])
            elif self._is_gradient[index] and (first or self._row.in_backward):
                self.gradients.append(live.pop(index))
                if self._row.in_backward:
                    self._update_before(self._row.in_backward)
            else:
                self.allocator.release(live.pop(index))
        self._has_workspaces = True
        if self._row.in_backward:
            self._update_before(1)

    def _update_before(self, at_once: int) -> None:
        """Update weights and free their gradients, the oldest first, until fewer than so many are there."""
        while len(self.gradients) >= at_once:
            block = self.gradients.pop(0)
            self._loop([g for g in self._largest if g.nbytes <= block.size][:1])
            self.allocator.release(block)

    def optimizer_step(self) -> None:
        is_first = not self._states
        for trained in self._groups:
            if is_first:
                self._make_states(trained)
            if self._row.temporaries == "foreach":
                sizes = [g.nbytes for g in trained * self._row.copies]
                self.allocator.release(*map(self.allocator.allocate, sizes))
            elif self._row.temporaries != "none" and not self._row.in_backward:
                self._loop(trained)

    def _make_states(self, trained: Sequence[ParameterGroup]) -> None:
        for group in trained:
            self._states += map(self.allocator.allocate, self._row.state_sizes(group)[0])

    def _loop(self, trained: Sequence[ParameterGroup]) -> None:
        before: list[Block] = []
        for group in trained:
            copies, width = self._row.copies_in_loop(group)
            blocks = [self.allocator.allocate(group.elements * width) for _ in range(copies)]
            self.allocator.release(*before)
            if (scratch := self._row.mean_bytes(group, self._generation)) > 0:
                self.allocator.release(blocks.pop(0))  # the squared gradient, of which there is a sum now
                self.allocator.release(self.allocator.allocate(scratch))
            self.allocator.release(*blocks[:-1])
            before = blocks[-1:]
        self.allocator.release(*before)

    def evaluate(self, how: Evaluation, forward: ForwardPass) -> None:
        """Run the first two batches of an evaluation and the last: `Trainer.evaluation_loop`.

        Kept logits of a batch are joined to all before in a new tensor (`EvalLoopContainer`); they stay until the next.
        """
        events, sizes, _ = _events(forward.storages, how.batch, self._generation)
        samples, inputs = how.kept_samples or 2 * how.batch, forward.inputs_bytes * how.batch
        kept: list[Block] = []
        for batch, done in enumerate(range(0, samples, how.batch)):
            if batch < 2 or batch == samples // how.batch - 1:
                live = {-1: self.allocator.allocate(inputs)} if inputs else {}
                for index, makes in events:
                    if makes and index >= 0:  # workspaces are there
                        live[index] = self.allocator.allocate(sizes[index])
                    elif index >= 0:
                        self.allocator.release(live.pop(index))
                self.allocator.release(*live.values())
            if how.kept_samples:
                size = min(how.batch, samples - done)
                logits = self.allocator.allocate(forward.outputs_bytes.at(size))
                self.allocator.release(*kept[1:])  # of the batch before
                joined = [self.allocator.allocate(forward.outputs_bytes.at(done + size))] if batch else []
                self.allocator.release(*kept[:1])
                kept = [*joined, logits]
        self.allocator.release(*kept)


def _events(
    storages: Storages, samples: float, generation: Generation
) -> tuple[list[tuple[int, bool]], list[float], list[bool]]:
    """Return (storage, whether it is made) in time, the storages' bytes, and whether each is a gradient.

    Storages that end before an operator make room for its results; a workspace, -1, comes last. A sum whose blocks
    share nothing takes nothing.
    """
    rows, taken = storages.rows, np.array(storages.workspaces, dtype=float)
    sizes = rows[:, 2] + rows[:, 3] * samples
    for at in np.flatnonzero(rows[:, 5]):
        sizes[at] = sum_bytes(int(sizes[at]), int(rows[at, 5]), generation)
    takes = (rows[:, 5] == 0) | (sizes > 0)
    rows, index = rows[takes], np.arange(takes.sum())
    when = np.concatenate([rows[:, 1], rows[:, 0], taken])
    makes = np.repeat([0, 1, 2], [len(rows), len(rows), len(taken)])
    which = np.concatenate([index, index, np.full(len(taken), -1)])
    order = np.lexsort((which, makes, when))
    return [(int(which[i]), bool(makes[i])) for i in order], sizes[takes].tolist(), (rows[:, 4] > 0).tolist()


def grouped(sizes: Sequence[float], first: int, others: int) -> list[float]:
    """Return the sizes of groups of neighbours, each of which is full at a limit: the first one's, or the others'."""
    found = [0.0]
    for size in sizes:
        if found[-1] >= (first if len(found) == 1 else others):
            found.append(0.0)
        found[-1] += size
    return found
