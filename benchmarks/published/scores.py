"""Errors of predictions by group, and the table of what fits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from published.rows import Row
from published.setups import Setup


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a row, in bytes.

    Attributes:
        least: What the device has to hold at least: near its capacity the allocator gives unused blocks back.
        reserved: What the allocator would reserve if the device had no end.
        device: What the driver would show.
        moment: The operator at the allocated peak.
        spare: What of the reserved memory is a whole block that can be given back (`SparingCrossEntropy`).
    """

    row: Row
    setup: Setup
    allocated: float
    reserved: float
    least: float
    device: float
    moment: str
    spare: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it is said to fit."""
        return self.least <= self.setup.gpu.memory_bytes

    @property
    def right(self) -> bool:
        """Whether what is said of fitting is what happened."""
        return self.fits == self.row.ran

    @property
    def reason(self) -> str:
        """Why it is off, as far as is known: by what was run, never by the row. See docs/how-it-works.md."""
        if self.setup.origin == "other":
            return "other model code: the library's model of the same figures stands for it"
        if not self.right:
            near = self.least > 0.9 * self.setup.gpu.memory_bytes
            return (
                "free memory lies in blocks too small to be used"
                if near
                else "software and settings only partly stated"
            )
        if self.setup.spread.parallelism.world_size > 1:
            return "sharded: of the allocator one stream is replayed, and blocks of the others can't be used by it"
        if self.reserved > 0.97 * self.setup.gpu.memory_bytes:
            return "near the device's capacity: when the allocator gives blocks back decides"
        return "not explained"

    def error(self, kind: str) -> float | None:
        """Return predicted over measured, less 1, of 'allocated', 'reserved' or 'device' memory."""
        measured = getattr(self.row, f"{kind}_bytes")
        return getattr(self, kind) / measured - 1 if measured and self.row.ran else None


@dataclass(frozen=True)
class Score:
    """Errors of a group, as shares of what was measured."""

    count: int
    signed_median: float
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> Score | None:
        """Return the score of the errors there are, None of none."""
        known = np.array([e for e in errors if e is not None])
        if not len(known):
            return None
        size = np.abs(known)
        return cls(
            count=len(known),
            signed_median=float(np.median(known)),
            median=float(np.median(size)),
            p90=float(np.percentile(size, 90)),
            worst=float(known[np.argmax(size)]),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the score with four digits."""
        return {k: v if isinstance(v, int) else round(v, 4) for k, v in vars(self).items()}


@dataclass(frozen=True)
class Fits:
    """How often what is said of fitting is right."""

    fits_ran: int
    fits_failed: int
    short_ran: int
    short_failed: int

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> Fits:
        """Return the table."""
        counts = [(p.fits, p.row.ran) for p in predictions]
        cells = ((True, True), (True, False), (False, True), (False, False))
        return cls(*(counts.count(cell) for cell in cells))

    @property
    def share(self) -> float:
        """The share that is right."""
        total = sum(vars(self).values())
        return (self.fits_ran + self.short_failed) / total if total else float("nan")
