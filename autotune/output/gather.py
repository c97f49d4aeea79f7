"""Gathers what is known of a search from its run directory: `autotune report` draws it.

It reads only, whatever state the directory is in: a search that runs still, was killed, or in which nothing fits.
"""

from __future__ import annotations

import datetime
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from autotune.cost.child import Traces
from autotune.cost.model import CostModel
from autotune.errors import AutotuneError
from autotune.output.run_report import Breakdown, ReportedTrial, RunReport
from autotune.planning.options import SearchOptions, fields_by_name
from autotune.planning.plan import SearchPlan
from autotune.search.explain import answer_in, refusals
from autotune.space.changes import changes
from autotune.storage.learned import rates_of
from autotune.storage.run_directory import RunDirectory, read_plan
from autotune.value import read_value
from autotune.values.explanation import Explanation
from autotune.values.result import Contender, ResultData, TrialSummary
from autotune.values.time_spent import Spent, spent_on
from autotune.values.trial import Purpose, TrialResult, TrialStatus
from autotune.values.user_code import OwnCode
from autotune.verification.attribution import explanation_of, label
from autotune.verification.verdict import nothing_found
from autotune.version import __version__


def gather(run_dir: str | Path) -> RunReport:
    """Return all that is known of the search in `run_dir`.

    Raises:
        RunDirectoryError: There is no search in it, or its plan can't be read.
        InputError: Its answer can't be read.
    """
    directory = RunDirectory.existing(Path(run_dir))
    plan = read_plan(directory.path)
    result = answer_in(directory)
    searched, explained = directory.results(), directory.explained()
    breakdowns, no_breakdown = _breakdowns(directory, plan, result, searched)
    return RunReport(
        run_directory=str(directory.path),
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        autotune_version=result.autotune_version if result is not None else __version__,
        is_running=directory.is_running(),
        command=None if plan.options is None else command(plan.options, plan.workload.own_code),
        workload=plan.workload,
        facts=plan.facts,
        hardware=plan.hardware,
        memory_budget_bytes=plan.memory_bytes,
        allowance=plan.allowance,
        baseline=plan.baseline,
        result=result,
        nothing=None if result is not None else _why_nothing(directory, plan, searched),
        explanation=_explanation(plan, result, [*searched, *explained]),
        trials=(*_reported(plan, result, searched), *_reported(plan, result, explained), *_refused(plan, result)),
        unfinished=len(list((directory.path / "trials").glob("[0-9]*"))) - len(searched),
        breakdowns=breakdowns,
        no_breakdown=no_breakdown,
        spent=_spent(result, searched),
    )


def command(options: SearchOptions, code: OwnCode | None = None) -> str | None:
    """Return the command line that asks for `options`: what differs from the defaults; None if none can.

    Args:
        options: What was asked for.
        code: The user's own, if that was tuned; only a script can be named.
    """
    if code is not None and not code.command:
        return None
    words = ["autotune", "find", "--model", options.model] if code is None else ["autotune", "script"]
    asked = options.model_dump(by_alias=True)
    for name, field in fields_by_name(SearchOptions).items():
        value, option = asked[name], name.replace("_", "-")
        if name == "model" or value == field.default:
            continue
        if name == "memory":
            words += [f"--{option}", _memory(value)]
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            words += [f"--{option}", ",".join(value)]
        else:
            words += [f"--{option}", f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)]
    return shlex.join(words) if code is None else f"{shlex.join(words)} -- {code.command_line}"


def _memory(size: int) -> str:
    """Return bytes as they may be typed, exactly: '8GiB', '12MiB', '8589934593'."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def _why_nothing(directory: RunDirectory, plan: SearchPlan, searched: Sequence[TrialResult]) -> str:
    if not searched:
        return "no trial has ended yet"
    if any(t.measurement is not None for t in searched):
        return f"the search was stopped before it wrote its answer; `autotune resume {directory.path}` goes on"
    return str(nothing_found(plan, searched))


def _explanation(plan: SearchPlan, result: ResultData | None, trials: Sequence[TrialResult]) -> Explanation | None:
    return None if result is None else explanation_of(result, trials, refusals(plan, result))


def _reported(plan: SearchPlan, result: ResultData | None, trials: Sequence[TrialResult]) -> list[ReportedTrial]:
    """Return the trials by number."""
    judged = {t.number: t for t in result.trials if t.number is not None} if result is not None else {}
    found = []
    for trial, ended_s in zip(trials, ends_s(trials), strict=True):
        own = trial.request.purpose is not Purpose.EXPLAIN
        found.append(_row(plan, trial, judged.get(trial.request.number) if own else None, ended_s))
    return found


def ends_s(trials: Sequence[TrialResult]) -> list[float]:
    """Return when each trial ended, in seconds during which trials ran: a search may be stopped for a night.

    Trials that don't tell when they began ran one after the other.
    """
    spans = [(t.began, t.began + t.duration_s) for t in trials if t.began is not None]
    if len(spans) < len(trials):
        return list(itertools.accumulate(t.duration_s for t in trials))
    busy: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if busy and began <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(busy[-1][1], ended))
        else:
            busy.append((began, ended))
    return [sum(min(end, stop) - start for start, stop in busy if start < end) for _, end in spans]


def _row(plan: SearchPlan, trial: TrialResult, judged: TrialSummary | None, ended_s: float) -> ReportedTrial:
    """Return a trial's line; one whose losses are refused completed as a trial, and its summary says what it showed."""
    measured, request = trial.measurement, trial.request
    cause = trial.outcome.cause if trial.outcome.kind == "failure" else None
    memory = trial.outcome.memory
    return ReportedTrial(
        label=label(trial),
        purpose=request.purpose,
        status=judged.status if judged is not None else trial.status,
        config=request.config,
        changes=changes(request.config, plan.baseline, plan.facts, plan.hardware),
        samples_per_second=measured.samples_per_second if measured else None,
        interval=measured.shown_interval if measured else None,
        tokens_per_second=measured.tokens_per_second if measured else None,
        peak_bytes=memory.peak_bytes if memory is not None and memory.is_known else None,
        prediction=request.prediction,
        duration_s=trial.duration_s,
        ended_s=ended_s,
        cause=judged.cause if judged is not None else cause,
    )


def _refused(plan: SearchPlan, result: ResultData | None) -> list[ReportedTrial]:
    if result is None:
        return []
    return [
        ReportedTrial(
            label="",
            status=TrialStatus.REJECTED,
            config=summary.config,
            changes=changes(summary.config, plan.baseline, plan.facts, plan.hardware),
            cause=summary.cause,
        )
        for summary in result.trials
        if summary.number is None
    ]


def _breakdowns(
    directory: RunDirectory, plan: SearchPlan, result: ResultData | None, searched: Sequence[TrialResult]
) -> tuple[tuple[Breakdown, ...], str | None]:
    """Return the predicted memory of baseline and winner, learned from the search's trials, or why there is none."""
    try:
        traces = read_value(Traces, directory.path / "trace" / "answer.json")
        rates = rates_of(plan.hardware)
    except (OSError, ValidationError):
        return (), "the model was not traced in this search"
    except AutotuneError as error:
        return (), str(error)
    model = CostModel.of(plan.workload, plan.hardware, rates, traces.profiles)
    model = model.observe(*(t for t in searched if t.request.task is None))
    wanted = {"baseline": result.baseline if result is not None else None}
    if result is not None and result.best.config != result.baseline.config:
        wanted["best"] = result.best
    found = []
    for name, contender in wanted.items():
        config = contender.config if contender is not None else plan.baseline
        estimate = model.estimate(config)
        if estimate is not None:
            found.append(Breakdown(name=name, predicted=estimate.memory, measured_bytes=_peak(contender)))
    return tuple(found), None if found else "their kinds of configurations were not traced"


def _peak(contender: Contender | None) -> int | None:
    measured = contender.measurement if contender is not None else None
    return measured.memory.peak_bytes if measured is not None and measured.memory.is_known else None


def _spent(result: ResultData | None, searched: Sequence[TrialResult]) -> Spent:
    if result is not None and result.spent is not None:
        return result.spent
    return spent_on(searched, sum(t.duration_s for t in searched), {})
