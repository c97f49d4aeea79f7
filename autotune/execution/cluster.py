"""Joins a Ray cluster and finds its nodes that are alike, on which a search runs its trials (see `ray_pool`).

Only trials on devices of one kind can be compared, so a search uses the nodes of one kind. Nodes may come and go.
"""

import contextlib
import json
import logging
import os
import re
import signal
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autotune.errors import InfrastructureError, InputError, MachineError, one_line
from autotune.execution.places import kind_of
from autotune.values.hardware import Hardware, cuda_count, detect
from autotune.values.problem import Allotment, Fleet
from autotune.version import __version__


@contextlib.contextmanager
def joined(address: str | None) -> Iterator["Cluster"]:
    """Yield the cluster at `address`; None: the one of RAY_ADDRESS, or one that is started on this machine.

    MachineError: Ray isn't installed; InputError: that is no address; InfrastructureError: it doesn't let us in.
    """
    # Otherwise Ray sends usage statistics, hides GPUs from tasks that ask for none, and prints on stdout what it loses.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    settings |= {"RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
    # Given an address, Ray 2.60 uses no token unless it is told.
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token or Path("~/.ray/auth_token").expanduser().exists():
        settings["RAY_AUTH_MODE"] = "token"
    os.environ.update({**settings, **os.environ})  # what the user has set stays
    try:
        import ray  # it reads its settings now
    except ImportError:
        raise MachineError("--engine ray: Ray is not installed: pip install 'autotune-train[ray]'") from None
    if ray.is_initialized():  # by whoever calls us
        yield Cluster(ray)
        return
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    named = None if named in ("auto", "local", "") else named  # as Ray has them
    if named is not None and not re.fullmatch(r"[^/]+:\d+", named):
        raise InputError(f"--address {named}: expected auto, or host:port of a cluster that this machine belongs to")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if named is not None:  # where nobody answers, Ray would try for minutes
            host, _, port = named.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10.0).close()
        with contextlib.chdir("/"):  # Ray has its workers import modules of the working directory first
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # whatever keeps us out
        said = f"--engine ray: the cluster at {named or 'this machine'} can't be joined: {one_line(error)}"
        token = "if it is there, this user needs its token (RAY_AUTH_TOKEN, or the file ~/.ray/auth_token)"
        raise InfrastructureError(f"{said}; {token}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


class Node(NamedTuple):
    """A node that trials can run on."""

    id: str
    address: str
    hardware: Hardware  # of each trial
    slots: int  # trials that it has devices for
    demand: tuple[float, float]  # CPUs and GPUs that a trial asks Ray for there, so that nothing else runs beside it


class Cluster:
    """The nodes that a search may use; `ray` is the module, connected."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.fleet = Fleet(engine="ray")
        self._device = self._kind = ""  # 'cuda' or 'cpu', and the digest of the devices that are used
        self._known: dict[str, Node | str] = {}  # what a node is, or why it isn't used

    def allotment(self, fleet: Fleet, device: str, planned: Hardware | None) -> Allotment:
        """Choose the nodes of one kind, which `nodes` returns from now on; return the hardware of each trial.

        `planned` is the hardware of a search that goes on. InputError: the device or its kind isn't one of the
        cluster's; MachineError: no node is of use.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"--device {device}: on a cluster it is auto, cpu or cuda")
        gpus = any(n["Alive"] and n["Resources"].get("GPU") for n in self.ray.nodes())
        self._device = planned.kind if planned is not None else {"auto": "cuda" if gpus else "cpu"}.get(device, device)
        self.fleet = fleet
        self._alive()
        kinds, unused = defaultdict(list), Counter[str]()
        for known in self._known.values():
            if isinstance(known, Node):
                kinds[kind_of(known.hardware)].append(known)
            else:
                unused[known] += 1
        if not kinds:
            why = "; ".join(unused) or "none"
            raise MachineError(f"no node of the cluster can run trials on {self._device}: {why}")
        names = {kind: nodes[0].hardware.name for kind, nodes in kinds.items()}
        there = ", ".join(f"{name} ({kind})" for kind, name in names.items())
        wanted = fleet.kind if planned is None else kind_of(planned)  # a digest, or part of a name
        fitting = [k for k in kinds if wanted in (None, k) or str(wanted).casefold() in names[k].casefold()]
        if not fitting and planned is not None:
            raise MachineError(f"the search was begun on {planned.name} ({wanted}); the cluster has {there} now")
        if not fitting:
            raise InputError(f"--kind {wanted}: the cluster has {there}")
        self._kind = max(fitting, key=lambda kind: sum(n.slots for n in kinds[kind]))
        chosen = kinds.pop(self._kind)
        hardware = planned or min((n.hardware for n in chosen), key=lambda one: one.free_bytes)
        trials = self.places(nodes := self.nodes())
        where = f"{len(nodes)} node{'s' * (len(nodes) > 1)} of the cluster with {chosen[0].hardware.name}"
        if not trials:
            raise MachineError(f"--nodes {fleet.nodes}: there is {where} that can run trials on {self._device}")
        at_once = f"up to {trials} trials at a time on {where}" if trials > 1 else f"one trial at a time on {where}"
        notes = [f"{at_once}; finals and checks run one at a time"]
        why = "not used, since only trials on devices of one kind can be compared"
        for digest, others in kinds.items():
            which = f"{names[digest]} ({others[0].address}{', ...' * (len(others) > 1)})"
            notes.append(f"{why}: {len(others)} x {which}; --kind {digest} searches for those")
        notes += [f"{count} node(s) of the cluster are not used: {why}" for why, count in unused.items()]
        return Allotment(hardware=hardware, notes=tuple(notes))

    def nodes(self) -> list[Node]:
        """Return the nodes of the search's kind that are alive."""
        alive = sorted(self._alive(), key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
        nodes = (self._known.get(n["NodeID"]) for n in alive)
        return [n for n in nodes if isinstance(n, Node) and kind_of(n.hardware) == self._kind]

    def places(self, nodes: list[Node]) -> int:
        """Return how many trials these nodes can run at once, of which each is on as many nodes as were asked for."""
        slots, each = [n.slots for n in nodes], self.fleet.nodes
        most = next(n for n in range(sum(slots), -1, -1) if sum(min(s, n) for s in slots) >= each * n)
        return min(most, self.fleet.workers or most)

    def pinned(self, node_id: str) -> Any:
        """Return the strategy by which a task runs on a node, or fails if that is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id, soft=False)

    def _alive(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive; ask those that aren't known yet what they are."""
        alive = [n for n in self.ray.nodes() if n["Alive"]]
        resource, task = "GPU" if self._device == "cuda" else "CPU", self.ray.remote(max_retries=0, num_cpus=0)(look)
        asked = {
            task.options(scheduling_strategy=self.pinned(n["NodeID"])).remote(self._device): n
            for n in alive
            if n["NodeID"] not in self._known and n["Resources"].get(resource)
        }
        limit_s = 120.0  # to start a worker, to import autotune there and to ask the driver
        ready = self.ray.wait(list(asked), num_returns=len(asked), timeout=limit_s)[0] if asked else []
        for answer, n in asked.items():
            if answer in ready:
                self._known[n["NodeID"]] = self._reported(n, answer)
            else:
                self.ray.cancel(answer, force=True)
                self._known[n["NodeID"]] = f"it did not answer within {limit_s:.0f} s"
        return alive

    def _reported(self, found: dict[str, Any], answer: Any) -> Node | str:
        """Return the node that a report describes, or why it can't be used."""
        try:
            version, *fields = json.loads(self.ray.get(answer))
        except Exception as error:  # whatever keeps it from answering
            return one_line(getattr(error, "cause", None) or error)
        if version != __version__:
            return f"it has autotune {version}, the search {__version__}"
        devices = [Hardware.model_validate(each) for each in fields]
        if len({kind_of(device) for device in devices}) != 1:
            return "its GPUs are not alike" if devices else "its NVIDIA driver shows no device"
        each, resources = self.fleet.devices // self.fleet.nodes, found["Resources"]
        cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
        slots, demand = 1, (cpus, 0.0)
        hardware = devices[0].model_copy(update={"count": self.fleet.devices, "nodes": self.fleet.nodes})
        if self._device == "cuda":
            if gpus < each:
                return f"it has {gpus} GPU{'s' * (gpus != 1)}, fewer than the {each} of --devices"
            slots = gpus // each
            demand = (min(1.0, cpus / gpus) * each, float(each))
        return Node(found["NodeID"], str(found["NodeManagerAddress"]), hardware, slots, demand)


def look(kind: str) -> str:
    """Return what the node is: its GPUs (kind 'cuda') or its processor ('cpu')."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # Ray hides the GPUs from a task that asks for none
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    devices = tuple(detect(f"cuda:{index}") for index in range(cuda_count())) if kind == "cuda" else (detect("cpu"),)
    return json.dumps([__version__, *(device.model_dump(mode="json") for device in devices)])
