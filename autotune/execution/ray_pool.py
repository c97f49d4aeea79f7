"""Runs trials on the nodes of a Ray cluster: joins it, finds nodes that are alike, and offers their slots as a pool.

The search stays in one process; a trial is a task, pinned to a node, that gets a request and gives back a result. Ray
never retries a task: a trial whose worker or node dies goes back in the queue, once. Only trials on devices of one kind
can be compared, so a search uses the nodes of one kind. Nodes may come and go at any time.

A worker process of a node calls `look`, `run` and `clean`. It keeps a runner, and so a launcher that has imported
everything, from trial to trial. Trials of a slot run in a directory of that slot: the next worker that serves it ends
what a worker that died there has left.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import pkgutil
import re
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autotune.errors import InfrastructureError, InputError, MachineError, one_line
from autotune.execution.places import kind_of
from autotune.execution.runner import LocalRunner, Runner, end_left_behind, trial_directory
from autotune.value import write_value
from autotune.values.hardware import Hardware, cuda_count, detect
from autotune.values.problem import Allotment, Fleet
from autotune.values.trial import Failure, TrialRequest, TrialResult, TrialStatus
from autotune.version import __version__


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[Cluster]:
    """Yield the cluster at `address`; None: the one of RAY_ADDRESS, or one that is started on this machine.

    MachineError: Ray isn't installed; InputError: that is no address; InfrastructureError: it doesn't let us in.
    """
    # Otherwise Ray sends usage statistics, and hides GPUs from tasks that ask for none.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Given an address, Ray 2.60 uses no token unless it is told.
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token or Path("~/.ray/auth_token").expanduser().exists():
        settings["RAY_AUTH_MODE"] = "token"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # it reads its settings now
    except ImportError:
        raise MachineError("--engine ray: Ray is not installed: pip install 'autotune-train[ray]'") from None
    if ray.is_initialized():  # by whoever calls us
        yield Cluster(ray)
        return
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
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
    slots: int
    demand: dict[str, float]  # what a trial asks Ray for, so that nothing else runs beside it


class Cluster:
    """The nodes that a search may use; `ray` is the module, connected."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self._fleet = Fleet(engine="ray")
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
        self._fleet = fleet
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
        nodes = self.nodes()
        where = f"{len(nodes)} node{'s' * (len(nodes) > 1)} of the cluster with {chosen[0].hardware.name}"
        trials = sum(n.slots for n in nodes)
        notes = [f"up to {trials} trials at a time on {where}; finals and checks run one at a time, on one of them"]
        why = "not used, since only trials on devices of one kind can be compared"
        for digest, others in kinds.items():
            which = f"{names[digest]} ({others[0].address}{', ...' * (len(others) > 1)})"
            notes.append(f"{why}: {len(others)} x {which}; --kind {digest} searches for those")
        notes += [f"{count} node(s) of the cluster are not used: {why}" for why, count in unused.items()]
        return Allotment(hardware=hardware, notes=tuple(notes))

    def nodes(self) -> list[Node]:
        """Return the nodes of the search's kind that are alive, with as many slots as were asked for at most."""
        left, found = self._fleet.workers or 1 << 30, []
        for n in sorted(self._alive(), key=lambda n: (n["NodeManagerAddress"], n["NodeID"])):
            node = self._known.get(n["NodeID"])
            if isinstance(node, Node) and kind_of(node.hardware) == self._kind and left:
                found.append(node._replace(slots=min(node.slots, left)))
                left -= found[-1].slots
        return found

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
        each, resources = self._fleet.devices, found["Resources"]
        cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
        slots, hardware, demand = 1, devices[0], {"num_cpus": cpus}
        if self._device == "cuda":
            if gpus < each:
                return f"it has {gpus} GPU{'s' * (gpus != 1)}, fewer than --devices {each}"
            slots, hardware = gpus // each, hardware.model_copy(update={"count": each})
            demand = {"num_cpus": min(1.0, cpus / gpus) * each, "num_gpus": float(each)}
        return Node(found["NodeID"], str(found["NodeManagerAddress"]), hardware, slots, demand)


def look(kind: str) -> str:
    """Return what the node is: its GPUs (kind 'cuda') or its processor ('cpu')."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # Ray hides the GPUs from a task that asks for none
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    devices = tuple(detect(f"cuda:{index}") for index in range(cuda_count())) if kind == "cuda" else (detect("cpu"),)
    return json.dumps([__version__, *(device.model_dump(mode="json") for device in devices)])


# This worker's runner, under its slot and device, and what ends it.
_runners: dict[tuple[object, ...], Runner] = {}
_ending = contextlib.ExitStack()
atexit.register(_ending.close)


def scratch(search: str) -> Path:
    """Return the node's directory of a search, in one that nobody else can write to; otherwise InfrastructureError."""
    own = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InfrastructureError(f"{own}: not a directory of this user alone (mode 700); remove it, or set TMPDIR")
    return own / search


def run(search: str, slot: str, maker: str, text: str) -> Iterator[tuple[str, dict[str, bytes]] | None]:
    """Run a trial by the runner that `maker` makes; yield None when it begins, then its result and its files."""
    yield None
    request, own = TrialRequest.model_validate_json(text), scratch(search) / slot
    key = (own, maker, request.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if key not in _runners:
        _runners.clear()
        _ending.close()
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        _runners[key] = _ending.enter_context(pkgutil.resolve_name(maker)(own, request.device))
    result = _runners[key].run(request)
    directory = trial_directory(own, request.number)
    left = [path for path in directory.glob("*") if path.suffix in (".txt", ".json")]
    files = {path.name: path.read_bytes() for path in left if path.name not in ("request.json", "result.json")}
    shutil.rmtree(directory, ignore_errors=True)
    yield result.model_dump_json(), files


def clean(search: str) -> None:
    """End and remove what a search, and its workers that were killed, have left on this node."""
    for slot in scratch(search).glob("*"):
        end_left_behind(slot)
    shutil.rmtree(scratch(search), ignore_errors=True)


def local_runner(directory: Path, device: str) -> Runner:
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: the processors of the task, which a user's training wouldn't have
    return LocalRunner(directory, detect(device))


class _Running(NamedTuple):
    request: TrialRequest
    node: str
    slot: int
    place: str
    began: float | None = None  # None: it waits in the cluster's queue


class RayPool(Runner):
    """The slots of a cluster's nodes, as a pool; `maker` names the function that makes a runner on a node."""

    def __init__(self, run_directory: Path, cluster: Cluster, *, maker: str = f"{__name__}:local_runner") -> None:
        self._directory, self._cluster, self._ray, self._maker = run_directory.resolve(), cluster, cluster.ray, maker
        # The search that goes on with this one finds the same directories on the nodes.
        self._search = hashlib.sha256(f"{socket.gethostname()} {self._directory}".encode()).hexdigest()[:12]
        self._running: dict[Any, _Running] = {}
        self._waiting: deque[TrialRequest] = deque()
        self._lost: dict[int, str] = {}  # trials whose worker has died, and where
        # Nodes that can't run trials and why, and those that are gone, which Ray may list as alive for a while.
        self._unfit: dict[str, str] = {}
        self._nodes: list[Node] = []
        self._looked = float("-inf")
        # Kept by its worker from trial to trial: Ray ends a worker that had a GPU after one task unless told otherwise.
        self._task = self._ray.remote(max_retries=0, max_calls=0, num_returns="streaming")(run)

    def __exit__(self, *_: object) -> None:
        """End what runs; leave nothing on the nodes."""
        for task in self._running:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)
        task = self._ray.remote(max_retries=0, num_cpus=0)(clean)
        with contextlib.suppress(Exception):
            pins = [self._cluster.pinned(node.id) for node in self._nodes]
            cleaning = [task.options(scheduling_strategy=pin).remote(self._search) for pin in pins]
            self._ray.wait(cleaning, num_returns=len(cleaning), timeout=5.0)

    def free(self) -> int:
        """Return how many more trials can begin now, after those that wait to run again."""
        return max(0, sum(len(slots) for _, slots in self._free()) - len(self._waiting))

    def begin(self, request: TrialRequest) -> None:
        self._waiting.append(request)
        self._submit()

    def wait(self) -> TrialResult:
        while True:
            self._submit()
            if self._running:
                ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=2.0)
                for task in ready:
                    if (result := self._taken(task)) is not None:
                        return result
            elif not self._nodes:
                why = "; ".join(dict.fromkeys(filter(None, self._unfit.values()))) or "all have gone"
                told = f"no node of the cluster is left for trials: {why}; `autotune resume` goes on"
                raise InfrastructureError(told)

    def run(self, request: TrialRequest) -> TrialResult:
        assert not self._running, "a trial that is run alone has to be alone"
        self.begin(request)
        return self.wait()

    def _free(self) -> list[tuple[Node, list[int]]]:
        if (now := time.monotonic()) - self._looked > 2.0 or not self._nodes:  # some may have come or gone
            self._looked = now
            self._nodes = [node for node in self._cluster.nodes() if node.id not in self._unfit]
        taken = {(running.node, running.slot) for running in self._running.values()}
        return [(n, [slot for slot in range(n.slots) if (n.id, slot) not in taken]) for n in self._nodes]

    def _submit(self) -> None:
        """Send waiting trials to free slots, each to the node that has most of them."""
        while self._waiting and (free := [found for found in self._free() if found[1]]):
            node, (slot, *_) = max(free, key=lambda found: len(found[1]))
            request = self._waiting.popleft()
            task = self._task.options(scheduling_strategy=self._cluster.pinned(node.id), **node.demand)
            task = task.remote(self._search, f"{node.id[:12]}-{slot}", self._maker, request.model_dump_json())
            self._running[task] = _Running(request, node.id, slot, f"{node.address} ({node.id[:6]}), slot {slot}")

    def _taken(self, task: Any) -> TrialResult | None:
        """Return a task's result, which is then on disk; None: it only begins, or was lost and waits again."""
        from ray import exceptions

        running, now, files = self._running.pop(task), time.monotonic(), {}
        request = running.request
        try:
            told = self._ray.get(next(task))
            if told is None:
                self._running[task] = running._replace(began=now)
                return None
            result, files = TrialResult.model_validate_json(told[0]), told[1]
        except exceptions.RayError as error:
            if (failure := self._failure(running, error)) is None:
                self._looked = float("-inf")
                self._waiting.appendleft(request)
                return None
            result = TrialResult(request=request, outcome=failure, duration_s=now - (running.began or now))
        lost = self._lost.pop(request.number, None)
        again = (f"it ran again: {lost}",) if lost is not None and result.status is not TrialStatus.CRASHED else ()
        began = time.time() - result.duration_s  # by this machine's clock
        update = {"place": running.place, "began": began, "warnings": (*result.warnings, *again)}
        result = result.model_copy(update=update)
        directory = trial_directory(self._directory, request.number)
        directory.mkdir(parents=True, exist_ok=True)
        write_value(request, directory / "request.json")
        for name, content in files.items():
            (directory / Path(name).name).write_bytes(content)
        write_value(result, directory / "result.json")
        return result

    def _failure(self, running: _Running, error: Any) -> Failure | None:
        """Return how a trial failed whose task raised `error`; None: its node or worker was lost, and it runs again."""
        from ray import exceptions

        if isinstance(error, exceptions.OutOfMemoryError):
            cause = f"Ray ended it, since memory of the host ran short: {one_line(error)}"
            return Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause)
        if isinstance(error, exceptions.RayTaskError):  # the node can't run trials: a trial's own error is a result
            self._unfit[running.node] = one_line(error.cause if error.cause is not None else error)
            return None
        if isinstance(error, exceptions.NodeDiedError | exceptions.TaskUnschedulableError):
            self._unfit[running.node] = ""
            if running.began is None:  # it only waited there
                return None
        lost, number = f"{running.place}: {type(error).__name__}", running.request.number
        if (before := self._lost.setdefault(number, lost)) is lost:
            return None
        return Failure(status=TrialStatus.CRASHED, cause=f"its worker died 2 times ({before}; {lost})")
