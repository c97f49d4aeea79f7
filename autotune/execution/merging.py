"""Makes one outcome of a trial's ranks: of their measurements, or the cause that the first of them failed for.

Every rank takes part in every step, so the times are those of the rank that took longest for all of them: of each step
the longest would count a moment's delay that the next step makes up for. Memory is that of the worst rank, which has to
fit as well. Samples are counted over all ranks; each one's loss is of its own samples, and the mean is that of the
global batch.

The first rank that fails takes the others with it: they lose a connection, or are killed while they wait. What they
leave behind is a consequence and not the cause. Which was first is known by when it was noticed; where two ends were
noticed at the same moment, who speaks of a lost peer was the second.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from autotune.execution.logtail import place_in, read_tail
from autotune.execution.outcome import Ending, outcome_of
from autotune.execution.outcome_files import log_file
from autotune.values.conditions import worst_of
from autotune.values.statistics import rate_interval
from autotune.values.trial import Failure, Measurement, Outcome, TrialRequest, TrialStatus, worst_memory

# What gloo, NCCL and torch say where the other end of a connection is gone.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "remote process exited",
    "nccl communicator was aborted",
    "distnetworkerror",
    "distbackenderror",
)


def merged_outcome(directory: Path, ending: Ending, request: TrialRequest) -> Outcome:
    """Return the outcome of a trial, be it of one process or of several ranks."""
    if request.ranks is None:
        return outcome_of(directory, ending, request)
    codes = ending.returncodes or (None,) * request.ranks  # nobody was left to see them
    outcomes = [
        outcome_of(directory, ending._replace(returncode=code), request, rank=rank) for rank, code in enumerate(codes)
    ]
    measurements = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    if len(measurements) == len(outcomes):
        return _merged(measurements, request)
    rank, failure = first_failure(outcomes, ending)
    if ending.launcher_died:
        return failure
    if failure.status is TrialStatus.TIMED_OUT:
        return failure.model_copy(update={"cause": failure.cause + _where_they_stood(directory, outcomes)})
    return failure.model_copy(update={"cause": f"rank {rank}: {failure.cause}"})


def first_failure(outcomes: Sequence[Outcome], ending: Ending) -> tuple[int, Failure]:
    """Return the rank that failed first, with its failure; the others' are its consequences."""
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    own = [(rank, failure) for rank, failure in failures if not _speaks_of_a_lost_peer(failure)]

    def noticed(found: tuple[int, Failure]) -> tuple[float, int]:
        at = ending.failed_at[found[0]] if ending.failed_at else None
        return (float("inf") if at is None else at, found[0])

    by_themselves = [found for found in own if noticed(found)[0] < float("inf")]
    return min(by_themselves or failures, key=noticed)


def _speaks_of_a_lost_peer(failure: Failure) -> bool:
    text = failure.cause.lower()
    return failure.status is TrialStatus.CRASHED and any(words in text for words in _LOST_PEER)


def _merged(ranks: Sequence[Measurement], request: TrialRequest) -> Outcome:
    """Return the measurement of all ranks, or what is wrong with it."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        for knob, seen in first.effects.items():
            if rank.effects.get(knob) != seen:
                cause = f"rank 0 ran with {knob} {seen}, rank {number} with {rank.effects.get(knob)}"
                return Failure(status=TrialStatus.INVALID, cause=cause)
        if len(rank.step_times_s) != len(first.step_times_s):
            cause = f"rank 0 measured {len(first.step_times_s)} steps, rank {number} {len(rank.step_times_s)}"
            return Failure(status=TrialStatus.CRASHED, cause=cause)
    times = max((rank.step_times_s for rank in ranks), key=sum)
    samples = request.workload.samples_per_step(request.config)
    rate = samples / statistics.fmean(times)
    tokens = request.workload.tokens_per_sample
    return first.model_copy(
        update={
            "step_times_s": times,
            "samples_per_second": rate,
            "samples_per_second_interval": rate_interval(list(times), samples),
            "tokens_per_second": None if tokens is None else rate * tokens,
            "memory": worst_memory([rank.memory for rank in ranks]),
            "startup_s": max(rank.startup_s for rank in ranks),
            "first_step_s": max(rank.first_step_s for rank in ranks),
            "data_wait_share": max((r.data_wait_share for r in ranks if r.data_wait_share is not None), default=None),
            "loss": statistics.fmean(losses) if (losses := [r.loss for r in ranks if r.loss is not None]) else None,
            "alloc_retries": max((r.alloc_retries for r in ranks if r.alloc_retries is not None), default=None),
            "warnings": tuple(dict.fromkeys(line for rank in ranks for line in rank.warnings)),
            "conditions": worst_of([rank.conditions for rank in ranks if rank.conditions is not None]),
        }
    )


def _where_they_stood(directory: Path, outcomes: Sequence[Outcome]) -> str:
    """Say at which call each rank without a measurement stood when the time was up, alike ones together."""
    standing: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            place = place_in(read_tail(directory / log_file(rank), lines=200, size=1 << 15))
            if place:
                standing.setdefault(place, []).append(rank)
    told = [f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} stood in {place}" for place, ranks in standing.items()]
    return f"; {', '.join(told)}" if told else ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
