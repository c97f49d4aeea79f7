"""Judges what a GPU pack has seen. Pure: stories of trials in, checks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autotune.trial import Memory, TrialStatus
from autotune.units import show_memory

# Between what a trial reports and what NVML shows at intervals: fragments of the driver, and peaks between readings.
TOLERANCE = 0.05
TOLERANCE_BYTES = 256 << 20


class Story(NamedTuple):
    """What one trial of one search came to."""

    search: str
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
        return f"{self.search} {self.number}"


class Check(NamedTuple):
    """One thing that has to hold."""

    name: str
    passed: bool
    detail: str


def check_trials(stories: Sequence[Story], *, capped: Sequence[str]) -> list[Check]:
    """Return the checks that can be made of `stories`; `capped` names the searches that had to run out of memory."""
    checks = [_no_crash(stories), _budget_kept(stories)]
    checks += [_ran_out_and_went_on(name, [s for s in stories if s.search == name]) for name in capped]
    if any(s.memory is not None and s.memory.device_bytes is not None for s in stories):
        checks.append(_figures_in_order(stories))
    if any(s.observed_bytes is not None for s in stories):
        checks += [_seen_from_outside(stories), _budget_kept_from_outside(stories)]
    return checks


def _no_crash(stories: Sequence[Story]) -> Check:
    bad = [s for s in stories if s.status is TrialStatus.CRASHED]
    return _check("no trial crashed", bad, len(stories), [s.line for s in bad])


def _budget_kept(stories: Sequence[Story]) -> Check:
    done = [s for s in stories if s.status is TrialStatus.COMPLETED and s.memory is not None]
    bad = [s for s in done if s.memory and s.memory.peak_bytes > s.budget_bytes]
    details = [f"{s.title}: {show_memory(s.memory.peak_bytes)}" for s in bad if s.memory]
    return _check("no completed trial reports more than its budget", bad, len(done), details)


def _ran_out_and_went_on(name: str, stories: Sequence[Story]) -> Check:
    out = sum(s.status is TrialStatus.OUT_OF_MEMORY for s in stories)
    done = sum(s.status is TrialStatus.COMPLETED for s in stories)
    detail = f"{out} of {len(stories)} trials ran out of memory, {done} completed"
    return Check(f"{name}: the budget is enforced, and the search goes on", out > 0 and done > 0, detail)


def _figures_in_order(stories: Sequence[Story]) -> Check:
    known = [(s, s.memory) for s in stories if s.memory is not None and s.memory.device_bytes is not None]
    bad = [s for s, m in known if not 0 < (m.allocated_bytes or 0) <= (m.reserved_bytes or 0) <= (m.device_bytes or 0)]
    return _check("allocated <= reserved <= device memory", bad, len(known), [s.title for s in bad])


def _seen_from_outside(stories: Sequence[Story]) -> Check:
    known = [s for s in stories if s.status is TrialStatus.COMPLETED and s.memory and s.observed_bytes is not None]
    bad = [s for s in known if not _agree(s)]
    worst = max((_deviation(s) for s in known), key=abs, default=0.0)
    details = [f"{s.title}: {_pair(s)}" for s in bad] or [f"worst deviation {worst:+.1%}"]
    return _check("the reported peak is the one seen from outside", bad, len(known), details)


def _budget_kept_from_outside(stories: Sequence[Story]) -> Check:
    known = [s for s in stories if s.observed_bytes is not None]
    bad = [s for s in known if (s.observed_bytes or 0) > s.budget_bytes + TOLERANCE_BYTES]
    details = [f"{s.title}: {show_memory(s.observed_bytes or 0)} of {show_memory(s.budget_bytes)}" for s in bad]
    return _check("no trial takes more than its budget, seen from outside", bad, len(known), details)


def _agree(story: Story) -> bool:
    reported, observed = _peaks(story)
    tolerance = max(TOLERANCE_BYTES, TOLERANCE * observed)
    return reported - observed <= tolerance and (story.gave_up or observed - reported <= tolerance)


def _deviation(story: Story) -> float:
    reported, observed = _peaks(story)
    return reported / observed - 1 if observed else 0.0


def _pair(story: Story) -> str:
    reported, observed = _peaks(story)
    return f"reported {show_memory(reported)}, seen {show_memory(observed)}"


def _peaks(story: Story) -> tuple[int, int]:
    assert story.memory is not None
    assert story.observed_bytes is not None
    return story.memory.peak_bytes, story.observed_bytes


def _check(name: str, bad: Sequence[Story], total: int, details: Sequence[str]) -> Check:
    """Return a check that fails if there is any bad story, or if there was nothing to look at."""
    found = f"{len(bad)} of {total} trials" if bad else f"{total} trials"
    return Check(name, not bad and total > 0, "; ".join([found, *details]))
