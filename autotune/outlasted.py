"""What the lasting record knows of trials that did not end in their time: who needs no other, and what helps.

Pure; called by `autotune.recall`. Time is not memory: the machine may have been busy then. So nothing is refused before
the baseline has told how fast the machine is beside what it was, and the baseline itself is always tried.
"""

from __future__ import annotations

from autotune.budget import Budget
from autotune.pacing import HOPELESS_FACTOR, HOPELESS_S
from autotune.recalled import Known
from autotune.trial import TrialResult, TrialStatus
from autotune.units import show_time


def foreword(baseline: Known | None, budget: Budget) -> str | None:
    """Return what is to be known before the baseline is tried again; None if it wasn't too slow for its time."""
    if baseline is None or baseline.result.status is not TrialStatus.TIMED_OUT:
        return None
    took, limit = show_time(baseline.kept.duration_s), show_time(budget.trial_timeout_s)
    text = f"the baseline did not end within {took} on {baseline.kept.day} (record); it is tried for {limit} now"
    return text if baseline.kept.duration_s < budget.trial_timeout_s else f"{text}; {budget.against_timeouts}"


def speed(then: Known | None, now: TrialResult | None) -> float | None:
    """Return how many times as fast the machine is as it was, by a configuration's trials; None: they don't tell.

    One that doesn't end now either, or that did then, says that the machine is not faster.
    """
    if then is None or now is None:
        return None
    if now.measurement is None:
        return 1.0 if now.status is TrialStatus.TIMED_OUT else None
    if then.result.measurement is None:
        return None
    return now.measurement.samples_per_second / then.result.measurement.samples_per_second


def refusal(known: Known, speed: float | None, leader: TrialResult | None, budget: Budget) -> str | None:
    """Return why a recorded trial that did not end wouldn't end now either, or None.

    Args:
        known: It.
        speed: How many times as fast the machine is.
        leader: The best so far, beside which a trial is ended early.
        budget: Of the search.
    """
    if speed is None or known.result.status is not TrialStatus.TIMED_OUT:
        return None
    limit_s = budget.trial_timeout_s
    if leader is not None and known.config.torch_compile_backend is None:
        limit_s = min(limit_s, HOPELESS_S + HOPELESS_FACTOR * leader.duration_s)
    if known.kept.duration_s / speed < limit_s:
        return None
    return f"did not end within {show_time(known.kept.duration_s)} on {known.kept.day} (record)"
