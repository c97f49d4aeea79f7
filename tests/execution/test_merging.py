"""What the ranks of a trial come to: one measurement, or the cause of the first that failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config, make_failure, make_limits, make_measurement, make_request

from autotune.execution.merging import merged_outcome
from autotune.execution.outcome import Ending
from autotune.value import write_value
from autotune.values.conditions import Conditions
from autotune.values.config import Parallelism
from autotune.values.trial import Failure, Measurement, Memory, Outcome, TrialStatus

LOST_PEER = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31580"
NO_MEMORY = make_failure(TrialStatus.OUT_OF_MEMORY, "DefaultCPUAllocator: can't allocate memory", log_tail="")


def merged(directory: Path, *outcomes: Outcome | None, failed_at=None, codes=None, **ending) -> Outcome:
    """Return what ranks with these outcomes come to; None has written none."""
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            write_value(outcome, directory / f"rank-{rank}.json")
    config = make_config(4, parallelism=Parallelism(world_size=len(outcomes)))
    request = make_request(config, limits=make_limits(timeout_s=90.0, memory_bytes=1000))
    codes = codes or [0] * len(outcomes)
    return merged_outcome(
        directory, Ending(returncode=codes[0], returncodes=codes, failed_at=failed_at or (), **ending), request
    )


def rank(times=(1.0, 1.0), peak: int = 500, **fields) -> Measurement:
    usual = {"step_times_s": times, "memory": Memory(resident_bytes=peak), "effects": {"parallelism": "DDP over 2"}}
    return make_measurement(**{**usual, **fields})


def test_times_are_those_of_the_slowest_rank(tmp_path):
    found = merged(tmp_path, rank((2.0, 1.0)), rank((1.0, 3.0)))
    assert found.step_times_s == (1.0, 3.0)
    assert found.samples_per_second == pytest.approx(16 / 2.0)  # the global batch, both ranks' samples together
    assert found.tokens_per_second == pytest.approx(128 * 16 / 2.0)
    assert found.samples_per_second_interval.low < 16 / 2.0 < found.samples_per_second_interval.high


def test_memory_is_the_worst_ranks_and_the_loss_the_mean(tmp_path):
    found = merged(tmp_path, rank(peak=300, loss=1.0), rank(peak=400, loss=2.0))
    assert found.memory == Memory(resident_bytes=400)
    assert found.loss == 1.5


def test_starts_and_waits_are_the_longest_and_conditions_the_worst(tmp_path):
    found = merged(
        tmp_path,
        rank(startup_s=1, first_step_s=4, data_wait_share=0.1, conditions=Conditions(clock_mhz=900, waited_share=0.0)),
        rank(startup_s=2, first_step_s=3, data_wait_share=0.2, conditions=Conditions(throttled={"heat": 0.5})),
    )
    assert (found.startup_s, found.first_step_s, found.data_wait_share) == (2, 4, 0.2)
    assert found.conditions == Conditions(clock_mhz=900, waited_share=0.0, throttled={"heat": 0.5})


def test_a_rank_beyond_the_budget_is_out_of_memory_for_all(tmp_path):
    found = merged(tmp_path, rank(), rank(peak=1001))
    assert found.status is TrialStatus.OUT_OF_MEMORY
    assert found.cause.startswith("rank 1: peaked at")


def test_ranks_that_ran_different_things_are_no_measurement(tmp_path):
    found = merged(tmp_path, rank(), rank(effects={"parallelism": "one device"}))
    assert found.status is TrialStatus.INVALID
    assert found.cause == "rank 0 ran with parallelism DDP over 2, rank 1 with one device"


def test_ranks_that_measured_different_numbers_of_steps_are_no_measurement(tmp_path):
    assert merged(tmp_path, rank((1.0, 1.0)), rank((1.0, 1.0, 1.0))).status is TrialStatus.CRASHED


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_first_failure_is_the_cause(tmp_path, culprit):
    outcomes: list[Outcome] = [make_failure(cause="RuntimeError: NCCL is unhappy")] * 3
    outcomes[culprit] = NO_MEMORY
    failed_at = [2.0, 2.0, 2.0]
    failed_at[culprit] = 1.0
    found = merged(tmp_path, *outcomes, failed_at=failed_at)
    assert found == NO_MEMORY.model_copy(update={"cause": f"rank {culprit}: {NO_MEMORY.cause}"})


def test_who_speaks_of_a_lost_peer_was_not_the_first(tmp_path):
    """Both ends were noticed at once, or the word came before the end."""
    for failed_at in ([1.0, 1.0], [1.0, 1.001]):
        found = merged(tmp_path, make_failure(cause=LOST_PEER), NO_MEMORY, failed_at=failed_at)
        assert found.status is TrialStatus.OUT_OF_MEMORY


def test_a_rank_that_is_killed_is_the_cause_whatever_the_others_say(tmp_path):
    found = merged(tmp_path, make_failure(cause=LOST_PEER), None, failed_at=[1.0, 1.001], codes=[0, -9])
    assert (found.status, found.cause) == (TrialStatus.CRASHED, "rank 1: killed by SIGKILL")


def test_a_rank_that_was_killed_for_another_is_not_the_cause(tmp_path):
    found = merged(tmp_path, None, NO_MEMORY, failed_at=[None, 1.0], codes=[-9, 0], host_oom=True)
    assert found.cause.startswith("rank 1: DefaultCPUAllocator")


def test_where_nobody_failed_by_itself_a_lost_peer_is_all_there_is_to_say(tmp_path):
    found = merged(tmp_path, rank(), make_failure(cause=LOST_PEER), failed_at=[None, 1.0])
    assert found.cause == f"rank 1: {LOST_PEER}"


def test_a_rank_that_fails_after_another_has_measured_fails_the_trial(tmp_path):
    found = merged(tmp_path, rank(), make_failure(TrialStatus.INVALID, "the loss became nan"), failed_at=[None, 1.0])
    assert (found.status, found.cause) == (TrialStatus.INVALID, "rank 1: the loss became nan")


STACK = 'Stack (most recent call first):\n  File "/lib/{}", line 7 in {}\n  File "/lib/trainer.py", line 9 in train\n'


def test_at_the_time_limit_it_is_said_where_each_rank_stood(tmp_path):
    for number, (file, name) in enumerate([("dist.py", "wait"), ("mine.py", "nap"), ("dist.py", "wait")]):
        log = tmp_path / (f"log-{number}.txt" if number else "log.txt")
        log.write_text("training\n" + STACK.format(file, name))
    found = merged(tmp_path, None, None, None, codes=[-9] * 3, failed_at=[None] * 3, timed_out=True)
    assert found.status is TrialStatus.TIMED_OUT
    assert found.cause == (
        "no result within 90 s; ranks 0, 2 stood in wait (dist.py:7), rank 1 stood in nap (mine.py:7)"
    )


def test_ranks_whose_launcher_died_fail_together(tmp_path):
    found = merged(tmp_path, rank(), None, launcher_died=True)
    assert isinstance(found, Failure)
    assert found.cause == "the process that runs trials died with it"
