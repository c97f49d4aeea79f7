"""`autotune estimate --devices N`: compares the ways to share one training among several devices.

The ways are DDP, ZeRO, FSDP, tensor, pipeline and, where samples are long, sequence parallelism, and offload. The
parallel degrees multiply to the number of devices. Tensor and sequence parallelism stay inside a node, as what they
exchange overlaps with no computation (Narayanan and others, arXiv:2104.04473, section 3). Each way is shown with its
best checkpointing and micro-batch; precision and optimizer are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autotune.cost.network import Network, network_of
from autotune.errors import InputError, NothingFitsError
from autotune.estimates.forecast import Forecast, Question
from autotune.estimates.ranking import fastest
from autotune.estimates.report import Device, SpreadReport, SpreadRow, miss
from autotune.estimates.request import EstimateOptions, Target, config_of, refusal
from autotune.space.points import Scalar
from autotune.units import show_memory
from autotune.values.catalogue.gpus import gpu_of
from autotune.values.config import Parallelism, Sharding, TrainConfig
from autotune.values.knob import Allowance
from autotune.values.model import ModelFacts

_PREFIX = "parallelism."

_PER_NODE = 8  # devices, as in NVIDIA's DGX and HGX systems and most rented ones

_SHARDINGS = ("none", "zero_1", "zero_2", "zero_3", "fsdp_grad_op", "fsdp_full")

# Ways that keep states or weights in the host's memory.
_OFFLOADS = (("zero_2", "optimizer"), ("zero_3", "optimizer"), ("zero_3", "parameters"), ("fsdp_full", "parameters"))


# Sharding of weights beside sequence parallelism: where they are whole, the loss can be worked out in chunks.
_BESIDE_SEQUENCE: tuple[Sharding, ...] = ("zero_2", "zero_3")

_OFFLOADED = {"optimizer": "states", "parameters": "weights"}

_CHECKPOINTING = "checkpointing"

# Tokens from which on it is worth a look to share those of a sample.
_LONG = 8192

_STAGES = "PP: every stage is counted with embeddings and head, of which it has one at the most"

SPREAD = (
    "each way with its best checkpointing (none, full) and micro-batch; what is given (--fix) is kept, "
    "the rest is as the Trainer has it"
)


def ways(devices: int, per_node: int, facts: ModelFacts, point: Mapping[str, Scalar]) -> tuple[Parallelism, ...]:
    """Return the ways to share a training among so many devices that agree with the knobs in `point`, the user's."""
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
    for degree in _tensor_degrees(devices, per_node, facts):
        for stage in _BESIDE_SEQUENCE:
            yield Parallelism(world_size=devices, sharding=stage, sequence_parallel=degree)
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
    """Return the powers of two from 2 on that divide `most`."""
    return [2**k for k in range(1, most.bit_length()) if most % 2**k == 0]


def nodes_of(devices: int, nodes: int | None) -> int:
    """Return the number of nodes that hold `devices`: `nodes`, or if that is None as many as of eight devices each."""
    count = nodes or -(-devices // _PER_NODE)
    if devices % count:
        raise InputError(f"--nodes {count}: does not divide the {devices} devices")
    return count


def shown(way: Parallelism) -> str:
    """Return the short name of a way: 'fsdp_full, TP 8', 'TP 8, PP 4, DP 2', 'zero_3, weights on cpu'."""
    parts: list[str] = [] if way.sharding == "none" else [way.sharding]
    degrees = {"TP": way.tensor_parallel, "PP": way.pipeline_parallel, "SP": way.sequence_parallel}
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if way.sharding == "none" and way.data_parallel > 1:
        parts.append(f"DP {way.data_parallel}" if parts else "ddp")
    if way.offload != "none":
        parts.append(f"{_OFFLOADED[way.offload]} on {way.offload_to}")
    return ", ".join(parts)


def spread(question: Question, target: Target, notes: Sequence[str]) -> SpreadReport:
    """Return the ways to share a training among the devices, fastest first.

    Raises:
        InputError: No way is possible.
        NothingFitsError: No way fits the memory of device and host.
    """
    devices = question.options.devices
    nodes = nodes_of(devices, question.options.nodes)
    network = network_for(question.options, target, devices)
    forecast = question.forecast(target, network=network)
    point, said = _filled(question, forecast)
    found = ways(devices, devices // nodes, question.facts, point)
    if forecast.plan.workload.sequence_length < _LONG and f"{_PREFIX}sequence_parallel" not in point:
        found = tuple(way for way in found if way.sequence_parallel == 1)
    rows: list[SpreadRow] = []
    refused: dict[str, list[str]] = {}
    for way in found:
        row = _row(question, forecast, point, way, devices // nodes)
        if isinstance(row, str):
            refused.setdefault(row, []).append(shown(way))
        else:
            rows.append(row)
    if not rows:
        why = next(iter(refused), "the knobs given contradict each other")
        raise InputError(f"not possible on {devices} x {target.device.name}: {why}")
    if not any(row.fits_at_all for row in rows):
        raise _nothing_fits(rows, forecast, devices)
    ordered = tuple(sorted(rows, key=_order))
    return SpreadReport(
        workload=forecast.plan.workload,
        device=target.device,
        devices=devices,
        nodes=nodes,
        link_gb_s=network.link / 1e9,
        network_gb_s=None if nodes == 1 else network.node / 1e9,
        host_memory_bytes=_host_memory(question.options, target.device),
        rows=ordered,
        run=question.run(ordered[0].predicted, target.device.name),
        refused={reason: tuple(names) for reason, names in refused.items()},
        notes=(
            *notes,
            *said,
            SPREAD,
            *([_STAGES] if any(row.predicted.config.parallelism.pipeline_parallel > 1 for row in rows) else []),
            *_network_notes(question.options, target.device, network, nodes),
        ),
    )


def network_for(options: EstimateOptions, target: Target, devices: int) -> Network:
    """Return the network that joins so many devices."""
    return network_of(
        target.device.hardware,
        devices,
        nodes=nodes_of(devices, options.nodes),
        gb_s=options.network_gb_s,
        host_bandwidth=target.rates.host_bandwidth,
    )


def _filled(question: Question, forecast: Forecast) -> tuple[dict[str, Scalar], tuple[str, ...]]:
    """Return the knobs that all ways share: the user's, and 16-bit precision if they may change it; with its note."""
    point, hardware = dict(question.point), forecast.plan.hardware
    if "precision" in point or not question.allowance.admits(Allowance.NUMERICS) or hardware.is_cpu:
        return point, ()
    point["precision"] = "bf16" if hardware.has_bf16 else "fp16"
    return point, (f"precision {point['precision']} (--fix precision=fp32)",)


def _row(
    question: Question, forecast: Forecast, point: dict[str, Scalar], way: Parallelism, per_node: int
) -> SpreadRow | str:
    """Return one way with its best checkpointing and micro-batch, or the reason why it isn't possible."""
    fields = {f"parallelism.{name}": value for name, value in way.model_dump().items()}
    kinds = [point] if _CHECKPOINTING in point else [{**point, _CHECKPOINTING: kind} for kind in ("none", "full")]
    configs: list[TrainConfig] = []
    reasons: list[str] = []
    for kind in kinds:
        config = config_of(forecast.plan, {**kind, **fields})
        for sized in question.with_micro_batches(config):
            reason = refusal(forecast.plan, sized)
            if reason is None:
                configs.append(sized)
            else:
                reasons.append(reason)
    if not configs:
        return reasons[0] if reasons else f"a global batch of {forecast.plan.workload.global_batch_size} is too small"
    try:
        best, _ = fastest(forecast, configs, 1)
        chosen = forecast.predicted(best[0] if best else forecast.tightest(configs))
    except InputError as error:
        return str(error).partition(": ")[2] or str(error)
    needed, host = chosen.host_bytes * per_node, _host_memory(question.options, forecast.device)
    return SpreadRow(way=shown(way), predicted=chosen, host_bytes=needed, host_fits=host is None or needed <= host)


def _host_memory(options: EstimateOptions, device: Device) -> int | None:
    """Return the bytes of a node's memory: as given, else this machine's if the device is in it, else None."""
    if options.host_memory_bytes is not None:
        return options.host_memory_bytes
    here = device.hardware.is_cpu or device.hardware.driver is not None
    return device.hardware.host_memory_bytes if here else None


def _nothing_fits(rows: Sequence[SpreadRow], forecast: Forecast, devices: int) -> NothingFitsError:
    nearest = min(rows, key=lambda row: row.predicted.memory.device_peak_bytes)
    took = miss(nearest.predicted, forecast.device)
    host = f" and {show_memory(nearest.host_bytes)} of each node's memory" if nearest.host_bytes else ""
    return NothingFitsError(f"nothing fits {devices} devices: {nearest.way} comes nearest and {took}{host}")


def _order(row: SpreadRow) -> tuple[bool, float]:
    """Return the sort key: ways that fit first, by falling rate; the others by rising peak memory."""
    found = row.predicted
    return not row.fits_at_all, -found.samples_per_second if row.fits_at_all else float(found.memory.device_peak_bytes)


def _network_notes(options: EstimateOptions, device: Device, network: Network, nodes: int) -> tuple[str, ...]:
    """Return lines on the bandwidth between the devices: which is assumed, and which option changes it."""
    gpu = gpu_of(device.hardware.name)
    kind = "link unknown, taken as that to the host" if gpu is None else gpu.link.kind
    lines = [] if device.hardware.is_cpu else [f"within a node {kind}: {network.link / 1e9:.0f} GB/s attained"]
    if options.nodes is None and nodes > 1:
        lines.append(f"{nodes} nodes of {network.devices_per_node} devices (--nodes)")
    if nodes > 1:
        why = " taken, 200 Gb/s a device" if options.network_gb_s is None else ""
        lines.append(f"between nodes {network.node / 1e9:.0f} GB/s attained of what each has{why} (--network-gb-s)")
    return tuple(lines)
