"""Tables within 80 columns: models, GPUs, search spaces, rates, findings of the doctor, dry runs and the record."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.doctor import Report
from autotune.output.table import about, show_config
from autotune.output.terminal import table_of
from autotune.search.run import Preview
from autotune.space.file import SpaceFile
from autotune.space.knobs import shown_changes
from autotune.space.space import MOST_POINTS
from autotune.storage.recorded import RecordedSearch
from autotune.units import GIB, show_memory, show_rate, show_time, visible
from autotune.value import Value
from autotune.values.catalogue import CatalogueEntry
from autotune.values.catalogue.gpus import Dtype, Gpu
from autotune.values.estimate import Rates


def models_table(entries: Sequence[CatalogueEntry]) -> RenderableType:
    """Return the catalogue as a table."""
    rows = ((e.names[0] if e.names else "", e.id, e.kind, f"{e.parameters / 1e6:,.1f}M") for e in entries)
    title = f"{len(entries)} models; weights are random, figures from each source"
    return table_of(("name", "full id", "kind", "parameters"), rows, right={"parameters"}, title=title)


def gpus_table(found: Sequence[Gpu]) -> RenderableType:
    """Return GPUs as a table with memory, bandwidth and peak rates."""
    figures = ("memory\nGiB", "bandwidth\nGB/s", "bf16 / fp16\nTFLOP/s", "tf32 / fp32\nTFLOP/s")
    rows = (
        (
            gpu.name,
            f"{'' if gpu.memory_from == 'cuda' else '~'}{gpu.memory_gib:.1f}",
            f"{gpu.bandwidth_gb_s:,.0f}",
            f"{_peak(gpu, 'bf16')} / {_peak(gpu, 'fp16')}",
            f"{_peak(gpu, 'tf32')} / {_peak(gpu, 'fp32')}",
        )
        for gpu in found
    )
    table = table_of(("name", *figures), rows, right=figures, whole=figures, title=f"{len(found)} GPUs")
    note = (
        "TFLOP/s are dense peaks with fp32 accumulation, by the data sheets; attainable is less. Memory is what a "
        "process may use; ~ nominal or as the driver shows it, a little more than that. --json gives fp8, int8 and the "
        "sources."
    )
    return Group(table, Text(note))


def _peak(gpu: Gpu, dtype: Dtype) -> str:
    tflops = gpu.peak_tflops.get(dtype)
    if tflops is None:
        return "-"
    return f"{tflops:,.0f}" if tflops >= 100 else f"{tflops:.1f}"


def spaces_table(found: Sequence[tuple[SpaceFile, int]], device: str, global_batch: int) -> RenderableType:
    """Return the built-in search spaces as a table, with the number of points that are legal on a device."""
    rows = (
        (s.name, s.description, f"{points:,}{' or more' * (points >= MOST_POINTS)}", ", ".join(s.parameters))
        for s, points in found
    )
    headings = ("name", "for whom", "points here", "parameters")
    title = "search spaces (--space NAME, or your own YAML file)"
    note = (
        f"points here: legal on {device} for a mixture of experts at a global batch of {global_batch}, with "
        "--effort standard --allow method; other models and options leave fewer"
    )
    return Group(table_of(headings, rows, right={"points here"}, title=title), Text(note))


def rates_table(measured: Rates, expected: Rates | None, file: str) -> RenderableType:
    """Return the measured rates of a device, stored in `file`, beside those that its data sheet lets expect."""
    beside = _rates(expected) if expected else {}
    rows = ((name, value, beside.get(name, "-")) for name, value in _rates(measured).items())
    figures = ("measured", "by the table")
    caption = {"caption": f"kept in {file}", "caption_justify": "left"}
    return table_of(("", *figures), rows, right=figures, title="rates", **caption)


def _rates(rates: Rates) -> dict[str, str]:
    products = {}
    for name, flops in rates.matmul_flops.items():
        scale, unit = (1e12, "TFLOP/s") if flops >= 1e12 else (1e9, "GFLOP/s")
        products[f"large products, {name}"] = f"{show_rate(flops / scale)} {unit}"
    return {
        **products,
        "element-wise operators": f"{show_rate(rates.bandwidth / 1e9)} GB/s",
        "an operator at the least": f"{show_rate(rates.launch_s * 1e6)} us",
        "host to device": f"{show_rate(rates.host_bandwidth / 1e9)} GB/s",
    }


def doctor_table(report: Report) -> RenderableType:
    """Return the doctor's findings as a table."""
    marks = {True: Text("yes", "green"), False: Text("no", "yellow")}
    rows = ((f.name, marks[f.available], Text(f.detail)) for f in report.findings)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return Group(table_of(("", "", "why, and what it would bring"), rows, title=report.machine), Text(versions))


# Reasons for refusals that the terminal shows; `--json` has all.
_MOST_REASONS = 8


def preview_table(found: Preview) -> RenderableType:
    """Return what a search would do: its extent, knobs, refusals and first trials."""
    budget, within = found.budget, show_memory(found.memory_bytes)
    title = f"{about(found.workload)}, on {found.hardware.name} within {within}; nothing was run"
    extent = f"at most {show_time(budget.max_time_s)} and {budget.max_trials:,} trials, finals not counted"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(f"{found.configurations:,} configurations (--allow {found.allowance}); {extent}"),
        Text(f"baseline: {show_config(found.baseline)}"),
        table_of(
            ("searched", "values"),
            ((name, ", ".join(values)) for name, values in found.knobs.items()),
            whole={"searched"},
        ),
    ]
    if found.first_trials:
        headings = ("", "samples/s", "GiB", "the first trials, if each gives what is predicted")
        rows = []
        for number, trial in enumerate(found.first_trials):
            rate, peak, changed = "?", "?", shown_changes(trial.changes)
            if (predicted := trial.predicted) is not None:
                rate, peak = show_rate(predicted.samples_per_second), f"{predicted.peak_bytes / GIB:.2f}"
                changed += " (more than the budget)" * (predicted.peak_bytes > found.memory_bytes)
            rows.append((str(number), rate, peak, changed))
        parts.append(table_of(headings, rows, right=headings[:3], whole=headings[:3]))
    refused = [f"not tried: {', '.join(names)}: {reason}" for reason, names in found.values_refused.items()]
    counts = list(found.refused.items())
    refused += [f"refused: {count:,} configurations: {reason}" for reason, count in counts[:_MOST_REASONS]]
    if (others := counts[_MOST_REASONS:]) != []:
        refused.append(
            f"refused: {sum(n for _, n in others):,} configurations for {len(others)} other reasons (--json)"
        )
    return Group(*parts, *map(Text, refused))


class SearchGroup(Value):
    """A summary of the searches with one key."""

    key: str
    when: str
    model: str
    workload: str
    device: str
    searches: int
    trials: int
    best_samples_per_second: float | None


def groups(searches: Sequence[RecordedSearch]) -> list[SearchGroup]:
    """Return searches grouped by key, in their order; where they differ, with the latest search's value."""
    by_key: dict[str, list[RecordedSearch]] = {}
    for search in searches:
        by_key.setdefault(search.key.short, []).append(search)
    return [
        SearchGroup(
            key=key,
            when=found[0].started,
            model=found[0].model,
            workload=found[0].shape,
            device=found[0].device,
            searches=len(found),
            trials=sum(len(s.trials) for s in found),
            best_samples_per_second=max(
                (r for s in found if (r := s.best_samples_per_second) is not None), default=None
            ),
        )
        for key, found in by_key.items()
    ]


def history_table(found: Sequence[SearchGroup], where: str) -> RenderableType:
    """Return the groups as a table."""
    if not found:
        return Text(f"nothing is recorded in {where} yet; `autotune find` does so")
    rows = (
        (
            group.key,
            group.when[:16].replace("T", " "),  # to the minute, in UTC
            visible(group.model),
            visible(group.workload),
            visible(group.device),
            "" if group.best_samples_per_second is None else show_rate(group.best_samples_per_second),
            str(group.searches),
            str(group.trials),
        )
        for group in found
    )
    figures = ("best\nsamples/s", "searches", "trials")
    headings = ("key", "when", "model", "workload", "device", *figures)
    note = "A search whose key is here measures its baseline and the old winner first."
    return Group(table_of(headings, rows, right=figures, title=f"recorded in {where}"), Text(note))
