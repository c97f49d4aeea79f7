"""The environment of the processes that run trials: variables set before any import, devices, compiled operators.

A trial sees its own devices and no other. The Trainer takes every visible device (`nn.DataParallel`, and it starts at
`cuda:0` whatever it is told), so the device of a search is made the only one, and is `cuda:0` to the trial; a trial of
several ranks sees as many as it has ranks, and rank N is at `cuda:N`.

DeepSpeed compiles its operators where they are first used: the messages of ranks on a CPU, the optimizer of the host
for what is offloaded. That takes a minute and more each, and is kept (`TORCH_EXTENSIONS_DIR`). In a trial it would
count against the limit; and a trial that is killed meanwhile leaves a lock for which all later ones wait. So a child
compiles them before, outside of any trial's time and memory; what can't be compiled, the trial reports. The lock of a
child or a trial that was ended meanwhile is removed, and the child of the next trial goes on.

Libraries that share memory between processes (NCCL between ranks, torch between a data loader and its workers,
DeepSpeed on the CPU) make files in /dev/shm and remove them themselves, unless they are killed before. Such files stay
until the machine is restarted, and take its memory: what a trial that was ended has left there is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from autotune.execution.ranks import FOREIGN, own_rank
from autotune.training.arguments import ZERO_STAGES
from autotune.value import read_value
from autotune.values.hardware import MMAP_THRESHOLD, OWN_MMAP_THRESHOLD, allocator_settings
from autotune.values.trial import TrialRequest

# See each library's reason. A value that the user has set stays.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() without a context, which a fork would inherit
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts, by which the device was chosen
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # pyarrow's own pool reserves 1 GiB, which the memory limit would count
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",  # what a trial printed before it was killed is in its log
}

# What a trial has no business with: the URL of the lasting record may hold a password, the token opens a cluster.
_WITHHELD = ("AUTOTUNE_RECORD", "RAY_AUTH_TOKEN")

# How the libraries call their files in shared memory; anything else is not ours to touch.
_SHARED_PREFIXES = ("torch_", "nccl-", "deepspeed_")
SHARED_MEMORY = Path("/dev/shm")

COMPILE_LIMIT_S = 1800.0  # two operators, on a slow machine that does other things as well
_BUILDING = "building.txt"  # beside the child's request: the lock of what is being built


def launcher_environment(
    device: str, mark: Mapping[str, str], present: Mapping[str, str] = os.environ, *, others: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of a launcher for `device` ('cpu' or 'cuda:N').

    Args:
        device: As the parent counts.
        mark: A variable that makes the launcher's descendants known for good; see `job`.
        present: The parent's environment.
        others: Further devices, of other trials or of further ranks.
    """
    wanted = dict(ENVIRONMENT)
    if device == "cpu":
        # Where the host's memory is what is measured, freed blocks go back at once; see `guard`, which undoes it in
        # time. At glibc's own first value of 128 KiB the peaks of small models were 1 to 5 MiB higher, by which blocks
        # of a micro-batch are below it: a BERT of a million weights spread by 1.5 MiB around what its tensors take, and
        # at 16 KiB by 0.3 MiB. Later glibc would come to keep freed blocks of up to 32 MiB, and the peak would be that
        # of the heap's history. Nothing undoes it for processes that collate batches beside a GPU, and each batch of
        # images would be mapped and cleared anew.
        wanted[MMAP_THRESHOLD] = OWN_MMAP_THRESHOLD
    chosen = {name: present.get(name, value) for name, value in wanted.items()}
    # The parent's own module path in its order: neither more (the present directory) nor less than what it imports.
    chosen["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
    # Beside the interpreter lie tools that libraries look for (ninja), whether its environment is activated or not.
    chosen["PATH"] = os.pathsep.join([present.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    shared = {name: value for name, value in present.items() if name not in (*_WITHHELD, *FOREIGN)}
    return {**shared, **chosen, **mark, "CUDA_VISIBLE_DEVICES": visible((device, *others), present)}


def visible(devices: Sequence[str], present: Mapping[str, str] = os.environ) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that leaves `devices` alone, named as this process counts."""
    there = present.get("CUDA_VISIBLE_DEVICES")
    names = None if there is None else [entry.strip() for entry in there.split(",") if entry.strip()]
    indices = [int(device.partition(":")[2] or 0) for device in devices if device != "cpu"]
    return ",".join(str(index) if names is None else names[index] for index in indices)


def choose_segments(expandable: bool) -> None:
    """Have torch's CUDA allocator make expandable segments or not; its other settings stay the user's.

    To be called before anything is allocated. A trial is forked from a process in which torch has read its variable.
    """
    given = allocator_settings()
    if expandable or given:
        import torch

        torch._C._accelerator_setAllocatorSettings(f"{f'{given},' if given else ''}expandable_segments:{expandable}")


def trial_device(device: str) -> str:
    """Return the name that the parent's `device`, or the one of this rank, has inside a trial."""
    return "cpu" if device == "cpu" else f"cuda:{own_rank().number}"


@contextlib.contextmanager
def cold_compile_cache(directory: Path, rank: int = 0) -> Iterator[None]:
    """Let inductor and Triton find nothing compiled, and leave nothing behind in `directory`; each rank its own.

    Otherwise they share their own caches in the user's temporary directory, from trial to trial and search to search.
    """
    cache = directory / f"compile-cache-{rank}"
    try:
        with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}):
            yield
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def forget_unfinished(since: float) -> None:
    """Remove libraries from inductor's cache that a killed compiler didn't write to their end.

    Every later training would load them: "file too short". They are those written at `since` (in seconds since 1970) or
    later, by a trial that has ended, and those that nobody has written to for ten minutes. One that a linker has open
    stays: the cache is shared by all trainings of the user.
    """
    if "torch" not in sys.modules:  # in a process that forks no trials
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    for library in cache.glob("*/*.so"):
        with contextlib.suppress(OSError):  # another process removes it
            found = library.stat()
            if since > found.st_mtime > time.time() - 600:
                continue
            with library.open("rb") as file:
                header = file.read(64)
            if len(header) == 64:  # a whole ELF file reaches to the end of its section headers, put last by linkers
                (start,), (each, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
                if found.st_size >= start + each * count:
                    continue
            if is_unused(library) and library.stat().st_mtime_ns == found.st_mtime_ns:
                library.unlink()


def operators_of(request: TrialRequest) -> tuple[str, ...]:
    """Return the operators of DeepSpeed that a trial is going to need, by the names of their builders."""
    spread = request.config.parallelism
    builders = {"ShareMemCommBuilder": request.device == "cpu", "CPUAdamBuilder": spread.offload != "none"}
    return tuple(name for name, is_needed in builders.items() if is_needed and spread.sharding in ZERO_STAGES)


def compile_operators(directory: Path) -> None:
    """Compile what the trial of the request in `directory` needs; at once if that has been done."""
    find_ninja()
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    for name in operators_of(read_value(TrialRequest, directory / "request.json")):
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            lock = Path(_get_build_directory(builder.name, verbose=False)) / "lock"
            with contextlib.suppress(FileNotFoundError):  # a killed builder's, for which torch would wait for ever
                if time.time() - lock.stat().st_mtime > COMPILE_LIMIT_S:
                    lock.unlink()
            (directory / _BUILDING).write_text(str(lock))
            builder.load(verbose=False)
    (directory / _BUILDING).unlink(missing_ok=True)


def find_ninja() -> None:
    """Put first on the path the ninja that was installed beside DeepSpeed, which need not be there."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def tell_deepspeed(device: str) -> None:
    """Tell DeepSpeed that the ranks have met: on a CPU TrainingArguments leaves that out, and ZeRO-3 asks for it."""
    find_ninja()  # where it looks at what it has compiled
    if device == "cpu" and own_rank().is_launched:
        importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")


def forget_ended_builder(directory: Path) -> bool:
    """Remove the lock that the child in `directory`, or a trial after it, was ended with; return whether there was one.

    That of another process stays: torch keeps the file open for as long as it builds.
    """
    try:
        lock = Path((directory / _BUILDING).read_text())
        if is_left := lock.exists() and is_unused(lock):
            lock.unlink()
    except OSError:  # nothing was being built, or another process was faster
        return False
    return is_left


def shared_files(directory: Path = SHARED_MEMORY) -> set[Path]:
    """Return the libraries' files in shared memory."""
    try:
        return {file for file in directory.iterdir() if file.name.startswith(_SHARED_PREFIXES)}
    except OSError:
        return set()


def remove_orphans(before: set[Path], directory: Path = SHARED_MEMORY) -> None:
    """Remove the libraries' files that have come since `before`, except those of processes that live."""
    for file in shared_files(directory) - before:
        with contextlib.suppress(OSError):
            if is_unused(file):
                file.unlink()


def is_unused(file: Path) -> bool:
    """Return whether a file is this user's, and no process has it open or mapped; False where the kernel can't tell.

    /proc doesn't show the processes of other containers, which may share memory and caches with this one. The kernel
    counts them all: it grants a lease for writing on a file that is open nowhere else (fcntl(2)).
    """
    try:
        if file.lstat().st_uid != os.getuid():
            return False
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored, if another process opens it meanwhile
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        finally:
            os.close(descriptor)  # and with it the lease
    except OSError:
        return False
    return True
