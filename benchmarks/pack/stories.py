"""What trials came to, and the checks that all of them have to pass. Pure: results in, stories and checks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autotune.output.table import measurement_detail, trial_line
from autotune.units import show_memory
from autotune.values.budget import SoakTask
from autotune.values.problem import Change
from autotune.values.trial import Failure, Memory, TrialResult, TrialStatus
from pack.check import Check, Kind

# Between what a trial reports and what NVML shows at intervals: fragments of the driver, and peaks between readings.
TOLERANCE = 0.05
TOLERANCE_BYTES = 256 << 20


class Story(NamedTuple):
    """What one trial of one part came to."""

    part: str
    number: int
    status: TrialStatus
    budget_bytes: int
    memory: Memory | None
    observed_bytes: int | None  # from outside; None on the CPU, where the children's libraries would be counted too
    line: str
    gave_up: bool = False  # an attempt of evaluation, whose peak is seen from outside and not reported

    @property
    def title(self) -> str:
        """Name the trial."""
        return f"{self.part} {self.number}"


def story_of(
    part: str, result: TrialResult, *, observed_bytes: int | None, named: str = "", changes: Sequence[Change] = ()
) -> Story:
    """Return the story of a trial; its line tells what `changes` against the baseline, or what it is `named`.

    Of trials that compute in turn, what is seen from outside is the memory of all of them: theirs is left out.
    """
    outcome, number = result.outcome, result.request.number
    observed_bytes = None if result.request.in_turn_with else observed_bytes
    detail = outcome.cause if isinstance(outcome, Failure) else measurement_detail(outcome)
    line = f"{named}: {result.status}: {detail}" if named else trial_line(number, result.status, changes, detail)
    seen = f", {show_memory(observed_bytes)} seen from outside" if observed_bytes is not None else ""
    return Story(
        part=part,
        number=number,
        status=result.status,
        budget_bytes=result.request.limits.memory_bytes,
        memory=outcome.memory,
        observed_bytes=observed_bytes,
        gave_up=_gave_up(result),
        line=f"{line}{seen} ({result.request.purpose}, {result.duration_s:.1f} s)",
    )


def _gave_up(result: TrialResult) -> bool:
    """Return whether a soak had to try a smaller evaluation batch than the first."""
    task, measured = result.request.task, result.measurement
    if not isinstance(task, SoakTask) or measured is None or measured.soaked is None:
        return False
    return measured.soaked.eval_batch_size != task.eval_batch_sizes[0]


def check_trials(stories: Sequence[Story]) -> list[Check]:
    """Return the checks that can be made of `stories`."""
    checks = [_no_crash(stories), _budget_kept(stories)]
    if any(s.memory is not None and s.memory.device_bytes is not None for s in stories):
        checks.append(_figures_in_order(stories))
    if any(s.observed_bytes is not None for s in stories):
        checks += [_reported_in_full(stories), _seen_from_outside(stories), _budget_kept_from_outside(stories)]
    return checks


def _no_crash(stories: Sequence[Story]) -> Check:
    bad = [s for s in stories if s.status is TrialStatus.CRASHED]
    return _check("no trial crashed", bad, len(stories), [s.line for s in bad])


def _budget_kept(stories: Sequence[Story]) -> Check:
    done = [s for s in stories if s.status is TrialStatus.COMPLETED and s.memory is not None]
    bad = [s for s in done if s.memory and s.memory.peak_bytes > s.budget_bytes]
    details = [f"{s.title}: {show_memory(s.memory.peak_bytes)}" for s in bad if s.memory]
    return _check("no completed trial reports more than its budget", bad, len(done), details)


def ran_out_and_went_on(name: str, stories: Sequence[Story]) -> Check:
    """Check that of the trials of a part under a small budget some ran out of memory and others did not."""
    stories = [s for s in stories if s.part == name]
    out = sum(s.status is TrialStatus.OUT_OF_MEMORY for s in stories)
    done = sum(s.status is TrialStatus.COMPLETED for s in stories)
    detail = f"{out} of {len(stories)} trials ran out of memory, {done} completed"
    return Check(f"{name}: the budget is enforced, and the search goes on", out > 0 and done > 0, detail)


def _figures_in_order(stories: Sequence[Story]) -> Check:
    known = [(s, s.memory) for s in stories if s.memory is not None and s.memory.device_bytes is not None]
    bad = [s for s, m in known if not 0 < (m.allocated_bytes or 0) <= (m.reserved_bytes or 0) <= (m.device_bytes or 0)]
    return _check("allocated <= reserved <= device memory", bad, len(known), [s.title for s in bad])


def _reported_in_full(stories: Sequence[Story]) -> Check:
    known = [s for s in _seen(stories) if not s.gave_up]
    bad = [s for s in known if s.observed_bytes - s.memory.peak_bytes > _tolerance(s)]
    return _check("no trial takes more than it reports, seen from outside", bad, len(known), _deviations(known, bad))


def _seen_from_outside(stories: Sequence[Story]) -> Check:
    """Check the other direction, where steps take time: readings miss what comes and goes between them."""
    known = _seen(stories)
    bad = [s for s in known if s.memory.peak_bytes - s.observed_bytes > _tolerance(s)]
    check = _check("the reported peak is seen from outside", bad, len(known), _deviations(known, bad))
    return check._replace(kind=Kind.VALUES_OR_TIME)


def _seen(stories: Sequence[Story]) -> list[Story]:
    return [s for s in stories if s.status is TrialStatus.COMPLETED and s.memory and s.observed_bytes is not None]


def _budget_kept_from_outside(stories: Sequence[Story]) -> Check:
    known = [s for s in stories if s.observed_bytes is not None]
    bad = [s for s in known if (s.observed_bytes or 0) > s.budget_bytes + TOLERANCE_BYTES]
    details = [f"{s.title}: {show_memory(s.observed_bytes or 0)} of {show_memory(s.budget_bytes)}" for s in bad]
    return _check("no trial takes more than its budget, seen from outside", bad, len(known), details)


def _tolerance(story: Story) -> float:
    return max(TOLERANCE_BYTES, TOLERANCE * (story.observed_bytes or 0))


def _deviations(known: Sequence[Story], bad: Sequence[Story]) -> list[str]:
    """Return the figures of bad stories, or by how much the worst of all is off."""
    pairs = [(s.memory.peak_bytes, s.observed_bytes or 0) for s in known if s.memory]
    worst = max((reported / observed - 1 for reported, observed in pairs if observed), key=abs, default=0.0)
    shown = [
        f"{s.title}: reported {show_memory(s.memory.peak_bytes)}, seen {show_memory(s.observed_bytes or 0)}"
        for s in bad
        if s.memory
    ]
    return shown or [f"worst deviation {worst:+.1%}"]


def _check(name: str, bad: Sequence[Story], total: int, details: Sequence[str]) -> Check:
    """Return a check that fails if there is any bad story, or if there was nothing to look at."""
    found = f"{len(bad)} of {total} trials" if bad else f"{total} trials"
    return Check(name, not bad and total > 0, "; ".join([found, *details]))
