"""Compares the loss curve of a configuration with the baseline's, to detect wrong gradients or learning rates.

All runs start from the same weights and see the same samples in the same order, without dropout, so that two correct
runs agree to the last digits. Differences are relative to the progress, the decrease of the reference's smoothed loss.
Measured on tiny models with 20 steps of Adam: another split or attention kernel below 0.001 %, bf16 0.03 to 0.23 %, fp8
(emulated) 0.09 to 0.13 %, a learning rate 1.25 times as high 5 to 17 %. Where randomness can't be switched off (atomics
on a GPU), a configuration may differ by a multiple of the difference between two seeds of the reference.

Another optimizer takes another path, fp16's loss scaler skips some of the first steps, and batch norm and routers see
other micro-batches. Of these the first loss, before any update, must agree, and the progress must be at least half the
reference's (measured: Adafactor 77 to 122 %, Lion 82 to 121 %, SGD at Adam's learning rate below 1 %). The losses of
other trained weights (adapters, quantized bases, pure bf16) must be finite and must not rise. Dropout is compared once,
by the spread it causes in the loss of one step's samples; not where the model is compiled.
"""

import math
import statistics
from collections.abc import Sequence

from autotune.values.budget import LossCurve, LossVerdict
from autotune.values.config import Allowance, Precision
from autotune.values.model import ModelFacts
from autotune.values.problem import Change

# Dropout is off if it moves the loss by a smaller share of it, and as the baseline's within this factor: the standard
# deviations, from eight draws each, differ by more about once in a thousand times (F distribution, 7 and 7 degrees).
_NO_SPREAD, _DROPOUT_FACTOR = 1e-6, 5.0


def compare(
    reference: LossCurve, again: LossCurve, curve: LossCurve, changed: Sequence[Change], facts: ModelFacts, window: int
) -> LossVerdict:
    """Compare the losses of a configuration, `curve`, with two runs of the user's training, of different seeds.

    `changed` are the configuration's changes; `window`, one pass over the samples in steps, is the moving mean's width.
    """
    ours, theirs, others = (
        [statistics.fmean(c.losses[end - window : end]) for end in range(window, len(c.losses) + 1)]
        for c in (curve, reference, again)
    )
    scale, progress = statistics.fmean(map(abs, reference.losses)), theirs[0] - theirs[-1]
    deepest = Allowance.deepest(c.allowance for c in changed)
    # Batch norm and routers depend on whole micro-batches.
    sizes, is_coupled = ("per_device_train_batch_size", "packing"), facts.batch_coupled is not None
    is_rebatched = is_coupled and any(c.knob in sizes or "batch_rebalance" in (c.before, c.after) for c in changed)
    # A loss scaler that only one of the two has skips some of the first steps until it has a scale.
    is_scaled = any(c.knob == "precision" and Precision.FP16 in (c.before, c.after) for c in changed)
    is_other_method = deepest is Allowance.METHOD
    is_other_path = deepest is Allowance.OPTIMIZER or is_rebatched or is_scaled
    spread, difference = (statistics.fmean(abs(a - b) for a, b in zip(c, theirs, strict=True)) for c in (others, ours))
    # Where there is almost no progress (a warm-up of thousands of steps), differences below these shares of the loss
    # count as rounding: 100 times those measured for exact changes, some 10 times those of bf16. FSDP returns the loss
    # itself in 16 bits (`output_dtype` of accelerate's mixed-precision policy); bf16 has an 8-bit significand.
    floors = {Allowance.EXACT: 1e-5, Allowance.NUMERICS: 2e-4, Allowance.OPTIMIZER: 2e-4, Allowance.METHOD: 1e-3}
    sharded = (c for c in changed if c.knob == "parallelism.sharding" and c.allowance is Allowance.NUMERICS)
    is_short = any(c.after.startswith("fsdp") for c in sharded)
    floor = max(floors[deepest], 2**-9 if is_short else 0.0) * scale
    wider = 3 * spread  # the distance between two runs is uncertain by about a factor of two
    first, their_first, fault = curve.losses[0], reference.losses[0], None
    if not all(map(math.isfinite, curve.losses)):
        fault = "its loss is not a number"
    elif is_other_method:
        if ours[-1] > ours[0] + wider + floor:
            fault = f"its loss rises, by {ours[-1] - ours[0]:.2g}"
    elif is_other_path:
        # Before any update rounding changes the loss by far less than 1 %, batch norm and routers by less than 10 %, a
        # wrong accumulation by the whole loss and more.
        share = 0.1 if is_rebatched else 0.01
        if abs(first - their_first) > 3 * abs(their_first - again.losses[0]) + share * scale:
            fault = f"its first loss is {first:.4g}, the baseline's from the same weights {their_first:.4g}"
        elif ours[-1] - theirs[-1] > max(progress, 0.0) / 2 + wider + floor:
            behind = f"its loss ended {ours[-1] - theirs[-1]:.2g} above the baseline's, which fell by {progress:.2g}"
            fault = f"it learns too little: {behind}"
    else:
        # 5 % of the progress lie between bf16 and a learning rate 1.25 times as high.
        allowed = wider + max(0.05 * max(progress, 0.0), floor)
        if difference > allowed:
            fell = f"where {allowed:.2g} is allowed and the baseline's fell by {progress:.2g}"
            fault = f"its losses leave the baseline's: {difference:.2g} apart on the mean, {fell}"
    mine, known = curve.dropout_spread, [c.dropout_spread for c in (reference, again) if c.dropout_spread is not None]
    if fault is None and not is_other_method and mine is not None and known:
        usual = statistics.fmean(known)
        is_alike = usual / _DROPOUT_FACTOR <= mine <= usual * _DROPOUT_FACTOR
        if max(mine, usual) > _NO_SPREAD * scale and not is_alike:
            fault = f"dropout moves its loss by {mine:.2g} where it moves the baseline's by {usual:.2g}"
    learnt = f"{ours[0] - ours[-1]:.2g}"
    if progress > 0:
        learnt = f"{(ours[0] - ours[-1]) / progress:.0%} of what the baseline learnt"
    if fault is not None:
        statement = fault
    elif is_other_method:
        statement = f"losses are sound, learnt {learnt}; another method is not held to the baseline's curve"
    elif is_other_path:
        statement = f"losses are no worse than the baseline's: learnt {learnt}"
    elif progress <= 0:
        statement = f"losses follow the baseline's: {difference:.2g} apart"
    else:
        apart = "less than 0.01%" if difference < 1e-4 * progress else f"{difference / progress:.2%}"
        statement = f"losses follow the baseline's: {apart} of what was learnt apart"
    statement += f" ({len(curve.losses)} steps on the same samples)"
    return LossVerdict(passed=fault is None, statement=statement)
