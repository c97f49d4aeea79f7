"""Trials in turn: a token goes round, one computes at a time, and the first process decides when it is enough."""

import os
import threading
import time

import pytest
from factories import make_limits
from running import python

from autotune.execution.token_ring import Turns, ring
from autotune.values.statistics import Speedup

LIMITS = make_limits(measure_time_s=1e6, relative_interval=0.05, measure_steps=4000)
NEVER = float("inf")


class Ring:
    """Processes as threads, each of which closes its ends of the pipes when it ends."""

    def __init__(self, *steps_s, limits=LIMITS, ends_at=NEVER, dies=()):
        self.log, self.turns = [], []
        self._limits, self._ends_at, self._dies = limits, ends_at, dict(dies)
        self._threads = []
        for place, ends in enumerate(ring(len(steps_s))):
            self._threads.append(threading.Thread(target=self._run, args=(place, ends, steps_s[place])))
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, place, ends, step_s):
        turns = Turns(*ends, place=place, count=len(self._threads))
        self.turns.append((place, turns))
        try:
            turns.begin()
            self._compute(place, "warm up")
            goes_on, count = turns.warmed_up(self._ends_at), 0
            while goes_on:
                if self._dies.get(place) == count:
                    return
                self._compute(place, "turn")
                goes_on, count = turns.end_turn(step_s(count), self._limits, self._ends_at), count + 1
            if turns.broken:
                self._compute(place, "alone")
        finally:
            for end in ends:
                os.close(end)

    def _compute(self, place, what):
        self.log.append((place, what, "begins"))
        time.sleep(0.001)
        self.log.append((place, what, "ends"))

    def of(self, place):
        return next(turns for at, turns in self.turns if at == place)


def steady(seconds):
    return lambda count: seconds


@pytest.mark.parametrize("count", [2, 3])
def test_one_computes_at_a_time_all_have_as_many_turns_and_the_first_learns_the_time_of_each(count):
    run = Ring(*(steady(1.0 + place) for place in range(count)))
    assert set(run.of(0).rounds) == {tuple(1.0 + place for place in range(count))}
    assert run.of(1).rounds == []
    for begins, ends in zip(run.log[::2], run.log[1::2], strict=True):
        assert (begins[:2], begins[2], ends[2]) == (ends[:2], "begins", "ends")
    order = [(place, what) for place, what, when in run.log if when == "begins"]
    assert order[:count] == [(place, "warm up") for place in range(count)]
    turns = [place for place, what in order[count:] if what == "turn"]
    rounds = [turns[n : n + count] for n in range(0, len(turns), count)]
    assert all(sorted(places) == list(range(count)) for places in rounds)
    assert len({places[0] for places in rounds}) == count


@pytest.mark.parametrize("count", [2, 4])
def test_neither_who_goes_first_nor_after_whom_nor_a_drift_favours_one_of_them(count):
    """Alike, but the first of a round takes 5 % longer, who follows the last place 4 %, and each turn 0.1 % more."""
    ran = []

    def effects(place):
        def step_s(_):
            slow = 1.05 if len(ran) % count == 0 else 1.0
            slow *= 1.04 if count > 2 and ran and ran[-1] == count - 1 != place else 1.0
            ran.append(place)
            return slow * 1.001 ** len(ran)

        return step_s

    limits = LIMITS.model_copy(update={"relative_interval": 1e-9})
    rounds = Ring(*map(effects, range(count)), limits=limits).of(0).rounds[1:]
    for place in range(1, count - 1) or [1]:
        assert Speedup.of_pairs([[(turns[0], turns[place]) for turns in rounds]]).ratio == pytest.approx(1.0, abs=0.01)


def test_it_ends_when_the_ratio_is_known_and_noise_takes_longer():
    noisy = [1.0, 1.3, 0.9, 1.2, 1.1]
    limits, began = LIMITS.model_copy(update={"measure_time_s": 1.0}), time.perf_counter()
    quiet = Ring(steady(1.0), steady(2.0), limits=limits)
    assert time.perf_counter() - began >= 2 * 1.0 / 16, "the least time of short turns"
    assert 1 + 12 <= len(quiet.of(0).rounds) < 200
    limits = limits.model_copy(update={"measure_time_s": 0.16})
    quiet, loud = (Ring(steady(1.0), side, limits=limits) for side in (steady(2.0), lambda n: 2 * noisy[n % 5]))
    assert 1 + 12 <= len(quiet.of(0).rounds) <= len(loud.of(0).rounds)


def test_it_ends_when_the_time_of_all_is_up_or_the_next_round_would_be_too_late():
    noisy = lambda count: 1.0 + count % 7  # noqa: E731
    limits = LIMITS.model_copy(update={"measure_time_s": 0.1, "relative_interval": 1e-9})
    assert 2 <= len(Ring(steady(1.0), noisy, limits=limits).of(0).rounds) < 200
    assert len(Ring(steady(1.0), noisy, ends_at=time.perf_counter()).of(0).rounds) == 2


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_when_one_dies_the_others_go_on_alone_one_after_the_other(dies):
    run = Ring(steady(1.0), steady(1.0), steady(1.0), dies=[(dies, 2)])
    alone = [(place, when) for place, what, when in run.log if what == "alone"]
    others = sorted({0, 1, 2} - {dies})
    assert sorted(place for place, _ in alone[::2]) == others
    for begins, ends in zip(alone[::2], alone[1::2], strict=True):
        assert begins[0] == ends[0], "one computes while another does"


def test_one_that_dies_before_it_has_warmed_up_leaves_the_others_alone_from_the_start():
    ends = ring(2)
    for end in ends[0]:
        os.close(end)
    second = Turns(*ends[1], place=1, count=2)
    second.begin()
    assert second.broken
    assert not second.warmed_up(NEVER)


def test_a_turn_has_several_short_steps_and_one_long_one():
    turns = Turns(0, 0, place=0, count=2)
    assert turns.steps(2.0, most=4000) == 1
    assert turns.steps(0.05, most=4000) == 5
    assert turns.steps(0.001, most=4000) == 4000 // 201


HANGING = """
import os, time
from autotune.execution.token_ring import Turns, ring
ends = ring(2)
if (child := os.fork()) == 0:
    os.close(ends[0][0]), os.close(ends[0][1])
    Turns(*ends[1], place=1, count=2, limit_s=1.0).begin()
    time.sleep(600)
os.close(ends[1][0]), os.close(ends[1][1])
turns = Turns(*ends[0], place=0, count=2, limit_s=1.0)
turns.begin()
goes_on = turns.warmed_up(float("inf"))
print(goes_on, turns.broken, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_one_that_hangs_is_ended_and_the_others_go_on_alone():
    run = python("-c", HANGING, timeout=60)
    assert run.stdout.split() == ["False", "True", "1"], run.stderr
    assert "Timeout (" in run.stderr


def test_one_that_stands_still_costs_the_others_nothing_that_they_have_measured():
    ends = ring(2)
    turns = Turns(*ends[0], place=0, count=2)
    now = time.perf_counter()
    os.write(ends[1][1], b'{"steps_s": [0.0, 1.0], "order": [0], "last": false}\n')
    assert turns.warmed_up(now + 60)
    assert not turns.end_turn(1.0, LIMITS, now), "the other neither passes the token on nor ends"
    assert not turns.broken, "the turns so far count"
    for end in (*ends[0], *ends[1]):
        os.close(end)
