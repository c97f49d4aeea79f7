"""What a pack has found so far, on disk as it comes.

    pack.jsonl      a line for all that is found, in the order of finding, synced at once; each trial in full
    summary.json    the same without the trials' details, rewritten with each line

Both say first what they were made on.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from provenance import provenance

from autotune.value import write_text
from autotune.values.hardware import Hardware
from autotune.values.trial import TrialResult
from pack.check import Check, Ground, Kind, ground_of
from pack.stories import Story


class Report:
    """What has been found so far."""

    def __init__(self, directory: Path, hardware: Hardware) -> None:
        self.directory = directory
        self.ground = ground_of(hardware)
        self.stories: list[Story] = []
        self._document: dict[str, Any] = {
            "made_on": self.ground,
            **provenance(hardware),
            "finished": False,
            "duration_s": 0.0,
            "checks": [],
            "parts": {},
        }
        self._part = ""
        self._started = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "pack.jsonl").write_text("")
        self._append({"made_on": self.ground, **provenance(hardware)})

    def elapsed_s(self) -> float:
        """Return the seconds since the pack began."""
        return time.monotonic() - self._started

    def begin(self, part: str) -> None:
        """Keep what comes now under the name of a part."""
        self._part = part

    def note(self, **found: Any) -> None:
        """Keep something that was found out of the present part."""
        self._document["parts"].setdefault(self._part, {}).update(found)
        self._append({"part": self._part, **found})

    def check(self, check: Check) -> None:
        """Keep a check."""
        judged = check.kind is Kind.ANYWHERE or self.ground is Ground.GPU
        kept = {"part": self._part, **check._asdict(), "judged": judged}
        self._document["checks"].append(kept)
        self._append({"check": kept})
        word = "ok    " if check.passed else "FAILED" if judged else "not ok"
        aside = "" if judged else f" ({check.kind}: not judged here)"
        print(f"{word} {check.name}: {check.detail}{aside}", flush=True)

    def trial(self, story: Story, result: TrialResult) -> None:
        """Keep a finished trial, in full and as a line."""
        self.stories.append(story)
        self._document["parts"].setdefault(self._part, {}).setdefault("trials", []).append(story.line)
        full = result.model_dump(mode="json")
        self._append({"part": self._part, "observed_bytes": story.observed_bytes, "trial": full})
        print(f"  {story.line}", flush=True)

    def finish(self) -> None:
        """Say that nothing more comes."""
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
