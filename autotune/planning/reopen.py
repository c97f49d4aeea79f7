"""Changes the limits of a search that is resumed (more time, more trials, another effort), and says what else is new.

The new plan replaces the old one in the run directory, so that later resumes keep the new limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.errors import MachineError
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import loss_steps_of
from autotune.units import show_time
from autotune.value import sha256_of
from autotune.values.budget import Budget, Effort
from autotune.values.hardware import Hardware
from autotune.values.time_spent import wall_s
from autotune.values.trial import Purpose, TrialResult, TrialStatus

_MOST_HASHED_BYTES = 64 << 20  # takes 0.1 s

# Note for a resumed search that ends without a trial.
NOTHING_RUN = (
    "no trial was run: the search is over, or what is left isn't enough for one (--max-time, --max-trials and --effort "
    "give it more)"
)


def reopened(
    plan: SearchPlan,
    results: Sequence[TrialResult],
    *,
    effort: Effort | None = None,
    max_trials: int | None = None,
    max_time_s: float | None = None,
    output: str | None = None,
) -> SearchPlan:
    """Return `plan` with other limits, which hold for the whole search including the trials so far.

    None leaves a limit as it was. The effort sets all limits, of which `max_trials` and `max_time_s` take precedence;
    `output` is another file to write the answer to.
    """
    budget = (plan.budget if effort is None else Budget.of(effort)).limited(
        max_trials=max_trials, max_time_s=max_time_s
    )
    if output is not None:
        plan = plan.model_copy(update={"output": output})
    if budget == plan.budget:
        return plan
    next_number = max((r.request.number for r in results), default=-1) + 1
    plan = plan.model_copy(update={"budget": budget, "reopened_at": next_number})
    if plan.options is None:
        return plan
    asked = {"effort": effort, "max_trials": max_trials, "max_time_s": max_time_s}
    options = plan.options.model_copy(
        update={name: value for name, value in asked.items() if effort is not None or value is not None}
    )
    # The effort also decides whether losses are compared.
    return plan.model_copy(update={"options": options, "loss_steps": loss_steps_of(options)})


def limits_of(plan: SearchPlan, results: Sequence[TrialResult]) -> str:
    """Return words on the limits of a resumed search, and on the time and trials that it has spent."""
    searched = sum(r.request.purpose is Purpose.SEARCH for r in results)
    trials = "1 trial" if searched == 1 else f"{searched} trials"
    return (
        f"the limits are {show_time(plan.budget.max_time_s)} and {plan.budget.max_trials} trials now; "
        f"{show_time(wall_s(results))} and {trials} are spent"
    )


def differences(then: Hardware, now: Hardware) -> list[str]:
    """Return a line on the packages whose versions have changed since the search began, if any have.

    Raises:
        MachineError: The search ran on another machine, so that new measurements can't be compared with its own.
    """
    if (then.name, then.cores) != (now.name, now.cores):
        raise MachineError(
            f"the search ran on {then.name} (cores: {then.cores}), this is {now.name} (cores: {now.cores}): go on "
            "where it ran"
        )
    packages = sorted(p for p in then.versions if then.versions[p] != now.versions.get(p))
    changed = ", ".join(f"{p} {then.versions[p]} is now {now.versions.get(p, 'gone')}" for p in packages)
    return [f"since the search: {changed}"] if changed else []


def changed_files(plan: SearchPlan) -> list[str]:
    """Return a line for each file that a search trains from and that is another one than when it began."""
    return [
        f"since the search: {file} has changed; what was measured before it did may not compare with what is now"
        for file, state in plan.files.items()
        if Path(file).is_file() and _state(Path(file)) != state
    ]


def with_files(plan: SearchPlan) -> SearchPlan:
    """Return the plan of a search that begins, with the present state of the files that it trains from."""
    return plan.model_copy(update={"files": {str(f): _state(f) for f in _trained_from(plan) if f.is_file()}})


def _state(file: Path) -> str:
    """Return a digest of a file, or of a large one its size and the time when it was written."""
    try:
        found = file.stat()
        if found.st_size > _MOST_HASHED_BYTES:
            return f"{found.st_size} bytes, {found.st_mtime_ns} ns"
        return sha256_of(file.read_bytes())
    except OSError as error:
        return str(error.strerror)


def _trained_from(plan: SearchPlan) -> Iterator[Path]:
    workload = plan.workload
    if workload.dataset is not None:
        yield Path(workload.dataset)
    if workload.model.path is not None:
        yield Path(workload.model.path) / "config.json"
    code = workload.own_code
    if code is not None and code.command and not code.is_module:
        yield Path(code.directory) / code.command[0]


def is_over(plan: SearchPlan, results: Sequence[TrialResult]) -> bool:
    """Return whether the search had begun its finals or checks, and its limits were not changed since."""
    return any(r.request.purpose.closes and r.request.number >= plan.reopened_at for r in results)


def outlived(plan: SearchPlan, results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials that ran into a shorter time limit than the present one, so that they should run again.

    If any trial has completed, the list is empty: configurations that took so much longer are too slow anyway.
    """
    if any(r.measurement is not None for r in results):
        return []
    cut_short = (r for r in results if r.status is TrialStatus.TIMED_OUT and r.request.number < plan.reopened_at)
    return [r for r in cut_short if r.request.limits.timeout_s < plan.budget.trial_timeout_s]
