"""`autotune estimate --devices N`: compares the ways to share one training among several devices.

Each way is shown with its best checkpointing and micro-batch; precision and optimizer are the same for all. Sequence
parallelism is compared where samples are long. Where the method may change, ways that take an adapter come with LoRA
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotune.cost.network import Network, network_of
from autotune.errors import InputError, NothingFitsError
from autotune.estimates.fitting import MUCH_FASTER
from autotune.estimates.forecast import Forecast, Question
from autotune.estimates.ranking import fastest
from autotune.estimates.report import Device, SpreadReport, SpreadRow, larger_device, miss
from autotune.estimates.request import EstimateOptions, Target, config_of, refusal
from autotune.estimates.ways import PREFIX, shown, ways
from autotune.space.knobs import in_words
from autotune.space.points import Scalar
from autotune.units import show_memory
from autotune.values.catalogue.gpus import gpu_of
from autotune.values.config import Allowance, Parallelism

_PER_NODE = 8  # devices, as in NVIDIA's DGX and HGX systems and most rented ones

_CHECKPOINTING = "checkpointing"

# Tokens from which on it is worth a look to share those of a sample.
_LONG = 8192

SPREAD = (
    "each way with its best checkpointing (none, full) and micro-batch; what is given (--fix) is kept, "
    "the rest is as the Trainer has it"
)

_LORA: dict[str, Scalar] = {"adapter": "lora"}
_PURE: dict[str, Scalar] = {"precision": "pure_bf16"}  # which DeepSpeed has as bf16: it keeps all weights in 16 bits

# What makes a training fit that no way does, in the order of naming; LoRA on weights in 4 bits last.
_LIGHTER: tuple[dict[str, Scalar], ...] = (
    _LORA,
    {**_LORA, **_PURE},
    {**_LORA, "quantization": "nf4"},
)


class _Kind(NamedTuple):
    """A way with the knobs beside it: of several points the first that it can run."""

    name: str
    way: Parallelism
    points: Sequence[Mapping[str, Scalar]]


def nodes_of(devices: int, nodes: int | None) -> int:
    """Return the number of nodes that hold `devices`: `nodes`, or if that is None as many as of eight devices each."""
    count = nodes or -(-devices // _PER_NODE)
    if devices % count:
        raise InputError(f"--nodes {count}: does not divide the {devices} devices")
    return count


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
    if forecast.plan.workload.sequence_length < _LONG and f"{PREFIX}sequence_parallel" not in point:
        found = tuple(way for way in found if way.sequence_parallel == 1)
    per_node = devices // nodes
    rows, refused = _rows(question, forecast, _kinds(question, forecast, point, found), per_node)
    if not rows:
        why = next(iter(refused), "the knobs given contradict each other")
        raise InputError(f"not possible on {devices} x {target.device.name}: {why}")
    if not any(row.fits_at_all for row in rows):
        raise _nothing_fits(question, forecast, rows, [kind for kind in found if _takes_adapters(kind)], per_node)
    ordered = tuple(sorted(rows, key=_order))
    faster = _by_method(question, forecast, ordered[0], found, per_node)
    return SpreadReport(
        workload=forecast.plan.workload,
        device=target.device,
        devices=devices,
        nodes=nodes,
        link_gb_s=network.link / 1e9,
        network_gb_s=None if nodes == 1 else network.node / 1e9,
        host_memory_bytes=_host_memory(question.options, target.device),
        rows=ordered,
        run=question.run(ordered[0].predicted),
        refused={reason: tuple(names) for reason, names in refused.items()},
        notes=(
            *faster,
            *notes,
            *said,
            SPREAD,
            *_adapter_notes(question, rows),
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


def _kinds(
    question: Question, forecast: Forecast, point: Mapping[str, Scalar], found: Sequence[Parallelism]
) -> list[_Kind]:
    """Return the ways as the user's knobs have them and, where the method may change, with LoRA."""
    kinds = [_Kind(shown(way), way, [point]) for way in found]
    if not question.allowance.admits(Allowance.METHOD):
        return kinds
    return kinds + _with_lora(forecast, point, found)


def _with_lora(forecast: Forecast, point: Mapping[str, Scalar], found: Sequence[Parallelism]) -> list[_Kind]:
    """Return the ways that take adapters with LoRA, its frozen weights in 16 bits where that is possible."""
    points = [{**point, **_LORA, **_PURE}] * forecast.plan.hardware.has_bf16 + [{**point, **_LORA}]
    return [_Kind(f"{shown(way)}, LoRA", way, points) for way in found if _takes_adapters(way)]


def _by_method(
    question: Question, forecast: Forecast, best: SpreadRow, found: Sequence[Parallelism], per_node: int
) -> tuple[str, ...]:
    """Return a line on LoRA where only what is offloaded fits, and LoRA would be much faster."""
    offloaded = best.predicted.config.parallelism.offload != "none"
    if not offloaded or question.allowance.admits(Allowance.METHOD) or "adapter" in question.point:
        return ()
    point, _ = _filled(question, forecast)
    rows, _ = _rows(question, forecast, _with_lora(forecast, point, found), per_node)
    fitting = [row for row in rows if row.fits_at_all]
    way = max(fitting, key=lambda row: row.predicted.samples_per_second, default=best)
    before = best.predicted.samples_per_second
    times = way.predicted.samples_per_second / before if before else 0.0
    return (f"with --allow method {times:.1f} times as fast: {way.way}",) if times >= MUCH_FASTER else ()


def _adapter_notes(question: Question, rows: Sequence[SpreadRow]) -> tuple[str, ...]:
    """Return a line on the adapters that the user hasn't given."""
    found = [row.predicted.config.precision for row in rows if row.predicted.config.adapter is not None]
    if "adapter" in question.point or not found:
        return ()
    pure = ",precision=pure_bf16; under DeepSpeed precision=bf16 keeps frozen weights in 16 bits too"
    return (f"LoRA: rank 16 on all linear layers (--fix adapter=lora{pure * ('pure_bf16' in found)})",)


def _takes_adapters(way: Parallelism) -> bool:
    """Return whether an adapter is worth a look: the layers are whole, and nothing need be offloaded."""
    return way.offload == "none" and way.sharding_ranks == way.world_size


def _rows(
    question: Question, forecast: Forecast, kinds: Sequence[_Kind], per_node: int
) -> tuple[list[SpreadRow], dict[str, list[str]]]:
    """Return a row for each kind that is possible, and the others by reason."""
    rows: list[SpreadRow] = []
    refused: dict[str, list[str]] = {}
    for kind in kinds:
        reason = ""
        for point in kind.points:
            row = _row(question, forecast, point, kind, per_node)
            if isinstance(row, SpreadRow):
                rows.append(row)
                break
            reason = row
        else:
            refused.setdefault(reason, []).append(kind.name)
    return rows, refused


def _row(
    question: Question, forecast: Forecast, point: Mapping[str, Scalar], kind: _Kind, per_node: int
) -> SpreadRow | str:
    """Return one kind with its best checkpointing and micro-batch, or the reason why it isn't possible."""
    fields = {f"parallelism.{name}": value for name, value in kind.way.model_dump().items()}
    both = [point] if _CHECKPOINTING in point else [{**point, _CHECKPOINTING: choice} for choice in ("none", "full")]
    bases = [config_of(forecast.plan, {**knobs, **fields}) for knobs in both]
    sized = [config for base in bases for config in question.with_micro_batches(base)]
    reasons = {config: refusal(forecast.plan, config) for config in sized}
    configs = [config for config, reason in reasons.items() if reason is None]
    if not configs:
        too_small = f"a global batch of {forecast.plan.workload.global_batch_size} is too small"
        return next(filter(None, reasons.values()), too_small)
    try:
        best, _ = fastest(forecast, configs, 1)
        chosen = forecast.predicted(best[0] if best else forecast.tightest(configs))
    except InputError as error:
        return str(error).partition(": ")[2] or str(error)
    needed, host = chosen.host_bytes * per_node, _host_memory(question.options, forecast.device)
    return SpreadRow(way=kind.name, predicted=chosen, host_bytes=needed, host_fits=host is None or needed <= host)


def _host_memory(options: EstimateOptions, device: Device) -> int | None:
    """Return the bytes of a node's memory: as given, else this machine's if the device is in it, else None."""
    if options.host_memory_bytes is not None:
        return options.host_memory_bytes
    here = device.hardware.is_cpu or device.hardware.driver is not None
    return device.hardware.host_memory_bytes if here else None


def _nothing_fits(
    question: Question, forecast: Forecast, rows: Sequence[SpreadRow], found: Sequence[Parallelism], per_node: int
) -> NothingFitsError:
    """Return an error that names the tightest way and the lighter training that fits in one of `found`."""
    nearest = min(rows, key=lambda row: row.predicted.memory.device_peak_bytes)
    took = miss(nearest.predicted, forecast.device)
    host = f"; of each node's memory it takes {show_memory(nearest.host_bytes)}" if nearest.host_bytes else ""
    text = f"nothing fits {question.options.devices} devices: {nearest.way} comes nearest and {took}{host}"
    given, _ = _filled(question, forecast)
    for lighter in _LIGHTER:
        if any(name in question.point and question.point[name] != value for name, value in lighter.items()):
            continue
        kinds = [_Kind(shown(way), way, [{**given, **lighter}]) for way in found]
        fitting = [row for row in _rows(question, forecast, kinds, per_node)[0] if row.fits_at_all]
        if fitting:
            best = max(fitting, key=lambda row: row.predicted.samples_per_second)
            knobs = {**question.point, **lighter}
            fix = ",".join(in_words(name, value) for name, value in knobs.items() if not name.endswith("world_size"))
            takes = show_memory(best.predicted.memory.device_peak_bytes)
            fits = "fits" if best.predicted.fits == "yes" else "probably fits"
            return NothingFitsError(f"{text}; with --fix {fix} {best.way} takes {takes}, which {fits}")
    if nearest.predicted.fits_at_all:
        return NothingFitsError(text)
    larger = larger_device(round(nearest.predicted.memory.device_interval.high), forecast.device)
    return NothingFitsError(f"{text}; as it is, {larger}")


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
