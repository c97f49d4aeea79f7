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
    others = (r for r in finals.history.ranking() if r.request.config != best)
    fastest = max(others, key=lambda r: r.measurement.samples_per_second if r.measurement else 0.0, default=None)
    seen = fastest.measurement if fastest is not None else None
    if answer is None or fastest is None or seen is None or not _is_shown_faster(seen, answer):
        return None
    config, again = fastest.request.config, finals.merged(fastest.request.config)
    latest = again or seen
    if finals.has_failed(config):
        why = "it failed when it was measured again or checked"
    elif _is_shown_faster(latest, answer) and plan.objective.rate(latest) < plan.objective.rate(answer):
        why = "what it takes at the start isn't won back in a run of this length"
    elif again is None:
        why = "it was not measured again, for which there is time for few"
    else:
        by = ", not clearly more" * _is_shown_faster(again, answer)
        why = f"measured again in turn it gave {shown_rate(again)}{by}"
    than = "your baseline" if best == plan.baseline else "the winner"
    what, number = shown_changes(changes(config, plan)), fastest.request.number
    return f"trial {number} ({what}) gave {shown_rate(seen)} samples/s in the search, more than {than}: {why}"


def _is_shown_faster(one: Measurement, other: Measurement) -> bool:
    mine, theirs = one.samples_per_second, other.samples_per_second
    return mine > theirs and show_rate(mine) != show_rate(theirs)


def disturbance(finals: Finals) -> str | None:
    """Return in a line by how much the machine was disturbed at the worst; None if it was quiet.

    The baseline's work is the same in each of its finals: where it takes longer, the machine has become slower.
    """
    seen = [m.conditions for r in finals.state.results if (m := r.measurement) is not None and m.conditions is not None]
    found = []
    for conditions in seen:
        found += [
            (share, f"{who} took {share:.0%} of the cores' time")
            for who, share in (
                ("other processes", conditions.others_share),
                ("the hypervisor", conditions.stolen_share),
            )
            if share is not None and (conditions.could_cost(share) or 0.0) >= WORTH_A_WARNING
        ]
        found += [(share, f"the GPU was slowed down by {why}") for why, share in conditions.throttled.items()]
    times = [m.step_times_s for r in finals.trials(finals.plan.baseline) if (m := r.measurement)]
    if (change := drift(times)) >= WORTH_TELLING:
        found.append((change, f"its speed drifted by {change:.0%} between trials of the baseline"))
    worst = max(found, default=None)
    return (
        None if worst is None else f"noise: the machine was disturbed: {worst[1]}; a quiet one would tell more surely"
    )


def nothing_found(plan: SearchPlan, results: Sequence[TrialResult], run_directory: str = "") -> AutotuneError:
    """Return the error for a search without an answer: nothing passed, nothing fits, or trials fail otherwise."""
    if any(r.measurement is not None and r.request.purpose.explores for r in results):
        finals, causes = Finals(SearchState(plan, results)), []  # the fastest first
        for config in (r.request.config for r in finals.history.ranking()):
            failed = [r for r in finals.trials(config) if r.has_failed]
            short = ending(failed[-1]) if failed else "the allocator ran short of memory"
            named = shown_changes(changes(config, plan)) or "the baseline"
            causes.append(f"{named}: {finals.proof.refusal(config) or short}")
        more = f"; and {len(causes) - _NAMED} more" if len(causes) > _NAMED else ""
        return NothingPassedError(
            f"nothing passed: what trained failed when measured again or checked ({'; '.join(causes[:_NAMED])}{more}); "
            "a larger --memory or a shorter --seq-len leaves more room"
        )
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
