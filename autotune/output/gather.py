"""Collects the data of a report from a run directory, without changing it; the search may still be running."""

import shlex
from dataclasses import replace
from pathlib import Path

from autotune.cost.model import CostModel
from autotune.errors import resuming
from autotune.estimates.forecast import Traces
from autotune.planning.options import SearchOptions, fields_by_name
from autotune.planning.plan import SearchState
from autotune.planning.user_code import DECIDED_BY_CODE
from autotune.space.knobs import changes
from autotune.storage.home import rates_of
from autotune.storage.run_directory import EXPLAIN_FOLDER, RunDirectory, read_plan
from autotune.units import now
from autotune.value import found_value
from autotune.values.result import Breakdown, ResultData, RunReport, rows_of
from autotune.values.time_spent import Spent
from autotune.values.workload import OwnCode
from autotune.verification.attribution import explanation_of
from autotune.verification.finals import Finals
from autotune.verification.verdict import nothing_found, trial_rows
from autotune.version import __version__


def gather(run_dir: str | Path) -> RunReport:
    """Return the report of the search in `run_dir`; InputError: there is none, or its plan or result can't be read."""
    directory = RunDirectory.existing(Path(run_dir))
    plan = read_plan(directory.path)
    result = directory.answer()
    searched, explained = directory.results(), RunDirectory(directory.path / EXPLAIN_FOLDER).results()
    finals = Finals(SearchState(plan, searched))
    told = result.trials if result is not None else ()
    judged = {row.number: row for row in told}
    rows = [judged.get(row.number, row) for row in trial_rows(finals)]
    rows += [*rows_of(explained), *(row for row in told if row.number is None)]
    nothing = "no trial has ended yet" if result is None else None
    if result is None and finals.contenders():
        nothing = f"the search was stopped before it wrote its answer; {resuming(directory.path)} goes on"
    elif result is None and searched:
        nothing = str(nothing_found(plan, searched))
    breakdowns, no_breakdown = _breakdowns(directory.path, finals, result)
    return RunReport(
        run_directory=str(directory.path),
        written=now(),
        autotune_version=result.autotune_version if result is not None else __version__,
        is_running=directory.is_running(),
        command=None if plan.options is None else command(plan.options, plan.workload.own_code),
        **plan.problem_fields(),
        result=result,
        nothing=nothing,
        explanation=None if result is None else explanation_of(plan, result, [*searched, *explained]),
        trials=tuple(row.model_copy(update={"changes": changes(row.config, plan)}) for row in rows),
        unfinished=len(directory.trial_folders()) - len(searched),
        breakdowns=breakdowns,
        no_breakdown=no_breakdown,
        spent=(result and result.spent) or Spent.of(searched, sum(t.duration_s for t in searched), {}),
    )


def command(options: SearchOptions, code: OwnCode | None = None) -> str | None:
    """Return the command line of a search, without options that have their defaults; None for pickled `code`."""
    if code is not None and not code.command:
        return None
    words = ["autotune", "find", "--model", options.model] if code is None else ["autotune", "script"]
    asked = options.model_dump(by_alias=True)
    for name, field in fields_by_name(SearchOptions).items():
        value, option = asked[name], name.replace("_", "-")
        if name == "model" or value == field.default or (code is not None and name in DECIDED_BY_CODE):
            continue
        if name == "memory":
            units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, ""))  # the largest that says it exactly
            words += [f"--{option}", next(f"{value // unit}{end}" for unit, end in units if value % unit == 0)]
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            words += [f"--{option}", ",".join(map(str, value))]
        else:
            words += [f"--{option}", f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)]
    return shlex.join(words) if code is None else f"{shlex.join(words)} -- {code.command_line}"


def _breakdowns(folder: Path, finals: Finals, result: ResultData | None) -> tuple[tuple[Breakdown, ...], str | None]:
    """Return the predicted memory of baseline and winner, corrected by the trials, or why there is none."""
    plan = finals.plan
    traces = found_value(Traces, folder / "trace" / "answer.json")
    if traces is None:
        return (), "the model was not traced in this search"
    model = CostModel.of(plan.workload, plan.hardware, rates_of(plan.hardware), traces.profiles)
    model = model.observe(*(t for t in finals.state.results if t.request.task is None))
    wanted = {plan.baseline: "baseline"}
    if result is not None:
        wanted.setdefault(result.best.config, "winner")
    found = []
    for config, name in wanted.items():
        if result is not None and result.soaked is not None and config == result.best.config:
            fixed = {**plan.workload.fixed_arguments, **result.soaked.arguments}  # it evaluates in these batches
            model = replace(model, workload=plan.workload.model_copy(update={"fixed_arguments": fixed}))
        if (estimate := model.estimate(config)) is not None:
            seen, alive = finals.measurement(config), model.alive(config)
            measured = seen.memory.peak_bytes if seen is not None and seen.memory.is_known else None
            found.append(Breakdown(name=name, predicted=estimate.memory, measured_bytes=measured, alive=alive))
    return tuple(found), None if found else "their kinds of configurations were not traced"
