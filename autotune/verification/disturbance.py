"""What of a search's trials was disturbed, told in a few lines: other processes, a slowed GPU, a machine that drifted.

Pure. Called for the answer; what disturbed a single trial is told when it ends (`autotune.values.conditions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.values.conditions import WORTH_A_WARNING, Conditions
from autotune.values.statistics import drift
from autotune.values.trial import TrialResult

# A drift below this is smaller than what a search could act upon.
WORTH_TELLING = 0.03


def disturbance_notes(results: Sequence[TrialResult], baseline_finals: Sequence[TrialResult]) -> tuple[str, ...]:
    """Return a line for each kind of disturbance.

    Args:
        results: All trials.
        baseline_finals: The baseline's trials of the finals, in the order they ran.
    """
    seen = [m.conditions for r in results if (m := r.measurement) is not None and m.conditions is not None]
    return (*_shares(seen), *_throttling(seen), *_drift(baseline_finals))


def _shares(seen: Sequence[Conditions]) -> list[str]:
    kinds: list[tuple[str, Callable[[Conditions], float | None]]] = [
        ("other processes took", lambda c: c.others_share),
        ("the hypervisor took", lambda c: c.stolen_share),
    ]
    lines = []
    for who, share_of in kinds:
        counting = (c for c in seen if (c.could_cost(share_of(c)) or 0.0) >= WORTH_A_WARNING)
        shares = sorted(s for c in counting if (s := share_of(c)) is not None)
        if shares:
            most = f"{shares[0]:.0%} to {shares[-1]:.0%}" if len(shares) > 1 else f"{shares[0]:.0%}"
            lines.append(
                f"noise: {who} {most} of the cores' time during {len(shares)} of {len(seen)} measurements; "
                "a quiet machine would tell more surely"
            )
    return lines


def _throttling(seen: Sequence[Conditions]) -> list[str]:
    slowed = [c for c in seen if c.throttled]
    if not slowed:
        return []
    reasons = ", ".join(sorted({reason for c in slowed for reason in c.throttled}))
    hottest = max((c.temperature_c for c in slowed if c.temperature_c is not None), default=None)
    heat = f", at up to {hottest:.0f} °C" if hottest is not None else ""
    return [f"noise: the GPU was slowed down by {reasons}{heat} during {len(slowed)} of {len(seen)} measurements"]


def _drift(baseline_finals: Sequence[TrialResult]) -> list[str]:
    """Say how far apart the baseline's own trials were: the same work, so the machine has changed."""
    measured = [(r.request.number, r.measurement.step_times_s) for r in baseline_finals if r.measurement]
    change = drift([times for _, times in measured])
    if change < WORTH_TELLING:
        return []
    numbers = " and ".join(str(number) for number, _ in measured)
    return [
        f"noise: the machine's speed drifted by {change:.0%} between trials of the baseline ({numbers}); "
        "the finals are compared round by round, the trials of the search are not"
    ]
