"""Tables within 80 columns: models, GPUs, search spaces, rates, findings of the doctor, dry runs and the record."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.doctor import Report
from autotune.output.table import about, show_config
from autotune.output.terminal import table_of
from autotune.search.run import Preview
from autotune.space.file import SpaceFile
from autotune.space.knobs import shown_changes
from autotune.storage.recorded import RecordedSearch
from autotune.units import GIB, show_memory, show_rate, show_time, visible
from autotune.values.catalogue import CatalogueEntry, Dtype, Gpu


def models_table(entries: Sequence[CatalogueEntry]) -> RenderableType:
    rows = ((e.names[0] if e.names else "", e.id, e.kind, f"{e.parameters / 1e6:,.1f}M") for e in entries)
    title = f"{len(entries)} models; weights are random, figures from each source"
    return table_of(("name", "full id", "kind", "parameters"), rows, right={"parameters"}, title=title)


def gpus_table(found: Sequence[Gpu]) -> RenderableType:
    figures = ("memory\nGiB", "bandwidth\nGB/s", "bf16 / fp16\nTFLOP/s", "tf32 / fp32\nTFLOP/s")
    rows = []
    for gpu in found:
        memory = f"{'' if gpu.memory_from == 'cuda' else '~'}{gpu.memory_gib:.1f}"
        peaks = _peaks(gpu, "bf16", "fp16"), _peaks(gpu, "tf32", "fp32")
        rows.append((gpu.name, memory, f"{gpu.bandwidth_gb_s:,.0f}", *peaks))
    table = table_of(("name", *figures), rows, right=figures, title=f"{len(found)} GPUs")
    note = (
        "TFLOP/s are dense peaks with fp32 accumulation, by the data sheets; attainable is less. Memory is what a "
        "process may use; ~ nominal or as the driver shows it, a little more than that. --json gives fp8, int8 and the "
        "sources."
    )
    return Group(table, Text(note))


def _peaks(gpu: Gpu, *dtypes: Dtype) -> str:
    found = (gpu.peak_tflops.get(dtype) for dtype in dtypes)
    return " / ".join("-" if peak is None else f"{peak:,.0f}" if peak >= 100 else f"{peak:.1f}" for peak in found)


def spaces_table(found: Sequence[SpaceFile]) -> RenderableType:
    rows = ((s.name, s.description, ", ".join(s.parameters)) for s in found)
    title = "search spaces (--space NAME, or your own YAML file)"
    return table_of(("name", "for whom", "parameters"), rows, title=title)


def doctor_table(report: Report) -> RenderableType:
    marks = {True: Text("yes", "green"), False: Text("no", "yellow")}
    rows = ((f.name, marks[f.available], Text(f.detail)) for f in report.findings)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return Group(table_of(("", "", "why, and what it would bring"), rows, title=report.machine), Text(versions))


def preview_table(found: Preview) -> RenderableType:
    budget, trials, count = found.budget, found.budget.max_trials, found.configurations
    title = f"{about(found.workload)}, on {found.hardware.name} within {show_memory(found.memory_bytes)}; nothing ran"
    extent = f"at most {show_time(budget.max_time_s)} and {trials:,} trial{'s' * (trials != 1)}, finals not counted"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(f"{count:,} configuration{'s' * (count != 1)} (--allow {found.allowance}); {extent}"),
        Text(f"baseline: {show_config(found.baseline, found.workload)}"),
        table_of(("searched", "values"), ((name, ", ".join(values)) for name, values in found.knobs.items())),
    ]
    if found.first_trials:
        headings = ("", "samples/s", "GiB", "the first trials, if predictions hold")
        rows = []
        for number, trial in enumerate(found.first_trials):
            rate, peak, changed = "?", "?", shown_changes(trial.changes)
            if (predicted := trial.predicted) is not None:
                rate, peak = show_rate(predicted.samples_per_second), f"{predicted.peak_bytes / GIB:.2f}"
                changed += " (more than the budget)" * (predicted.peak_bytes > found.memory_bytes)
            rows.append((str(number), rate, peak, changed))
        parts.append(table_of(headings, rows, right=headings[:3]))
    refused = [f"not tried: {', '.join(names)}: {reason}" for reason, names in found.values_refused.items()]
    counts = list(found.refused.items())  # the most frequent reasons; `--json` has all
    refused += [f"refused: {count:,} configuration{'s' * (count != 1)}: {reason}" for reason, count in counts[:8]]
    if others := counts[8:]:
        count = sum(count for _, count in others)
        refused.append(f"refused: {count:,} configurations for {len(others)} other reasons (--json)")
    return Group(*parts, *map(Text, refused))


def history_table(found: Sequence[RecordedSearch], where: str) -> RenderableType:
    if not found:
        return Text(f"nothing is recorded in {where} yet; `autotune find` does so")
    rows = []
    for search in found:
        started, best = search.started[:16].replace("T", " "), search.best_samples_per_second  # to the minute, in UTC
        figures = show_rate(best) if best else "", str(len(search.trials))
        rows.append((*map(visible, (search.key, started, search.model, search.shape, search.device)), *figures))
    headings = ("key", "when", "model", "workload", "device", "best\nsamples/s", "trials")
    note = "A search whose key is here measures its baseline and the old winner first."
    return Group(table_of(headings, rows, right=headings[-2:], title=f"recorded in {where}"), Text(note))
