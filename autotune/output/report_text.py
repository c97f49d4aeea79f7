"""A report as Markdown, and its trials as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from autotune.exports import targets
from autotune.output import report_facts as facts
from autotune.storage.run_directory import ANSWER_FILE
from autotune.units import show_time, visible
from autotune.values.result import RunReport, TrialRow

# Characters with a meaning in Markdown: emphasis, code, links, cells, escapes.
_MARKDOWN = re.compile(r"[\\|*`\[\]]")


def markdown_report(report: RunReport) -> str:
    """Return the report as Markdown, without charts."""
    result = report.result
    parts = [f"# {_plain(facts.subject(report))}", f"**{_plain(facts.answer(report))}**", _plain(facts.state(report))]
    if result is not None:
        parts += ["## Baseline against winner", _table(("", *facts.sides_of(result)), facts.against(result))]
        if facts.knobs(result):
            parts += ["## What changes", _table(("knob", "baseline", "winner", "changes"), facts.knobs(result))]
        parts.append("## What each knob brought")
        if report.explanation is not None:
            parts.append(_table(("knob", "factor", "how it is known"), facts.contributions(report)))
        parts.append(_with_code(facts.explained(report)))
    if facts.accuracy(report):
        parts += ["## Predicted against measured", _lines(facts.accuracy(report))]
    heading, rows = facts.memory_rows(report)
    parts.append("## Where the memory goes")
    parts.append(_table(heading, rows) if rows else f"Not known: {_plain(str(report.no_breakdown))}.")
    shares = report.spent.shares() if report.spent.total_s else {}
    if shares:
        spent = [(what, show_time(share * report.spent.total_s), f"{share:.0%}") for what, share in shares.items()]
        spent += [("waiting for a quiet machine", show_time(report.spent.waiting_s), "")] if report.spent.waited else []
        parts += ["## Where the time went", _table(("", "time", "share"), spent)]
    cells = [tuple(c.shown for c in facts.trial_cells(t, at)) for at, t in enumerate(report.trials)]
    parts += ["## All trials", _table(facts.TRIAL_COLUMNS, cells)]
    if facts.remarks(report):
        parts += ["## Checks and notes", _lines(facts.remarks(report))]
    parts += ["## Machine and versions", _table(("", ""), [*facts.machine(report), *facts.versions(report)])]
    parts.append("## To reproduce it")
    parts.append(_fenced("bash", report.command) if report.command else "The command was not recorded.")
    if result is not None:
        arguments = json.dumps(result.arguments.training_arguments, indent=2)
        parts.append(
            "Training with the answer:\n\n"
            + _fenced("bash", *targets.to_train(result, f"{report.run_directory}/{ANSWER_FILE}"))
        )
        parts.append("with these TrainingArguments, exactly as measured:\n\n" + _fenced("json", *arguments.split("\n")))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_row(heading), _row(["---"] * len(heading)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(c) for c in cells)} |"


def _lines(found: Sequence[str]) -> str:
    return "\n".join(f"* {_plain(line)}" for line in found)


def _plain(words: str) -> str:
    """Return `words` on one line, escaped for Markdown and HTML."""
    return _MARKDOWN.sub(r"\\\g<0>", visible(" ".join(words.split()))).replace("&", "&amp;").replace("<", "&lt;")


def _with_code(words: str) -> str:
    """Return an escaped text, with parts between backticks as code."""
    pieces = words.split("`")
    return "".join(f"`{visible(piece)}`" if at % 2 else _plain(piece) for at, piece in enumerate(pieces))


def _fenced(language: str, *lines: str) -> str:
    """Return lines as a fenced block of code."""
    return "\n".join((f"```{language}", *map(visible, lines), "```"))


def csv_report(report: RunReport) -> str:
    """Return the trials and refused configurations as CSV, with units in the names of columns and every knob."""
    rows = [{n: visible(v) if isinstance(v, str) else v for n, v in _figures(t).items()} for t in report.trials]
    columns = dict.fromkeys(name for row in rows for name in row)
    written = io.StringIO()
    writer = csv.DictWriter(written, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _figures(trial: TrialRow) -> dict[str, Any]:
    prediction, interval = trial.prediction, trial.interval
    return {
        "trial": trial.label,
        "purpose": trial.purpose,
        "status": trial.status,
        "samples_per_second": trial.samples_per_second,
        "samples_per_second_low": interval.low if interval else None,
        "samples_per_second_high": interval.high if interval else None,
        "tokens_per_second": trial.tokens_per_second,
        "peak_bytes": trial.peak_bytes,
        "predicted_samples_per_second": prediction.samples_per_second if prediction else None,
        "predicted_peak_bytes": prediction.peak_bytes if prediction else None,
        "duration_s": trial.duration_s,
        "ended_s": trial.ended_s,
        "cause": trial.cause,
        "config_id": trial.config.config_id,
        **_flat("", trial.config.model_dump(mode="json")),
    }


def _flat(prefix: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the knobs of a configuration as flat columns such as 'adapter.rank'."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found.update(_flat(f"{prefix}{name}.", value))
        else:
            found[f"{prefix}{name}"] = value
    return found
