"""Trials that go wrong: entries (`module:function`) for the launcher, each doing one bad thing for real.

`behave` is an entry too: it does what the request's `fixed_arguments` say, and trains where they say nothing, so that
one launcher serves every test.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from running import wait_for

from autotune.execution.environment import own_rank
from autotune.execution.job import PROCESS_FILE
from autotune.execution.launch import run_trial
from autotune.execution.outcome import outcome_file
from autotune.value import read_value, write_text, write_value
from autotune.values.trial import Failure, Memory, TrialRequest, TrialStatus

FLOOD_BYTES = 200 << 20
FOR_EVER_S = 3600


def behave(directory: Path) -> None:
    request = read_value(TrialRequest, directory / "request.json")
    name = request.workload.fixed_arguments.get("misbehaviour")
    entry = run_trial if name is None else globals()[name]
    entry(directory)


def print_and_end(directory: Path) -> None:
    print_and_end.kept = tempfile.TemporaryDirectory(dir=directory)  # as `datasets` keeps one until a process ends
    print("on stdout")
    print("on stderr", file=sys.stderr)


def be_killed_while_building(directory: Path) -> None:
    """As a child that compiles is, the first time: `builds.txt` in the run directory has a line for each."""
    builds = directory.parent / "builds.txt"
    if not builds.exists():
        builds.write_text("killed\n")
        os.kill(os.getpid(), signal.SIGKILL)
    with builds.open("a") as file:
        print("built", file=file)
    (directory / "compiled.txt").touch()


def tell(directory: Path) -> None:
    """Say how the process finds itself, and end as a rank that has measured something, as far as a launcher looks."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    print(*(f"{name}={os.environ.get(name)}" for name in names), "")
    print("cores", sorted(os.sched_getaffinity(0)), "threads", os.environ.get("OMP_NUM_THREADS"))
    print("torch was imported before:", "torch" in sys.modules)
    print("core files of", resource.getrlimit(resource.RLIMIT_CORE)[0])
    print("open:", *(entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()))
    complete(directory)


def complete(directory: Path) -> None:
    """As far as the launcher looks, to which an outcome appears whole."""
    write_text('{"kind": "measurement"}', directory / outcome_file(own_rank().number))


def seen(directory: Path, what: object) -> None:
    (directory / "seen.json").write_text(json.dumps(what))


def hang(directory: Path) -> None:
    time.sleep(FOR_EVER_S)


def be_killed_with_temporary_files(directory: Path) -> None:
    seen(directory, tempfile.mkdtemp())
    kill_itself(directory)


def ignore_sigterm(directory: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang(directory)


def crash_by_null_pointer(directory: Path) -> None:
    print("before the crash")
    ctypes.string_at(0)


def kill_itself(directory: Path) -> None:
    print("before the kill")
    os.kill(os.getpid(), signal.SIGKILL)


def die_of_realtime_signal(directory: Path) -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 5)


def exit_without_a_word(directory: Path) -> None:
    os._exit(0)


def exit_from_a_library(directory: Path) -> None:
    sys.exit(3)


def raise_an_error(directory: Path) -> None:
    raise ZeroDivisionError("planted")


def write_garbage(directory: Path) -> None:
    (directory / outcome_file()).write_bytes(b'{"kind": "measurement", \xff\x00')


def write_half_a_result_and_die(directory: Path) -> None:
    (directory / f".{outcome_file()}.1").write_text('{"kind": ')
    os._exit(0)


def flood(directory: Path) -> None:
    print("the first line")
    line = b"x" * 1023 + b"\n"
    for _ in range(FLOOD_BYTES // (len(line) * 1024)):
        os.write(1, line * 1024)
    print("the last line")


def print_binary_garbage(directory: Path) -> None:
    sys.stdout.buffer.write(b"readable\n" + bytes(range(256)) + b"\x1b[31m\xff\xfe last\tline\n")
    sys.stdout.flush()
    os._exit(1)


def leave_a_child(directory: Path) -> None:
    """In the trial's own process group."""
    _spawn(directory)


def leave_a_session(directory: Path) -> None:
    """A grandchild with a session of its own, whose parent has ended: a daemon."""
    _spawn(directory, start_new_session=True)


def leave_a_child_holding_the_pipe(directory: Path) -> None:
    _spawn(directory, stdout=None, stderr=None, start_new_session=True)


def hang_with_children(directory: Path) -> None:
    leave_a_child(directory)
    leave_a_session(directory)
    leave_a_child_holding_the_pipe(directory)
    hang(directory)


def _spawn(directory: Path, **options: object) -> None:
    """Start a process that outlives this one, and write down its id."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["sleep", str(FOR_EVER_S)], stdin=subprocess.DEVNULL, **{**quiet, **options})
    with (directory / "left.txt").open("a") as file:
        file.write(f"{child.pid}\n")
    child.returncode = 0  # nobody waits for it


def refuse(directory: Path) -> None:
    """End well, with an outcome that needs no libraries."""
    write_value(Failure(status=TrialStatus.INVALID, cause="planted"), directory / outcome_file())


def hang_after_the_result(directory: Path) -> None:
    refuse(directory)
    hang(directory)


def kill_the_launcher(directory: Path) -> None:
    """Leave no parent, but children."""
    leave_a_child(directory)
    leave_a_session(directory)
    wait_for(directory / PROCESS_FILE)
    os.kill(os.getppid(), signal.SIGKILL)
    hang(directory)


def stop_the_launcher(directory: Path) -> None:
    wait_for(directory / PROCESS_FILE)
    os.kill(os.getppid(), signal.SIGSTOP)
    hang(directory)


def change_the_process(directory: Path) -> None:
    """Change all that a trial could leave behind in its process."""
    import random

    import numpy as np
    import torch

    os.environ["OMP_NUM_THREADS"] = "2"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    torch.nn.Linear.forward = None
    exit_without_a_word(directory)


def use_memory(directory: Path) -> None:
    """Take 100 MiB within a guard of the request's budget, then more than the budget, then more outside the guard."""
    import torch

    from autotune.execution.guard import memory_guard
    from autotune.execution.outcome import is_out_of_memory

    budget = read_value(TrialRequest, directory / "request.json").limits.memory_bytes
    found: dict[str, object] = {}
    guard = memory_guard("cpu", budget)
    with guard:
        kept = torch.ones(100 << 20, dtype=torch.uint8)
        found["peak_within"] = guard.peak().resident_bytes
        try:
            torch.ones(budget, dtype=torch.uint8)
        except RuntimeError as error:
            found["recognised"] = is_out_of_memory(error)
        del kept
        found["peak_after_freeing"] = guard.peak().resident_bytes
    with memory_guard("cpu", budget) as guard:
        guard.relax()
        relaxed = torch.ones(2 * budget, dtype=torch.uint8)
        found["peak_relaxed"] = guard.peak().resident_bytes
        del relaxed
    found["over"] = []
    for name in ("relax", "check"):
        with memory_guard("cpu", budget) as guard:
            little_more = torch.ones(budget + (4 << 20), dtype=torch.uint8)
            try:
                getattr(guard, name)()
            except MemoryError as error:
                found["over"].append(str(error))
            del little_more
            guard.begin_anew(Memory())
            found["peak_anew"] = guard.peak().resident_bytes
    found["allocated_after"] = torch.empty(2 * budget, dtype=torch.uint8).numel()
    seen(directory, found)


def keep_the_users_limit(directory: Path) -> None:
    """Enter a guard where the data segment is limited already."""
    from autotune.execution.guard import memory_guard

    resource.setrlimit(resource.RLIMIT_DATA, (1 << 42, 1 << 43))
    limits = [resource.getrlimit(resource.RLIMIT_DATA)]
    with memory_guard("cpu", 1 << 30):
        limits.append(resource.getrlimit(resource.RLIMIT_DATA))
    seen(directory, [*limits, resource.getrlimit(resource.RLIMIT_DATA)])


def hold_device_memory(directory: Path) -> None:
    """Take a GiB of the CUDA device and hang."""
    import torch

    from autotune.values.hardware import cuda_used_bytes

    kept = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    seen(directory, {"held": cuda_used_bytes("cuda:0")})
    hang(directory)
    del kept


def ask_for_the_precision(directory: Path) -> None:
    """Make a Trainer; write down whether products are TF32, and before that ask as inductor does."""
    import torch
    from transformers import Trainer, TrainingArguments

    from autotune.training.arguments import training_plan
    from autotune.values.hardware import detect

    request = read_value(TrialRequest, directory / "request.json")
    workload = request.workload.model_copy(update={"fixed_arguments": {}})
    tuned = training_plan(request.config, workload, detect("cuda:0")).tuned
    Trainer(torch.nn.Linear(2, 2), TrainingArguments(str(directory), **tuned))
    torch.get_float32_matmul_precision()
    seen(directory, torch.backends.cuda.matmul.fp32_precision == "tf32")


def count_devices(directory: Path) -> None:
    import torch

    seen(directory, {"devices": torch.cuda.device_count()})


def grow_beside_the_allocator(directory: Path) -> None:
    """Fill the allocator under a guard, while memory comes to lie beside it that is none of its own."""
    import torch

    from autotune.execution.guard import memory_guard
    from autotune.values.hardware import cuda_used_bytes

    budget = read_value(TrialRequest, directory / "request.json").limits.memory_bytes
    idle = cuda_used_bytes("cuda:0")
    beside = []

    def now() -> dict[str, int]:
        reserved = torch.cuda.memory_reserved("cuda:0")
        return {"used": cuda_used_bytes("cuda:0") - idle, "reserved": reserved, "peak": guard.peak().peak_bytes}

    def load(size: int) -> None:
        """Take device memory past torch, as kernels do."""
        pointer = ctypes.c_uint64()
        assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        beside.append(pointer)

    def filled() -> list[torch.Tensor]:
        kept = []
        while True:
            try:
                kept.append(torch.empty(20 << 20, dtype=torch.uint8, device="cuda:0"))
            except torch.OutOfMemoryError:
                return kept

    found: dict[str, object] = {}
    with memory_guard("cuda:0", budget) as guard:
        found["entered"] = now()
        kept = filled()
        found["full"] = now()
        load(300 << 20)
        found["over"] = now()
        try:
            guard.step_ended()
        except MemoryError as error:
            found["too_much"] = str(error)
        kept = kept[: len(kept) // 2]
        torch.cuda.reset_peak_memory_stats()  # as if the step had held no more at once, but the cache
        guard.step_ended()
        found["settled"] = now()
        kept += filled()
        found["full_again"] = now()
        found["peak"] = guard.peak().peak_bytes
        guard.check()
        del kept
        torch.cuda.empty_cache()
        guard.begin_anew(Memory())
        known = guard.peak()
        found["before_attempt"] = known.peak_bytes
        del filled()[:]
        torch.cuda.empty_cache()
        guard.begin_anew(known)
        found["known"] = guard.peak().peak_bytes
        found["after_attempt"] = guard.peak().peak_bytes
        load(budget)
        try:
            guard.check()
        except MemoryError as error:
            found["outgrown"] = str(error)
    seen(directory, found)


def thrash(directory: Path) -> None:
    """Train while each step needs the memory that is cached, in another size."""
    import torch

    def take_and_free() -> None:
        for mib in (700, 1200):  # which a budget of 2 GiB has no room for together
            torch.empty(mib << 20, dtype=torch.uint8, device="cuda:0")
        torch.cuda.empty_cache()

    around_each_step(before=take_and_free)
    train_usually(directory)


def count_compilations(directory: Path) -> None:
    """Train, and write down how often torch had compiled and recorded CUDA graphs by the end of each step."""
    import torch
    from torch._dynamo import callback

    begin, counts, by_step = torch.cuda.CUDAGraph.capture_begin, {"compiled": 0, "recorded": 0}, []

    def compiled(_: object) -> None:
        counts["compiled"] += 1

    def capture_begin(self: torch.cuda.CUDAGraph, *arguments: object, **named: object) -> None:
        counts["recorded"] += 1
        begin(self, *arguments, **named)

    callback.on_compile_start(compiled)
    torch.cuda.CUDAGraph.capture_begin = capture_begin
    around_each_step(after=lambda: by_step.append({**counts}))
    train_usually(directory)
    seen(directory, by_step)


def look_at_the_compile_cache(directory: Path) -> None:
    """Train, and write down where compiled code goes while it trains, and whether that is there after it."""
    names, found = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), {}

    def look() -> None:
        found.update({name: os.environ[name] for name in names})
        found.setdefault("at first", [path.name for path in Path(os.environ[names[0]]).iterdir()])
        Path(os.environ[names[1]]).mkdir(exist_ok=True)

    around_each_step(before=look)
    train_usually(directory)
    seen(directory, {**found, "after": Path(found[names[0]]).exists()})


def around_each_step(*, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
    """Have the Trainer do this before and that after each of its micro-steps."""
    from transformers import Trainer

    step = Trainer.training_step

    def training_step(self: Trainer, *arguments: object, **named: object) -> object:
        before()
        loss = step(self, *arguments, **named)
        after()
        return loss

    Trainer.training_step = training_step


def train_usually(directory: Path) -> None:
    request = read_value(TrialRequest, directory / "request.json")
    workload = request.workload.model_copy(update={"fixed_arguments": {}})
    write_value(request.model_copy(update={"workload": workload}), directory / "request.json")
    run_trial(directory)


def have_another_hold(directory: Path, size: str) -> int:
    """Have a process that isn't the trial's hold so many bytes of the device, an expression; return its number."""
    held = directory / "held"
    held.unlink(missing_ok=True)
    hold = f"import os, time, torch; held = torch.empty({size}, dtype=torch.uint8, device='cuda')"
    hold = f"{hold}; print(os.getpid(), file=open({str(held)!r}, 'w'), flush=True); time.sleep(60)"
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: the orphan is the launcher's, not the trial's
    subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, hold], check=True)
    return int(wait_for(held))


def see_another_take_memory(directory: Path) -> None:
    """`seen.json`: what counts against the budget before and after another process takes 1 GiB."""
    from autotune.execution.guard import memory_guard

    with memory_guard("cuda:0", 2 << 30) as guard:
        before = guard.in_use_bytes()
        have_another_hold(directory, "1 << 30")
        seen(directory, [before, guard.in_use_bytes()])


def see_another_begin_meanwhile(directory: Path) -> None:
    """The same of a process that takes it while the guard makes its context."""
    from autotune.execution.guard import CudaGuard
    from autotune.values.hardware import cuda_used_bytes

    found, idle = [], cuda_used_bytes("cuda:0")

    class Slow(CudaGuard):
        def _make_context(self) -> None:
            super()._make_context()
            found.append(cuda_used_bytes("cuda:0") - idle)
            have_another_hold(directory, "1 << 30")

    with Slow("cuda:0", 2 << 30) as guard:
        seen(directory, [*found, guard.in_use_bytes()])


def see_untold_memory_come_and_go(directory: Path) -> None:
    """The same where the driver names no process: another gives back what it had before, a third takes more."""
    from autotune.execution import guard as guards

    guards.own_used_bytes = lambda device: None
    other = have_another_hold(directory, "2 << 30")
    with guards.memory_guard("cuda:0", 2 << 30) as guard:
        found = [guard.in_use_bytes()]
        os.kill(other, signal.SIGKILL)
        time.sleep(0.5)
        found.append(guard.in_use_bytes())
        have_another_hold(directory, "5 << 30")
        guard.step_ended()
        seen(directory, [*found, guard.in_use_bytes(), guard.peak().peak_bytes])


def be_crowded_out(directory: Path) -> None:
    """Train while another process leaves 2 GiB of the device; `times.txt` in the run directory has a line for each."""
    with (directory.parent / "times.txt").open("a") as times:
        print(directory.name, file=times)
    have_another_hold(directory, "torch.cuda.mem_get_info()[0] - (2 << 30)")
    train_usually(directory)


def be_crowded_out_once(directory: Path) -> None:
    times = directory.parent / "times.txt"
    if times.exists() and directory.name in times.read_text().split():
        return train_usually(directory)
    be_crowded_out(directory)


class Misbehaviour(NamedTuple):
    name: str  # of a function above
    status: str  # of its trial
    cause: str  # as it begins
    logged: str = ""  # at the end of the log


MISBEHAVIOURS = (
    Misbehaviour("crash_by_null_pointer", "crashed", "killed by SIGSEGV", "Segmentation fault"),
    Misbehaviour("kill_itself", "crashed", "killed by SIGKILL", "before the kill"),
    Misbehaviour("die_of_realtime_signal", "crashed", f"killed by signal {signal.SIGRTMIN + 5}"),
    Misbehaviour("exit_from_a_library", "crashed", "ended without a result (exit code 1)", "SystemExit: 3"),
    Misbehaviour("raise_an_error", "crashed", "ended without a result (exit code 1)", "ZeroDivisionError: planted"),
    Misbehaviour("write_garbage", "crashed", "the trial's outcome file is garbage"),
    Misbehaviour("write_half_a_result_and_die", "crashed", "ended without a result (exit code 0)"),
    Misbehaviour("print_binary_garbage", "crashed", "ended without a result (exit code 1)", "last    line"),
)
