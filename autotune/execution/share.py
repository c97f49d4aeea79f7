"""The part of a node of a Ray cluster: an actor that runs its ranks of trials and measures the network (`ray_pool`)."""

import os
import pkgutil
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

from autotune.errors import InfrastructureError, one_line
from autotune.execution import environment
from autotune.execution.outcome import log_file, read_tail
from autotune.execution.runner import LocalRunner, end_left_behind, trial_directory
from autotune.value import read_value, write_text
from autotune.values.hardware import detect
from autotune.values.trial import Description, Inquiry, TrialRequest, TrialResult

Files = dict[str, bytes]  # by name

DATA = "data"  # directory in a run directory with the user's pickled code, and all else that trials share

_NETWORK_FILE = "network.txt"  # bytes/s that a machine attains to the others, one way
NETWORK_LIMIT_S = 120.0
_BYTES = 32 << 20  # of a message, as of a bucket of gradients
_LEAST_S, _LEAST_ROUNDS = 0.5, 3


def scratch(search: str) -> Path:
    """Return the node's directory of a search, in one that nobody else can write to; otherwise InfrastructureError."""
    own = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InfrastructureError(f"{own}: not a directory of this user alone (mode 700); remove it, or set TMPDIR")
    return own / search


def clean(search: str) -> None:
    """End and remove what a search, and its actors that were killed, have left on this node."""
    for place in scratch(search).glob("*"):
        end_left_behind(place)
    shutil.rmtree(scratch(search), ignore_errors=True)


def local_runner(directory: Path, device: str) -> LocalRunner:
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: the processors of the actor, which a user's training wouldn't have
    return LocalRunner(directory, detect(device))


class Share:
    """An actor: runs one node's share of the trials of a place, by the runner that `maker` makes."""

    def __init__(self, search: str, place: str, maker: str, device: str) -> None:
        self._search, self._place, self._maker, self._device = search, place, maker, device
        self._runner: LocalRunner | None = None

    @property
    def _own(self) -> Path:
        return scratch(self._search) / self._place

    def keep(self, files: Files) -> str:
        """Keep files of the search where its trials look for them; return the id of this node."""
        import ray

        (self._own / DATA).mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            (self._own / DATA / name).parent.mkdir(parents=True, exist_ok=True)
            (self._own / DATA / name).write_bytes(content)
        return str(ray.get_runtime_context().get_node_id())

    def free_port(self) -> int:
        with socket.create_server(("", 0)) as listener:
            return int(listener.getsockname()[1])

    def run(self, request: TrialRequest) -> tuple[TrialResult, Files] | str:
        """Run a trial, or this node's ranks of one; return its result and files, or why the node can run none."""
        try:
            result = self._started().run(request)
        except Exception as error:  # a trial's own error is a result
            return one_line(error)
        directory = trial_directory(self._own, request.number)
        left = [path for path in directory.glob("*") if path.suffix in (".txt", ".json")]
        files = {path.name: path.read_bytes() for path in left if path.name not in ("request.json", "result.json")}
        shutil.rmtree(directory, ignore_errors=True)
        return result, files

    def measure_network(self, request: TrialRequest) -> float:
        """Return the bytes/s that this node attains to those that run the other ranks; InfrastructureError: none."""
        runner, entry, limit_s = self._started(), f"{__name__}:all_reduce", NETWORK_LIMIT_S
        ranks, meeting = request.ranks, request.rendezvous
        directory = runner.ask("network", entry, request, timeout_s=limit_s, ranks=ranks, rendezvous=meeting)
        try:
            return float((directory / _NETWORK_FILE).read_text())
        except OSError:
            told = read_tail(directory / log_file((request.ranks or (0,))[0]), lines=1) or "no answer"
            raise InfrastructureError(f"the machines don't reach each other: {told}") from None

    def describe(self, request: Inquiry) -> tuple[Description, Files]:
        """Return the description of a workload, and files that trials need of it; raises as `LocalRunner.describe`."""
        kept, found = set((self._own / DATA).iterdir()), self._started().describe(request)
        return found, {p.name: p.read_bytes() for p in (self._own / DATA).iterdir() if p not in kept}

    def _started(self) -> LocalRunner:
        if self._runner is None:  # it is left when Ray ends this process, with which its launcher ends
            self._runner = pkgutil.resolve_name(self._maker)(self._own, self._device).__enter__()
        return self._runner


def all_reduce(directory: Path) -> None:
    """Measure what this machine attains to the others, by all-reduces among all devices of a training."""
    import torch
    from torch import distributed

    device = environment.trial_device(read_value(TrialRequest, directory / "request.json").device)
    environment.meet(device, timeout_s=NETWORK_LIMIT_S)
    message, world = torch.zeros(_BYTES // 4, device=device), distributed.get_world_size()

    def seconds(rounds: int) -> float:
        started = time.perf_counter()
        for _ in range(rounds):
            distributed.all_reduce(message)
        message[0].item()  # which waits for all of them
        return time.perf_counter() - started

    seconds(1)  # opens the channels
    usual = torch.tensor([seconds(1)])
    distributed.broadcast(usual, src=0)
    rounds = max(_LEAST_ROUNDS, int(_LEAST_S / float(usual)))
    # A ring over all devices leaves each machine once, with nearly twice the message.
    rate = 2 * (world - 1) / world * _BYTES * rounds / seconds(rounds)
    if environment.own_rank().local == 0:
        write_text(str(rate), directory / _NETWORK_FILE)
