"""Why a trial that was faster than the answer isn't the answer.

A search looks at many configurations once, so the fastest single trial is likely to
have been lucky: who wins is measured again, in turn with the baseline.
"""

from __future__ import annotations

from autotune.space.knobs import changes, shown_changes
from autotune.units import show_rate
from autotune.values.config import TrainConfig
from autotune.values.trial import Measurement, TrialResult
from autotune.verification.finals import Finals


def outshone(finals: Finals, best: TrainConfig) -> str | None:
    """Return a line on the fastest trial of the search that was faster than the answer; None if none was.

    Args:
        finals: What measuring the leaders again gave.
        best: The answer.
    """
    plan, answer = finals.plan, finals.merged(best)
    if answer is None:
        return None
    others = (r for r in finals.history.ranking() if r.request.config != best and r.measurement is not None)
    fastest = max(others, key=lambda r: r.measurement.samples_per_second if r.measurement else 0.0, default=None)
    if fastest is None or fastest.measurement is None or not _is_shown_faster(fastest.measurement, answer):
        return None
    what = shown_changes(changes(fastest.request.config, plan))
    rate, steps = show_rate(fastest.measurement.samples_per_second), len(fastest.measurement.step_times_s)
    return (
        f"trial {fastest.request.number} ({what}) gave {rate} samples/s, more than the answer: one trial of {steps} "
        f"steps; {_reason(finals, fastest, answer)}"
    )


def _reason(finals: Finals, fastest: TrialResult, answer: Measurement) -> str:
    plan, config = finals.plan, fastest.request.config
    refused = finals.proof.refusal(config)
    if refused is not None:
        return f"it was refused when it was checked ({refused})"
    if finals.ran_short(config):
        return "the allocator ran short when it was measured again: it is too near the memory budget"
    if finals.has_failed(config):
        return "it failed when it was measured again"
    again = finals.merged(config)
    latest = again or fastest.measurement
    is_behind = latest is not None and plan.objective.rate(latest) < plan.objective.rate(answer)
    if latest is not None and is_behind and _is_shown_faster(latest, answer):
        return "what it takes at the start isn't won back in a run of this length"
    if again is not None:
        alike = ", which can't be told from an answer that changes less" if _is_shown_faster(again, answer) else ""
        return f"measured again, in turn with the others, it gave {show_rate(again.samples_per_second)}{alike}"
    if config in finals.contenders():
        return "there was no time to measure it again"
    finalists = plan.budget.finalists
    fastest_ones = "the fastest of the search is" if finalists == 1 else f"the {finalists} fastest of the search are"
    return f"{fastest_ones} measured again (--effort {plan.budget.effort})"


def _is_shown_faster(one: Measurement, other: Measurement) -> bool:
    """Whether a reader sees a higher rate."""
    mine, theirs = one.samples_per_second, other.samples_per_second
    return mine > theirs and show_rate(mine) != show_rate(theirs)
