"""How a trial ended, by the files of its process or its ranks: outcomes, errors, logs."""

import signal
from pathlib import Path

import pytest
from factories import make_config, make_failure, make_limits, make_measurement, make_request

from autotune.errors import MachineError
from autotune.execution import outcome
from autotune.execution.checking import CheckError
from autotune.execution.outcome import Ending, first_line, is_out_of_memory
from autotune.value import write_value
from autotune.values.conditions import Conditions
from autotune.values.config import Parallelism
from autotune.values.trial import Measurement, Memory, Outcome, TrialStatus

LIBGOMP = "libgomp: Thread creation failed: Resource temporarily unavailable\n"
BITSANDBYTES = "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp\n"
MEASURED = make_measurement(memory=Memory(resident_bytes=500))
WELL = Ending(returncodes=(0,))


def verdict(directory: Path, ending: Ending = WELL, *, log: str = "", budget: int = 1000):
    (directory / outcome.log_file()).write_text(log)
    return outcome.outcome_of(directory, ending, make_request(limits=make_limits(memory_bytes=budget, timeout_s=90)))


NO_RESULT, NO_MEMORY_LEFT = "ended without a result (exit code {})", "died of a failed allocation ({})"
BAD_ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"


@pytest.mark.parametrize(
    ("code", "ending", "log", "status", "cause"),
    [
        (0, {}, "", "crashed", NO_RESULT.format(0)),
        (3, {}, "", "crashed", NO_RESULT.format(3)),
        (-11, {}, "", "crashed", "killed by SIGSEGV"),
        (-9, {}, "", "crashed", "killed by SIGKILL"),
        (-9, {"host_oom": True}, "", "out of memory", "the host's out-of-memory killer"),
        (-11, {"host_oom": True}, "", "crashed", "killed by SIGSEGV"),
        (-6, {}, "CUDA error: uncorrectable ECC error encountered\n", "crashed", "killed by SIGABRT"),
        (-9, {"timed_out": True}, "", "timed out", "no result within 90 s"),
        (None, {"timed_out": True}, "", "timed out", "no result within 90 s"),
        (None, {"launcher_died": True}, "", "crashed", "the process that runs trials died with it"),
        (None, {"timed_out": True, "launcher_died": True}, "", "timed out", "no result within 90 s"),
        (1, {}, LIBGOMP, "out of memory", NO_MEMORY_LEFT.format("exit code 1")),
        (-6, {}, BAD_ALLOC, "out of memory", NO_MEMORY_LEFT.format("killed by SIGABRT")),
        (1, {}, BITSANDBYTES, "out of memory", NO_MEMORY_LEFT.format("exit code 1")),
        (1, {}, BITSANDBYTES + "goodbye\n", "out of memory", NO_MEMORY_LEFT.format("exit code 1")),
        (1, {}, BITSANDBYTES + "step\n" * 200, "crashed", NO_RESULT.format(1)),
        (3, {}, BITSANDBYTES, "crashed", NO_RESULT.format(3)),
        (1, {}, BITSANDBYTES.replace("out of memory", "invalid argument"), "crashed", NO_RESULT.format(1)),
        (1, {}, "Said: " + BITSANDBYTES, "crashed", NO_RESULT.format(1)),
        (127, {}, "cannot allocate memory for thread-local data: ABORT\n", "out of memory", "127"),
    ],
)
def test_an_end_without_an_outcome(tmp_path, code, ending, log, status, cause):
    codes = () if ending.get("launcher_died") else (code,)
    failure = verdict(tmp_path, Ending(returncodes=codes, **ending), log=log)
    assert failure.status == status
    assert cause in failure.cause
    assert "\n" not in failure.cause


def test_a_measurement_outranks_the_end_of_the_process_and_beyond_the_budget_is_out_of_memory(tmp_path):
    write_value(MEASURED, tmp_path / outcome.outcome_file())
    assert verdict(tmp_path, Ending(returncodes=(-signal.SIGKILL,), timed_out=True), budget=500) == MEASURED
    failure = verdict(tmp_path, budget=499)
    assert (failure.status, failure.memory) == (TrialStatus.OUT_OF_MEMORY, MEASURED.memory)


@pytest.mark.parametrize(("status", "becomes"), [("crashed", "out of memory"), ("invalid", "invalid")])
def test_a_crash_after_a_failed_allocation_anywhere_in_the_log_is_out_of_memory(tmp_path, status, becomes):
    """A data-loader worker says it; the tracebacks of the trial itself come after."""
    write_value(make_failure(status, "DataLoader worker exited unexpectedly"), tmp_path / outcome.outcome_file())
    assert verdict(tmp_path, log=LIBGOMP + "  frame\n" * 100).status == becomes


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b'{"kind": "measurement"}', b'{"kind": "else"}', b"[]"])
def test_an_outcome_that_cannot_be_read_is_a_crash(tmp_path, content):
    (tmp_path / outcome.outcome_file()).write_bytes(content)
    failure = verdict(tmp_path)
    assert failure.status is TrialStatus.CRASHED
    assert "garbage" in failure.cause


@pytest.mark.parametrize(("counted", "kills"), [("oom_kill 12\n", 12), ("", 0)])
def test_the_hosts_out_of_memory_kills_are_counted_where_the_kernel_tells(tmp_path, counted, kills):
    (tmp_path / "vmstat").write_text(f"nr_free_pages 1\n{counted}numa_hit 3\n")
    assert outcome.host_oom_kills(tmp_path / "vmstat") == kills
    assert outcome.host_oom_kills(tmp_path / "missing") == 0


LOST_PEER = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31580"
NO_MEMORY = make_failure(TrialStatus.OUT_OF_MEMORY, "DefaultCPUAllocator: can't allocate memory")


def merged(directory: Path, *outcomes: Outcome | None, failed_at=None, codes=None, **ending) -> Outcome:
    """Return the outcome of a trial whose ranks have written these; None: nothing."""
    for rank, written in enumerate(outcomes):
        if written is not None:
            write_value(written, directory / f"rank-{rank}.json")
    config = make_config(4, parallelism=Parallelism(world_size=len(outcomes)))
    request = make_request(config, limits=make_limits(timeout_s=90.0, memory_bytes=1000))
    codes = codes or [0] * len(outcomes)
    return outcome.merged_outcome(directory, Ending(returncodes=codes, failed_at=failed_at or (), **ending), request)


def rank(times=(1.0, 1.0), peak: int = 500, **fields) -> Measurement:
    usual = {"step_times_s": times, "memory": Memory(resident_bytes=peak), "effects": {"parallelism": "DDP over 2"}}
    return make_measurement(**{**usual, **fields})


def test_several_ranks_have_one_measurement_with_the_times_of_the_slowest(tmp_path):
    idle, hot = Conditions(idle_share=0.1), Conditions(throttled={"heat": 0.5})
    one = rank((2.0, 1.0), 300, loss=1.0, startup_s=1, first_step_s=4, data_wait_share=0.1, conditions=idle)
    two = rank((1.0, 3.0), 400, loss=2.0, startup_s=2, first_step_s=3, data_wait_share=0.2, conditions=hot)
    found = merged(tmp_path, one, two)
    assert found.step_times_s == (1.0, 3.0)
    assert found.samples_per_second == pytest.approx(16 / 2.0)  # the global batch, both ranks' samples together
    assert found.samples_per_second_interval.low < 16 / 2.0 < found.samples_per_second_interval.high
    assert (found.memory, found.loss) == (Memory(resident_bytes=400), 1.5)
    assert (found.startup_s, found.first_step_s, found.data_wait_share) == (2, 4, 0.2)
    assert found.conditions == Conditions(idle_share=0.1, throttled={"heat": 0.5})


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_first_failure_is_the_cause(tmp_path, culprit):
    outcomes, failed_at = [make_failure(cause="RuntimeError: NCCL is unhappy")] * 3, [2.0, 2.0, 2.0]
    outcomes[culprit], failed_at[culprit] = NO_MEMORY, 1.0
    found = merged(tmp_path, *outcomes, failed_at=failed_at)
    assert found == NO_MEMORY.model_copy(update={"cause": f"rank {culprit}: {NO_MEMORY.cause}"})


def test_a_rank_that_lost_its_peer_was_not_the_first_to_fail(tmp_path):
    """Both ends were noticed at once, or the word came before the end."""
    for failed_at in ([1.0, 1.0], [1.0, 1.001]):
        found = merged(tmp_path, make_failure(cause=LOST_PEER), NO_MEMORY, failed_at=failed_at)
        assert found.status is TrialStatus.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("outcomes", "ending", "status", "cause"),
    [
        ([rank(), rank(peak=1001)], {}, "out of memory", "rank 1: peaked at"),
        ([rank(), rank(effects={"parallelism": "one device"})], {}, "invalid",
         "rank 0 ran with parallelism DDP over 2, rank 1 with one device"),
        ([rank((1.0, 1.0)), rank((1.0, 1.0, 1.0))], {}, "crashed", "rank 0 measured 2 steps, rank 1 3"),
        # killed, whatever the others say
        ([make_failure(cause=LOST_PEER), None], {"failed_at": [1.0, 1.001], "codes": [0, -9]}, "crashed",
         "rank 1: killed by SIGKILL"),
        # killed for another
        ([None, NO_MEMORY], {"failed_at": [None, 1.0], "codes": [-9, 0], "host_oom": True}, "out of memory",
         "rank 1: DefaultCPUAllocator"),
        # where nobody failed by itself, a lost peer is all there is to say
        ([rank(), make_failure(cause=LOST_PEER)], {"failed_at": [None, 1.0]}, "crashed", f"rank 1: {LOST_PEER}"),
        ([rank(), make_failure(TrialStatus.INVALID, "the loss became nan")], {"failed_at": [None, 1.0]}, "invalid",
         "rank 1: the loss became nan"),
        ([rank(), None], {"launcher_died": True}, "crashed", "the process that runs trials died with it"),
    ],
    ids=["budget", "effects", "steps", "killed", "killed for another", "lost peer", "later", "launcher"],
)  # fmt: skip
def test_one_rank_that_fails_fails_the_trial(tmp_path, outcomes, ending, status, cause):
    found = merged(tmp_path, *outcomes, **ending)
    assert found.status == status
    assert found.cause.startswith(cause)


MIB, GIB = 1 << 20, 1 << 30
# torch 2.11, under a cap of 8 GiB on a device of 80.
CUDA = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 72.42 GiB is "
    "free. Including non-PyTorch memory, this process has 7.58 GiB memory in use. 7.16 GiB allowed; Of the allocated "
    "memory 7.08 GiB is allocated by PyTorch, and 56.14 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8388608 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "in_use", "cause"),
    [
        (RuntimeError(CUDA), 8 * GIB - MIB, "64.00 MiB were asked for with 8.00 GiB in use; the budget is 8.00 GiB"),
        (RuntimeError(CPU), 100 * MIB, "8 MiB were asked for with 100 MiB in use; the budget is 8.00 GiB"),
        (RuntimeError(CPU), None, "8 MiB were asked for; the budget is 8.00 GiB"),
        (MemoryError(), 7 * GIB, "MemoryError with 7.00 GiB in use; the budget is 8.00 GiB"),
        (MemoryError("needed 9.00 GiB, more than the budget of 8.00 GiB"), 9 * GIB,
         "needed 9.00 GiB, more than the budget of 8.00 GiB"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            7 * GIB,
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` with 7.00 GiB in use; the "
            "budget is 8.00 GiB",
        ),
        (  # where a check ran out comes first
            CheckError(f"while evaluating with a batch: {first_line(RuntimeError(CUDA))}"),
            7 * GIB,
            "while evaluating with a batch: 64.00 MiB were asked for with 7.00 GiB in use; the budget is 8.00 GiB",
        ),
    ],
    ids=["cuda", "cpu", "unknown", "python", "over", "library", "check"],
)  # fmt: skip
def test_a_shortage_is_told_with_the_bytes_asked_for_in_use_and_in_the_budget(error, in_use, cause):
    assert outcome.shortage(error, in_use, 8 * GIB) == cause


TALK = "a library that talks and talks "


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(TALK * 20 + "\nand more"), TALK * 6 + "a library ..."),
        (LookupError("\n******\n  Resource punkt not found.\n******"), "Resource punkt not found."),
        (ValueError("***"), "ValueError"),
    ],
    ids=["long", "framed", "no words"],
)
def test_the_first_line_of_an_error_has_its_first_words_and_ends_between_words(error, line):
    assert first_line(error) == line


def raised(error: BaseException, *, cause: BaseException | None = None, during: BaseException | None = None):
    """Return `error` as it is once it was raised from `cause`, or while `during` was handled."""
    error.__cause__, error.__context__ = cause, during
    return error


class OutOfMemoryError(RuntimeError):
    """By its name, as torch.OutOfMemoryError."""


class InductorError(RuntimeError):
    """A compiler's wrapper."""


CIRCLE = [ValueError("1"), ValueError("2")]
CIRCLE[0].__context__, CIRCLE[1].__context__ = CIRCLE[1], CIRCLE[0]
FAILED_ALLOCATIONS = [
    RuntimeError(CPU), RuntimeError("could not execute a primitive"), RuntimeError("could not create a primitive"),
    MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("std::bad_alloc"),
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    RuntimeError("CUDA error: out of memory"), RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"),
    RuntimeError("NCCL error: unhandled cuda error. Cuda failure 'out of memory'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    InductorError("MemoryError: "), raised(InductorError("while compiling"), cause=MemoryError()),
    raised(ValueError("on top of it"), during=RuntimeError(CPU)),
    raised(InductorError("outer"), cause=raised(InductorError("inner"), during=MemoryError())),
]  # fmt: skip
OTHER_ERRORS = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    ValueError("fp16 needs an accelerator"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    OSError(28, "No space left on device"),
    raised(KeyError("a"), cause=ValueError("b")),
    CIRCLE[0],  # errors that refer to each other are looked at once
]


@pytest.mark.parametrize(
    "error", [*FAILED_ALLOCATIONS, *OTHER_ERRORS], ids=lambda e: f"{type(e).__name__}-{str(e)[:30]}"
)
def test_a_failed_allocation_is_told_from_another_error(error):
    assert is_out_of_memory(error) == (error in FAILED_ALLOCATIONS)


@pytest.mark.parametrize(
    ("error", "is_devices"),
    [
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: unknown error"), True),
        (RuntimeError("CUDA error: the MPS client has been terminated by the server"), True),
        (raised(ValueError("a"), cause=MachineError("cuda:0: the NVIDIA driver doesn't report it: GPU is lost")), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
    ids=str,
)
def test_an_error_of_the_device_is_told_from_the_configurations(error, is_devices):
    assert outcome.is_of_device(error) == is_devices


@pytest.mark.parametrize(
    ("content", "options", "tail"),
    [
        (b"1\n2\n3\n4\n", {"lines": 2}, "3\n4"),
        (b"x" * 10_000 + b"\nend\n", {"lines": 15, "size": 10}, "xxxxx\nend"),
        (b"1\n\n  \n2\n\n", {"lines": 2}, "1\n2"),
        (b"\x1b[31mred\xff\x00\n", {"lines": 15}, "\ufffd[31mred\ufffd\ufffd"),
        (b"\tat line 3\n 50%\r100%\n", {"lines": 15}, "    at line 3\n 50%\n100%"),  # a progress bar returns
    ],
    ids=["last lines", "end of a long log", "no empty lines", "unprintable", "tabs and progress bars"],
)
def test_the_tail_is_the_last_lines_as_they_can_be_shown(tmp_path, content, options, tail):
    (tmp_path / "log.txt").write_bytes(content)
    assert outcome.read_tail(tmp_path / "log.txt", **options) == tail


def test_a_log_that_is_missing_or_no_file_has_an_empty_tail(tmp_path):
    assert outcome.read_tail(tmp_path / "none.txt", lines=1) == ""
    assert outcome.read_tail(tmp_path, lines=1) == ""
