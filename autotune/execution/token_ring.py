"""Several trials alive at once, of which one computes at a time: each runs in its turn, so that noise hits all alike.

The processes form a ring of pipes, through which a token goes round that names the process that computes. First each
makes its model and warms up, then each measures a few steps a turn, in an order that is drawn anew every other round
and reversed in between. The token carries how long a step took in each; the first decides when enough is known.

A process whose predecessor has ended without passing the token on goes on alone; its successor waits until it has
ended. One that holds the token for half of the trials' time limit is ended, its stack in its log. One that waits in
vain until measuring has to end keeps the turns that it has measured.
"""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import random
import select
import time
from typing import Any, Self

from autotune.values.statistics import Speedup
from autotune.values.trial import Limits

# The reading end, the writing end, the place in the ring and its length, in the environment of a process.
VARIABLE = "AUTOTUNE_TURNS"

_MOST_ROUNDS = 200  # that are measured


class Turns:
    """The place of this process in the ring, between the descriptors that the token comes from and goes to.

    Place 0 draws the order of every round and decides how many there are; `limit_s` is the trials' time limit.
    """

    def __init__(self, receive: int, send: int, *, place: int, count: int, limit_s: float = math.inf) -> None:
        self._receive, self._send, self._place, self._limit_s = receive, send, place, limit_s
        # The places whose turn is still to come in this round, and the seconds of a step in each's last turn.
        self._token: dict[str, Any] = {"steps_s": [0.0] * count, "order": [], "last": False}
        self._draw, self._order = random.Random(count), list(range(count))
        self._limits: tuple[Limits, float] | None = None
        self._measuring_since = 0.0
        self.waited_s = 0.0  # for the token
        self.broken = False  # the predecessor ended without passing the token on, so that this process is alone
        self.rounds: list[tuple[float, ...]] = []  # in the first process: seconds of a step in each one's turn

    @classmethod
    def here(cls, limit_s: float) -> Self | None:
        """Return the place that this process has by its environment; None: it has none."""
        if (given := os.environ.get(VARIABLE)) is None:
            return None
        receive, send, place, count = map(int, given.split(","))
        return cls(receive, send, place=place, count=count, limit_s=limit_s)

    def begin(self) -> None:
        """Wait until this process may make its model; the first begins at once."""
        if self._place:
            self._take(math.inf)
        else:
            self._hold()

    def warmed_up(self, ends_at: float) -> bool:
        """Let the others warm up, until `ends_at` at most; return whether to measure in turn from now on."""
        self._pass()
        return self._next(ends_at)

    def steps(self, step_s: float, *, most: int) -> int:
        """Return the steps of a turn, by the seconds of one; `most` may be measured in all turns."""
        # A quarter of a second at the least: the first steps find the others' data in the processor's caches.
        return max(1, min(math.ceil(0.25 / step_s), most // (_MOST_ROUNDS + 1)))

    def end_turn(self, step_s: float, limits: Limits, ends_at: float) -> bool:
        """End a turn, whose mean step took `step_s`, and wait for the next; return whether there is one."""
        self._limits = limits, ends_at
        self._token["steps_s"][self._place] = step_s
        del self._token["order"][0]
        self._pass()
        return self._next(ends_at)

    def _next(self, ends_at: float) -> bool:
        """Hand on the token until it is this process's turn; return whether there is one."""
        while self._take(ends_at):
            if not self._place and not self._token["order"]:  # a round is over
                if self._limits is None:
                    self._measuring_since = time.perf_counter()
                else:
                    self.rounds.append(tuple(self._token["steps_s"]))
                    if self._is_enough(*self._limits):
                        self._token["last"] = True
                        self._pass()
                        return False
                if len(self.rounds) % 2:
                    self._order.reverse()
                else:
                    self._draw.shuffle(self._order)
                self._token["order"] = list(self._order)
            if self._token["order"][:1] == [self._place]:
                return True
            self._pass()
        return False

    def _is_enough(self, limits: Limits, ends_at: float) -> bool:
        """Whether all ratios are known, or the time is up; the first round doesn't count."""
        counted, now = self.rounds[1:], time.perf_counter()
        took_s = now - self._measuring_since
        if not counted:
            return False
        is_late = took_s >= limits.measure_time_s * len(counted[0]) or now + took_s / len(self.rounds) > ends_at
        if is_late or len(counted) >= _MOST_ROUNDS:
            return True
        # From twelve on one disturbed pair hardly changes the interval; several short turns may be of one moment.
        if len(counted) < 12 or took_s < limits.measure_time_s / 16 * len(counted[0]):
            return False
        # The 95 % interval of each is to be twice as wide as asked for at most.
        pairs = itertools.combinations(zip(*counted, strict=True), 2)
        spans = (Speedup.of_pairs([list(zip(*pair, strict=True))], spread=0.0).interval for pair in pairs)
        return all(interval.high <= interval.low * (1 + limits.relative_interval) ** 2 for interval in spans)

    def _hold(self) -> None:
        if math.isfinite(self._limit_s):
            faulthandler.dump_traceback_later(0.5 * self._limit_s, exit=True, file=2)

    def _pass(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the successor has ended; the end of file will come round
            os.write(self._send, json.dumps(self._token).encode() + b"\n")

    def _take(self, ends_at: float) -> bool:
        """Wait for the token, until `ends_at` at most; return whether the trials go on in turn."""
        since, text, is_late = time.perf_counter(), b"", False
        poll = select.poll()
        poll.register(self._receive, select.POLLIN)
        while not text.endswith(b"\n"):
            late_s = min(1.0, 0.05 * self._limit_s)  # the last turn may take a moment
            left_s = max(0.0, ends_at + late_s - time.perf_counter())
            is_late = not poll.poll(None if math.isinf(left_s) else left_s * 1000)
            if is_late or not (part := os.read(self._receive, 4096)):
                break
            text += part
        self.waited_s += time.perf_counter() - since
        if not text.endswith(b"\n"):
            self.broken = not is_late
            return False
        self._token = json.loads(text)
        if self._token["last"]:
            self._pass()
        elif self._token["order"][:1] in ([], [self._place]):
            self._hold()
        return not self._token["last"]


def take_place(place: int, ends: tuple[int, int], count: int) -> None:
    """Give this process a place in a ring of `count`; a fresh interpreter that replaces it has the place too."""
    for end in ends:
        os.set_inheritable(end, True)
    os.environ[VARIABLE] = ",".join(map(str, (*ends, place, count)))


def ring(count: int) -> list[tuple[int, int]]:
    """Return, for each of `count` processes that are forked from this one, the ends of its pipes."""
    pipes = [os.pipe() for _ in range(count)]
    return [(pipes[place][0], pipes[(place + 1) % count][1]) for place in range(count)]
