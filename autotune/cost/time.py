"""Seconds of an optimizer step: computing, the optimizer's part, and waiting for other devices or for the host.

A roofline: each operator takes the time of its arithmetic or of its bytes, whichever is more, and never less than a
launch. On the CPU these add up; a GPU's micro-step takes the device's sum or the host's, whichever is more. Operators
and optimizers that were measured on the device in the model's shapes, at a few micro-batches, take these times; between
these, time is a line. An operator that wasn't measured has the rate of the nearest of its kind that was. Pure
arithmetic on arrays, with an element for each micro-batch.
"""

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.cost.optimizers import optimizer
from autotune.cost.profile import CONTRACTION, FUSED_ATTENTION, TRANSFER, VIEW, ParameterGroup, Profile, Vector
from autotune.cost.sharding import Network, Spread, exposed_seconds, host_seconds, stepped
from autotune.values.config import Precision
from autotune.values.estimate import Arithmetic, Rates
from autotune.values.trial import StepPart

# A compiled model runs chains of element-wise operators as one: of the bytes of all of them about this share is left.
# Published: Llama-2-1B, micro-batch 4, 6,200 against 9,000 tokens/s (torchao's low-bit optimizers table).
COMPILED_SHARE = 0.4

# Of the rate of large products: fused attention attains 50 to 73 % of an A100's peak, forward and backward, where
# products reach 75 % (FlashAttention-2, arXiv:2307.08691, abstract); the lower end, as sequences are seldom so long.
FUSED_ATTENTION_SHARE = 2 / 3

# Of the Trainer itself around a micro-step, on the host.
TRAINER_S = 1.5e-3

# Micro-batches at which operators are measured.
SIZES = (1, 4, 16, 64, 256)

# Measured of parameters as if they were optimizers: clipping, and adding one gradient to another.
CLIPPING, ADDING = "clipping", "adding"

_NUMBER = re.compile(r"\d+")
_LINE = re.compile(r"<(-?\d+):(-?\d+)>")


@dataclass(frozen=True)
class StepCost:
    """The time of a step of one configuration."""

    profile: Profile  # of one device's part of the model
    rates: Rates  # of the device, alone
    optim: str
    spread: Spread
    network: Network
    tf32: bool = False  # whether fp32 contractions use tensor cores
    compiled: bool = False  # whether element-wise operators are fused
    kept: float = 1.0  # share of the activations that a compiler keeps; it computes the others again
    generated: int | None = None  # completions at once, of a recipe that generates; None: those of a step

    def seconds(self, samples: Vector, accumulation: Vector, attended: Vector | None = None) -> Vector:
        """Return the seconds of a step for each micro-batch, in samples of full length, with its accumulation.

        `attended`: micro-batches by the work of attention, see `lengths`; None: `samples`.
        """
        return sum(self.parts(samples, accumulation, attended).values(), start=np.zeros_like(samples))

    def parts(self, samples: Vector, accumulation: Vector, attended: Vector | None = None) -> dict[StepPart, Vector]:
        """Return these seconds by what they are spent on."""
        adding = measured_step(self.profile.parameters, ADDING, self._rates)
        if adding is None:
            adding = 3.0 * self.profile.gradients_bytes / self._rates.bandwidth  # read both, write one
        if self.spread.parallelism.sharding in ("zero_2", "zero_3"):  # which add up what is reduced
            adding /= self.spread.parallelism.sharding_ranks
        micro = micro_step_parts(self.profile, self._rates, samples, attended, tf32=self.tf32, compiled=self.compiled)
        again = (1 - self.kept) / 3  # of a micro-step, a third of which is the forward pass
        micro = {part: each * (1 + again) for part, each in micro.items()}
        found = {part: accumulation * each for part, each in micro.items()}
        found["element-wise"] = found["element-wise"] + (accumulation - 1) * adding
        found["optimizer"] = np.full_like(samples, self._stepping())
        found["other devices"] = self._waiting(sum(micro.values(), start=np.zeros_like(samples)), samples, accumulation)
        found["generating"] = self._generating(samples * accumulation)
        return found

    def _waiting(self, micro: Vector, samples: Vector, accumulation: Vector) -> Vector:
        """Return the seconds of a step that the device waits for others or for the host."""
        parallelism, network = self.spread.parallelism, self.network
        if parallelism.is_single:
            return np.zeros_like(samples)
        waiting = exposed_seconds(self.profile, parallelism, network, micro, samples, accumulation)
        if parallelism.offload == "none" or network.on_cpu:
            return waiting
        per_step, per_micro = host_seconds(self.profile, self.spread, self._rates, network.devices_per_node)
        return waiting + per_step + accumulation * per_micro

    @property
    def _rates(self) -> Rates:
        """The rates that one device has while all compute: on a CPU its processes share those of their node."""
        there = min(self.spread.parallelism.world_size, self.network.devices_per_node)
        share, rates = there if self.network.on_cpu else 1, self.rates
        if share == 1:
            return rates
        products = {arithmetic: flops / share for arithmetic, flops in rates.matmul_flops.items()}
        shared = {"matmul_flops": products, "bandwidth": rates.bandwidth / share, "timings": None}
        return rates.model_copy(update=shared)

    def _generating(self, completions: Vector) -> Vector:
        """Return the seconds in which so many completions are generated.

        A pass over the prompts, then one for each token, which reads all weights (in mixed precision it casts them
        first), and the cache three times: to attend to it, and to join the new token's keys and values to it.
        """
        how = self.profile.generation
        if how is None:
            return np.zeros_like(completions)
        at_once = np.full_like(completions, self.generated) if self.generated else completions
        one = self.profile.model_copy(update={"work": how.work})

        def passing(tokens: Vector) -> Vector:
            parts = micro_step_parts(one, self._rates, tokens / how.length, tf32=self.tf32, compiled=False)
            return sum(parts.values(), start=np.zeros_like(tokens))

        weights = how.weights_bytes * (2.0 if self.profile.family.autocast else 1.0)
        cached = at_once * how.cached_bytes(how.prompt + how.completion / 2)
        token = np.maximum(passing(at_once), (weights + 3 * cached) / self._rates.bandwidth)
        found: Vector = completions / at_once * (passing(at_once * how.prompt) + how.completion * token)
        return found

    def _stepping(self) -> float:
        """Return the seconds of the optimizer's step, of which a device does its part where states are dealt out."""
        if self.spread.parallelism.offload != "none" and not self.network.on_cpu:
            return 0.0
        part = self.profile
        if not self.spread.parallelism.is_single:
            part = part.model_copy(update={"parameters": stepped(part, self.spread)})
        return optimizer_seconds(part, self._rates, self.optim)


def micro_step_parts(
    profile: Profile, rates: Rates, micro_batches: Vector, attended: Vector | None = None, *, tf32: bool, compiled: bool
) -> dict[StepPart, Vector]:
    """Return the seconds of a forward and backward pass for each micro-batch, by what they are spent on.

    `attended`: micro-batches by the work of attention. Of the host's time on a GPU that which the device waits for.
    """
    work, timings = profile.work_arrays(), rates.timings
    count, attends, kinds = work["count"], work["attends"] > 0, work["kind"]
    attended = micro_batches if attended is None else attended
    launched = COMPILED_SHARE if compiled else 1.0
    busy = functools.partial(_busy, profile, rates, work, tf32=tf32, compiled=compiled)
    if timings is None:
        each = count[:, None] * np.where(attends[:, None], busy(attended), busy(micro_batches))
        host = float(count[kinds != VIEW].sum()) * launched * rates.launch_s
        trainer = TRAINER_S
    else:
        seconds = expected = busy(np.array(SIZES, dtype=float))
        if not compiled:
            rows = [[timings.operators.get(at(w.call, size), np.nan) for size in SIZES] for w in profile.work]
            seconds = np.array(rows)
            if tf32:
                seconds[(kinds == CONTRACTION) & (work["width"] == 4)] = np.nan
            seconds = filled(seconds, expected, 8 * kinds + work["width"])
        host, trainer = float(count.sum()) * launched * timings.operator_s, timings.micro_step_s

    def spent(chosen: NDArray[np.bool_]) -> Vector:
        if timings is None:
            alone: Vector = each[chosen].sum(axis=0)
            return alone
        total = along(micro_batches, SIZES, (count * (chosen & ~attends)) @ seconds)
        total += along(attended, SIZES, (count * (chosen & attends)) @ seconds)
        return total

    found: dict[StepPart, Vector] = {
        "matrix products": spent(kinds == CONTRACTION),
        "attention": spent((kinds != CONTRACTION) & attends),
        "element-wise": spent((kinds != CONTRACTION) & ~attends),
    }
    waited: Vector = np.full_like(micro_batches, host)
    if profile.family.device == "cuda":
        waited = np.maximum(0.0, host - sum(found.values(), start=np.zeros_like(micro_batches)))
    return {**found, "host": waited + trainer}


def _busy(
    profile: Profile, rates: Rates, work: dict[str, Vector], micro_batches: Vector, *, tf32: bool, compiled: bool
) -> Vector:
    """Return the seconds of each row of work for each micro-batch, by arithmetic or bytes, whichever is more."""
    ones = np.stack([np.ones_like(micro_batches), micro_batches])
    flops, moved = work["flops"] @ ones, work["moved"] @ ones
    attention = work["kind"] == FUSED_ATTENTION
    contraction = (work["kind"] == CONTRACTION) | attention
    half: Arithmetic = "fp16" if "float16" in (profile.family.autocast, profile.family.dtype) else "bf16"
    fp32 = rates.matmul_flops["fp32"]
    wide = rates.matmul_flops.get("tf32") if tf32 else None
    short = rates.matmul_flops.get(half) or fp32
    speed = np.where(work["width"] == 1, rates.matmul_flops.get("fp8") or short, short)
    speed = np.where(work["width"] == 4, wide or fp32, speed)
    speed = speed * np.where(attention, FUSED_ATTENTION_SHARE, 1.0)
    computing = np.where(contraction[:, None], flops / speed[:, None], 0.0)
    transfer = work["kind"] == TRANSFER
    share = np.where(contraction | transfer, 1.0, COMPILED_SHARE if compiled else 1.0)
    moving = moved * share[:, None] / np.where(transfer, rates.host_bandwidth, rates.bandwidth)[:, None]
    return np.maximum(computing, moving)


def worth_measuring(profiles: Sequence[Profile], rates: Rates, largest: int) -> list[str]:
    """Return the calls that micro-batches up to `largest` make and that weren't measured, the costliest first."""
    sizes = [size for size in SIZES if size < 4 * largest]
    known = {} if rates.timings is None else rates.timings.operators
    costs: dict[str, float] = defaultdict(float)
    for profile in profiles:
        work = profile.work_arrays()
        busy = _busy(profile, rates, work, np.array(sizes, dtype=float), tf32=False, compiled=False)
        seconds = work["count"][:, None] * (busy + rates.launch_s)
        for size, column in zip(sizes, seconds.T / np.array(sizes)[:, None], strict=True):
            for row, cost in zip(profile.work, column, strict=True):
                costs[at(row.call, size)] += float(cost)
    return [call for call in sorted(costs, key=lambda c: -costs[c]) if call and call not in known]


def optimizer_seconds(profile: Profile, rates: Rates, optim: str) -> float:
    """Return the seconds of an optimizer step, the clipping of gradients included."""
    steps = [measured_step(profile.parameters, what, rates) for what in (optim, CLIPPING)]
    if None not in steps:
        return sum(step for step in steps if step is not None)
    row, on_cpu, trained = optimizer(optim), profile.family.device == "cpu", profile.gradients_bytes
    clipping = 3.0 * trained  # the norm reads them, scaling reads and writes
    # Weights are read and written, gradients read, states read and written.
    fused = 3.0 * trained + 2.0 * sum(optimizer(optim).state_bytes(profile.parameters))
    tensors = sum(g.count for g in profile.parameters if g.trained)
    kernels = tensors * (row.kernels if on_cpu or row.temporaries in ("loop", "adafactor") else 0.2)
    return (clipping + (row.cpu_cost if on_cpu else row.passes) * fused) / rates.bandwidth + kernels * rates.launch_s


def dense_peak(rates: Rates, precision: Precision, *, tf32: bool) -> float | None:
    """Return the data sheet's peak that the model FLOP utilisation of a precision is a share of, if it has one."""
    names: dict[str, Arithmetic] = {"fp32": "tf32" if tf32 else "fp32", "fp16": "fp16", "fp8": "fp8"}
    return rates.peak_flops.get(names.get(precision, "bf16"))


def as_line(low: str, high: str, samples: tuple[int, int]) -> str:
    """Return one text for a call at two micro-batches; empty where they differ in more than sizes that are lines."""
    if low == high:
        return low
    if _NUMBER.sub("", low) != _NUMBER.sub("", high):
        return ""
    larger = map(int, _NUMBER.findall(high))

    def line(match: re.Match[str]) -> str:
        slope = (next(larger) - int(match[0])) // (samples[1] - samples[0])
        return f"<{int(match[0]) - slope * samples[0]}:{slope}>" if slope else match[0]

    text = _NUMBER.sub(line, low)
    return text if at(text, samples[1]) == high else ""


def attends(kind: int, low: str, high: str) -> bool:
    """Return whether an operator with calls at two micro-batches attends, or works on scores: (..., length, length)."""
    if kind == FUSED_ATTENTION or not low:
        return kind == FUSED_ATTENTION

    def sizes(args: Any) -> list[list[int]]:
        flat = [inner for value in args for inner in (value if isinstance(value, list) else [value])]
        return [value["n"] for value in flat if isinstance(value, dict) and "n" in value]

    name, args, _ = json.loads(low)
    if "attention" in name:
        return True
    one, two = sizes(args), sizes(json.loads(high)[1])
    if "bmm" in name:
        (rows, width), columns = one[-2][-2:], one[-1][-1]
        return len({rows, width, columns}) < 3 and all(a[0] != b[0] for a, b in zip(one, two, strict=True))
    return "conv" not in name and any(len(n) == 4 and n[-1] == n[-2] > 1 for n in one)


@functools.lru_cache(maxsize=1 << 16)  # a search asks for the calls of each family again and again
def at(call: str, samples: int) -> str:
    return _LINE.sub(lambda m: str(int(m[1]) + int(m[2]) * samples), call)


def filled(seconds: Vector, expected: Vector, kinds: Vector) -> Vector:
    """Return measured seconds, and where there are none the expected ones at the rate of the nearest measured.

    `seconds` are (operators, sizes), NaN where nothing was measured; `expected` are those by a roofline. One that took
    about as long as those that hardly compute was a launch, which comes on top of the expected and tells no rate.
    """
    found, lacking = seconds.copy(), np.isnan(seconds)
    hardly = seconds[~lacking & (expected < 1e-6)]
    a_launch = 3 * float(np.median(hardly)) if len(hardly) else 0.0
    with np.errstate(divide="ignore"):
        logs = np.log(expected)
    for kind in np.unique(kinds):
        alike = (kinds == kind)[:, None]
        known = alike & ~lacking & (expected > 0)
        is_launch, more = seconds[known] < a_launch, np.maximum(seconds[known] - expected[known], 0.0)
        ratios, added = np.where(is_launch, 1.0, seconds[known] / expected[known]), np.where(is_launch, more, 0.0)
        for here in map(tuple, np.argwhere(alike & lacking)):
            nearest = np.argmin(np.abs(logs[known] - logs[here])) if known.any() and expected[here] > 0 else None
            found[here] = expected[here] if nearest is None else expected[here] * ratios[nearest] + added[nearest]
    return found


def along(samples: Vector, sizes: Sequence[int], seconds: Vector) -> Vector:
    """Return seconds between sizes by lines, beyond the last two by theirs, and before the first two, never below 0."""
    before, after = (max(0.0, (seconds[i + 1] - seconds[i]) / (sizes[i + 1] - sizes[i])) for i in (0, -2))
    before = min(before, seconds[0] / sizes[0])
    lacking, beyond = np.minimum(samples - sizes[0], 0.0), np.maximum(samples - sizes[-1], 0.0)
    found: Vector = np.interp(samples, sizes, seconds) + lacking * before + beyond * after
    return found


def parameter_key(optim: str, group: ParameterGroup) -> str:
    dtype = {4.0: "float32", 2.0: "bfloat16"}.get(group.element_bytes, "")
    return f"{optim} {dtype} {'x'.join(map(str, group.shape))}{' embedding' * group.embedding}"


def measured_step(groups: Iterable[ParameterGroup], optim: str, rates: Rates) -> float | None:
    """Return the seconds of a step over trained parameters; None if none of this optimizer was measured.

    A shape that wasn't measured takes the time of the one with the most nearly equal number of elements, times the
    ratio of the times of a launch and of moving the bytes of each: a small shape's time is that of the launch.
    """
    if rates.timings is None:
        return None
    measured = [(g, rates.timings.optimizers.get(parameter_key(optim, g))) for g in groups if g.trained]
    known = {g.elements: (g, seconds) for g, seconds in measured if seconds is not None}
    if measured and not known:
        return None

    def expected(group: ParameterGroup) -> float:
        return rates.launch_s + 3 * group.nbytes / rates.bandwidth

    total = sum(g.count * seconds for g, seconds in measured if seconds is not None)
    for group in (g for g, seconds in measured if seconds is None):
        closest = min(known, key=lambda elements: abs(np.log((elements + 1) / (group.elements + 1))))
        other, of_other = known[closest]
        total += group.count * of_other * max(1.0, expected(group) / expected(other))
    return total
