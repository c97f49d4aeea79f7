"""How others tune; each keeps the baseline's other knobs but for coordinate descent.

A way is a script: it yields configurations and is sent the samples/s that each gave, None for what failed.
"""

from __future__ import annotations

import random

from searching.samplers import Script

from autotune.planning.plan import SearchPlan
from autotune.space.points import MICRO_BATCH
from autotune.values.config import TrainConfig

# DeepSpeed's autotuner tries so many micro-batches of those that fit (`num_tuning_micro_batch_sizes`, its default).
_DEEPSPEED_SIZES = 3


def deepspeed(plan: SearchPlan) -> Script:
    """Find the largest micro-batch that fits by bisection, then try a few below it as long as they are faster.

    In the way of DeepSpeed's autotuner (`get_min_max_micro_batch_size` and `run_tuning_micro_batch_sizes` in its
    autotuning/autotuner.py), on the lattice of the table and with its one stage of ZeRO: the user's
    micro-batch first, the smallest where that doesn't run.
    """
    sizes = _sizes(plan)
    low, high = 0, len(sizes) - 1
    if (yield plan.baseline) is not None:
        low = sizes.index(plan.baseline.per_device_train_batch_size)
    elif (yield _with(plan, sizes[0])) is None:
        return
    while low < high:
        middle = (low + high + 1) // 2
        if (yield _with(plan, sizes[middle])) is None:
            high = middle - 1
        else:
            low = middle
    step = max(1, (low + 1) // _DEEPSPEED_SIZES)
    best = 0.0
    for index in list(range(low, -1, -step))[:_DEEPSPEED_SIZES]:
        rate = (yield _with(plan, sizes[index])) or 0.0
        if rate < best:
            return
        best = rate


def doubling(plan: SearchPlan) -> Script:
    """Double the micro-batch until it runs out of memory, as Lightning's batch size finder ("power")."""
    for size in _sizes(plan):
        if (yield _with(plan, size)) is None:
            return


def halving(plan: SearchPlan) -> Script:
    """Halve the micro-batch until it fits, as accelerate's `find_executable_batch_size`."""
    for size in reversed(_sizes(plan)):
        if (yield _with(plan, size)) is not None:
            return


def coordinate_descent(plan: SearchPlan) -> Script:
    """Try all choices of one knob after another, keeping the best, until none of them changes any more."""
    space = plan.search_space()
    dimensions = list(space.dimensions)
    random.Random(plan.workload.seed).shuffle(dimensions)
    here, best = plan.baseline, (yield plan.baseline) or 0.0
    moved = True
    while moved:
        moved = False
        for dimension in dimensions:
            origin = space.point(here)
            for choice in dimension.choices:
                config = space.config({**origin, dimension.name: choice})
                rate = yield config
                if rate is not None and rate > best:
                    here, best, moved = config, rate, True


def _sizes(plan: SearchPlan) -> list[int]:
    dimension = next(d for d in plan.search_space().dimensions if d.name == MICRO_BATCH)
    return sorted(int(choice) for choice in dimension.choices if choice is not None)


def _with(plan: SearchPlan, size: int) -> TrainConfig:
    return plan.baseline.model_copy(update={MICRO_BATCH: size})
