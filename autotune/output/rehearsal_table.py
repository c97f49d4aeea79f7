"""Tables of a rehearsal within 80 columns: memory by phase, the parts of the peak, what would make it fit; all GPUs."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.output.estimate_table import alive_table, unit_of
from autotune.output.terminal import table_of
from autotune.space.knobs import MICRO_BATCH, shown_changes
from autotune.units import GIB, show_memory
from autotune.values.config import Allowance
from autotune.values.rehearsal import Rehearsal


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
    for lever in found.levers:
        takes = "fails" if lever.memory is None else f"takes {show_memory(lever.memory.peak_bytes)}"
        fits = "fits" if lever.chance_to_fit >= 0.5 else "does not fit"
        others = [change.knob for change in lever.changes if change.allowance is not Allowance.EXACT]
        same = "the same training" + ", if its gradient doesn't depend on the micro-batch," * (MICRO_BATCH in others)
        same += ", rounded in other places," * any(knob != MICRO_BATCH for knob in others)
        lines.append(f"{same} with {shown_changes(lever.changes)}: {takes}, {fits}")
    if found.short and not found.levers:
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
    lines = [f"not told: {', '.join(names)}: {reason}" for reason, names in refused.items()]
    if any(fits == "no" for *_, fits, _ in rows):
        lines.insert(0, "no: near capacity unused blocks can be given back, which --gpu with that device alone tries")
    devices = f", on {found[0].devices} devices" if found[0].devices > 1 else ""
    title, right = Text(f"{found[0].workload.model.name}{devices}", style="bold"), ("GiB", "takes", "chance")
    return Group(title, table_of(("device", "GiB", "takes", "fits", "chance"), rows, right=right), *map(Text, lines))


def _chance(found: Rehearsal) -> str:
    chance = found.chance_to_fit
    return "over 99 %" if chance > 0.99 else "under 1 %" if chance < 0.01 else f"{chance:.0%}"
