"""Seconds of an optimizer step of published rows, measured and predicted, and intervals held against them.

Rows whose throughput is of a whole training step, with lengths that are stated; not parts of a step, padded data, or
arithmetic that isn't predicted. What is predicted is what `autotune estimate` shows of a device by its data sheet.

Intervals: each source by what the other sources' errors say. The model is the one that predicts
(`autotune.cost.corrections`): the logarithm of measured over predicted seconds is the device's error, alike for all
configurations, a weight for each knob, on several devices two more, and a residual. All is estimated by moments,
sources weighing alike, by what is known of the device; where it has one-device rows of two sources, by those alone.
Factor on the priors of knobs and residual: what one-device rows differ from their source's median by, over what the
priors would give. The device's error: the medians of source and GPU. Several devices: the medians of their rows, and
what each differs from them by, beyond the former; both wider by Student's t, as so few sources say little of another
one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from autotune.cost import time
from autotune.cost.corrections import Process, TimeSpread, Z, known_by
from autotune.cost.profile import Profile
from autotune.cost.rates import sheet_rates
from autotune.cost.sharding import network_of
from autotune.cost.time import StepCost
from published.rows import NotPredicted, Row
from published.setups import Setup, read

# Devices as their sources write them, where the table of GPUs has another name.
_DEVICES = {
    "V100 (memory size not stated; 16 per node)": "v100-32gb",
    "H100": "h100-80gb",
    "A6000 Ada 48GB": "rtx-6000-ada",
    "A5000 24GB": "rtx-a5000",
    "A100 40GB SXM": "a100-40gb",
    "RTX 4070Ti SUPER 16GB": "rtx-4070-ti-super",
}
# Devices of a node, where they are on several: DGX-2 has 16, all others 8.
_NODE = {"deepspeed_autotune": 16}

# FSDP with mixed precision computes with 16-bit weights, in Composer under autocast as well.
_SHARDED_IN_BF16 = {"llmfoundry": "weights loaded bfloat16 + bf16 autocast", "torchao": "bf16", "torchtitan": "bf16"}

_COMPILED = (True, "torch.compile")

# Half the width that holds 95 % of Student's t with 1, 2 ... degrees of freedom, which so many sources' errors are.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

# A source of fewer rows says little about a share.
_SOURCE_ROWS = 20


class Timed(NamedTuple):
    """Seconds of an optimizer step of a row, predicted and measured."""

    row: Row
    setup: Setup
    seconds: float
    measured: float

    @property
    def log_factor(self) -> float:
        """The logarithm of measured over predicted seconds, as `Observation.log_time`."""
        return math.log(self.measured / self.seconds)

    @property
    def alone(self) -> bool:
        return self.setup.spread.parallelism.is_single

    @property
    def known(self) -> str:
        """What is known of its device."""
        return known_by(self.setup.gpu.name, self.setup.gpu.capability)


def timed(row: Row, traced: Callable[[Setup], Profile]) -> Timed:
    """Return the seconds of a row's step; `NotPredicted` where they aren't stated, or what was run isn't predicted."""
    _check(row)
    setup = read(_as_read(row))
    measured = _measured_seconds(row, setup)
    rates, nodes = sheet_rates(setup.gpu), max(1, setup.devices // _NODE.get(row.group, 8))
    network = network_of(setup.gpu.hardware(), setup.devices, nodes=nodes, host_bandwidth=rates.host_bandwidth)
    tf32, compiled = "tf32" in row.precision.lower(), row.compile in _COMPILED
    cost = StepCost(traced(setup), rates, setup.optim, setup.spread, network, tf32=tf32, compiled=compiled)
    # Version 2 is about twice as fast as version 1 (arXiv:2307.08691, abstract).
    share = time.FUSED_ATTENTION_SHARE / (2 if "version 1" in row.attn else 1)
    with patch.object(time, "FUSED_ATTENTION_SHARE", share):
        seconds = cost.seconds(np.array([float(setup.micro_batch)]), np.array([float(setup.accumulation)]))[0]
    return Timed(row, setup, float(seconds), measured)


def _measured_seconds(row: Row, setup: Setup) -> float:
    """Return the seconds of an optimizer step as its source states them."""
    samples = setup.micro_batch * setup.accumulation
    if row.throughput:
        if "tokens/s" in row.throughput_unit:  # of one device, where there are several
            return samples * setup.shape.length / row.throughput
        return samples * (setup.devices if "global" in row.throughput_unit else 1) / row.throughput
    if row.time and row.time_unit == "s for 1024 samples":
        return row.time * samples * setup.devices / 1024
    if row.time and row.time_unit == "ms per step":
        return row.time / 1e3
    raise NotPredicted("no time of a step")


def _check(row: Row) -> None:
    """Refuse what isn't a whole step of known sizes, and what isn't predicted."""
    text = f"{row.precision} {row.quant}".lower()
    if not (row.n_gpus and row.ran and (row.throughput or row.time)):
        raise NotPredicted("no time of a step")
    if row.group == "litgpt_resource":
        raise NotPredicted("padded to the longest of a batch, lengths not stated")
    if row.seq_len is None or row.micro_batch is None or not row.precision:
        raise NotPredicted("sequence length, micro-batch or precision not stated")
    if "internal" in row.throughput_unit:
        raise NotPredicted("not the time of a whole step")
    if re.search(r"float8|fp8|mxfp8|int8 weight|rowwise", text):
        raise NotPredicted("arithmetic in 8 bits")
    if row.compile not in (None, False, "eager", *_COMPILED):
        raise NotPredicted("compiled in a way that isn't predicted")
    if re.search(r"selective|layer", str(row.grad_ckpt).lower()):
        raise NotPredicted("checkpointing by operator or by layer")
    if re.search(r"\b(CP|TP)\b|TP\d|CP \d", row.distributed):
        raise NotPredicted("spread in a way that isn't modelled: " + row.distributed)
    if "4-bit" in row.optimizer or "lpmm" in row.optimizer:
        raise NotPredicted("optimizer not modelled: 4-bit states")


def _as_read(row: Row) -> Row:
    """Return a row in the words that `setups` reads."""
    changed: dict[str, Any] = {
        "gpu": _DEVICES.get(row.gpu) or _DEVICES.get(re.sub(r"^\d+x | \(.*", "", row.gpu), row.gpu)
    }
    if row.distributed.startswith("FSDP2"):
        changed["distributed"] = "FSDP FULL_SHARD"
    if row.group in _SHARDED_IN_BF16 and (row.n_gpus or 1) > 1:
        changed["precision"] = _SHARDED_IN_BF16[row.group]
    if row.group == "deepspeed_autotune" and "vanilla" in row.distributed and row.precision == "fp16":
        changed["precision"] = "fp16 amp, fp32 weights"
    return row.model_copy(update=changed)


class Held(NamedTuple):
    """A row with its interval: the deviation of the logarithm, and what is left of it."""

    timed: Timed
    deviation: float
    log_error: float

    @classmethod
    def by(cls, process: Process, timed: Timed, spread: TimeSpread) -> Held:
        mean, deviation = process.predict([_features(timed)])
        each = 0.0 if timed.alone else spread.each
        return cls(timed, math.hypot(float(deviation[0]), process.noise, each), timed.log_factor - float(mean[0]))


def _features(timed: Timed) -> dict[str, float]:
    """Return what of a row may make the prediction of its time wrong, by the names of `time_features`."""
    setup, family, parallelism = timed.setup, timed.setup.family, timed.setup.spread.parallelism
    names = [f"precision={family.autocast or family.dtype}", f"optim={setup.optim}"]
    names += [f"attention={family.attn_implementation}"]
    names += [f"checkpointing={family.checkpointing}"] * (family.checkpointing != "none")
    names += ["adapter"] * (setup.software.lora is not None)
    if setup.software.quantization is not None:
        names.append(f"quantization={setup.software.quantization.kind}")
    if setup.devices > 1:
        names += ["several", *[f"sharding={parallelism.sharding}"] * (parallelism.sharding != "none")]
    names += ["compile=inductor"] * (timed.row.compile in _COMPILED)
    return {"all": 1.0, "samples": math.log2(setup.micro_batch) / 4, **dict.fromkeys(names, 1.0)}


def estimated(rows: Sequence[Timed]) -> dict[str, TimeSpread]:
    """Return the deviations by what is known of the devices, from the errors of rows."""
    alone = [t for t in rows if t.alone]
    spread = _sources(t for t in rows if not t.alone)
    # Deviations of a further source's median, and of its rows from it, on several devices.
    wider = _STUDENT[min(len(spread), len(_STUDENT)) - 1] / Z if spread else 1.0
    common = wider * _root_mean_square([_median(source) for source in spread])
    each = wider * _root_mean_square([_root_mean_square(_from_median(source)) for source in spread])
    found = {}
    for kind, known in _grouped(rows, lambda t: t.known).items():
        sources = _sources(t for t in known if t.alone)
        enough = len(sources) > 1
        ratios = [_ratio(source) for source in (sources if enough else _sources(alone)) if len(source) > 1]
        groups = _grouped((t for t in known if t.alone or not enough), lambda t: (t.row.group, t.setup.gpu.name))
        device = _root_mean_square([_median(group) for group in groups.values()])
        found[kind] = TimeSpread(device, math.sqrt(np.mean(ratios)) if ratios else 1.0, common, each)
    return found


def _ratio(source: Sequence[Timed]) -> float:
    """Return the variance of rows about their median over what the priors of their knobs would give."""
    process = TimeSpread(0.0).process()
    usual = process.predict([_features(t) for t in source])[1] ** 2 + process.noise**2
    return float(np.mean(np.square(_from_median(source))) / np.mean(usual))


def _median(rows: Sequence[Timed]) -> float:
    return float(np.median([t.log_factor for t in rows]))


def _from_median(rows: Sequence[Timed]) -> list[float]:
    median = _median(rows)
    return [t.log_factor - median for t in rows]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(float(np.mean(np.square(values)))) if len(values) else 0.0


def _sources(rows: Iterable[Timed]) -> list[list[Timed]]:
    return list(_grouped(rows, lambda t: t.row.group).values())


def _grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def left_out(rows: Sequence[Timed]) -> list[Held]:
    """Return each row with the interval that the rows of the other sources give it; none where there is one source."""
    held = []
    for source in _sources(rows):
        spreads = estimated([t for t in rows if t.row.group != source[0].row.group])
        if spreads:
            widest = max(spreads.values())  # of what nothing is known by the others
            for timed in source:
                spread = spreads.get(timed.known, widest)
                held.append(Held.by(spread.process(), timed, spread))
    return held


def after_one(rows: Sequence[Timed], spreads: dict[str, TimeSpread]) -> list[Held]:
    """Return each row with its interval after the first row of the same source, model and devices was measured."""
    held = []
    for first, *others in _grouped(rows, lambda t: (t.row.group, t.setup.spec.name, t.setup.devices)).values():
        spread = spreads[first.known]
        process = spread.process([_features(first)], [first.log_factor])
        held += [Held.by(process, timed, spread) for timed in others]
    return held


def figures(held: Sequence[Held]) -> dict[str, Any]:
    """Return count, absolute error, coverage and typical half width of intervals, as shares."""
    errors = np.array([np.expm1(-h.log_error) for h in held])
    shares = {
        "signed_median": np.median(errors),
        "median": np.median(np.abs(errors)),
        "p90": np.percentile(np.abs(errors), 90),
        "coverage": np.mean([abs(h.log_error) <= Z * h.deviation for h in held]),
        "half_width": math.expm1(Z * float(np.median([h.deviation for h in held]))),
    }
    return {"count": len(held), **{name: round(float(share), 4) for name, share in shares.items()}}


def time_figures(rows: Sequence[Timed]) -> dict[str, Any]:
    """Return the figures of predicted time: left out by source, after one trial, and with all sources."""
    spreads = estimated(rows)
    groups: dict[str, list[Held]] = defaultdict(list)
    for h in left_out(rows):
        setup, several = h.timed.setup, h.timed.setup.devices > 1
        groups["all"].append(h)
        groups[f"all, {'several devices' if several else 'one device'}"].append(h)
        groups[f"known by {h.timed.known}"].append(h)
        groups[f"source {h.timed.row.group}"].append(h)
        groups[f"device {setup.gpu.name}{f' x {setup.devices}' * several}"].append(h)
        groups[f"technique {setup.technique}{' on several' * several}"].append(h)
    after = _grouped(after_one(rows, spreads), lambda h: "one device" if h.timed.alone else "several devices")
    every = [Held.by(spreads[t.known].process(), t, spreads[t.known]) for t in rows]
    known = _grouped(every, lambda h: f"{h.timed.known}, {'one device' if h.timed.alone else 'several'}")
    return {
        "left_out": {name: figures(group) for name, group in sorted(groups.items())},
        "after_one_trial": {name: figures(group) for name, group in sorted(after.items())},
        "half_widths": {name: figures(group)["half_width"] for name, group in known.items()},
        "deviations": {kind: [round(x, 3) for x in spread] for kind, spread in spreads.items()},
    }


def report_time(found: dict[str, Any]) -> None:
    print(f"\n{'predicted seconds over measured, source left out':62}   n  signed  median    p90  in 95 %  +-width")
    after = {f"after one trial of the model, {name}": f for name, f in found["after_one_trial"].items()}
    for name, f in {**found["left_out"], **after}.items():
        shares = f"{f['signed_median']:+7.1%} {f['median']:6.1%} {f['p90']:6.1%} {f['coverage']:7.1%}"
        few = "" if f["count"] >= _SOURCE_ROWS else "  (few)"
        print(f"{name:62} {f['count']:3} {shares} {f['half_width']:7.1%}{few}")
    print(f"typical half width with all sources: {found['half_widths']}")
    print(f"deviation of the device, factor on the knobs' priors, deviations of several: {found['deviations']}")
