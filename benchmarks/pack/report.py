"""What a pack has found so far, on disk as it comes, and the checks that all of its trials have to pass.

    pack.jsonl      a line for all that is found, in the order of finding, synced at once; each trial in full
    summary.json    the same without the trials' details, rewritten with each line

Both say first what they were made on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from provenance import provenance

from autotune.output.table import measurement_detail, trial_line
from autotune.units import show_memory
from autotune.value import write_text
from autotune.values.budget import SoakTask
from autotune.values.hardware import Hardware
from autotune.values.problem import Change
from autotune.values.trial import Failure, Memory, TrialResult, TrialStatus

_STAND_IN = "fakecuda_loader"  # every Python of an environment with tests/fakecuda begins with this module

# Between what a trial reports and what NVML shows at intervals: fragments of the driver, and peaks between readings.
TOLERANCE = 0.05
TOLERANCE_BYTES = 256 << 20


class Ground(StrEnum):
    GPU = "a GPU"
    STAND_IN = "a stand-in for CUDA (tests/fakecuda), no real GPU: values are zero and times mean nothing"
    CPU = "a CPU"


def ground_of(hardware: Hardware) -> Ground:
    if hardware.is_cpu:
        return Ground.CPU
    return Ground.STAND_IN if _STAND_IN in sys.modules else Ground.GPU


class Kind(StrEnum):
    """What has to be real for a check to be judged."""

    ANYWHERE = "anywhere"
    VALUES_OR_TIME = "values/time"  # of a real GPU; elsewhere it is kept and not judged


class Check(NamedTuple):
    """One thing that has to hold."""

    name: str
    passed: bool
    detail: str
    kind: Kind = Kind.ANYWHERE


class Story(NamedTuple):
    part: str
    number: int
    status: TrialStatus
    budget_bytes: int
    memory: Memory | None
    observed_bytes: int | None  # from outside; None on the CPU, where the children's libraries would be counted too
    line: str
    gave_up: bool  # an attempt of evaluation, whose peak is seen from outside and not reported

    @property
    def title(self) -> str:
        return f"{self.part} {self.number}"

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes if self.memory else 0

    @property
    def tolerance_bytes(self) -> float:
        return max(TOLERANCE_BYTES, TOLERANCE * (self.observed_bytes or 0))


def story_of(
    part: str, result: TrialResult, *, observed_bytes: int | None, named: str = "", changes: Sequence[Change] = ()
) -> Story:
    """Return the story of a trial; its line tells what `changes` against the baseline, or what it is `named`.

    Of trials that compute in turn, what is seen from outside is the memory of all of them: theirs is left out.
    """
    outcome, request, measured = result.outcome, result.request, result.measurement
    observed_bytes = None if request.in_turn_with else observed_bytes
    detail = outcome.cause if isinstance(outcome, Failure) else measurement_detail(outcome)
    line = f"{named}: {result.status}: {detail}"
    if not named:
        line = trial_line(request.number, result.status, changes, detail)
    seen = f", {show_memory(observed_bytes)} seen from outside" if observed_bytes is not None else ""
    soaked = measured.soaked if measured is not None and isinstance(request.task, SoakTask) else None
    return Story(
        part=part,
        number=request.number,
        status=result.status,
        budget_bytes=request.limits.memory_bytes,
        memory=outcome.memory,
        observed_bytes=observed_bytes,
        line=f"{line}{seen} ({request.purpose}, {result.duration_s:.1f} s)",
        gave_up=soaked is not None and soaked.eval_batch_size != request.task.eval_batch_sizes[0],
    )


def check_trials(stories: Sequence[Story]) -> list[Check]:
    crashed = [s for s in stories if s.status is TrialStatus.CRASHED]
    done = [s for s in stories if s.status is TrialStatus.COMPLETED and s.memory is not None]
    over = [s for s in done if s.peak_bytes > s.budget_bytes]
    checks = [
        _check("no trial crashed", crashed, stories, [s.line for s in crashed]),
        _check(
            "no completed trial reports more than its budget",
            over,
            done,
            [f"{s.title}: {show_memory(s.peak_bytes)}" for s in over],
        ),
    ]
    if known := [(s, s.memory) for s in stories if s.memory is not None and s.memory.device_bytes is not None]:
        bad = [
            s for s, m in known if not 0 < (m.allocated_bytes or 0) <= (m.reserved_bytes or 0) <= (m.device_bytes or 0)
        ]
        checks.append(_check("allocated <= reserved <= device memory", bad, known, [s.title for s in bad]))
    if any(s.observed_bytes is not None for s in stories):
        checks += _checks_from_outside(stories, [s for s in done if s.observed_bytes is not None])
    return checks


def _checks_from_outside(stories: Sequence[Story], done: Sequence[Story]) -> list[Check]:
    whole = [s for s in done if not s.gave_up]
    more = [s for s in whole if s.observed_bytes - s.peak_bytes > s.tolerance_bytes]
    # The other direction, where steps take time: readings miss what comes and goes between them.
    less = [s for s in done if s.peak_bytes - s.observed_bytes > s.tolerance_bytes]
    seen = _check("the reported peak is seen from outside", less, done, _deviations(done, less))
    known = [s for s in stories if s.observed_bytes is not None]
    over = [s for s in known if s.observed_bytes > s.budget_bytes + TOLERANCE_BYTES]
    return [
        _check("no trial takes more than it reports, seen from outside", more, whole, _deviations(whole, more)),
        seen._replace(kind=Kind.VALUES_OR_TIME),
        _check(
            "no trial takes more than its budget, seen from outside",
            over,
            known,
            [f"{s.title}: {show_memory(s.observed_bytes)} of {show_memory(s.budget_bytes)}" for s in over],
        ),
    ]


def _deviations(known: Sequence[Story], bad: Sequence[Story]) -> list[str]:
    """Return the figures of bad stories, or by how much the worst of all is off."""
    worst = max((s.peak_bytes / s.observed_bytes - 1 for s in known if s.observed_bytes), key=abs, default=0.0)
    return [
        f"{s.title}: reported {show_memory(s.peak_bytes)}, seen {show_memory(s.observed_bytes or 0)}" for s in bad
    ] or [f"worst deviation {worst:+.1%}"]


def _check(name: str, bad: Sequence[Story], known: Sequence[Any], details: Sequence[str]) -> Check:
    """Return a check that fails if there is any bad story, or if there was nothing to look at."""
    found = f"{len(bad)} of {len(known)} trials" if bad else f"{len(known)} trials"
    return Check(name, not bad and bool(known), "; ".join([found, *details]))


class Report:
    """What has been found so far."""

    def __init__(self, directory: Path, hardware: Hardware) -> None:
        self.directory = directory
        self.ground = ground_of(hardware)
        self.stories: list[Story] = []
        origin = {"made_on": self.ground, **provenance(hardware)}
        self._document: dict[str, Any] = {**origin, "finished": False, "duration_s": 0.0, "checks": [], "parts": {}}
        self._part = ""
        self._started = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "pack.jsonl").write_text("")
        self._append(origin)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def begin(self, part: str) -> None:
        """Keep what comes now under the name of a part."""
        self._part = part

    def note(self, **found: Any) -> None:
        """Keep something that was found out of the present part."""
        self._document["parts"].setdefault(self._part, {}).update(found)
        self._append({"part": self._part, **found})

    def check(self, name: str, passed: bool, detail: str, kind: Kind = Kind.ANYWHERE) -> None:
        judged = kind is Kind.ANYWHERE or self.ground is Ground.GPU
        kept = {"part": self._part, **Check(name, passed, detail, kind)._asdict(), "judged": judged}
        self._document["checks"].append(kept)
        self._append({"check": kept})
        word = "ok    " if passed else "FAILED" if judged else "not ok"
        print(f"{word} {name}: {detail}" + ("" if judged else f" ({kind}: not judged here)"), flush=True)

    def trial(self, story: Story, result: TrialResult) -> None:
        """Keep a finished trial, in full and as a line."""
        self.stories.append(story)
        self._document["parts"].setdefault(self._part, {}).setdefault("trials", []).append(story.line)
        full = result.model_dump(mode="json")
        self._append({"part": self._part, "observed_bytes": story.observed_bytes, "trial": full})
        print(f"  {story.line}", flush=True)

    def finish(self) -> None:
        self._document["finished"] = True
        self._append({"finished": True})

    @property
    def passed(self) -> bool:
        """Whether every check that can be judged has passed, and there was one."""
        judged = [c["passed"] for c in self._document["checks"] if c["judged"]]
        return bool(judged) and all(judged)

    def _append(self, line: dict[str, Any]) -> None:
        with (self.directory / "pack.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._document["duration_s"] = round(self.elapsed_s(), 1)
        write_text(json.dumps(self._document, indent=2) + "\n", self.directory / "summary.json")
