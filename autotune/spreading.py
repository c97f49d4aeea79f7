"""`autotune estimate --devices N`: the ways to spread a training over many devices, side by side.

Each way has its best checkpointing and micro-batch; precision and optimizer are the same for all. Predictions only.
Called by `autotune.estimating`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.catalogue.gpus import gpu_of
from autotune.config import Allowance, Parallelism, TrainConfig
from autotune.cost.network import Network, network_of
from autotune.errors import InputError, NothingFitsError
from autotune.estimate_plan import EstimateOptions, Target, config_of, refusal
from autotune.estimate_report import Device, SpreadReport, SpreadRow, miss
from autotune.forecast import Forecast, Question, with_micro_batch
from autotune.knobs import Scalar
from autotune.search.space import MICRO_BATCH, micro_batches
from autotune.spread_plan import nodes_of, shown, ways
from autotune.units import show_memory

_CHECKPOINTING = "checkpointing"

SPREAD = (
    "each way with its best checkpointing (none, full) and micro-batch; what is given (--precision, --optim, "
    "--tensor-parallel ...) is kept, the rest is as the Trainer has it"
)


def spread(question: Question, target: Target, notes: Sequence[str]) -> SpreadReport:
    """Return the ways to spread a training, fastest first.

    Raises:
        InputError: No way is possible.
        NothingFitsError: None has the memory.
    """
    devices = question.options.devices
    nodes = nodes_of(devices, question.options.nodes)
    network = network_for(question.options, target, devices)
    forecast = question.forecast(target, network=network)
    point, said = _filled(question, forecast)
    found = ways(devices, devices // nodes, question.facts, point)
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
            *_stage_notes(rows),
            *_network_notes(question.options, target.device, network, nodes),
        ),
    )


def network_for(options: EstimateOptions, target: Target, devices: int) -> Network:
    """Return the network of so many devices.

    Raises:
        InputError: They can't be dealt out to the nodes evenly.
    """
    return network_of(
        target.device.hardware,
        devices,
        nodes=nodes_of(devices, options.nodes),
        gb_s=options.network_gb_s,
        host_bandwidth=target.rates.host_bandwidth,
    )


def _filled(question: Question, forecast: Forecast) -> tuple[dict[str, Scalar], tuple[str, ...]]:
    """Return the knobs that are the same for all ways, and a line about the one that was chosen."""
    point, hardware = dict(question.point), forecast.plan.hardware
    if "precision" in point or not question.allowance.admits(Allowance.NUMERICS) or hardware.is_cpu:
        return point, ()
    point["precision"] = "bf16" if hardware.has_bf16 else "fp16"
    return point, (f"precision {point['precision']} (--precision)",)


def _row(
    question: Question, forecast: Forecast, point: dict[str, Scalar], way: Parallelism, per_node: int
) -> SpreadRow | str:
    """Return the best of one way, or why it isn't possible."""
    fields = {f"parallelism.{name}": value for name, value in way.model_dump().items()}
    kinds = [point] if _CHECKPOINTING in point else [{**point, _CHECKPOINTING: kind} for kind in ("none", "full")]
    configs: list[TrainConfig] = []
    reasons: list[str] = []
    for kind in kinds:
        config = config_of(forecast.plan, {**kind, **fields})
        for size in _sizes(forecast, config, given=MICRO_BATCH in point):
            reason = refusal(forecast.plan, size)
            if reason is None:
                configs.append(size)
            else:
                reasons.append(reason)
    if not configs:
        return reasons[0] if reasons else f"a global batch of {forecast.plan.workload.global_batch_size} is too small"
    try:
        best, _ = forecast.best(configs, 1)
        chosen = forecast.predicted(best[0] if best else forecast.tightest(configs))
    except InputError as error:
        return str(error).partition(": ")[2] or str(error)
    needed, host = chosen.host_bytes * per_node, _host_memory(question.options, forecast.device)
    return SpreadRow(way=shown(way), predicted=chosen, host_bytes=needed, host_fits=host is None or needed <= host)


def _sizes(forecast: Forecast, config: TrainConfig, *, given: bool) -> list[TrainConfig]:
    """Return the micro-batches that divide what each data-parallel rank has of the global batch."""
    if given:
        return [config]
    total, ranks = forecast.plan.workload.global_batch_size, config.parallelism.data_parallel
    if total is None:
        return [with_micro_batch(config, size) for size in micro_batches(None)]
    return [with_micro_batch(config, size) for size in micro_batches(total // ranks)] if total % ranks == 0 else []


def _host_memory(options: EstimateOptions, device: Device) -> int | None:
    """Return a node's memory: as given, or this machine's where the device is in it; None: not known."""
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
    speed = row.predicted.speed
    rate = speed.samples_per_second if speed is not None else 0.0
    return not row.fits_at_all, -rate if row.fits_at_all else float(row.predicted.memory.device_peak_bytes)


def _stage_notes(rows: Sequence[SpreadRow]) -> tuple[str, ...]:
    """Return a line about what is too much of a pipeline's stages."""
    if all(row.predicted.config.parallelism.pipeline_parallel == 1 for row in rows):
        return ()
    return ("PP: every stage is counted with embeddings and head, of which it has one at the most",)


def _network_notes(options: EstimateOptions, device: Device, network: Network, nodes: int) -> tuple[str, ...]:
    """Return lines about what joins the devices."""
    gpu = gpu_of(device.hardware.name)
    kind = "link unknown, taken as that to the host" if gpu is None else gpu.link.kind
    lines = [] if device.hardware.is_cpu else [f"within a node {kind}: {network.link / 1e9:.0f} GB/s attained"]
    if options.nodes is None and nodes > 1:
        lines.append(f"{nodes} nodes of {network.devices_per_node} devices (--nodes)")
    if nodes > 1:
        why = " taken, 200 Gb/s a device" if options.network_gb_s is None else ""
        lines.append(f"between nodes {network.node / 1e9:.0f} GB/s attained of what each has{why} (--network-gb-s)")
    return tuple(lines)
