"""The nodes of a Ray cluster: which there are and which are alike, and what runs on them for a search.

Trials are compared with each other only on devices of one kind, so a search uses the nodes of one kind: the most
frequent, or the one that was asked for. A note names the other nodes, and how to search for them. Nodes may come and
go at any time.

`look`, `run` and `clean` are called as Ray tasks, in a worker process of a node, with text in and text out. The worker
keeps a runner, and so a launcher that has imported everything, from trial to trial. Trials of a slot run in a directory
of that slot: the next worker that serves it ends what a worker that died there has left.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pkgutil
import shutil
import stat
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.errors import AutotuneError, InfrastructureError, InputError, MachineError, one_line
from autotune.execution.places import Place, core_sets, kind_of, share_of, shared_note
from autotune.execution.runner import LocalRunner, Runner, trial_directory
from autotune.value import Value
from autotune.values.hardware import Hardware, cuda_count, detect
from autotune.values.problem import Allotment, Fleet
from autotune.values.trial import TrialRequest
from autotune.version import __version__


class Node(NamedTuple):
    """A node that trials can run on."""

    id: str
    address: str
    hardware: Hardware  # of each of its GPUs, or of its processor
    slots: int
    num_cpus: float  # what a trial asks Ray for
    num_gpus: float


class Cluster:
    """The nodes that a search may use; `ray` is the module, connected."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self._kind = "cpu"
        self._planned: Hardware | None = None
        self._workers: int | None = None
        self._each = 1  # GPUs of a trial
        self.slots_a_node = 1  # trials that share a processor
        self._known: dict[str, Node | str] = {}  # what a node is, or why it isn't used
        self._asked: dict[str, Any] = {}  # reports that are on their way

    def allotment(self, fleet: Fleet, device: str, planned: Hardware | None) -> Allotment:
        """Return the hardware that each trial of a search has; from now on `nodes` returns those that offer it.

        Args:
            fleet: What was asked for.
            device: 'auto', 'cpu' or 'cuda'.
            planned: What the trials of a search that goes on have had.

        Raises:
            MachineError: No node is of use.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"--device {device}: on a cluster it is auto, cpu or cuda")
        self._workers, self._each = fleet.workers, fleet.devices
        alive = self._alive()
        gpus = any(n["Resources"].get("GPU") for n in alive)
        self._kind = planned.kind if planned is not None else {"auto": "cuda" if gpus else "cpu"}.get(device, device)
        # To start a worker on each node, import autotune there and ask the driver.
        self._look(alive, wait_s=120.0)
        by_kind, unused = defaultdict(list), Counter(why for why in self._known.values() if isinstance(why, str))
        for known in self._known.values():
            if isinstance(known, Node):
                by_kind[kind_of(known.hardware)].append(known)
        kinds = sorted(by_kind.values(), key=lambda nodes: -sum(n.slots for n in nodes))
        if not kinds:
            why = "; ".join(unused) or "none"
            raise MachineError(f"no node of the cluster can run trials on {self._kind}: {why}")
        chosen = _like(kinds, planned) if planned is not None else _chosen(kinds, fleet.kind)
        if self._kind == "cpu":
            usual = math.ceil((fleet.workers or 1) / len(chosen))
            self.slots_a_node = usual if planned is None else max(1, chosen[0].hardware.cores // planned.cores)
        shares = [self._share(n.hardware) for n in chosen]
        self._planned = planned or min(shares, key=lambda share: share.free_bytes)
        return Allotment(
            hardware=self._planned,
            is_shared=self.slots_a_node > 1,
            notes=(
                *self._notes(kinds, chosen),
                *(f"{count} node(s) of the cluster are not used: {why}" for why, count in unused.items()),
            ),
        )

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive now and give a trial what was planned, with no more slots than asked for."""
        alive = self._alive()
        self._look(alive, wait_s=0.0)
        ids = {n["NodeID"] for n in alive}
        fitting = (known for id_, known in self._known.items() if id_ in ids and isinstance(known, Node))
        left, found = self._workers or math.inf, []
        for node in sorted(fitting, key=lambda n: (n.address, n.id)):
            try:
                if self._planned is None or kind_of(self._share(node.hardware)) != kind_of(self._planned):
                    continue
            except AutotuneError:  # too little memory is free
                continue
            slots = int(min(self.slots_a_node if self._kind == "cpu" else node.slots, left))
            left -= slots
            if slots:
                found.append(node._replace(slots=slots))
        return found

    def demand(self, node: Node) -> dict[str, float]:
        """Return what a trial on a node asks Ray for, so that nothing else runs beside it."""
        if self._kind == "cuda":
            return {"num_cpus": node.num_cpus, "num_gpus": node.num_gpus}
        return {"num_cpus": math.floor(node.num_cpus / self.slots_a_node * 1e4) / 1e4}

    def _alive(self) -> list[dict[str, Any]]:
        return [n for n in self.ray.nodes() if n["Alive"]]

    def _look(self, alive: Sequence[dict[str, Any]], *, wait_s: float) -> None:
        """Ask the nodes that aren't known yet what they are, and note the answers that have come."""
        resource = "GPU" if self._kind == "cuda" else "CPU"
        for n in alive:
            if n["NodeID"] in self._known or n["NodeID"] in self._asked or not n["Resources"].get(resource):
                continue
            pinned = self.pinned(n["NodeID"])
            task = self.ray.remote(max_retries=0, num_cpus=0)(look)
            self._asked[n["NodeID"]] = task.options(scheduling_strategy=pinned).remote(self._kind)
        if not self._asked:
            return
        waiting = list(self._asked.values())
        ready, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=wait_s)
        by_id = {n["NodeID"]: n for n in alive}
        for id_, answer in list(self._asked.items()):
            if answer in ready:
                del self._asked[id_]
                if id_ in by_id:
                    self._known[id_] = self._reported(by_id[id_], answer)
            elif wait_s:
                self.ray.cancel(answer, force=True)
                del self._asked[id_]
                self._known[id_] = f"it did not answer within {wait_s:.0f} s"

    def _reported(self, found: dict[str, Any], answer: Any) -> Node | str:
        """Return the node that a report describes, or why it can't be used."""
        try:
            report = NodeReport.model_validate_json(self.ray.get(answer))
        except Exception as error:  # whatever keeps it from answering
            return one_line(getattr(error, "cause", None) or error)
        if report.autotune != __version__:
            return f"it has autotune {report.autotune}, the search {__version__}"
        if not report.devices:
            return "its NVIDIA driver shows no device"
        if len({kind_of(device) for device in report.devices}) > 1:
            return "its GPUs are not alike"
        resources = found["Resources"]
        cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
        hardware = report.devices[0]
        address = str(found["NodeManagerAddress"])
        if self._kind == "cpu":
            return Node(found["NodeID"], address, hardware, 1, cpus, 0.0)
        if gpus < self._each:
            return f"it has {gpus} GPU{'s' * (gpus != 1)}, fewer than --devices {self._each}"
        own = hardware.model_copy(update={"count": self._each})
        cpus_each = min(1.0, cpus / gpus) * self._each
        return Node(found["NodeID"], address, own, gpus // self._each, cpus_each, float(self._each))

    def pinned(self, node_id: str) -> Any:
        """Return what makes a task run on a node, or fail if that is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id, soft=False)

    def _share(self, hardware: Hardware) -> Hardware:
        return share_of(hardware, self.slots_a_node) if hardware.is_cpu else hardware

    def _notes(self, kinds: Sequence[list[Node]], chosen: list[Node]) -> list[str]:
        """Say where trials run and, if not all nodes are alike, how to search for the others."""
        nodes = self.nodes()
        trials = sum(n.slots for n in nodes)
        where = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} of the cluster with {_called(chosen[0].hardware)}"
        lines = [f"up to {trials} trials at a time on {where}; finals and checks run one at a time, on one of them"]
        if self._planned is not None and self.slots_a_node > 1:
            lines.append(shared_note(self.slots_a_node, self._planned))
        for nodes in kinds:
            if nodes is chosen:
                continue
            names = ", ".join(n.address for n in nodes[:3]) + (", ..." if len(nodes) > 3 else "")
            device = nodes[0].hardware
            lines.append(
                f"not used, since only trials on devices of one kind can be compared: {len(nodes)} x {_called(device)} "
                f"({names}), which differs in {_difference(device, chosen[0].hardware)}; "
                f"--kind {kind_of(device)} searches for those"
            )
        return lines


def _chosen(kinds: Sequence[list[Node]], wanted: str | None) -> list[Node]:
    """Return the nodes of the kind asked for by a part of its name or by its digest, or of the most frequent kind."""
    if wanted is None:
        return kinds[0]
    for nodes in kinds:
        if wanted.casefold() in nodes[0].hardware.name.casefold() or kind_of(nodes[0].hardware) == wanted:
            return nodes
    there = ", ".join(f"{_called(nodes[0].hardware)} ({kind_of(nodes[0].hardware)})" for nodes in kinds)
    raise InputError(f"--kind {wanted}: the cluster has {there}")


def _like(kinds: Sequence[list[Node]], planned: Hardware) -> list[Node]:
    """Return the nodes that can give a trial what it has had, all of a device or a share of a processor."""
    for nodes in kinds:
        hardware = nodes[0].hardware
        if hardware.is_cpu and planned.cores and hardware.cores >= planned.cores:
            hardware = hardware.model_copy(update={"cores": planned.cores})
        if kind_of(hardware) == kind_of(planned):
            return nodes
    there = ", ".join(_called(nodes[0].hardware) for nodes in kinds)
    raise MachineError(f"the search was begun on {_called(planned)}; the cluster has {there} now")


def _called(hardware: Hardware) -> str:
    return f"{hardware.name}, {hardware.cores} cores" if hardware.is_cpu else hardware.name


def _difference(one: Hardware, other: Hardware) -> str:
    fields = ("name", "memory_bytes", "cores", "capability", "driver", "features", "cxx")
    different = [f for f in fields if getattr(one, f) != getattr(other, f)]
    packages = {p for p in {*one.versions, *other.versions} if one.versions.get(p) != other.versions.get(p)}
    return ", ".join([*(f.removesuffix("_bytes") for f in different), *sorted(packages)]) or "something"


class NodeReport(Value):
    """What a node says of itself."""

    autotune: str
    devices: tuple[Hardware, ...]


class Job(Value):
    """A trial with all that a node needs to run it."""

    search: str
    node: str
    request: TrialRequest
    slot: NonNegativeInt
    slots: PositiveInt
    maker: str = Field(description="`module:function`: from a job to what runs it and similar ones")

    @property
    def directory(self) -> Path:
        """Where the trials of the slot run; nobody else's files are there."""
        return scratch(self.search) / f"{self.node[:12]}-{self.slot}"


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


# Of this worker: what runs trials at the latest slot and device, and what ends it.
_runners: dict[tuple[object, ...], Runner] = {}
_ending = contextlib.ExitStack()
atexit.register(_ending.close)


def run(text: str) -> Iterator[tuple[str, dict[str, bytes]] | None]:
    """Run a trial; yield None when it begins, then its result and the files that it left.

    An InfrastructureError says why this node can't.
    """
    yield None
    job = Job.model_validate_json(text)
    key = (job.directory, job.maker, job.request.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if key not in _runners:
        _runners.clear()
        _ending.close()
        job.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        runner = pkgutil.resolve_name(job.maker)(job)
        if isinstance(runner, contextlib.AbstractContextManager):
            _ending.enter_context(runner)
        _runners[key] = runner
    result = _runners[key].run(job.request)
    directory = trial_directory(job.directory, job.request.number)
    left = {path.name: path for path in directory.glob("*") if path.suffix in (".txt", ".json")}
    files = {
        name: left[name].read_bytes() for name in left.keys() - {"request.json", "result.json"}
    }  # the search's own
    shutil.rmtree(directory, ignore_errors=True)
    yield result.model_dump_json(), files


def clean(search: str) -> None:
    """Remove what a search has left on this node."""
    shutil.rmtree(scratch(search), ignore_errors=True)


def local_runner(job: Job) -> Runner:
    """Return what runs real trials on this node: all of it, or as many of its cores as a slot has."""
    # Ray sets it to the processors that a task asks for, which a user's own training wouldn't have.
    os.environ.pop("OMP_NUM_THREADS", None)
    hardware = detect(job.request.device)
    places: tuple[Place, ...] = ()  # all of what Ray lets this task see
    if job.slots > 1 and hardware.is_cpu:
        hardware, places = share_of(hardware, job.slots), core_sets(job.slots)[job.slot : job.slot + 1]
    return LocalRunner(job.directory, hardware, places=places)
