"""The ways to share a training among several devices, and their short names.

They are DDP, ZeRO, FSDP, tensor and sequence parallelism, and offload. The parallel degrees multiply to the number of
devices. Tensor and sequence parallelism stay inside a node, as nothing is computed while they exchange (Narayanan and
others, arXiv:2104.04473, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.space.points import Scalar
from autotune.values.config import Parallelism, Sharding
from autotune.values.model import ModelFacts

PREFIX = "parallelism."

_SHARDINGS = ("none", "zero_1", "zero_2", "zero_3", "fsdp_grad_op", "fsdp_full")

# Ways that keep states or weights in the host's memory.
_OFFLOADS = (("zero_2", "optimizer"), ("zero_3", "optimizer"), ("zero_3", "parameters"), ("fsdp_full", "parameters"))


# Sharding of weights beside sequence parallelism: where they are whole, the loss can be worked out in chunks.
_BESIDE_SEQUENCE: tuple[Sharding, ...] = ("zero_2", "zero_3")

_OFFLOADED = {"optimizer": "states", "parameters": "weights"}


def ways(devices: int, per_node: int, facts: ModelFacts, point: Mapping[str, Scalar]) -> tuple[Parallelism, ...]:
    """Return the ways to share a training among so many devices that agree with the knobs in `point`, the user's."""
    written = {k.removeprefix(PREFIX): v for k, v in point.items() if k.startswith(PREFIX)}
    given = Parallelism.model_validate(written).model_dump(include=set(written))
    settled = ("ddp_bucket_cap_mb", "ddp_static_graph", "wrapping")
    rest = {name: given[name] for name in settled if name in given}
    found = []
    for way in _all(devices, per_node, facts):
        if all(getattr(way, name) == value for name, value in given.items() if name not in rest):
            found.append(way.model_copy(update=rest))
    return tuple(found)


def _all(devices: int, per_node: int, facts: ModelFacts) -> Iterator[Parallelism]:
    for sharding in _SHARDINGS:
        yield Parallelism(world_size=devices, sharding=sharding)
    for sharding, offload in _OFFLOADS:
        yield Parallelism(world_size=devices, sharding=sharding, offload=offload)
    for degree in _tensor_degrees(devices, per_node, facts):
        sharding = "fsdp_full" if devices > degree else "none"
        yield Parallelism(world_size=devices, sharding=sharding, tensor_parallel=degree)
    for degree in _tensor_degrees(devices, per_node, facts):
        for stage in _BESIDE_SEQUENCE:
            yield Parallelism(world_size=devices, sharding=stage, sequence_parallel=degree)


def _tensor_degrees(devices: int, per_node: int, facts: ModelFacts) -> list[int]:
    heads, most = facts.tensor_parallel_heads, min(devices, per_node)
    doublings = [2**k for k in range(1, most.bit_length())]
    return [d for d in doublings if heads is not None and most % d == 0 and heads % d == 0 and devices % d == 0]


def shown(way: Parallelism) -> str:
    """Return the short name of a way: 'fsdp_full, TP 8', 'TP 8, DP 4', 'zero_3, weights on cpu'."""
    parts: list[str] = [] if way.sharding == "none" else [way.sharding]
    degrees = {"TP": way.tensor_parallel, "SP": way.sequence_parallel}
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if way.sharding == "none" and way.data_parallel > 1:
        parts.append(f"DP {way.data_parallel}" if parts else "ddp")
    if way.offload != "none":
        parts.append(f"{_OFFLOADED[way.offload]} on cpu")
    return ", ".join(parts)
