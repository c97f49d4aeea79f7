"""What a node of a cluster does for a search: says what it is, runs a trial, cleans up after the search.

Each function is called as a Ray task, in a worker process of the node, with text in and text out; nothing here imports
Ray. The worker keeps a runner, and so a launcher that has imported everything, from trial to trial. Trials of a slot
run in a directory of that slot: the next worker that serves it ends what a worker that died there has left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pkgutil
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.errors import InfrastructureError
from autotune.execution.places import Place, core_sets, share_of
from autotune.execution.runner import LocalRunner, Runner, trial_directory
from autotune.value import Value
from autotune.values.hardware import Hardware, cuda_count, detect
from autotune.values.trial import TrialRequest
from autotune.version import __version__

# What is brought back of a trial's directory, without what the search itself writes.
_BROUGHT_BACK = (".txt", ".json")
_NOT_BACK = ("request.json", "result.json")


class NodeReport(Value):
    """What a node says of itself."""

    autotune: str
    devices: tuple[Hardware, ...]


class Job(Value):
    """A trial with all that a node needs to run it."""

    search: str
    node: str
    request: TrialRequest
    device: str
    slot: NonNegativeInt
    slots: PositiveInt
    maker: str = Field(description="`module:function`: from a job to what runs it and similar ones")

    @property
    def directory(self) -> Path:
        """Where the trials of the slot run; nobody else's files are there."""
        return scratch(self.search) / f"{self.node[:12]}-{self.slot}"


# Of this worker: what runs trials, by directory and device.
_runners: dict[tuple[object, ...], tuple[Runner, contextlib.ExitStack]] = {}


def scratch(search: str) -> Path:
    """Return the node's directory of a search, in one that nobody else can have made or can write to.

    Raises:
        InfrastructureError: That one is somebody else's, a link, or open to others.
    """
    own = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InfrastructureError(f"{own}: not a directory of this user alone (mode 700); remove it, or set TMPDIR")
    return own / search


def look(kind: str) -> str:
    """Return what the node is: its GPUs (kind 'cuda') or its processor ('cpu')."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # Ray hides the GPUs from a task that asks for none
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    devices = tuple(detect(f"cuda:{index}") for index in range(cuda_count())) if kind == "cuda" else (detect("cpu"),)
    return NodeReport(autotune=__version__, devices=devices).model_dump_json()


def run(text: str) -> Iterator[tuple[str, dict[str, bytes]] | None]:
    """Run a trial; yield None when it begins, then its result and the files that it left.

    An InfrastructureError says why this node can't.
    """
    yield None
    job = Job.model_validate_json(text)
    result = _runner(job).run(job.request)
    directory = trial_directory(job.directory, job.request.number)
    left = [path for path in directory.glob("*") if path.suffix in _BROUGHT_BACK and path.name not in _NOT_BACK]
    files = {path.name: path.read_bytes() for path in left}
    shutil.rmtree(directory, ignore_errors=True)
    yield result.model_dump_json(), files


def clean(search: str) -> None:
    """Remove what a search has left on this node."""
    shutil.rmtree(scratch(search), ignore_errors=True)


def local_runner(job: Job) -> Runner:
    """Return what runs real trials on this node: all of it, or as many of its cores as a slot has."""
    # Ray sets it to the processors that a task asks for, which a user's own training wouldn't have.
    os.environ.pop("OMP_NUM_THREADS", None)
    hardware = detect(job.device)
    places: tuple[Place, ...] = ()  # all of what Ray lets this task see
    if job.slots > 1 and hardware.is_cpu:
        hardware, places = share_of(hardware, job.slots), core_sets(job.slots)[job.slot : job.slot + 1]
    return LocalRunner(job.directory, hardware, places=places)


def _runner(job: Job) -> Runner:
    """Return this worker's runner for a job; one for another slot or device is ended first."""
    key = (job.directory, job.maker, job.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if key not in _runners:
        _end_runners()
        job.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        runner, stack = pkgutil.resolve_name(job.maker)(job), contextlib.ExitStack()
        if isinstance(runner, contextlib.AbstractContextManager):
            stack.enter_context(runner)
        _runners[key] = runner, stack
    return _runners[key][0]


def _end_runners() -> None:
    while _runners:
        _runners.popitem()[1][1].close()


atexit.register(_end_runners)
