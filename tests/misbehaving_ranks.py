"""Ranks that go wrong: entries (`module:function`) for the launcher, of which one rank does the one bad thing.

Those that need no libraries come first. `behave` trains for real; what one of its ranks does meanwhile stands in a file
of the run directory, as `plan` writes it.
"""

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from misbehaving import FOR_EVER_S, around_each_step, complete

from autotune.execution.environment import own_rank
from autotune.execution.outcome import outcome_file
from autotune.value import write_value
from autotune.values.trial import Failure, TrialStatus

PLAN_FILE, PAUSED_FILE = "misbehaviour.json", "paused"
BAD_STEP = 2  # micro-steps that go well before


def meet_at_the_port(directory: Path) -> None:
    """Connect to the first rank as torch's store does, which each has to be able to from its first moment on."""
    rank, there = own_rank(), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank.number == 0:
        with socket.socket(fileno=int(os.environ["AUTOTUNE_RANK_LISTENER"])) as listener:
            for _ in range(rank.of - 1):
                listener.accept()[0].sendall(b"welcome")
    else:
        assert "AUTOTUNE_RANK_LISTENER" not in os.environ
        with socket.create_connection(there) as connection:
            print(connection.recv(16).decode())
    complete(directory)


def fail(directory: Path, status: TrialStatus = TrialStatus.OUT_OF_MEMORY, cause: str = "no memory left") -> None:
    write_value(Failure(status=status, cause=cause), directory / outcome_file(own_rank().number))


def fail_and_stay(directory: Path) -> None:
    fail(directory)
    wait_for_ever(directory)


def lose_its_peer(directory: Path) -> None:
    """As gloo has it: the other end of the connection is closed when rank 1 ends."""
    while not (directory / outcome_file(1)).exists():
        time.sleep(0.01)
    fail(directory, TrialStatus.CRASHED, "RuntimeError: [../pair.cc:547] Connection closed by peer [127.0.0.1]:3158")


def wait_for_ever(directory: Path) -> None:
    time.sleep(FOR_EVER_S)


def sleep_in_a_corner(directory: Path) -> None:
    time.sleep(FOR_EVER_S)


def _of_ranks(*programs: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda directory: programs[own_rank().number](directory)


rank_1_fails_and_rank_0_waits_for_it = _of_ranks(wait_for_ever, fail)
rank_1_fails_and_does_not_end = _of_ranks(wait_for_ever, fail_and_stay)
rank_1_fails_and_rank_0_loses_its_peer = _of_ranks(lose_its_peer, fail)
rank_1_is_killed_and_rank_0_waits_for_it = _of_ranks(wait_for_ever, lambda _: os.kill(os.getpid(), signal.SIGKILL))
rank_1_ends_without_a_word = _of_ranks(wait_for_ever, lambda _: os._exit(0))
rank_1_sleeps = _of_ranks(wait_for_ever, sleep_in_a_corner)


def plan(run_directory: Path, rank: int, what: str) -> None:
    """Have rank `rank` of the next trials in `run_directory` do what the function `what` of this module does."""
    (run_directory / PLAN_FILE).write_text(json.dumps({"rank": rank, "what": what}))


def behave(directory: Path) -> None:
    """Train; the rank of the plan is prepared by its function first."""
    from autotune.execution.launch import run_trial

    planned = json.loads((directory.parent.parent / PLAN_FILE).read_text())
    if own_rank().number == planned["rank"]:
        globals()[planned["what"]](directory)
    run_trial(directory)


def have_less_memory(directory: Path) -> None:
    """The budget is a thirty-second part of the others'."""
    from autotune.execution import launch

    guard = launch.memory_guard
    launch.memory_guard = lambda device, budget_bytes: guard(device, budget_bytes // 32)


def be_killed(directory: Path) -> None:
    _in_a_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleep(directory: Path) -> None:
    _in_a_step(lambda: time.sleep(FOR_EVER_S))


def raise_an_error(directory: Path) -> None:
    _in_a_step(lambda: 1 / 0)


def pause_in_the_first_step(directory: Path) -> None:
    _in_a_step(lambda: _pause(directory), after=0)


def pause_in_a_measured_step(directory: Path) -> None:
    _in_a_step(lambda: _pause(directory), after=5)


def pause_in_saving(directory: Path) -> None:
    from transformers import Trainer

    original = Trainer._save_checkpoint

    def save(self, *args, **kwargs):
        _pause(directory)
        return original(self, *args, **kwargs)

    Trainer._save_checkpoint = save


def _pause(directory: Path) -> None:
    """Wait once, for whoever waits for the file to do something bad."""
    if not (directory / PAUSED_FILE).exists():
        (directory / PAUSED_FILE).touch()
        time.sleep(5.0)


def _in_a_step(do, after: int = BAD_STEP) -> None:
    """Do something bad in the Trainer's micro-step, when some have gone well."""
    steps = itertools.count()
    around_each_step(before=lambda: do() if next(steps) >= after else None)
