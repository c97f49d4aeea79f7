"""Other limits for a search that is gone on with: more time, more trials, another effort. Pure.

The plan that comes of it takes the place of the old one in the run directory, so that who resumes the search again goes
on within the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.errors import InputError
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import loss_steps_of
from autotune.units import show_time
from autotune.values.budget import Budget, Effort
from autotune.values.time_spent import wall_s
from autotune.values.trial import Purpose, TrialResult, TrialStatus

# Said of a search that is gone on with and comes to its end at once.
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
    """Return `plan` within other limits; those of the whole search, what it has had until now included.

    Args:
        plan: As it stands.
        results: The trials so far.
        effort: Stands for all its limits but those that are given with it.
        max_trials: Of the search.
        max_time_s: Of the search.
        output: The file in which the answer is wanted now; None: as before.

    Raises:
        InputError: The points of a recording don't depend on limits.
    """
    if plan.exhaustive and effort is not None:
        raise InputError(
            f"--effort {effort}: what an exhaustive search measures was settled when it began; --max-time and "
            "--max-trials can be changed"
        )
    budget = (plan.budget if effort is None else Budget.of(effort)).limited(
        max_trials=max_trials, max_time_s=max_time_s
    )
    if output is not None:
        plan = plan.model_copy(update={"output": output})
    if budget == plan.budget:
        return plan
    plan = plan.model_copy(update={"budget": budget, "reopened_at": _next_number(results)})
    if plan.options is None:
        return plan
    asked = {"effort": effort, "max_trials": max_trials, "max_time_s": max_time_s}
    options = plan.options.model_copy(
        update={name: value for name, value in asked.items() if effort is not None or value is not None}
    )
    # Whether losses are compared is a matter of effort, too.
    return plan.model_copy(update={"options": options, "loss_steps": loss_steps_of(options)})


def limits_of(plan: SearchPlan, results: Sequence[TrialResult]) -> str:
    """Return the limits of a search that goes on, and what of them is spent, in words."""
    searched = sum(r.request.purpose is Purpose.SEARCH for r in results)
    trials = "1 trial" if searched == 1 else f"{searched} trials"
    return (
        f"the limits are {show_time(plan.budget.max_time_s)} and {plan.budget.max_trials} trials now; "
        f"{show_time(wall_s(results))} and {trials} are spent"
    )


def is_over(plan: SearchPlan, results: Sequence[TrialResult]) -> bool:
    """Return whether the search had come to its finals, and wasn't given other limits since."""
    return any(r.request.purpose.closes and r.request.number >= plan.reopened_at for r in results)


def outlived(plan: SearchPlan, results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials that were ended at a time limit shorter than any has now: what they tried is tried again.

    None where some trial has completed: what took so much longer than that is slow.
    """
    if any(r.measurement is not None for r in results):
        return []
    cut_short = (r for r in results if r.status is TrialStatus.TIMED_OUT and r.request.number < plan.reopened_at)
    return [r for r in cut_short if r.request.limits.timeout_s < plan.budget.trial_timeout_s]


def _next_number(results: Sequence[TrialResult]) -> int:
    return max((r.request.number for r in results), default=-1) + 1
