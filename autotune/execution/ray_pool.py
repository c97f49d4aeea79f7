"""Runs trials on the nodes of a Ray cluster: joins it, and offers the slots of its nodes as a pool.

The search stays in one process: it proposes, learns and writes; a trial is a task that gets a request and gives back a
result as values, pinned to a node. Nothing is left to Ray: it never retries a task, where tasks run is decided here,
and so is what becomes of one whose worker or node dies (it goes back in the queue, once). Ray's token authentication
stays as it is where it is on, and is used wherever there is a token.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from autotune.errors import InfrastructureError, InputError, MachineError, one_line
from autotune.execution import ray_nodes as remote
from autotune.execution.launch import LAUNCHER_START_S
from autotune.execution.ray_nodes import Cluster, Job, Node
from autotune.execution.runner import LAUNCHER_GRACE_S, Runner, trial_directory
from autotune.value import write_value
from autotune.values.trial import Failure, TrialRequest, TrialResult, TrialStatus

_LOOK_EVERY_S = 2.0  # for nodes that come or go, and for tasks that are overdue

# What Ray does unless it is told otherwise: send usage statistics, hide GPUs from tasks that ask for none.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def joined(address: str | None) -> Iterator[Cluster]:
    """Yield the cluster at `address`; None: the one of RAY_ADDRESS, or one that is started on this machine.

    Raises:
        MachineError: Ray isn't installed.
        InputError: That is no address.
        InfrastructureError: There is no cluster, or it doesn't let us in.
    """
    for name, value in {**_ENVIRONMENT, **_authentication()}.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # it reads its settings now
    except ImportError:
        raise MachineError("--engine ray: Ray is not installed: pip install 'autotune-train[ray]'") from None
    if ray.is_initialized():  # by whoever calls us
        yield Cluster(ray)
        return
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    _check_address(named)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with chdir("/"):  # Ray has its workers import modules of the working directory first
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # whatever keeps us out
        where = named or "this machine"
        raise InfrastructureError(
            f"--engine ray: the cluster at {where} can't be joined: {one_line(error)}; if it is there, this user needs "
            "its token (RAY_AUTH_TOKEN, or the file ~/.ray/auth_token)"
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _check_address(address: str | None) -> None:
    """Refuse an address where nobody listens, which Ray would try for minutes."""
    if address is None:
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise InputError(f"--address {address}: expected auto, or host:port of a cluster that this machine belongs to")
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise InfrastructureError(f"--address {address}: nobody answers there: {one_line(error)}") from None


def _authentication() -> dict[str, str]:
    """Return the variable that has Ray use a token that exists; 2.60 does so only where it finds the cluster itself."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return {"RAY_AUTH_MODE": "token"} if named or Path("~/.ray/auth_token").expanduser().exists() else {}


class _Slot(NamedTuple):
    node: Node
    number: int

    @property
    def shown(self) -> str:
        return f"{self.node.address} ({self.node.id[:6]}), slot {self.number}"


class _Running(NamedTuple):
    request: TrialRequest
    slot: _Slot
    began: float | None = None  # None: it waits in the cluster's queue


class RayPool(Runner):
    """The slots of a cluster's nodes, as a pool.

    Args:
        run_directory: The search's, on this machine.
        cluster: Its nodes.
        maker: ``module:function`` that makes what runs trials on a node; another one than the default is for tests.
    """

    def __init__(
        self, run_directory: Path, cluster: Cluster, *, maker: str = f"{remote.__name__}:local_runner"
    ) -> None:
        self._directory = run_directory.resolve()
        self._cluster = cluster
        self._ray = cluster.ray
        self._maker = maker
        # What goes on with this search finds the same directories on the nodes.
        self._search = hashlib.sha256(f"{socket.gethostname()} {self._directory}".encode()).hexdigest()[:12]
        self._running: dict[Any, _Running] = {}
        self._waiting: deque[TrialRequest] = deque()
        self._losses: dict[int, list[str]] = {}
        self._unfit: dict[str, str] = {}  # why a node that was tried runs no trial
        self._gone: set[str] = set()  # nodes that Ray may list as alive for a while; one that comes back has another id
        self._slots: list[_Slot] = []
        self._looked = self._had_slots = float("-inf")
        # Kept by its worker from trial to trial: Ray ends a worker that had a GPU after one task unless told otherwise.
        self._task = self._ray.remote(max_retries=0, max_calls=0, num_returns="streaming")(remote.run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs; leave nothing on the nodes."""
        for task in self._running:
            with suppress(Exception):
                self._ray.cancel(task, force=True)
        pins = [self._cluster.pinned(node) for node in sorted({slot.node.id for slot in self._slots})]
        task = self._ray.remote(max_retries=0, num_cpus=0)(remote.clean)
        with suppress(Exception):
            cleaning = [task.options(scheduling_strategy=pin).remote(self._search) for pin in pins]
            self._ray.wait(cleaning, num_returns=len(cleaning), timeout=5.0)

    def free(self) -> int:
        """Return how many more trials can be begun now; those of dead workers come first."""
        self._look()
        return max(0, len(self._free_slots()) - len(self._waiting))

    def begin(self, request: TrialRequest) -> None:
        """Begin a trial at a free slot, on the node that has most of them."""
        self._waiting.append(request)
        self._submit()

    def wait(self) -> TrialResult:
        """Return the result of the trial that ends next; InfrastructureError if no node is left that could run one."""
        while True:
            self._submit()
            if self._running:
                ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK_EVERY_S)
                for task in ready:
                    if (result := self._taken(task)) is not None:
                        return result
            elif not self._slots:
                if self._unfit or time.monotonic() - self._had_slots > 60.0:  # others may come
                    why = "; ".join(dict.fromkeys(self._unfit.values())) or "all have gone"
                    raise InfrastructureError(
                        f"no node of the cluster is left for trials: {why}; `autotune resume` goes on"
                    )
                time.sleep(_LOOK_EVERY_S)
            self._look()
            self._end_overdue()

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial alone, at the first slot that there is."""
        assert not self._running, "a trial that is run alone has to be alone"
        self.begin(request)
        return self.wait()

    def _look(self) -> None:
        """Take note of nodes that have come or gone."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S and self._slots:
            return
        self._looked = now
        nodes = [n for n in self._cluster.nodes() if n.id not in self._unfit and n.id not in self._gone]
        most = max((n.slots for n in nodes), default=0)
        self._slots = [_Slot(n, index) for index in range(most) for n in nodes if index < n.slots]  # spread over nodes
        if self._slots:
            self._had_slots = now

    def _free_slots(self) -> list[_Slot]:
        taken = {(running.slot.node.id, running.slot.number) for running in self._running.values()}
        return [slot for slot in self._slots if (slot.node.id, slot.number) not in taken]

    def _submit(self) -> None:
        """Begin what waits, as far as there are free slots."""
        self._look()
        for slot in self._free_slots()[: len(self._waiting)]:
            request = self._waiting.popleft()
            job = Job(
                search=self._search,
                node=slot.node.id,
                request=request,
                slot=slot.number,
                slots=self._cluster.slots_a_node,
                maker=self._maker,
            )
            task = self._task.options(
                name=f"autotune trial {request.number}",
                scheduling_strategy=self._cluster.pinned(slot.node.id),
                **self._cluster.demand(slot.node),
            ).remote(job.model_dump_json())
            self._running[task] = _Running(request, slot)

    def _taken(self, task: Any) -> TrialResult | None:
        """Return the result of a task that has told something; None if it begins, or if it was lost and waits again."""
        from ray import exceptions

        running = self._running.pop(task)
        try:
            told = self._ray.get(next(task))
        except exceptions.OutOfMemoryError as error:
            cause = f"Ray ended it, since memory of the host ran short: {one_line(error)}"
            return self._failed(running, Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause))
        except exceptions.RayTaskError as error:  # the node can't run trials; what a trial does is a result
            self._unfit[running.slot.node.id] = one_line(error.cause if error.cause is not None else error)
            self._looked = float("-inf")
            self._waiting.appendleft(running.request)
            return None
        except exceptions.RayError as error:
            return self._lost(running, error)
        if told is None:
            self._running[task] = running._replace(began=time.monotonic())
            return None
        text, files = told
        return self._arrived(running, TrialResult.model_validate_json(text), files)

    def _lost(self, running: _Running, error: Exception) -> TrialResult | None:
        """Put a trial whose worker or node has died back in the queue, or give it up.

        One that had not begun when its node went is no cause of that.
        """
        from ray import exceptions

        losses, self._looked = self._losses.setdefault(running.request.number, []), float("-inf")
        is_gone = isinstance(error, exceptions.NodeDiedError | exceptions.TaskUnschedulableError)
        if is_gone:
            self._gone.add(running.slot.node.id)
        if running.began is not None or not is_gone:
            losses.append(f"{running.slot.shown}: {type(error).__name__}")
        if len(losses) < 2:  # a trial whose worker dies so often may be what kills it
            self._waiting.appendleft(running.request)
            return None
        cause = f"its worker died {len(losses)} times ({'; '.join(losses)})"
        return self._failed(running, Failure(status=TrialStatus.CRASHED, cause=cause))

    def _failed(self, running: _Running, failure: Failure) -> TrialResult:
        now = time.monotonic()
        result = TrialResult(request=running.request, outcome=failure, duration_s=now - (running.began or now))
        return self._arrived(running, result, {})

    def _arrived(self, running: _Running, result: TrialResult, files: dict[str, bytes]) -> TrialResult:
        losses = self._losses.pop(running.request.number, [])
        lost = tuple(f"it ran again: {loss}" for loss in losses if result.status is not TrialStatus.CRASHED)
        began = time.time() - result.duration_s  # by this machine's clock
        update = {"place": running.slot.shown, "began": began, "warnings": (*result.warnings, *lost)}
        result = result.model_copy(update=update)
        directory = trial_directory(self._directory, running.request.number)
        directory.mkdir(parents=True, exist_ok=True)
        write_value(running.request, directory / "request.json")
        for name, content in files.items():
            (directory / Path(name).name).write_bytes(content)
        write_value(result, directory / "result.json")
        return result

    def _end_overdue(self) -> None:
        """End the worker of a task that has begun and gives no sign, long after its trial's own time limit."""
        now = time.monotonic()
        for task, running in self._running.items():
            limit_s = running.request.limits.timeout_s + LAUNCHER_GRACE_S + LAUNCHER_START_S
            if running.began is not None and now - running.began > limit_s:
                with suppress(Exception):
                    self._ray.cancel(task, force=True)
