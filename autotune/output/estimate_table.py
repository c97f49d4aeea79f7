"""Tables of estimates within 80 columns: one configuration, a ranking, all GPUs, ways to use several devices.

And of rehearsals: memory by phase, the parts of the peak, what would make it fit; all GPUs.
"""

from collections.abc import Collection, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from autotune.estimates import report as reports
from autotune.estimates.report import Rehearsal
from autotune.output.step_time import parts_line
from autotune.output.table import about, show_config
from autotune.output.terminal import table_of
from autotune.space.knobs import MICRO_BATCH, shown_changes
from autotune.units import GIB, show_memory, show_rate
from autotune.values.config import Allowance, Precision
from autotune.values.estimate import MemoryBreakdown, Speed
from autotune.values.trial import Alive, Interval
from autotune.values.workload import Workload

_UNKNOWN = "-"
_UNSURE = "? probably fits: the upper end of the interval, or the figure with unused blocks, is beyond the memory"


def estimate_table(report: reports.Report, *, with_notes: bool = True) -> RenderableType:
    match report:
        case reports.ConfigReport():
            place, *parts = _configuration(report)
        case reports.RankingReport():
            place, *parts = _ranking(report)
        case reports.SpreadReport():
            place, *parts = _spread(report)
        case reports.DevicesReport():
            place, *parts = _devices(report)
    target = f" + {report.workload.target_length}" if report.workload.target_length else ""
    notes = [f"note: {note}" for note in report.notes if with_notes]
    lines = (Text(part) if isinstance(part, str) else part for part in (*parts, *notes))
    return Group(Text(f"{about(report.workload)}{target}{place}", style="bold"), *lines)


def _configuration(report: reports.ConfigReport) -> list[RenderableType]:
    found = report.predicted
    rows = [*_memory_rows(found, on_cpu=report.device.hardware.is_cpu), *_speed_rows(found.speed)]
    world = found.config.parallelism.world_size
    steps, largest, chance = found.accumulation_steps, report.largest_micro_batch, found.chance_to_fit
    freed = " if unused blocks are given back" * (found.memory.device_peak_bytes > report.device.memory_bytes)
    unsure = f" (chance to fit{freed}: {chance:.0%})" if chance is not None and 0.005 < chance < 0.995 else ""
    figures = ("predicted", "95 % interval")
    fits = {"yes": "fits", "probably": "probably fits", "probably not": "probably does not fit", "no": "does not fit"}
    given_back = "unused blocks have to be given back, which takes time"
    none_fits = given_back if found.fits_at_all else "no micro-batch does, as it is"
    return [
        f", on {f'{world} x ' * (world > 1)}{report.device.name} of {show_memory(report.device.memory_bytes)}",
        f"{show_config(found.config)}; {f'{steps} micro-batches' if steps > 1 else 'one micro-batch'} a step",
        table_of(("", *figures), rows, right=figures),
        *([f"a step's time goes to: {parts_line(found.parts)}"] if found.speed is not None else []),
        *([phases_line(found.memory), alive_table(report.alive)] if report.alive else []),
        f"{fits[found.fits]} {show_memory(report.device.memory_bytes)}{unsure}; "
        + (f"largest micro-batch that fits: {largest}" if largest else none_fits),
        *_run_lines(report.run),
    ]


def _memory_rows(found: reports.Predicted, *, on_cpu: bool) -> list[tuple[str, str, str]]:
    memory = found.memory
    size, unit, digits = unit_of(memory.allocated_peak_bytes)

    def row(name: str, value: float, interval: Interval | None = None) -> tuple[str, str, str]:
        ends = (interval.low, interval.high) if interval is not None else ()
        return name, f"{value / size:,.{digits}f} {unit}", " to ".join(f"{end / size:,.{digits}f}" for end in ends)

    parts = memory.components
    parts["correction by earlier trials"] = memory.allocated_peak_bytes - sum(parts.values())
    rows = [row(f"  {name}", value) for name, value in parts.items() if round(value / size, digits)]
    rows.append(row("allocated at the peak", memory.allocated_peak_bytes, memory.allocated_interval))
    if not on_cpu:
        rows.append(row("reserved by the allocator", memory.reserved_peak_bytes, memory.reserved_interval))
    rows.append(row(f"  beyond the {'tensors' if on_cpu else 'allocator'}", memory.framework_bytes))
    whole = "process" if on_cpu else "device, as nvidia-smi shows"
    rows.append(row(whole, memory.device_peak_bytes, memory.device_interval))
    if found.host_bytes:
        rows.append(row("  of the host's memory, for each device", found.host_bytes))
    return rows


def _speed_rows(speed: Speed | None) -> list[tuple[str, str, str]]:
    if speed is None:
        return []
    known = (
        ("optimizer step, seconds", speed.step_time_s, speed.step_time_interval),
        ("samples/s", speed.samples_per_second, speed.samples_per_second_interval),
        ("tokens/s", speed.tokens_per_second, speed.tokens_per_second_interval),
    )
    rows = [(name, show_rate(value), _interval(ends)) for name, value, ends in known if value is not None and ends]
    if (ends := speed.mfu_interval) is not None:
        rows.append(("model FLOP utilisation", f"{speed.mfu:.0%}", f"{ends.low:.0%} to {ends.high:.0%}"))
    return rows


def _ranking(report: reports.RankingReport) -> list[RenderableType]:
    rows = [
        {
            f"{_unit(report.workload)}\n(95 %)": _rate(found.speed, with_interval=True),
            "MFU": _share(found.speed),
            "memory": f"{show_memory(found.memory.device_peak_bytes)}{_mark(found)}",
            "what changes": shown_changes(found.changes),
        }
        for found in report.best
    ]
    return [
        f", on {report.device.name} of {show_memory(report.device.memory_bytes)}",
        _table_of_known(rows, left={"what changes"}),
        f"the baseline: {show_config(report.baseline)}",
        f"{report.considered:,} configuration{'s' * (report.considered != 1)} compared (--allow {report.allowance}), "
        f"{report.fitting:,} may fit; of each kind the best micro-batch",
        *[_UNSURE] * any(_mark(found) != "" for found in report.best),
        *_run_lines(report.run),
    ]


def _devices(report: reports.DevicesReport) -> list[RenderableType]:
    rows: list[dict[str, str]] = []
    left_out: dict[str, list[str]] = {}
    for row in report.rows:
        if (best := row.best) is None:
            left_out.setdefault(row.why_not or "", []).append(row.device.name)
            continue
        config, speed, hours = best.config, best.speed, row.run.hours if row.run is not None else None
        tf32 = config.tf32 and config.precision is Precision.FP32
        knobs = [str(config.per_device_train_batch_size), "tf32" if tf32 else str(config.precision), config.optim]
        knobs += ["checkpointing"] * (config.checkpointing != "none")
        knobs += [config.adapter.kind] if config.adapter is not None else []
        knobs += [config.quantization] if config.quantization is not None else []
        memory = f"{show_memory(best.memory.device_peak_bytes)}{_mark(best)}"
        cells = {
            "device\nGiB": f"{row.device.name}\n{row.device.memory_bytes / GIB:.1f}",
            "largest\nmicro-\nbatch": str(row.largest_micro_batch or ""),
            _unit(report.workload): _rate(speed),
            "MFU": _share(speed),
            "hours": "" if hours is None else show_rate(hours),
            "best configuration, its memory": f"{', '.join(knobs)}; {memory}",
        }
        rows.append(cells)
    first, *_, last = rows[0]
    return [
        "",
        _table_of_known(rows, left={first, last}),
        *[_UNSURE] * any(row.best is not None and _mark(row.best) != "" for row in report.rows),
        *(f"not, as {reason}: {', '.join(names)}" for reason, names in left_out.items()),
        *_run_lines(next((row.run for row in report.rows if row.run is not None), None), with_hours=False),
    ]


def _spread(report: reports.SpreadReport) -> list[RenderableType]:
    nodes = "one node" if report.nodes == 1 else f"{report.nodes} nodes"
    unit = _unit(report.workload)
    size, memory, _ = unit_of(max(row.predicted.memory.device_peak_bytes for row in report.rows))
    rows = []
    for row in report.rows:
        found, speed = row.predicted, row.predicted.speed if row.fits_at_all else None
        mark = "no" if not found.fits_at_all else "host" if not row.host_fits else _mark(found)
        cells = {
            "way": row.way,
            unit: _rate(speed),
            "MFU": _share(speed),
            "wait": "" if speed is None else f"{found.parts.get('other devices', 0.0):.0%}",
            memory: f"{found.memory.device_peak_bytes / size:,.1f} {mark.strip()}".rstrip(),
            "host\nGiB": f"{row.host_bytes / GIB:,.0f}" if row.host_bytes else "",
            "micro x\nsteps": f"{found.config.per_device_train_batch_size} x {found.accumulation_steps}",
            "check-\npoint": found.config.checkpointing,
        }
        rows.append(cells)
    first, *_, last = rows[0]
    with_host, on_cpu = any(row.host_bytes for row in report.rows), report.device.hardware.is_cpu
    return [
        f", on {report.devices} x {report.device.name} in {nodes}",
        _table_of_known(rows, left={first, last}, box=box.SIMPLE_HEAD),
        f"{sum(row.fits_at_all for row in report.rows)} of {len(report.rows)} ways fit; no: the device's memory, "
        "host: a node's memory is too small; ?: probably, though its interval reaches beyond the memory",
        f"{unit}: all devices together; wait: the share of a step in which devices wait for each other or for the "
        f"host; {memory}: of each {'process' if on_cpu else 'device, as nvidia-smi shows'}; "
        f"{'host: of each node; ' * with_host}micro x steps: samples of a micro-batch, micro-batches of a step; "
        "TP, SP, DP: tensor, sequence and data parallel; replicas: copies that FSDP splits among neighbours",
        *(f"not possible: {', '.join(names)}: {reason}" for reason, names in report.refused.items()),
        *_run_lines(report.run),
    ]


def _table_of_known(rows: Sequence[dict[str, str]], *, left: Collection[str], **options: Any) -> RenderableType:
    """Return a table of the columns in which something is known; `options` as of `table_of`."""
    known = [heading for heading in rows[0] if any(row[heading] not in ("", _UNKNOWN) for row in rows)]
    cells = ([row[heading] for heading in known] for row in rows)
    return table_of(known, cells, right=[name for name in known if name not in left], **options)


def _run_lines(run: reports.RunCost | None, *, with_hours: bool = True) -> list[str]:
    if run is None:
        return []
    lines = [
        f"{run.tokens:.4g} tokens: 6 P D = 6 x {run.parameters:,} x {run.tokens:.4g} = {run.flops_by_parameters:.3e} "
        f"FLOP = {run.petaflop_s_days_by_parameters:,.3g} PetaFLOP/s-days",
        f"as traced, attention counted and what a token doesn't pass through left out: {run.needed_flops:.3e} "
        f"FLOP = {run.needed_petaflop_s_days:,.3g} PetaFLOP/s-days",
    ]
    if with_hours and run.hours is not None and run.hours_interval is not None:
        hours = f"{show_rate(run.hours)} hours ({_interval(run.hours_interval)})"
        where = "one device" if run.devices == 1 else f"{run.devices} devices"
        lines.append(f"{hours} on {where}, so {show_rate(run.gpu_hours or 0.0)} GPU-hours")
    return lines


def _mark(found: reports.Predicted) -> str:
    return "" if found.fits == "yes" or (found.chance_to_fit or 0.0) > 0.99 else " ?"


def _unit(workload: Workload) -> str:
    return "tokens/s" if workload.task.takes_text else "samples/s"


def _interval(interval: Interval) -> str:
    return f"{show_rate(interval.low)} to {show_rate(interval.high)}"


def _rate(speed: Speed | None, *, with_interval: bool = False) -> str:
    """Return tokens per second, or samples if there are none, with the interval in a second line; empty if unknown."""
    if speed is None:
        return ""
    rate, ends = speed.tokens_per_second, speed.tokens_per_second_interval
    if rate is None or ends is None:
        rate, ends = speed.samples_per_second, speed.samples_per_second_interval
    return show_rate(rate) + (f"\n{_interval(ends)}" if with_interval else "")


def _share(speed: Speed | None) -> str:
    return "" if speed is None else _UNKNOWN if speed.mfu is None else f"{speed.mfu:.0%}"


def unit_of(value: float) -> tuple[int, str, int]:
    """Return bytes, name and decimals of the unit in which `value` is at least a half, else of the next smaller."""
    return (GIB, "GiB", 2) if value >= GIB / 2 else (GIB >> 10, "MiB", 1)


MOST_ROWS = 20  # of the table; JSON has them all


def phases_line(memory: MemoryBreakdown) -> str:
    """Return the largest phase of a training, and what is allocated in each, evaluation and saving too."""
    each = ", ".join(f"{phase.name} {show_memory(phase.allocated_bytes)}" for phase in memory.phases)
    peak = next(phase for phase in memory.phases if phase.name == memory.phase)
    more = " and ".join(phase.name for phase in memory.phases if phase.allocated_bytes > peak.allocated_bytes)
    left_out = f"; {more}, which takes more, counts with --eval-batch" if more else ""
    return f"the peak is in the phase {peak.name}, at {peak.operator}; allocated at most: {each}{left_out}"


def alive_table(rows: Sequence[Alive]) -> RenderableType:
    """Return the largest of what is alive at the peak, with the option that would shrink each where it is known."""
    size, unit, digits = unit_of(sum(row.allocated_bytes for row in rows))
    cells = []
    for row in rows[:MOST_ROWS]:
        where, tensors = ": ".join(filter(None, (row.module, row.operator))), str(row.tensors or "")
        cells.append([f"{row.allocated_bytes / size:,.{digits}f}", row.kind, where, tensors, row.knob or ""])
    if rest := rows[MOST_ROWS:]:
        left = sum(row.allocated_bytes for row in rest)
        cells.append([f"{left / size:,.{digits}f}", "", f"{len(rest)} more", "", ""])
    headings = (unit, "at the peak", "module: operator", "of", "shrunk by")
    known = [dict(zip(headings, row, strict=True)) for row in cells]
    return _table_of_known(known, left=("at the peak", "module: operator", "shrunk by"))


def rehearsal_table(found: Rehearsal) -> RenderableType:
    size, unit, digits = unit_of(found.peak.peak_bytes)

    def shown(value: int | None) -> str:
        return "" if value is None else f"{value / size:,.{digits}f}"

    figures = ("allocated", "reserved", f"device, {unit}")
    peaks = {**found.parts.phases, "peak": found.peak}
    rows = [(n, *map(shown, (m.allocated_bytes, m.reserved_bytes, m.device_bytes))) for n, m in peaks.items()]
    device = f"{f'{found.devices} x ' * (found.devices > 1)}{found.gpu} of {show_memory(found.memory_bytes)}"
    lines = [f"{'fits' if found.chance_to_fit >= 0.5 else 'does not fit'} {device} (chance {_chance(found)})"]
    lines += [f"with that much memory: {found.short}"] if found.short else []
    for lever in found.levers or ():
        takes = "fails" if lever.memory is None else f"takes {show_memory(lever.memory.peak_bytes)}"
        fits = "fits" if lever.chance_to_fit >= 0.5 else "does not fit"
        others = [change.knob for change in lever.changes if change.allowance is not Allowance.EXACT]
        same = "the same training" + ", if its gradient doesn't depend on the micro-batch," * (MICRO_BATCH in others)
        same += ", rounded in other places," * any(knob != MICRO_BATCH for knob in others)
        lines.append(f"{same} with {shown_changes(lever.changes)}: {takes}, {fits}")
    if found.short and found.levers == ():
        lines.append("no other configuration of the same training is expected to fit")
    return Group(
        Text(f"{found.workload.model.name}, on a stand-in for {device}", style="bold"),
        table_of(("", *figures), rows, right=figures),
        *([alive_table(found.parts.alive)] if found.parts.alive else []),
        *(Text(line) for line in (*lines, *(f"note: {note}" for note in found.notes))),
    )


def cards_table(found: Sequence[Rehearsal]) -> RenderableType:
    """Return the GPUs of the table with the peak on each; those on which it can't be told, by the reason."""
    rows, refused = [], dict[str, list[str]]()
    for each in found:
        if each.refused is not None:
            refused.setdefault(each.refused, []).append(each.gpu)
            continue
        has, takes = f"{each.memory_bytes / GIB:.1f}", f"{each.peak.peak_bytes / GIB:.2f}"
        rows.append((each.gpu, has, takes, "yes" if each.chance_to_fit >= 0.5 else "no", _chance(each)))
    lines = ["it ran once for a compute capability, on the largest, whose memory it was told if it asked"]
    lines += [f"not told: {', '.join(names)}: {reason}" for reason, names in refused.items()]
    if any(fits == "no" for *_, fits, _ in rows):
        lines.insert(0, "no: near capacity unused blocks can be given back, which --gpu with that device alone tries")
    lines += [f"note: {note}" for note in found[0].notes]
    devices = f", on {found[0].devices} devices" if found[0].devices > 1 else ""
    title, right = Text(f"{found[0].workload.model.name}{devices}", style="bold"), ("GiB", "takes", "chance")
    return Group(title, table_of(("device", "GiB", "takes", "fits", "chance"), rows, right=right), *map(Text, lines))


def _chance(found: Rehearsal) -> str:
    chance = found.chance_to_fit
    return "over 99 %" if chance > 0.99 else "under 1 %" if chance < 0.01 else f"{chance:.0%}"
