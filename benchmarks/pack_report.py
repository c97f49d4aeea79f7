"""What a GPU pack has found so far, on disk after every change."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from gpu_checks import Check, Story
from provenance import provenance

from autotune.events import TrialEnded
from autotune.files import write_text
from autotune.hardware import Hardware


class Report:
    """What has been found so far; on disk after every change."""

    def __init__(self, directory: Path, hardware: Hardware) -> None:
        self.directory = directory
        self.stories: list[Story] = []
        self._document: dict[str, Any] = {
            **provenance(hardware),
            "finished": False,
            "duration_s": 0.0,
            "checks": [],
            "searches": {},
        }
        self._started = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "trials.jsonl").write_text("")
        self.write()

    def elapsed_s(self) -> float:
        """Return the seconds since the pack began."""
        return time.monotonic() - self._started

    def note(self, name: str, value: Any) -> None:
        """Keep something that was found out."""
        self._document[name] = value
        self.write()

    def check(self, check: Check) -> None:
        """Keep a check."""
        self._document["checks"].append(check._asdict())
        self.write()
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}", flush=True)

    def trial(self, story: Story, event: TrialEnded) -> None:
        """Keep a finished trial, in full and as a line."""
        self.stories.append(story)
        record = {
            "search": story.search,
            "observed_bytes": story.observed_bytes,
            "result": event.result.model_dump(mode="json"),
        }
        with (self.directory / "trials.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.search(story.search).setdefault("trials", []).append(story.line)
        self.write()
        print(f"  {story.line}", flush=True)

    def search(self, name: str) -> dict[str, Any]:
        """Return the record of a search, to be filled and written."""
        record: dict[str, Any] = self._document["searches"].setdefault(name, {})
        return record

    def write(self) -> None:
        """Put everything on disk."""
        self._document["duration_s"] = round(self.elapsed_s(), 1)
        write_text(json.dumps(self._document, indent=2) + "\n", self.directory / "summary.json")

    @property
    def passed(self) -> bool:
        """Whether every check has passed."""
        return bool(self._document["checks"]) and all(c["passed"] for c in self._document["checks"])
