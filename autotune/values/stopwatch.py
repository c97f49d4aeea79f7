"""A stopwatch with named laps: at every moment exactly one of them runs, so that they sum up to the whole.

Used inside a trial's process and around a search, to say where the time went.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Runs from its making on.

    Args:
        lap: Name of the first lap.
        clock: Seconds from some moment on.
    """

    def __init__(self, lap: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lap = lap
        self._since = self.started_at = clock()
        self._laps: dict[str, float] = {}

    def enter(self, lap: str) -> None:
        """End the present lap and begin `lap`, or go on with it if there was one of that name."""
        now = self._clock()
        self._laps[self._lap] = self._laps.get(self._lap, 0.0) + now - self._since
        self._lap, self._since = lap, now

    def laps(self) -> dict[str, float]:
        """Return the seconds of each lap so far, the present one included."""
        self.enter(self._lap)
        return dict(self._laps)
