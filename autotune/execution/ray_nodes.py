"""The nodes of a Ray cluster: which there are, which are alike, and how many trials each can run at a time.

Trials are compared with each other only on devices of one kind, so a search uses the nodes of one kind: the most
frequent, or the one that was asked for. A note names the other nodes, and how to search for them. Nodes may come and
go at any time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from autotune.errors import AutotuneError, InputError, MachineError, one_line
from autotune.execution import ray_worker as remote
from autotune.execution.places import kind_of, share_of, shared_note
from autotune.execution.ray_worker import NodeReport
from autotune.values.hardware import Hardware
from autotune.values.problem import Allotment, Fleet
from autotune.version import __version__

_LOOK_LIMIT_S = 120.0  # to start a worker on a node, import autotune there and ask the driver


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
        self._look(alive, wait_s=_LOOK_LIMIT_S)
        kinds = self._kinds()
        if not kinds:
            raise MachineError(f"no node of the cluster can run trials on {self._kind}: {self._why_not() or 'none'}")
        chosen = _like(kinds, planned) if planned is not None else _chosen(kinds, fleet.kind)
        if self._kind == "cpu":
            usual = math.ceil((fleet.workers or 1) / len(chosen))
            self.slots_a_node = usual if planned is None else max(1, chosen[0].hardware.cores // planned.cores)
        shares = [self._share(n.hardware) for n in chosen]
        self._planned = planned or min(shares, key=lambda share: share.free_bytes)
        return Allotment(
            hardware=self._planned,
            is_shared=self.slots_a_node > 1,
            notes=(*self._notes(kinds, chosen), *self._unused()),
        )

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive now and give a trial what was planned."""
        alive = self._alive()
        self._look(alive, wait_s=0.0)
        ids = {n["NodeID"] for n in alive}
        wanted = kind_of(self._planned) if self._planned is not None else None
        found = []
        for id_, known in self._known.items():
            if id_ in ids and isinstance(known, Node) and self._fits(known, wanted):
                found.append(known._replace(slots=self.slots_a_node if self._kind == "cpu" else known.slots))
        return self._limited(sorted(found, key=lambda n: (n.address, n.id)))

    def _fits(self, node: Node, wanted: str | None) -> bool:
        try:
            return kind_of(self._share(node.hardware)) == wanted
        except AutotuneError:  # too little memory is free
            return False

    def _limited(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes with no more slots in all than were asked for."""
        left, found = self._workers or math.inf, []
        for node in nodes:
            slots = int(min(node.slots, left))
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
            task = self.ray.remote(max_retries=0, num_cpus=0)(remote.look)
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

    def _kinds(self) -> list[list[Node]]:
        """Return the nodes that can be used by their kind, the kind with the most places first."""
        kinds: dict[str, list[Node]] = defaultdict(list)
        for known in self._known.values():
            if isinstance(known, Node):
                kinds[kind_of(known.hardware)].append(known)
        return sorted(kinds.values(), key=lambda nodes: -sum(n.slots for n in nodes))

    def _why_not(self) -> str:
        return "; ".join(dict.fromkeys(known for known in self._known.values() if isinstance(known, str)))

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

    def _unused(self) -> list[str]:
        counts = Counter(known for known in self._known.values() if isinstance(known, str))
        return [f"{count} node(s) of the cluster are not used: {reason}" for reason, count in counts.items()]


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
    """Say in what two kinds of device differ."""
    fields = ("name", "memory_bytes", "cores", "capability", "driver", "features", "cxx")
    different = [f for f in fields if getattr(one, f) != getattr(other, f)]
    packages = {p for p in {*one.versions, *other.versions} if one.versions.get(p) != other.versions.get(p)}
    return ", ".join([*(f.removesuffix("_bytes") for f in different), *sorted(packages)]) or "something"
