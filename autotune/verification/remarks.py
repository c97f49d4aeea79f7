"""Remarks on a result, in lines: failed checks, faster trials, disturbances; and the error of a search without one.

Disturbances of a single trial are reported when it ends (`autotune.values.conditions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from autotune.errors import AutotuneError, InfrastructureError, InputError, NothingFitsError, NothingPassedError
from autotune.planning.plan import SearchPlan, SearchState
from autotune.space.knobs import changes, shown_changes
from autotune.units import show_memory, show_rate
from autotune.values.conditions import WORTH_A_WARNING
from autotune.values.config import Allowance, TrainConfig
from autotune.values.result import shown_rate
from autotune.values.statistics import drift
from autotune.values.trial import Measurement, TrialResult, TrialStatus
from autotune.verification.checks import ending, largest_default
from autotune.verification.finals import Finals

# Least drift of the machine's speed that is reported.
WORTH_TELLING = 0.03

# Number of failed configurations that an error names.
_NAMED = 3


def plain_notes(state: SearchState) -> tuple[str, ...]:
    """Return the warnings of trials, and the reference in place of a baseline that ran out of memory."""
    plan, history, results = state.plan, state.history, state.results
    notes = tuple(f"trial {r.request.number}: {warning}" for r in results for warning in r.warnings)
    baseline = history.known(plan.baseline)
    if baseline is not None and baseline.measurement is not None:
        notes += baseline.measurement.warnings
    if baseline is not None and baseline.status is TrialStatus.OUT_OF_MEMORY:
        reference = largest_default(plan, history)
        if reference is not None:
            notes += (
                "the baseline ran out of memory; the largest default that fits has a micro-batch of "
                f"{reference.request.config.per_device_train_batch_size} (trial {reference.request.number})",
            )
    return notes


def proof_notes(finals: Finals, best: TrainConfig) -> tuple[str, ...]:
    """Return the configurations that failed a check, and the checks that the winner lacks, a line each."""
    refused = [
        f"refused as the winner: {shown_changes(changes(config, finals.plan))}: {reason}"
        for config, reason in finals.proof.refusals().items()
    ]
    measured = finals.merged(best)
    if (measured is not None and measured.ran_short) or finals.runs_short(best):
        refused.append("the allocator ran short while the winner was measured: it is too near the memory budget")
    return (*refused, *finals.proof.gaps(best))


def faster_trial(finals: Finals, best: TrainConfig) -> str | None:
    """Return why the fastest trial of the search, if it was faster than the winner, didn't win; otherwise None.

    Of many configurations that are each measured once, the fastest is likely to have been lucky.
    """
    plan, answer = finals.plan, finals.merged(best)
    if answer is None:
        return None
    than = "your baseline" if best == plan.baseline else "the winner"
    again = {c: m for c in finals.contenders() if c != best and (m := finals.merged(c)) is not None}
    rate_of = plan.objective.rate
    above = max(again, key=lambda c: rate_of(again[c]), default=None)
    if above is not None and rate_of(again[above]) > rate_of(answer) and _is_shown_faster(again[above], answer):
        what, rate = shown_changes(changes(above, plan)), shown_rate(again[above])
        return f"{what} gave {rate} samples/s in the finals, not clearly more than {than}, which changes less"
    others = (r for r in finals.history.ranking() if r.request.config != best and r.measurement is not None)
    fastest = max(others, key=lambda r: r.measurement.samples_per_second if r.measurement else 0.0, default=None)
    if fastest is None or fastest.measurement is None or not _is_shown_faster(fastest.measurement, answer):
        return None
    what = shown_changes(changes(fastest.request.config, plan))
    number, rate, why = fastest.request.number, shown_rate(fastest.measurement), _reason(finals, fastest, answer)
    return f"trial {number} ({what}) gave {rate} samples/s in the search, more than {than}: {why}"


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
        return f"measured again in turn it gave {shown_rate(again)}"
    if config in finals.contenders():
        return "there was no time to measure it again"
    finalists = finals.finalists
    fastest_ones = "the fastest of the search is" if finalists == 1 else f"the {finalists} fastest of the search are"
    return f"{fastest_ones} measured again (--effort {plan.budget.effort})"


def _is_shown_faster(one: Measurement, other: Measurement) -> bool:
    mine, theirs = one.samples_per_second, other.samples_per_second
    return mine > theirs and show_rate(mine) != show_rate(theirs)


def disturbance_notes(results: Sequence[TrialResult], baseline_finals: Sequence[TrialResult]) -> tuple[str, ...]:
    """Return a line for each kind of disturbance of the trials, of which the baseline's finals show a drift."""
    seen = [m.conditions for r in results if (m := r.measurement) is not None and m.conditions is not None]
    lines = []
    for who, share in (("other processes", "others_share"), ("the hypervisor", "stolen_share")):
        taken = [getattr(c, share) for c in seen if (c.could_cost(getattr(c, share)) or 0.0) >= WORTH_A_WARNING]
        if taken:
            most = f"{min(taken):.0%} to {max(taken):.0%}" if len(taken) > 1 else f"{taken[0]:.0%}"
            lines.append(
                f"noise: {who} took {most} of the cores' time during {len(taken)} of {len(seen)} measurements; "
                "a quiet machine would tell more surely"
            )
    if slowed := [c for c in seen if c.throttled]:
        reasons = ", ".join(sorted({reason for c in slowed for reason in c.throttled}))
        hottest = max((c.temperature_c for c in slowed if c.temperature_c is not None), default=None)
        heat = f", at up to {hottest:.0f} °C" if hottest is not None else ""
        lines.append(
            f"noise: the GPU was slowed down by {reasons}{heat} during {len(slowed)} of {len(seen)} measurements"
        )
    # The baseline's work is the same in each of its finals, so that the machine's speed has changed between them.
    again = [(r.request.number, r.measurement.step_times_s) for r in baseline_finals if r.measurement]
    if (change := drift([times for _, times in again])) >= WORTH_TELLING:
        *others, last = (str(number) for number, _ in again)
        far = f"{change:.0%}" if change < 1 else f"a factor of {show_rate(1 + change)}"
        lines.append(
            f"noise: the machine's speed drifted by {far} between trials of the baseline ({', '.join(others)} and "
            f"{last}); the finals are compared round by round, the trials of the search are not"
        )
    return tuple(lines)


def drifts_apart(finals: Finals) -> tuple[str, ...]:
    """Return a line for each finalist whose ratio to the baseline changed in the course of their rounds in turn."""
    lines, baseline = [], finals.plan.baseline
    for config in finals.contenders():
        for pairs in finals.pairs(config, baseline) if config != baseline else ():
            ratios = [theirs / ours for theirs, ours in pairs]
            if (change := drift([ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]])) >= WORTH_TELLING:
                what = shown_changes(changes(config, finals.plan))
                lines.append(f"noise: {what} drifted by {change:.0%} beside the baseline while they ran in turn")
    return tuple(lines)


def nothing_found(plan: SearchPlan, results: Sequence[TrialResult], run_directory: str = "") -> AutotuneError:
    """Return the error for a search without an answer: nothing passed, nothing fits, or trials fail otherwise."""
    if any(r.measurement is not None and r.request.purpose.explores for r in results):
        return _nothing_passed(Finals(SearchState(plan, results)))
    ran = [r for r in results if r.duration_s > 0] or results  # a baseline that can't fit isn't run
    failures = [(r, r.outcome) for r in ran if r.outcome.kind == "failure"]
    others = [(r, f) for r, f in failures if f.status is not TrialStatus.OUT_OF_MEMORY]
    if others and len(others) == len(failures):
        result, failure = others[0]
        log = PurePath(run_directory, "trials", f"{result.request.number:04d}", "log.txt")
        too_slow = all(f.status is TrialStatus.TIMED_OUT for _, f in others)
        own = plan.workload.own_code is not None or plan.workload.own_step is not None
        raised = all(f.status is not TrialStatus.TIMED_OUT and f.phases is not None for _, f in others)
        kind = InputError if own and raised else InfrastructureError  # what the user's code raised is the code's
        return kind(
            f"no trial completed; trial {result.request.number} {failure.status}: {failure.cause} "
            f"(its log: {log}){f'; {plan.budget.against_timeouts}' if too_slow else ''}"
        )
    # The search goes from heavy to light, so its last trial out of memory came closest.
    closest, failure = [(r, f) for r, f in failures if f.status is TrialStatus.OUT_OF_MEMORY][-1]
    what = shown_changes(changes(closest.request.config, plan))
    seen = f" (it had reached {show_memory(failure.memory.peak_bytes)})" if failure.memory else ""
    remedies = ["a larger --memory", "a shorter --seq-len"]
    if plan.allowance is not Allowance.METHOD:
        remedies.insert(0, "--allow method (LoRA, pure bf16)")
    return NothingFitsError(
        f"nothing fits {show_memory(plan.memory_bytes)}: the closest, {what}, still ran out{seen}; "
        f"what could make it fit: {', '.join(remedies)}"
    )


def _nothing_passed(finals: Finals) -> NothingPassedError:
    """Return the error that names what failed, the fastest first, with its cause."""
    causes = []
    for config in (r.request.config for r in finals.history.ranking()):
        failed = [r for r in finals.trials(config) if r.has_failed]
        cause = finals.proof.refusal(config) or (ending(failed[-1]) if failed else "the allocator ran short of memory")
        causes.append(f"{shown_changes(changes(config, finals.plan)) or 'the baseline'}: {cause}")
    more = f"; and {len(causes) - _NAMED} more" if len(causes) > _NAMED else ""
    return NothingPassedError(
        f"nothing passed: what trained failed when measured again or checked ({'; '.join(causes[:_NAMED])}{more}); "
        "a larger --memory or a shorter --seq-len leaves more room"
    )
