"""Tables of the lasting record: groups of comparable searches, and the trials of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.output.terminal import table_of
from autotune.space.knobs import SHORT_NAMES
from autotune.storage.recorded import RecordedSearch
from autotune.units import show_memory, show_rate, show_time, visible
from autotune.value import Value


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
    return [_group(key, found) for key, found in by_key.items()]


def _group(key: str, searches: Sequence[RecordedSearch]) -> SearchGroup:
    latest = searches[0]
    rates = [s.best_samples_per_second for s in searches if s.best_samples_per_second is not None]
    return SearchGroup(
        key=key,
        when=latest.started,
        model=latest.model,
        workload=latest.shape,
        device=latest.device,
        searches=len(searches),
        trials=sum(len(s.trials) for s in searches),
        best_samples_per_second=max(rates, default=None),
    )


def history_table(found: Sequence[SearchGroup], where: str) -> RenderableType:
    """Return the groups as a table."""
    if not found:
        return Text(f"nothing is recorded in {where} yet; `autotune find` does so")
    rows = (
        (
            group.key,
            _moment(group.when),
            visible(group.model),
            visible(group.workload),
            visible(group.device),
            _shown(group.best_samples_per_second, show_rate),
            str(group.searches),
            str(group.trials),
        )
        for group in found
    )
    figures = ("best\nsamples/s", "searches", "trials")
    headings = ("key", "when", "model", "workload", "device", *figures)
    note = "A search whose key is here measures its baseline and the old winner first; `autotune history show KEY`."
    return Group(table_of(headings, rows, right=figures, title=f"recorded in {where}"), Text(note))


def trials_table(searches: Sequence[RecordedSearch]) -> RenderableType:
    """Return the trials of searches with one key, one table per search."""
    return Group(*(_trials(search) for search in searches))


def _trials(search: RecordedSearch) -> RenderableType:
    verdict = search.verdict or "no answer"
    gain = f", {search.speedup:.2f} times the baseline" if search.speedup is not None else ""
    within = f"{search.device}, {show_memory(search.memory_bytes)}, --allow {search.allowance} --effort {search.effort}"
    first, last = f"{search.model}: {search.shape}", f"{_moment(search.started)}: {verdict}{gain}"
    where = f"{search.host}:{search.run_directory}" if search.host else search.run_directory
    title = "\n".join(map(visible, (first, within, last, where)))
    rows = (
        (
            str(trial.number),
            str(trial.purpose),
            str(trial.status),
            _shown(trial.samples_per_second, show_rate),
            _shown(trial.peak_bytes, show_memory),
            show_time(trial.duration_s),
            Text(_differences(trial.config, search.baseline) + " *" * (trial.config_id == search.best_config_id)),
        )
        for trial in search.trials
    )
    headings = ("trial", "purpose", "status", "samples/s", "peak memory", "took", "differs from the baseline in")
    return table_of(headings, rows, right=("trial", "samples/s", "peak memory", "took"), title=Text(title))


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _differences(config: dict[str, Any], baseline: dict[str, Any]) -> str:
    """Return the differing knobs in words; both are plain dictionaries, since any version may have written them."""
    before = _by_knob(baseline)
    changed = {knob: value for knob, value in _by_knob(config).items() if value != before.get(knob)}
    return ", ".join(f"{SHORT_NAMES.get(knob, knob)} {_short(value)}" for knob, value in changed.items()) or "nothing"


def _by_knob(config: dict[str, Any]) -> dict[str, Any]:
    single = {name: value for name, value in config.items() if name != "parallelism"}
    return {**single, **{f"parallelism.{name}": value for name, value in (config.get("parallelism") or {}).items()}}


def _short(value: object) -> object:
    """Return a knob's value; for an adapter, its kind."""
    return value["kind"] if isinstance(value, dict) and "kind" in value else value


def _moment(iso: str) -> str:
    """Return a time to the minute, in UTC: '2026-11-22 20:49'."""
    return iso[:16].replace("T", " ")
