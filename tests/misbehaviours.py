"""How trials without a result of their own are judged, by every runner: see `misbehaving`."""

import signal
from typing import NamedTuple


class Misbehaviour(NamedTuple):
    """What a function of `misbehaving` comes to: a status, how its cause begins, and what the log's end holds."""

    name: str
    status: str
    cause: str
    logged: str = ""


MISBEHAVIOURS = (
    Misbehaviour("crash_by_null_pointer", "crashed", "killed by SIGSEGV", "Segmentation fault"),
    Misbehaviour("kill_itself", "crashed", "killed by SIGKILL", "before the kill"),
    Misbehaviour("die_of_realtime_signal", "crashed", f"killed by signal {signal.SIGRTMIN + 5}"),
    Misbehaviour("exit_without_a_word", "crashed", "ended without a result (exit code 0)"),
    Misbehaviour("exit_from_a_library", "crashed", "ended without a result (exit code 1)", "SystemExit: 3"),
    Misbehaviour("raise_an_error", "crashed", "ended without a result (exit code 1)", "ZeroDivisionError: planted"),
    Misbehaviour("write_garbage", "crashed", "the trial's outcome file is garbage"),
    Misbehaviour("write_half_a_result_and_die", "crashed", "ended without a result (exit code 0)"),
    Misbehaviour("die_of_libgomp", "out of memory", "died of a failed allocation (exit code 1)", "libgomp: Thread cre"),
    Misbehaviour("lose_a_worker_to_libgomp", "out of memory", "RuntimeError: DataLoader worker (pid(s) 1) exited"),
    Misbehaviour("print_binary_garbage", "crashed", "ended without a result (exit code 1)", "last    line"),
)


def run_all(pool, bench, misbehaviour) -> None:
    """Run all of them on a pool, and check each result."""
    waiting = {}

    def check_next() -> None:
        result = pool.wait()
        case = waiting.pop(result.request.number)
        assert result.status == case.status
        assert result.outcome.cause.startswith(case.cause)
        assert case.logged in result.outcome.log_tail

    for case in MISBEHAVIOURS:
        request = bench.request(workload=misbehaviour(case.name), limits={"timeout_s": 60})
        waiting[request.number] = case
        if not pool.free():
            check_next()
        pool.begin(request)
    while waiting:
        check_next()
