"""Laps that sum up to the whole."""

import pytest

from autotune.values.stopwatch import Stopwatch


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_every_moment_belongs_to_one_lap():
    clock = Clock()
    stopwatch = Stopwatch("model", clock=clock)
    for lap, seconds in (("data", 2.0), ("model", 3.0), ("steps", 5.0)):
        clock.now += seconds
        stopwatch.enter(lap)
    clock.now += 7.0
    assert stopwatch.laps() == {"model": 2.0 + 5.0, "data": 3.0, "steps": 7.0}
    assert sum(stopwatch.laps().values()) == pytest.approx(clock.now - stopwatch.started_at)


def test_looking_at_the_laps_does_not_stop_the_present_one():
    clock = Clock()
    stopwatch = Stopwatch("model", clock=clock)
    clock.now += 1.0
    assert stopwatch.laps() == {"model": 1.0}
    clock.now += 1.0
    assert stopwatch.laps() == {"model": 2.0}
