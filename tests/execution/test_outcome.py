"""What a trial's end means, by what it left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from autotune.execution.outcome import LOG_FILE, OUTCOME_FILE, Ending, host_oom_kills, outcome_of
from autotune.value import write_value
from autotune.values.trial import Failure, Interval, Measurement, Memory, TrialStatus

LIBGOMP = "libgomp: Thread creation failed: Resource temporarily unavailable\n"
BITSANDBYTES = "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp\n"
MEASURED = Measurement(
    step_times_s=(1.0, 1.0),
    accumulation_steps=1,
    samples_per_second=2.0,
    samples_per_second_interval=Interval(low=1.9, high=2.1),
    memory=Memory(resident_bytes=500),
    startup_s=1.0,
    first_step_s=1.0,
    data_wait_share=0.0,
    loss=1.0,
    effects={},
)


@pytest.fixture
def request_of(bench):
    """A request by its memory budget."""
    return lambda memory_bytes: bench.request(limits={"memory_bytes": memory_bytes, "timeout_s": 90})


def verdict(directory: Path, request_of, ending: Ending, *, log: str = "", budget: int = 1000):
    (directory / LOG_FILE).write_text(log)
    return outcome_of(directory, ending, request_of(budget))


@pytest.mark.parametrize(
    ("ending", "log", "status", "cause"),
    [
        (Ending(returncode=0), "", "crashed", "ended without a result (exit code 0)"),
        (Ending(returncode=3), "", "crashed", "ended without a result (exit code 3)"),
        (Ending(returncode=-signal.SIGSEGV), "", "crashed", "killed by SIGSEGV"),
        (Ending(returncode=-signal.SIGKILL), "", "crashed", "killed by SIGKILL"),
        (Ending(returncode=-signal.SIGKILL, host_oom=True), "", "out of memory", "the host's out-of-memory killer"),
        (Ending(returncode=-signal.SIGSEGV, host_oom=True), "", "crashed", "killed by SIGSEGV"),
        (Ending(returncode=-signal.SIGKILL, timed_out=True), "", "timed out", "no result within 90 s"),
        (Ending(returncode=None, timed_out=True, unkillable=1), "", "timed out", "no result within 90 s"),
        (Ending(launcher_died=True), "", "crashed", "the process that runs trials died with it"),
        (Ending(timed_out=True, launcher_died=True), "", "timed out", "no result within 90 s"),
        (Ending(returncode=1), LIBGOMP, "out of memory", "died of a failed allocation (exit code 1)"),
        (
            Ending(returncode=-signal.SIGABRT),
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            "out of memory",
            "died of a failed allocation (killed by SIGABRT)",
        ),
        (Ending(returncode=1), BITSANDBYTES, "out of memory", "died of a failed allocation (exit code 1)"),
        (
            Ending(returncode=1),
            BITSANDBYTES + "goodbye\n",
            "out of memory",
            "died of a failed allocation (exit code 1)",
        ),
        (Ending(returncode=1), BITSANDBYTES + "step\n" * 200, "crashed", "ended without a result (exit code 1)"),
        (Ending(returncode=3), BITSANDBYTES, "crashed", "ended without a result (exit code 3)"),
        (
            Ending(returncode=1),
            BITSANDBYTES.replace("out of memory", "invalid argument"),
            "crashed",
            "ended without a result (exit code 1)",
        ),
        (Ending(returncode=1), "Said: " + BITSANDBYTES, "crashed", "ended without a result (exit code 1)"),
        (Ending(returncode=127), "cannot allocate memory for thread-local data: ABORT\n", "out of memory", "127"),
    ],
)
def test_an_end_without_an_outcome(tmp_path, request_of, ending, log, status, cause):
    failure = verdict(tmp_path, request_of, ending, log=log)
    assert failure.status == status
    assert cause in failure.cause
    assert "\n" not in failure.cause


def test_an_outcome_outranks_the_end_of_the_process(tmp_path, request_of):
    write_value(MEASURED, tmp_path / OUTCOME_FILE)
    assert verdict(tmp_path, request_of, Ending(returncode=-signal.SIGKILL, timed_out=True)) == MEASURED


def test_a_measurement_beyond_the_budget_is_out_of_memory(tmp_path, request_of):
    write_value(MEASURED, tmp_path / OUTCOME_FILE)
    assert verdict(tmp_path, request_of, Ending(returncode=0), budget=500) == MEASURED
    failure = verdict(tmp_path, request_of, Ending(returncode=0), budget=499)
    assert failure.status is TrialStatus.OUT_OF_MEMORY
    assert failure.memory == MEASURED.memory


def test_a_failure_comes_with_the_end_of_the_log(tmp_path, request_of):
    write_value(Failure(status=TrialStatus.INVALID, cause="no"), tmp_path / OUTCOME_FILE)
    failure = verdict(tmp_path, request_of, Ending(returncode=0), log="why\n")
    assert (failure.status, failure.log_tail) == (TrialStatus.INVALID, "why")


@pytest.mark.parametrize(("status", "becomes"), [("crashed", "out of memory"), ("invalid", "invalid")])
def test_a_crash_after_a_failed_allocation_anywhere_in_the_log_is_out_of_memory(tmp_path, request_of, status, becomes):
    """A data-loader worker says it; the tracebacks of the trial itself come after."""
    write_value(Failure(status=status, cause="DataLoader worker exited unexpectedly"), tmp_path / OUTCOME_FILE)
    assert verdict(tmp_path, request_of, Ending(returncode=0), log=LIBGOMP + "  frame\n" * 100).status == becomes


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b'{"kind": "measurement"}', b'{"kind": "else"}', b"[]"])
def test_an_outcome_that_cannot_be_read_is_a_crash(tmp_path, request_of, content):
    (tmp_path / OUTCOME_FILE).write_bytes(content)
    failure = verdict(tmp_path, request_of, Ending(returncode=0), log="the end\n")
    assert failure.status is TrialStatus.CRASHED
    assert "garbage" in failure.cause
    assert failure.log_tail == "the end"


def test_an_outcome_that_is_no_file_is_a_crash(tmp_path, request_of):
    (tmp_path / OUTCOME_FILE).mkdir()
    assert verdict(tmp_path, request_of, Ending(returncode=0)).status is TrialStatus.CRASHED


def test_a_missing_log_is_an_empty_one(tmp_path, request_of):
    assert outcome_of(tmp_path, Ending(returncode=0), request_of(1000)).log_tail == ""


def test_the_hosts_out_of_memory_kills_are_counted_by_the_kernel(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 12\nnuma_hit 3\n")
    assert host_oom_kills(tmp_path / "vmstat") == 12


def test_a_kernel_that_does_not_count_them_counts_none(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 1\n")
    assert host_oom_kills(tmp_path / "vmstat") == host_oom_kills(tmp_path / "missing") == 0
