"""`autotune estimate --devices N`: compares the ways to share one training among several devices.

They are DDP, ZeRO, FSDP, tensor and sequence parallelism, and offload; the parallel degrees multiply to the number of
devices. Tensor and sequence parallelism stay inside a node, as nothing is computed while they exchange (Narayanan and
others, arXiv:2104.04473, section 3). Each way is shown with its best checkpointing and micro-batch; precision and
optimizer are the same for all. Sequence parallelism is compared where samples are long.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.cost.sharding import WAYS
from autotune.errors import InputError, NothingFitsError
from autotune.estimates.fitting import SMALLER_EVALUATION, larger_device
from autotune.estimates.forecast import Forecast, Question
from autotune.estimates.report import Predicted, SpreadReport, SpreadRow
from autotune.estimates.request import Target, config_of, nodes_of
from autotune.space.knobs import in_words
from autotune.training.arguments import loading_bytes
from autotune.units import show_memory
from autotune.values.catalogue import gpu_of
from autotune.values.config import OF_DDP, Allowance, Parallelism, Scalar
from autotune.values.model import ModelFacts

PREFIX = "parallelism."

# Ways that keep states or weights in the host's memory.
_OFFLOADS = (("zero_2", "optimizer"), ("zero_3", "optimizer"), ("zero_3", "parameters"), ("fsdp_full", "parameters"))

# Changes that are tried where no way fits, in this order; LoRA on weights in 4 bits last.
_LIGHTER: tuple[dict[str, Scalar], ...] = (
    {"adapter": "lora"},
    {"adapter": "lora", "precision": "pure_bf16"},
    {"adapter": "lora", "quantization": "nf4"},
)


def ways(devices: int, per_node: int, facts: ModelFacts, point: Mapping[str, Scalar]) -> tuple[Parallelism, ...]:
    """Return the ways to share a training among so many devices that agree with the knobs in `point`, the user's."""
    heads, most = facts.tensor_parallel_heads, min(devices, per_node)
    doublings = [2**k for k in range(1, most.bit_length())]
    degrees = [d for d in doublings if heads is not None and most % d == 0 and heads % d == 0 and devices % d == 0]
    fields: list[dict[str, Any]] = [{"sharding": sharding} for sharding in WAYS]
    fields += [{"sharding": sharding, "offload": offload} for sharding, offload in _OFFLOADS]
    fields += [{"sharding": "fsdp_full" if devices > d else "none", "tensor_parallel": d} for d in degrees]
    fields += [{"sharding": s, "sequence_parallel": d} for d in degrees for s in ("zero_3", "fsdp_full")]
    # A replica of FSDP's on each node, or as many as the user says.
    copies = {devices // most, point.get(f"{PREFIX}replicas", 1)} - {1, devices}
    fields += [{"sharding": s, "replicas": count} for count in copies for s in ("fsdp_full", "fsdp_grad_op")]
    every = [Parallelism(world_size=devices, **way) for way in fields]
    written = {k.removeprefix(PREFIX): v for k, v in point.items() if k.startswith(PREFIX)}
    given = {name: getattr(Parallelism.model_validate(written), name) for name in written}
    rest = {name: given.pop(name) for name in (*OF_DDP, "wrapping") if name in given}
    agreeing = (way for way in every if all(getattr(way, name) == value for name, value in given.items()))
    return tuple(way.model_copy(update=rest) for way in agreeing)


def shown(way: Parallelism) -> str:
    """Return the short name of a way: 'fsdp_full, TP 8', 'fsdp_full, replicas 2', 'zero_3, weights on cpu'."""
    parts: list[str] = [] if way.sharding == "none" else [way.sharding]
    degrees = {"TP": way.tensor_parallel, "SP": way.sequence_parallel, "MP": way.model_parallel}
    degrees["replicas"] = way.replicas
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if way.sharding == "none" and way.data_parallel > 1:
        parts.append(f"DP {way.data_parallel}" if parts else "ddp")
    if way.offload != "none":
        parts.append(f"{'states' if way.offload == 'optimizer' else 'weights'} on cpu")
    return ", ".join(parts)


def spread(question: Question, target: Target, notes: Sequence[str]) -> SpreadReport:
    """Return the ways to share a training among the devices, fastest first, or raise a NothingFitsError."""
    options, hardware = question.options, target.device.hardware
    devices, nodes = options.devices, nodes_of(options.devices, options.nodes)
    network = question.network(target)
    point, said = options.point, list(notes)
    if "precision" not in point and question.allowance.admits(Allowance.NUMERICS) and not hardware.is_cpu:
        point["precision"] = "bf16" if hardware.has_bf16 else "fp16"
        said.append(f"precision {point['precision']} (--fix precision=fp32)")
    found = ways(devices, devices // nodes, question.facts, point)
    # Sharing a sample's tokens is worth a look where there are many.
    if question.workload.sequence_length < 8192 and f"{PREFIX}sequence_parallel" not in point:
        found = tuple(way for way in found if way.sequence_parallel == 1)
    forecast = question.forecast(target, network)
    refused: dict[str, list[str]] = {}

    def compared(ways: Sequence[Parallelism], point: Mapping[str, Scalar]) -> list[SpreadRow]:
        """Return a row for each way that is possible, the best first; the others are `refused`."""
        rows: list[SpreadRow] = []
        for way in ways:
            chosen = _best(question, forecast, way, point)
            if isinstance(chosen, str):
                refused.setdefault(chosen, []).append(shown(way))
                continue
            needed, there = question.host_memory(hardware, chosen)
            fits = there is None or needed <= there
            rows.append(SpreadRow(way=shown(way), predicted=chosen, host_bytes=needed, host_fits=fits))
        fitting = sorted((r for r in rows if r.fits_at_all), key=lambda r: -r.predicted.samples_per_second)
        others = sorted((r for r in rows if not r.fits_at_all), key=lambda r: r.predicted.memory.device_peak_bytes)
        return [*fitting, *others]

    rows = compared(found, point)
    if any(loading_bytes(row.predicted.config, 1) for row in rows):
        said.append(
            "each process of FSDP begins with the whole weights in the host's memory, unless fsdp_config has "
            "cpu_ram_efficient_loading, with which one process of a node reads them"
        )
    if not rows:
        why = next(iter(refused), "the knobs given contradict each other")
        raise InputError(f"not possible on {devices} x {target.device.name}: {why}")
    if not rows[0].fits_at_all:
        nearest, host = rows[0], f"; of each node's memory it takes {show_memory(rows[0].host_bytes)}"
        took = nearest.predicted.miss(target.device) + host * bool(nearest.host_bytes)
        text = f"nothing fits {devices} devices: {nearest.way} comes nearest and {took}"
        if nearest.predicted.memory.phase == "evaluation":
            raise NothingFitsError(f"{text}; {SMALLER_EVALUATION}")
        # An adapter is tried where the layers are whole and nothing need be offloaded.
        whole = [way for way in found if way.offload == "none" and way.sharding_ranks == way.world_size]
        for lighter in _LIGHTER:
            if any(options.point.get(name, value) != value for name, value in lighter.items()):
                continue
            fitting = compared(whole, {**point, **lighter})
            if fitting and fitting[0].fits_at_all:
                best, knobs = fitting[0], {**options.point, **lighter}
                fix = ",".join(in_words(*knob) for knob in knobs.items() if not knob[0].endswith("world_size"))
                takes = show_memory(best.predicted.memory.device_peak_bytes)
                fits = "fits" if best.predicted.fits == "yes" else "probably fits"
                raise NothingFitsError(f"{text}; with --fix {fix} {best.way} takes {takes}, which {fits}")
        if not nearest.predicted.fits_at_all:
            text += f"; as it is, {larger_device(forecast, nearest.predicted.config)}"
        raise NothingFitsError(text)
    said.append(
        "each way with its best checkpointing (none, full) and micro-batch; what is given (--fix) is kept, "
        "the rest is as the Trainer has it"
    )
    if not hardware.is_cpu:
        gpu = gpu_of(hardware.name)
        kind = "link unknown, taken as that to the host" if gpu is None else gpu.link.kind
        said.append(f"within a node {kind}: {network.link / 1e9:.0f} GB/s attained")
    said += [f"{nodes} nodes of {network.devices_per_node} devices (--nodes)"] * (nodes > 1 and options.nodes is None)
    if nodes > 1:
        why = " taken, 200 Gb/s a device" if options.network_gb_s is None else ""
        said.append(f"between nodes {network.node / 1e9:.0f} GB/s attained of what each has{why} (--network-gb-s)")
    return SpreadReport(
        workload=question.workload,
        device=target.device,
        devices=devices,
        nodes=nodes,
        network_gb_s=None if nodes == 1 else network.node / 1e9,
        host_memory_bytes=question.host_memory(hardware, rows[0].predicted)[1],
        rows=tuple(rows),
        run=question.run(rows[0].predicted),
        refused={reason: tuple(names) for reason, names in refused.items()},
        notes=tuple(said),
    )


def _best(question: Question, forecast: Forecast, way: Parallelism, point: Mapping[str, Scalar]) -> Predicted | str:
    """Return a way with its best checkpointing and micro-batch, or the reason why it isn't possible."""
    plan, fields = forecast.plan, {f"{PREFIX}{knob}": value for knob, value in way.model_dump().items()}
    kinds = [point] if "checkpointing" in point else [{**point, "checkpointing": kind} for kind in ("none", "full")]
    bases = [config_of(plan, {**knobs, **fields}) for knobs in kinds]
    sized = [config for base in bases for config in question.with_micro_batches(base)]
    reasons = {config: plan.refusal(config) for config in sized}
    configs = [config for config, reason in reasons.items() if reason is None]
    if not configs:
        unequal = f"{way.data_parallel} devices don't share a global batch of {plan.workload.global_batch_size}"
        return next(filter(None, reasons.values()), unequal)
    try:
        best, _ = forecast.fastest(configs, 1)
        return forecast.predicted(best[0] if best else forecast.tightest(configs))
    except InputError as error:
        return str(error).partition(": ")[2] or str(error)
