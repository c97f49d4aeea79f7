"""From a configuration and a purpose to the request of a trial: how much of the step is run, and for how long.

Pure; called by the tuner.
"""

from __future__ import annotations

from autotune.planning.plan import SearchPlan
from autotune.values.checks import CheckTask, LossTask, RoutingTask
from autotune.values.config import TrainConfig
from autotune.values.trial import Limits, Prediction, Purpose, TrialRequest

# Micro-steps of a search trial: the gradients of one are kept during the next, and the rest is inferred.
SEARCH_ACCUMULATION = 2

# Purposes whose trials run the workload's true accumulation.
_WHOLE_STEPS = (Purpose.FINAL, Purpose.LOSS_CHECK, Purpose.EXPLAIN)

# Purposes whose trials are compared with each other, and so measured more finely than those of the search.
_AGAIN = (Purpose.FINAL, Purpose.EXPLAIN)

# A check is over after the steps it asks for, however long they take and however much they differ.
_NEVER_SURE, _NO_TIME_LIMIT_S = 1e-12, 1e9


def request_of(
    plan: SearchPlan,
    config: TrainConfig,
    purpose: Purpose,
    *,
    number: int,
    timeout_s: float,
    task: CheckTask | None = None,
    prediction: Prediction | None = None,
    cold_compile: bool = False,
    to_beat: float | None = None,
) -> TrialRequest:
    """Return the request for a trial of `config`.

    Args:
        plan: The search.
        config: What is run.
        purpose: Why.
        number: Of the trial.
        timeout_s: When it is ended.
        task: Of a check.
        prediction: What the cost model expects.
        cold_compile: Whether what is compiled is compiled anew, as in a user's first run.
        to_beat: Samples/s below which the exact rate doesn't matter; None: it always does.
    """
    full = plan.workload.accumulation_steps(config)
    # What is inside a step of the user's own can't be seen, and so not be inferred.
    whole = purpose in _WHOLE_STEPS or plan.workload.own_step is not None
    return TrialRequest(
        number=number,
        purpose=purpose,
        config=config,
        workload=plan.workload,
        device=plan.hardware.device,
        accumulation_steps=full if whole else min(full, SEARCH_ACCUMULATION),
        prediction=prediction,
        limits=_limits(plan, task, timeout_s).model_copy(
            update={
                "beaten_step_s": plan.workload.samples_per_step(config) / to_beat if to_beat else None,
                **(plan.budget.when_measured_again if purpose in _AGAIN else {}),
            }
        ),
        task=task,
        cold_compile=cold_compile,
    )


def _limits(plan: SearchPlan, task: CheckTask | None, timeout_s: float) -> Limits:
    budget = plan.budget
    limits = Limits(
        memory_bytes=plan.memory_bytes,
        timeout_s=timeout_s,
        discarded_steps=budget.discarded_steps,
        discarded_s=budget.discarded_s,
        measure_steps=budget.measure_steps,
        measure_time_s=budget.measure_time_s,
        relative_interval=budget.relative_interval,
    )
    if task is None or isinstance(task, RoutingTask):
        return limits
    # Of a soak, the first step makes the optimizer's states and the next two meet them.
    steps = task.steps if isinstance(task, LossTask) else 2
    fixed = {"measure_time_s": _NO_TIME_LIMIT_S, "relative_interval": _NEVER_SURE}
    return limits.model_copy(update={"discarded_steps": 1, "discarded_s": 0.0, "measure_steps": max(2, steps), **fixed})
