"""The ways to spread a training over many devices: DDP, ZeRO, FSDP, tensor and pipeline parallel, offload. Pure.

Degrees multiply to the number of devices; tensor parallel stays inside a node, as its all-reduces hide behind nothing
(arXiv:2104.04473, section 3). Called by `autotune.spreading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.architecture import ModelFacts
from autotune.config import Parallelism
from autotune.errors import InputError
from autotune.knobs import Scalar

_PREFIX = "parallelism."

_PER_NODE = 8  # devices, as in NVIDIA's DGX and HGX systems and most rented ones

_SHARDINGS = ("none", "zero_1", "zero_2", "zero_3", "fsdp_grad_op", "fsdp_full")

# What keeps parts in the host's memory: slower, so only of use where nothing else fits.
_OFFLOADS = (("zero_2", "optimizer"), ("zero_3", "optimizer"), ("zero_3", "parameters"), ("fsdp_full", "parameters"))


def ways(devices: int, per_node: int, facts: ModelFacts, point: Mapping[str, Scalar]) -> tuple[Parallelism, ...]:
    """Return the ways that are compared, those that contradict `point` left out.

    Args:
        devices: How many there are.
        per_node: How many of them in each node.
        facts: Of the model.
        point: Knobs that were given.
    """
    written = {k.removeprefix(_PREFIX): v for k, v in point.items() if k.startswith(_PREFIX)}
    given = Parallelism.model_validate(written).model_dump(include=set(written))
    settled = ("ddp_bucket_cap_mb", "ddp_static_graph", "wrapping", "offload_to", "nvme_path")
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
    for stages in _doublings(devices):
        if facts.layers and facts.layers % stages == 0:
            for degree in (1, *_tensor_degrees(devices // stages, per_node, facts)):
                yield Parallelism(world_size=devices, tensor_parallel=degree, pipeline_parallel=stages)


def _tensor_degrees(devices: int, per_node: int, facts: ModelFacts) -> list[int]:
    heads = facts.tensor_parallel_heads
    if heads is None:
        return []
    return [d for d in _doublings(min(devices, per_node)) if heads % d == 0 and devices % d == 0]


def _doublings(most: int) -> list[int]:
    """Return 2, 4, 8 and so on as far as they divide `most`."""
    found = [2]
    while found[-1] <= most and most % found[-1] == 0:
        found.append(2 * found[-1])
    return found[:-1]


def nodes_of(devices: int, nodes: int | None) -> int:
    """Return on how many nodes the devices are: of eight each, where nothing is said.

    Raises:
        InputError: They can't be dealt out evenly.
    """
    count = nodes or -(-devices // _PER_NODE)
    if devices % count:
        raise InputError(f"--nodes {count}: does not divide the {devices} devices")
    return count


_OFFLOADED = {"optimizer": "states", "parameters": "weights"}


def shown(way: Parallelism) -> str:
    """Return a way in a few words: 'fsdp_full, TP 8', 'TP 8, PP 4, DP 2', 'zero_3, weights on cpu'."""
    parts: list[str] = [] if way.sharding == "none" else [way.sharding]
    degrees = {"TP": way.tensor_parallel, "PP": way.pipeline_parallel}
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if way.sharding == "none" and way.data_parallel > 1:
        parts.append(f"DP {way.data_parallel}" if parts else "ddp")
    if way.offload != "none":
        parts.append(f"{_OFFLOADED[way.offload]} on {way.offload_to}")
    return ", ".join(parts)
