"""The environment of the processes that run trials: variables set before any import, devices, ranks, shared files.

A trial sees its own devices alone, from `cuda:0` on, since the Trainer takes every visible one. The launcher forks the
ranks in tens of milliseconds, where torchrun's interpreters take ten seconds each. They meet at a port that the
launcher has held since before they were forked, on several machines at one that was free on the first. A group that
computes on CUDA can send tensors of the host as well, which decisions need.

DeepSpeed compiles its operators where they are first used, in a minute and more each, and keeps them
(`TORCH_EXTENSIONS_DIR`): a child compiles them before any trial, and locks of killed processes are removed, as are the
files that killed libraries (NCCL, torch's data loaders, DeepSpeed on the CPU) leave in /dev/shm.
"""

import contextlib
import datetime
import fcntl
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from autotune.stand_in.device import is_rehearsal
from autotune.training.arguments import ZERO_STAGES
from autotune.value import read_value
from autotune.values.hardware import MMAP_THRESHOLD, OWN_MMAP_THRESHOLD
from autotune.values.trial import Rendezvous, TrialRequest

T = TypeVar("T")

# Variables: the listening socket of the first rank, open in its process; the threads of each rank; gloo's network.
_LISTENER, _THREADS, _INTERFACE = "AUTOTUNE_RANK_LISTENER", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"
ADDRESS = "127.0.0.1"

# Variables of other launchers, by which libraries would take a trial for one of their processes.
FOREIGN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", _LISTENER,
)  # fmt: skip

# A value that the user has set stays.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() without a context, which a fork would inherit
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts, by which the device was chosen
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # pyarrow's own pool reserves 1 GiB, which the memory limit would count
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",  # the log has all that a trial printed before it was killed
}

SHARED_MEMORY = Path("/dev/shm")

COMPILE = f"{__name__}:compile_operators"
COMPILE_LIMIT_S = 1800.0  # two operators, on a slow machine that does other things as well
COMPILED_FILE = "compiled.txt"  # beside the child's request, once all is compiled


def launcher_environment(
    device: str,
    mark: Mapping[str, str],
    present: Mapping[str, str] = os.environ,
    *,
    others: Sequence[str] = (),
    python: str = sys.executable,
) -> dict[str, str]:
    """Return the environment of a launcher for `device` and `others` like it, named as the parent counts.

    `mark` is a variable by which the launcher's descendants are known (see `job`); `python` runs it.
    """
    wanted = dict(ENVIRONMENT)
    if device == "cpu":
        # The host's memory is measured, so freed blocks go back at once, until `guard` undoes that for the timed steps.
        # At glibc's own first value of 128 KiB the peaks of small models were 1 to 5 MiB higher. Beside a GPU nothing
        # would undo it in the processes that collate batches, which would map and clear each batch of images anew.
        wanted[MMAP_THRESHOLD] = OWN_MMAP_THRESHOLD
    chosen = {name: present.get(name, value) for name, value in wanted.items()}
    if python == sys.executable:  # the parent's own module path, in its order
        chosen["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
    # Beside the interpreter lie tools that libraries look for (ninja), whether its environment is activated or not.
    chosen["PATH"] = os.pathsep.join([present.get("PATH", os.defpath), str(Path(python).parent)])
    # The URL of the lasting record may hold a password, the token opens a cluster.
    withheld = {"AUTOTUNE_RECORD", "RAY_AUTH_TOKEN", *FOREIGN}
    shared = {name: value for name, value in present.items() if name not in withheld}
    return {**shared, **chosen, **mark, "CUDA_VISIBLE_DEVICES": visible((device, *others), present)}


def visible(devices: Sequence[str], present: Mapping[str, str] = os.environ) -> str:
    """Return CUDA_VISIBLE_DEVICES for processes that are to see these `devices` of this one alone."""
    there = present.get("CUDA_VISIBLE_DEVICES")
    names = None if there is None else [entry.strip() for entry in there.split(",") if entry.strip()]
    indices = [int(device.partition(":")[2] or 0) for device in devices if device != "cpu"]
    return ",".join(str(index) if names is None else names[index] for index in indices)


def trial_device(device: str) -> str:
    """Return the name that the parent's `device`, or the one of this rank, has inside a trial."""
    return "cpu" if device == "cpu" else f"cuda:{own_rank().local}"


def forget_unfinished(since: float) -> None:
    """Remove the libraries from inductor's cache that a killed compiler has left unfinished: "file too short".

    Looked at are those written at `since` (in seconds since 1970) or later, by a trial that has ended, and those that
    nobody has written to for ten minutes. One that a linker has open stays, since all trainings share the cache.
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
    spread = request.config.parallelism
    builders = {"ShareMemCommBuilder": request.device == "cpu", "CPUAdamBuilder": spread.offload != "none"}
    return tuple(name for name, is_needed in builders.items() if is_needed and spread.sharding in ZERO_STAGES)


def compile_operators(directory: Path) -> None:
    remove_unused_locks()
    from deepspeed.accelerator import get_accelerator

    for name in operators_of(read_value(TrialRequest, directory / "request.json")):
        if (builder := get_accelerator().create_op_builder(name)) is not None:
            builder.load(verbose=False)
    (directory / COMPILED_FILE).touch()


def remove_unused_locks() -> None:
    """Remove the locks of builders that were killed, for which torch would wait for ever."""
    from torch.utils.cpp_extension import get_default_build_root

    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).rglob("lock"):
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            # Torch keeps a lock open for as long as it builds, or looks at what it has built.
            if is_unused(lock) or time.time() - lock.stat().st_mtime > COMPILE_LIMIT_S:
                lock.unlink()


def shared_files(directory: Path = SHARED_MEMORY) -> set[Path]:
    return {file for kind in ("torch_", "nccl-", "deepspeed_") for file in directory.glob(f"{kind}*")}


def remove_orphans(before: set[Path], directory: Path = SHARED_MEMORY) -> None:
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


class Rank(NamedTuple):
    """One process of a trial."""

    number: int = 0
    of: int = 1
    is_launched: bool = False  # as one of a group, which may have one member
    local: int = 0  # its number on this machine


def rank_environment(number: int, here: int, meeting: Rendezvous, listener: int | None = None) -> dict[str, str]:
    """Return the variables that torchrun sets for rank `number`, one of `here` on this machine.

    `listener` is the open socket that listens where the ranks meet, for the first rank alone. Threads are set as in the
    exported command: torchrun gives each rank one unless OMP_NUM_THREADS is set.
    """
    return {
        **dict.fromkeys(("RANK", "ROLE_RANK"), str(number)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(here * meeting.nodes)),
        **{"LOCAL_RANK": str(number - here * meeting.node_rank), "LOCAL_WORLD_SIZE": str(here)},
        **{"GROUP_RANK": str(meeting.node_rank), "GROUP_WORLD_SIZE": str(meeting.nodes)},
        **{"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)},
        _THREADS: str(threads_of_rank(len(os.sched_getaffinity(0)), here)),
        **({_LISTENER: str(listener)} if listener is not None else {}),
        **({_INTERFACE: os.environ.get(_INTERFACE) or interface_to(meeting.address)} if meeting.nodes > 1 else {}),
    }


def interface_to(address: str) -> str:
    """Return the network interface by which an address is reached; empty: none is known.

    Gloo takes the one of the host's own name, which on many machines is the loopback (Debian's /etc/hosts).
    """
    own, family = "", socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # no route leads there
        probe.connect((address, 9))  # which sends nothing
        own = probe.getsockname()[0]
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if own in (a.address for a in addresses)), "")


def threads_of_rank(cores: int, ranks: int, present: Mapping[str, str] = os.environ) -> int:
    """Return the threads of each rank: its share of the cores, or fewer if OMP_NUM_THREADS says so."""
    share, asked = max(1, cores // ranks), present.get(_THREADS, "")
    return min(share, int(asked)) if asked.isdigit() and int(asked) else share


def own_rank() -> Rank:
    if "LOCAL_RANK" not in os.environ:
        return Rank()
    number, of, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Rank(number, of, is_launched=True, local=local)


def meet(device: str, *, timeout_s: float) -> None:
    """Wait for the other ranks; collectives work from here on. `timeout_s` is the trial's."""
    rank = own_rank()
    if not rank.is_launched:
        return
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore, TCPStore
    from torch.distributed import Backend, init_process_group

    # Beyond the trial's, so that a collective that hangs is reported as a trial that timed out.
    limit = datetime.timedelta(seconds=timeout_s + 120.0)
    listener = os.environ.get(_LISTENER)
    torch.set_num_threads(int(os.environ[_THREADS]))  # a fork has the threads of its parent
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = None if listener is None else int(listener)
    backend = "gloo" if device == "cpu" else "cuda:nccl,cpu:gloo"
    store: Any
    if is_rehearsal():  # the others aren't there
        backend, store = "cuda:nccl,cpu:alone", HashStore()

        def alone(group: Any, options: Any) -> Any:
            return FakeProcessGroup._create_internal(group.group_rank, group.group_size)

        Backend.register_backend("alone", alone, extended_api=True, devices=["cpu"])
    else:
        store = TCPStore(address, port, rank.of, rank.number == 0, limit, wait_for_workers=False, master_listen_fd=kept)
    init_process_group(backend, store=store, rank=rank.number, world_size=rank.of, timeout=limit)


def agree(decision: bool) -> bool:
    """Return the first rank's decision, whatever this one's: a collective that only some go into waits for ever."""
    if not own_rank().is_launched:
        return decision
    import torch
    from torch import distributed

    flag = torch.tensor([int(decision)])
    distributed.broadcast(flag, src=0)
    return bool(flag.item())


def gathered(mine: T) -> list[T]:
    """Return the objects of all ranks in their order, once all have come here."""
    if not own_rank().is_launched:
        return [mine]
    from torch import distributed

    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def wait_for_all(tensor: Any) -> None:
    """Wait until every rank has come here; summing `tensor`, libraries open their channels to its device."""
    if own_rank().is_launched:
        from torch import distributed

        distributed.all_reduce(tensor)
