"""Computes the result of a search from its trials: the winner, its speed-up and the verdict.

The winner is the finalist with the highest throughput; where the intervals overlap, it is the simpler configuration,
which changes less of the user's training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from autotune.exports.launch_files import needs_code
from autotune.space.knobs import changes, shown_changes
from autotune.training.arguments import plan as training_plan
from autotune.units import show_rate
from autotune.values.config import Allowance, TrainConfig
from autotune.values.problem import break_even_steps, cold_start_s
from autotune.values.result import Arguments, Compilation, Contender, ResultData, Speedup, TrialRow, Verdict, rows_of
from autotune.values.time_spent import spent_on
from autotune.values.trial import Measurement, Purpose, TrialStatus
from autotune.verification.finals import WORTH_DECIDING, Finals
from autotune.verification.remarks import disturbance, faster_trial, plain_notes, proof_notes
from autotune.version import __version__

RUNNERS_UP = 4


def assemble(finals: Finals, search_time_s: float, starting: Mapping[str, float] | None = None) -> ResultData | None:
    """Return the result by the trials so far; None if none has completed, or if all failed in finals or checks.

    `starting` are the seconds before the first trial, by kind of work.
    """
    plan, results, refused = finals.plan, finals.state.results, finals.state.refused
    if not finals.contenders():
        return None
    decision = verdict_of(finals)
    proof, best, speedup = finals.proof, decision.best, decision.speedup
    soaked = proof.soaked(best)
    corrections = _corrections(finals, decision)
    ranked = [r.request.config for r in finals.history.ranking() if not finals.has_failed(r.request.config)]
    contenders = [_contender(finals, c, corrections) for c in ranked]
    contenders.sort(key=lambda c: c.rate(plan.objective), reverse=True)
    others = [c for c in contenders if c.config not in (best, plan.baseline)]
    mapping = training_plan(best, plan.workload, plan.hardware)
    baseline_cause = None  # why it can't be compared with; None too if it hasn't run
    if plan.baseline not in finals.contenders():
        failures = [r.outcome for r in finals.trials_of(plan.baseline) if r.outcome.kind == "failure"]
        lines = [f"{failure.status}: {failure.cause}" for failure in failures]
        baseline_cause = next(iter(lines), None) or proof.refusal(plan.baseline)
    by_allowance: dict[Allowance, Contender] = {}  # the winner, where it belongs to a class, or else the fastest
    for allowance in filter(plan.allowance.admits, Allowance):
        if admitted := [c for c in contenders if allowance.admits(c.allowance)]:
            by_allowance[allowance] = next((c for c in admitted if c.config == best), admitted[0])
    ours, reference, compilation = finals.merged(best), finals.merged(plan.baseline), None
    if best.torch_compile_backend is not None and ours is not None:
        steps = break_even_steps(ours, reference) if reference is not None else None
        compilation = Compilation(cold_start_s=cold_start_s(ours), break_even_steps=steps)
    return ResultData(
        autotune_version=__version__,
        verdict=decision.verdict,
        **{**plan.problem_fields(), "baseline": _contender(finals, plan.baseline, corrections)},
        baseline_cause=baseline_cause,
        best=_contender(finals, best, corrections),
        arguments=Arguments(
            training_arguments={**mapping.tuned, **(soaked.arguments if soaked else {})},
            model=mapping.model,
            quantization=mapping.quantization,
            adapter=mapping.adapter,
        ),
        soaked=soaked,
        loss_check=proof.verdict(best),
        proof_notes=proof_notes(finals, best),
        objective=plan.objective,
        compilation=compilation,
        speedup=speedup,
        challenger=_challenger(finals) if best == plan.baseline else None,
        kept_because=decision.kept_because,
        others_share=decision.others_share,
        best_by_allowance=by_allowance,
        runners_up=tuple(sorted(others, key=lambda c: not c.confirmed))[:RUNNERS_UP],  # those of the finals first
        trials=(
            *trial_rows(finals, corrections),
            *(TrialRow(number=None, config=c, status=TrialStatus.REJECTED, cause=why) for c, why in refused.items()),
        ),
        notes=plan.notes + plain_notes(finals.state),
        disturbances=tuple(filter(None, [disturbance(finals)])),
        outshone=faster_trial(finals, best),
        search_time_s=search_time_s,
        spent=spent_on(results, search_time_s, starting or {}),
    )


class Decision(NamedTuple):
    """The winner, the verdict, and the speed-up over the baseline."""

    best: TrainConfig
    verdict: Verdict
    speedup: Speedup | None = None
    kept_because: str | None = None  # why the baseline is kept and not an unconfirmed leader
    others_share: float | None = None  # of the machine, that other processes took, where that left it open


def verdict_of(finals: Finals) -> Decision:
    """Return the decision by the trials so far, of which one at least has completed and not failed afterwards."""
    plan = finals.plan
    contenders = finals.contenders()
    measured = [c for c in contenders if finals.is_measured(c)]
    ranking = [r.request.config for r in finals.history.ranking()]
    leader = next(c for c in ranking if c in contenders)
    if plan.baseline not in contenders:
        roomy = (c for c in ranking if c in contenders and not finals.runs_short(c))
        best = _simplest_of_the_fastest(finals, measured) if measured else next(roomy, leader)
        return Decision(best, "baseline_failed")
    if plan.baseline not in measured or len(measured) < 2:
        if leader == plan.baseline:
            others = [r.status for r in finals.history.results if r.request.config != plan.baseline]
            if any(status is not TrialStatus.TIMED_OUT for status in others):
                return Decision(leader, "no_clear_winner")
            return Decision(leader, "unconfirmed", kept_because="every other trial timed out" if others else None)
        doubts = {c: _doubt(finals, c) for c in ranking if c in contenders and c != plan.baseline}
        best = next((c for c, doubt in doubts.items() if doubt is None), plan.baseline)
        return Decision(best, "unconfirmed", kept_because=doubts[leader] if best == plan.baseline else None)
    best = _simplest_of_the_fastest(finals, measured)
    speedup = _speedup(finals, best)
    if speedup is not None:
        return Decision(best, "faster", speedup)
    # If finals are undecided and other processes took more than a quarter of the machine meanwhile, they are the cause.
    # Finals that ran one after the other don't decide by their intervals then; trials in turn share what others take.
    others_share, challenger = finals.others_share(), _challenger(finals)
    is_unsure, is_telling = challenger is not None and challenger.bound is None, others_share > 0.25
    if is_telling and not finals.ran_in_turn():
        is_unsure = is_unsure or challenger is None or challenger.interval.high > WORTH_DECIDING
    if not is_unsure:
        return Decision(best, "no_clear_winner")
    return Decision(best, "undecided", others_share=others_share if is_telling else None)


def _challenger(finals: Finals) -> Speedup | None:
    """Return the speed-up of the finalist whose interval has the highest upper end."""
    found = [speedup for c in finals.contenders() if (speedup := _speedup(finals, c)) is not None]
    return max(found, key=lambda speedup: speedup.interval.high, default=None)


def _speedup(finals: Finals, config: TrainConfig) -> Speedup | None:
    """Return the speed-up of `config` over the baseline; None for the baseline, or if either has no final trial."""
    found = finals.speedup(config, finals.plan.baseline) if config != finals.plan.baseline else None
    return None if found is None else Speedup(ratio=found.ratio, interval=found.interval, reference="the baseline")


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
    return (
        f"the baseline gave {show_rate(theirs.samples_per_second)} samples/s in trial {their_trial}, "
        f"{shown_changes(changes(config, plan))} {show_rate(ours.samples_per_second)} in trial {our_trial}"
    )


def _simplest_of_the_fastest(finals: Finals, contenders: list[TrainConfig]) -> TrainConfig:
    """Return the simplest of the contenders that aren't clearly slower than the fastest.

    Beside the baseline only those count that are clearly faster than it; if none is, it is the baseline.
    """
    plan = finals.plan

    def rate(config: TrainConfig) -> float:
        if (lead := finals.speedup(config, plan.baseline)) is not None:
            return lead.ratio
        measured = finals.merged(config)
        return plan.objective.rate(measured) if measured else 0.0

    def is_clearly_faster(config: TrainConfig, than: TrainConfig) -> bool:
        lead = finals.speedup(config, than)
        return lead is not None and lead.interval.low > 1.0

    if plan.baseline in contenders:
        contenders = [c for c in contenders if is_clearly_faster(c, plan.baseline)] or [plan.baseline]
    fastest = max(contenders, key=rate)
    alike = [c for c in contenders if not is_clearly_faster(fastest, c)]

    def complexity(config: TrainConfig) -> tuple[int, bool, int]:
        """Return the rank of the deepest change (-1: none), code that flags can't say, and the number of changes."""
        changed = changes(config, plan)
        is_in_code = plan.workload.own_code is not None and any(map(needs_code, changed))
        return max((c.allowance.rank for c in changed), default=-1), is_in_code, len(changed)

    return min(alike, key=complexity)


def _corrections(finals: Finals, decision: Decision) -> dict[TrainConfig, float]:
    """Return the corrections of what was measured once: a single trial is no evidence of more than a decided winner."""
    found, objective = finals.corrections(), finals.plan.objective
    measured, base = finals.merged(decision.best), finals.merged(finals.plan.baseline)
    if measured is None or base is None or decision.verdict not in ("faster", "no_clear_winner"):
        return found
    ratio = 1.0 if decision.speedup is None else decision.speedup.ratio
    most = min(objective.rate(measured), ratio * objective.rate(base))
    trials = [(c, finals.state.measured(c)) for c in found]
    return {c: min(found[c], most / objective.rate(seen)) for c, seen in trials if seen is not None}


def _contender(finals: Finals, config: TrainConfig, corrections: Mapping[TrainConfig, float]) -> Contender:
    return Contender(
        config=config,
        changes=changes(config, finals.plan),
        measurement=measurement_of(finals, config),
        trials=tuple(r.request.number for r in finals.trials_of(config)),
        confirmed=finals.is_measured(config),
        speedup=_speedup(finals, config),
        correction=corrections.get(config, 1.0),
    )


def measurement_of(finals: Finals, config: TrainConfig) -> Measurement | None:
    """Return what all outputs state of a configuration: its final trials as one, or else its trial of the search.

    The search's trial of a finalist doesn't count: it ran at another time, and was chosen for being fast.
    """
    return finals.merged(config) or finals.state.measured(config)


def trial_rows(finals: Finals, corrections: Mapping[TrainConfig, float] | None = None) -> list[TrialRow]:
    """Return the rows of the trials; a loss run that failed the check is marked invalid, although it completed."""
    configs = {r.request.config for r in finals.state.results}
    measured = {c: m.samples_per_second for c in configs if (m := measurement_of(finals, c)) is not None}
    rates = {c: rate * (corrections or {}).get(c, 1.0) for c, rate in measured.items()}
    found = []
    for row in rows_of(finals.state.results):
        update: dict[str, Any] = {"config_samples_per_second": rates.get(row.config)}
        verdict = finals.proof.verdict(row.config) if row.purpose is Purpose.LOSS_CHECK else None
        if verdict is not None and not verdict.passed:
            update |= {"status": TrialStatus.INVALID, "cause": row.cause or verdict.statement}
        found.append(row.model_copy(update=update))
    return found
