"""Computes the result of a search from its trials: the winner, its speed-up, the verdict, and remarks in lines.

The winner is the finalist with the highest throughput; where the intervals overlap, it is the simpler configuration,
which changes less of the training. A trial's disturbances are reported when it ends (`autotune.values.conditions`).
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from autotune.errors import AutotuneError, InfrastructureError, InputError, NothingFitsError, NothingPassedError
from autotune.planning.plan import SearchPlan, SearchState
from autotune.space.knobs import changes, shown_changes
from autotune.training.arguments import arguments_of
from autotune.units import show_memory, show_rate
from autotune.values.conditions import POWER_CAP
from autotune.values.config import Allowance, TrainConfig
from autotune.values.result import Compilation, Contender, ResultData, StepTime, TrialRow, Verdict, rows_of
from autotune.values.statistics import Speedup, drift
from autotune.values.time_spent import Spent
from autotune.values.trial import Measurement, Purpose, StepParts, TrialResult, TrialStatus
from autotune.verification.checks import largest_default
from autotune.verification.finals import WORTH_DECIDING, Finals
from autotune.version import __version__

RUNNERS_UP = 4


def assemble(finals: Finals, search_time_s: float, starting: Mapping[str, float] | None = None) -> ResultData | None:
    """Return the result so far; None: nothing stood its trials. `starting`: seconds before them, by kind of work."""
    plan, results, refused = finals.plan, finals.state.results, finals.state.refused
    if not finals.contenders():
        return None
    decision = verdict_of(finals)
    proof, best, corrections = finals.proof, decision.best, _corrections(finals, decision)
    soaked = proof.soaked(best)
    ranked = [c for r in finals.history.ranking() if finals.failure(c := r.request.config) is None]
    contenders = [_contender(finals, c, corrections) for c in ranked]
    contenders.sort(key=lambda c: c.rate(plan.objective), reverse=True)
    others = [c for c in contenders if c.config not in (best, plan.baseline)]
    baseline_cause = None  # why it can't be compared with; None too if it hasn't run
    if plan.baseline not in finals.contenders():
        outcomes = (r.outcome for r in finals.trials_of(plan.baseline))
        failed = next((f"{o.status}: {o.cause}" for o in outcomes if o.kind == "failure"), None)
        baseline_cause = failed or proof.refusal(plan.baseline)
    by_allowance: dict[Allowance, Contender] = {}  # the winner, where it belongs to a class, or else the fastest
    for allowance in filter(plan.allowance.admits, Allowance):
        if admitted := [c for c in contenders if allowance.admits(c.allowance)]:
            by_allowance[allowance] = next((c for c in admitted if c.config == best), admitted[0])
    ours, reference, compilation = finals.merged(best), finals.merged(plan.baseline), None
    if best.torch_compile_backend is not None and ours is not None:
        steps = ours.break_even_steps(reference) if reference is not None else None
        compilation = Compilation(cold_start_s=ours.cold_start_s, break_even_steps=steps)
    return ResultData(
        autotune_version=__version__,
        verdict=decision.verdict,
        **{**plan.problem_fields(), "baseline": _contender(finals, plan.baseline, corrections)},
        baseline_cause=baseline_cause,
        best=_contender(finals, best, corrections),
        arguments=arguments_of(best, plan.workload, plan.hardware, soaked),
        soaked=soaked,
        loss_check=proof.verdict(best),
        proof_notes=_proof_notes(finals, best),
        objective=plan.objective,
        compilation=compilation,
        speedup=decision.speedup,
        challenger=_challenger(finals) if best == plan.baseline else None,
        kept_because=decision.kept_because,
        others_share=decision.others_share,
        best_by_allowance=by_allowance,
        # Those of the finals first, among which is one for each number of devices.
        runners_up=tuple(sorted(others, key=lambda c: not c.confirmed))[: max(RUNNERS_UP, len(plan.world_sizes))],
        trials=(
            *trial_rows(finals, corrections),
            *(TrialRow(number=None, config=c, status=TrialStatus.REJECTED, cause=why) for c, why in refused.items()),
        ),
        notes=plan.notes + _plain_notes(finals.state),
        disturbances=disturbances(finals, best),
        outshone=faster_finalist(finals, best) or faster_trial(finals, best),
        search_time_s=search_time_s,
        spent=Spent.of(results, search_time_s, starting or {}),
    )


class Decision(NamedTuple):
    """The winner, the verdict, and the speed-up over the baseline."""

    best: TrainConfig
    verdict: Verdict
    speedup: Speedup | None = None
    kept_because: str | None = None  # why the baseline is kept and not an unconfirmed leader
    others_share: float | None = None  # of the machine, that other processes took, where that left it open


def verdict_of(finals: Finals) -> Decision:
    """Return the decision by the trials so far; a configuration has completed and has not failed afterwards."""
    plan, contenders = finals.plan, finals.contenders()
    measured = [c for c in contenders if finals.is_measured(c)]
    ranking = [config for r in finals.history.ranking() if (config := r.request.config) in contenders]
    leader = ranking[0]
    if plan.baseline not in contenders:
        roomy = (c for c in ranking if not finals.runs_short(c))
        best = finals.simplest_of_the_fastest(measured)[0] if measured else next(roomy, leader)
        is_over = finals.history.known(plan.baseline) is not None  # else it runs, elsewhere
        return Decision(best, "baseline_failed" if is_over else "unconfirmed")
    if plan.baseline not in measured or len(measured) < 2:
        if leader == plan.baseline:
            others = [r.status for r in finals.history.results if r.request.config != plan.baseline]
            if set(others) - {TrialStatus.TIMED_OUT}:
                share = finals.others_share()
                return Decision(leader, "no_clear_winner" if share is None else "undecided", others_share=share)
            which = "the only other trial" if len(others) == 1 else "every other trial"
            told = f"{which} timed out" if others else "nothing else was tried"
            return Decision(leader, "unconfirmed", kept_because=told)

        def shown(config: TrainConfig) -> float:  # as it is told: of the finals, where they have run
            return plan.objective.rate(seen) if (seen := finals.measurement(config)) is not None else 0.0

        doubts = {c: _doubt(finals, c) for c in sorted(ranking, key=shown, reverse=True) if c != plan.baseline}
        best = next((c for c, doubt in doubts.items() if doubt is None), plan.baseline)
        return Decision(best, "unconfirmed", kept_because=doubts[leader] if best == plan.baseline else None)
    best, _ = finals.simplest_of_the_fastest(measured)
    if (speedup := _speedup(finals, best)) is not None:
        return Decision(best, "faster", speedup)
    # If finals are undecided and other processes took much of the machine meanwhile, they are the cause.
    # Finals that ran one after the other don't decide by their intervals then; trials in turn share what others take.
    others_share, challenger = finals.others_share(), _challenger(finals)
    is_unsure = challenger is not None and challenger.bound is None
    if others_share is not None and not finals.ran_in_turn():
        is_unsure = is_unsure or challenger is None or challenger.interval.high > WORTH_DECIDING
    return Decision(best, "undecided", others_share=others_share) if is_unsure else Decision(best, "no_clear_winner")


def _challenger(finals: Finals) -> Speedup | None:
    found = [speedup for c in finals.contenders() if (speedup := _speedup(finals, c)) is not None]
    return max(found, key=lambda speedup: speedup.interval.high, default=None)


def _speedup(finals: Finals, config: TrainConfig) -> Speedup | None:
    return finals.speedup(config, finals.plan.baseline) if config != finals.plan.baseline else None


def _doubt(finals: Finals, config: TrainConfig) -> str | None:
    """Return which measurements put the unconfirmed `config` below the baseline; None if none do."""
    plan = finals.plan
    measured, theirs_all = (
        [(r.request.number, r.measurement) for r in finals.trials_of(c) if r.measurement is not None]
        for c in (config, plan.baseline)
    )
    if finals.runs_short(config):
        return f"the allocator ran short in trial {measured[0][0]}, which was not measured again"
    rate = plan.objective.rate
    their_trial, theirs = max(theirs_all, key=lambda m: rate(m[1]))
    our_trial, ours = min(measured, key=lambda m: rate(m[1]))
    if rate(ours) >= rate(theirs):
        return None
    told = f"{shown_changes(changes(config, plan))} {show_rate(rate(ours))} in trial {our_trial}"
    return f"the baseline gave {show_rate(rate(theirs))} samples/s in trial {their_trial}, {told}"


def _corrections(finals: Finals, decision: Decision) -> dict[TrainConfig, float]:
    """Return the corrections of rates that were measured once; with them none is above the rate of a decided winner."""
    found, objective = finals.corrections(), finals.plan.objective
    measured, base = finals.merged(decision.best), finals.merged(finals.plan.baseline)
    if measured is None or base is None or decision.verdict not in ("faster", "no_clear_winner"):
        return found
    ratio = 1.0 if decision.speedup is None else decision.speedup.ratio
    most = min(objective.rate(measured), ratio * objective.rate(base))
    trials = [(c, finals.state.measured(c)) for c in found]
    return {c: min(found[c], most / objective.rate(seen)) for c, seen in trials if seen is not None}


def _contender(finals: Finals, config: TrainConfig, corrections: Mapping[TrainConfig, float]) -> Contender:
    measured, trials = finals.measurement(config), finals.trials_of(config)
    predicted = next((r.request.prediction for r in trials if r.request.prediction is not None), None)
    correction, tokens = corrections.get(config, 1.0), finals.plan.workload.tokens_per_sample
    rate = measured.samples_per_second * correction if measured else None
    return Contender(
        config=config,
        changes=changes(config, finals.plan),
        measurement=measured,
        trials=tuple(r.request.number for r in trials),
        confirmed=finals.is_measured(config),
        speedup=_speedup(finals, config),
        correction=correction,
        tokens_per_second=rate * tokens if rate and tokens else None,
        mfu=predicted.mfu_at(rate) if predicted and rate else None,
        step=_step_time(finals, config, measured, predicted.parts if predicted else {}) if measured else None,
    )


def _step_time(finals: Finals, config: TrainConfig, measured: Measurement, predicted: StepParts) -> StepTime | None:
    """Return where a step's time goes: the device's work by a profile, the wait for data, and the host for the rest."""
    step_s, waits = statistics.fmean(measured.step_times_s), measured.data_wait_share or 0.0
    parts: StepParts = {**{part: share * (1.0 - waits) for part, share in predicted.items()}, "data": waits}
    profiles = [m.busy_s for r in finals.state.trials(config, Purpose.PROFILE) if (m := r.measurement) and m.busy_s]
    if profiles:
        parts = {**{part: seconds / step_s for part, seconds in profiles[-1].items()}, "data": waits}
        parts["host"] = max(0.0, 1.0 - sum(parts.values()))
    if not predicted and not profiles:
        return None
    whole = sum(parts.values())
    shares: StepParts = {part: share / whole for part, share in parts.items() if share}
    return StepTime(seconds=step_s, shares=shares, is_profiled=bool(profiles))


def trial_rows(finals: Finals, corrections: Mapping[TrainConfig, float] | None = None) -> list[TrialRow]:
    """Return the rows of the trials; a loss run that failed the check is marked invalid, although it completed."""
    configs = {r.request.config for r in finals.state.results}
    measured = {c: m.samples_per_second for c in configs if (m := finals.measurement(c)) is not None}
    rates = {c: rate * (corrections or {}).get(c, 1.0) for c, rate in measured.items()}
    found = []
    for row in rows_of(finals.state.results):
        update: dict[str, Any] = {"config_samples_per_second": rates.get(row.config)}
        verdict = finals.proof.verdict(row.config) if row.purpose is Purpose.LOSS_CHECK else None
        if verdict is not None and not verdict.passed:
            update |= {"status": TrialStatus.INVALID, "cause": row.cause or verdict.statement}
        found.append(row.model_copy(update=update))
    return found


def _plain_notes(state: SearchState) -> tuple[str, ...]:
    """Return the warnings of trials, and which default stands in for a baseline that ran out of memory."""
    plan, history, results = state.plan, state.history, state.results
    notes = tuple(f"trial {r.request.number}: {warning}" for r in results for warning in r.warnings)
    baseline = history.known(plan.baseline)
    if baseline is not None and baseline.measurement is not None:
        notes += baseline.measurement.warnings
    known = [m.conditions for r in results if (m := r.measurement) is not None and m.conditions is not None]
    seen = [conditions.throttled.get(POWER_CAP, 0.0) >= 0.5 for conditions in known]  # for most of the time
    if any(seen):
        trials = f"{sum(seen)} of {len(seen)} trials"
        notes += (f"the GPU ran at its power limit in {trials}: there it settles under load, as in your training",)
    reference = largest_default(plan, history)
    if baseline is not None and baseline.status is TrialStatus.OUT_OF_MEMORY and reference is not None:
        size = f"{reference.request.config.per_device_train_batch_size} (trial {reference.request.number})"
        notes += (f"the baseline ran out of memory; the largest default that fits has a micro-batch of {size}",)
    return notes


def _proof_notes(finals: Finals, best: TrainConfig) -> tuple[str, ...]:
    """Return the configurations that failed a check, and the checks that the winner lacks, a line each."""
    refused = [
        f"refused as the winner: {shown_changes(changes(config, finals.plan))}: {reason}"
        for config, reason in finals.proof.refusals().items()
    ]
    measured = finals.merged(best)
    if (measured is not None and measured.ran_short) or finals.runs_short(best):
        refused.append("the allocator ran short while the winner was measured: it is too near the memory budget")
    return (*refused, *finals.proof.gaps(best))


def faster_finalist(finals: Finals, best: TrainConfig) -> str | None:
    """Return that the fastest finalist, if it was faster than the winner, was so not clearly; otherwise None."""
    measured = {c: m for c in finals.contenders() if finals.is_measured(c) and (m := finals.merged(c)) is not None}
    fastest = max(measured.keys() - {finals.plan.baseline}, key=lambda c: measured[c].samples_per_second, default=best)
    needed = {best, finals.plan.baseline} & {best, *finals.contenders()}
    is_slower = needed <= measured.keys() and _is_shown_faster(measured[fastest], measured[best])
    if not is_slower or best == finals.plan.baseline or finals.plan.objective.run_samples is not None:
        return None
    what, rate = shown_changes(changes(fastest, finals.plan)), measured[fastest].shown_rate()
    return f"{what} gave {rate} samples/s, not clearly more than the winner, which is simpler"


def faster_trial(finals: Finals, best: TrainConfig) -> str | None:
    """Return why the fastest trial of the search, if it was faster than the winner, didn't win; otherwise None."""
    # Of many configurations that are each measured once, the fastest is likely to have been lucky.
    plan, answer = finals.plan, finals.merged(best)
    others = (r for r in finals.history.ranking() if r.request.config != best)
    fastest = max(others, key=lambda r: r.measurement.samples_per_second if r.measurement else 0.0, default=None)
    seen = fastest.measurement if fastest is not None else None
    if answer is None or fastest is None or seen is None or not _is_shown_faster(seen, answer):
        return None
    at_the_time = finals.history.known(best)  # the machine may have become slower by the finals
    if at_the_time is not None and at_the_time.measurement and not _is_shown_faster(seen, at_the_time.measurement):
        return None
    config, again = fastest.request.config, finals.merged(fastest.request.config)
    latest = again or seen
    if finals.failure(config) is not None:
        why = "it failed when it was measured again or checked"
    elif _is_shown_faster(latest, answer) and plan.objective.rate(latest) < plan.objective.rate(answer):
        why = "what it takes at the start isn't won back in a run of this length"
    elif again is None:
        why = "it was not measured again, for which there is time for few"
    else:
        by = ", not clearly more" * _is_shown_faster(again, answer)
        why = f"measured again in turn it gave {again.shown_rate()}{by}"
    than = "your baseline" if best == plan.baseline else "the winner"
    what, number = shown_changes(changes(config, plan)), fastest.request.number
    return f"trial {number} ({what}) gave {seen.shown_rate()} samples/s in the search, more than {than}: {why}"


def _is_shown_faster(one: Measurement, other: Measurement) -> bool:
    mine, theirs = one.samples_per_second, other.samples_per_second
    return mine > theirs and show_rate(mine) != show_rate(theirs)


def disturbances(finals: Finals, best: TrainConfig) -> tuple[str, ...]:
    """Return the worst disturbance of the machine in a line, and whether it moved the rates that stand beside it."""
    # The baseline's work is the same in each of its finals: where it takes longer, the machine has become slower.
    seen = [m.conditions for r in finals.state.results if (m := r.measurement) is not None and m.conditions is not None]
    found = []
    for conditions in seen:
        found += conditions.taken()
        found += [(share, f"the GPU was slowed down by {why}") for why, share in conditions.slowed_by.items()]
    times = [m.step_times_s for r in finals.trials(finals.plan.baseline) if (m := r.measurement)]
    if (change := drift(times)) >= 0.03:
        found.append((change, f"its speed drifted by {change:.0%} between trials of the baseline"))
    told = [f"noise: the machine was disturbed: {max(found)[1]}; repeat the search on a quiet one"] if found else []
    ours, theirs = finals.merged(best), finals.merged(finals.plan.baseline)
    if ours is not None and theirs is not None and (lead := _speedup(finals, best)) is not None:
        quotient = finals.plan.objective.rate(ours) / finals.plan.objective.rate(theirs)
        if not lead.interval.low <= quotient <= lead.interval.high:
            how = f"are means, disturbed turns included, and differ by {quotient:.2f}x"
            told.append(f"noise: the rates of winner and baseline {how}; {lead.ratio:.2f}x is by turns side by side")
    return tuple(told)


def nothing_found(plan: SearchPlan, results: Sequence[TrialResult], run_directory: str = "") -> AutotuneError:
    """Return the error for a search without an answer: nothing passed, nothing fits, or trials fail otherwise."""
    shorter, batch = "a shorter --seq-len", "a smaller --global-batch"
    if plan.workload.recipe is not None:
        shorter = "a shorter --prompt-len or --completion-len"
    if plan.workload.own_code is not None:  # which decides both
        shorter, batch = "shorter samples", "a smaller batch"
    if any(r.measurement is not None and r.request.purpose.explores for r in results):
        finals, causes = Finals(SearchState(plan, results)), []  # the fastest first
        for config in (r.request.config for r in finals.history.ranking()):
            causes.append(f"{shown_changes(changes(config, plan))}: {finals.failure(config)}")
        more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
        return NothingPassedError(
            f"nothing passed: what trained failed when measured again or checked ({'; '.join(causes[:3])}{more}); "
            f"a larger --memory or {shorter} leaves more room"
        )
    ran = [r for r in results if r.duration_s > 0] or results  # a baseline that can't fit isn't run
    failures = [(r, r.outcome) for r in ran if r.outcome.kind == "failure"]
    others = [(r, f) for r, f in failures if f.status is not TrialStatus.OUT_OF_MEMORY]
    if others and len(others) == len(failures):
        result, failure = others[0]
        number, how = result.request.number, failure.status
        log = PurePath(run_directory, "trials", f"{number:04d}", "log.txt")
        told = f"no trial completed; trial {number} {how}: {failure.cause} (its log: {log})"
        if all(f.status is TrialStatus.TIMED_OUT for _, f in others):
            told += f"; a longer --max-time, more --effort, {shorter} or {batch} may help"
        raised = all(f.status is not TrialStatus.TIMED_OUT and f.phases is not None for _, f in others)
        # What the user's code raised is the code's.
        return InputError(told) if plan.workload.is_users_own and raised else InfrastructureError(told)
    # The search goes from heavy to light, so its last trial out of memory came closest.
    closest, failure = [(r, f) for r, f in failures if f.status is TrialStatus.OUT_OF_MEMORY][-1]
    what = shown_changes(changes(closest.request.config, plan))
    seen = f" (it had reached {show_memory(failure.memory.peak_bytes)})" if failure.memory else ""
    first = "--allow method (LoRA, pure bf16), " * (plan.allowance is not Allowance.METHOD)
    return NothingFitsError(
        f"nothing fits {show_memory(plan.memory_bytes)}: the closest, {what}, still ran out{seen}; "
        f"what could make it fit: {first}a larger --memory, {shorter}"
    )
