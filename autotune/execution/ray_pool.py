"""Runs trials on the nodes of a Ray cluster: places on them, as a pool.

A place is a placement group of Ray's with a bundle on each node that a trial is spread over, and an actor in each that
keeps a launcher, which has imported everything. Ray finds nodes by their labels, and waits while others use them. A
place that loses an actor or a node is given up, and its trial runs again, once, at another. The search stays in one
process, with a thread for each trial that runs. Trials of a place run in a directory of its number: the next actor that
serves it on a node ends what an actor that died there has left.
"""

import contextlib
import hashlib
import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, InfrastructureError, one_line
from autotune.execution.cluster import Cluster, Node
from autotune.execution.outcome import outcome_of_nodes
from autotune.execution.places import goes_on
from autotune.execution.runner import Runner, trial_directory
from autotune.execution.share import DATA, Files, Share, clean
from autotune.value import write_bytes, write_value
from autotune.values.trial import Description, Failure, Inquiry, Rendezvous, TrialRequest, TrialResult, TrialStatus

logger = logging.getLogger(__name__)


class _Unfit(Exception):
    """A node can run no trial: its id, and why."""


class _Place:
    """A placement group among `nodes`, with an actor on each of its own."""

    def __init__(
        self, cluster: Cluster, nodes: list[Node], number: int, files: Files, *, search: str, maker: str
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self.among, self.number = cluster.ray, {node.id: node for node in nodes}, number
        count, label = cluster.fleet.nodes, {"ray.io/node-id": f"in({','.join(self.among)})"}
        cpus, gpus = (min(demand) for demand in zip(*(node.demand for node in nodes), strict=True))
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self.needs = f"{' and '.join(f'{n:g} {what}' for what, n in bundle.items())} on each of {count} node(s)"
        # Reserved by Ray as soon as all of it is free.
        self._group = placement_group([bundle] * count, "STRICT_SPREAD", bundle_label_selector=[label] * count)
        made = self._ray.remote(max_restarts=0, max_task_retries=0, num_cpus=cpus, num_gpus=gpus)(Share)
        bundles = [PlacementGroupSchedulingStrategy(self._group, index) for index in range(count)]
        self.actors = [
            made.options(scheduling_strategy=own).remote(search, f"{number}-{index}", maker, nodes[0].hardware.device)
            for index, own in enumerate(bundles)
        ]
        self._starting = self.keep(files)
        self.nodes: list[Node] = []  # once it has been reserved
        self.is_at_rest = True  # nothing runs there, and nothing was lost

    @property
    def shown(self) -> str:
        return " + ".join(f"{node.address} ({node.id[:6]})" for node in self.nodes)

    def keep(self, files: Files) -> list[Any]:
        """Have its actors keep files of the search; return the calls, which return the nodes' ids."""
        kept = self._ray.put(files)
        return [actor.keep.remote(kept) for actor in self.actors]

    def is_reserved(self, wait_s: float) -> bool:
        ready, rest = self._ray.wait(self._starting, num_returns=len(self._starting), timeout=wait_s)
        if not rest:
            self.nodes = [self.among[node] for node in self._ray.get(ready)]
        return not rest

    def call(self, method: str, request: TrialRequest, name: str) -> dict[Any, int]:
        """Call a method of the actors of as many nodes as a trial needs; return the calls and their nodes' ranks."""
        needed, _ = self.nodes[0].hardware.nodes_of(request.config.parallelism.world_size)
        meeting, calls = None, {}
        if needed > 1:
            port = self._ray.get(self.actors[0].free_port.remote())
            meeting = Rendezvous(address=self.nodes[0].address, port=port, nodes=needed)
        for rank, actor in enumerate(self.actors[:needed]):
            own = meeting and meeting.model_copy(update={"node_rank": rank})
            asked = request.model_copy(update={"rendezvous": own})
            calls[getattr(actor, method).options(name=name).remote(asked)] = rank
        return calls

    def run(self, request: TrialRequest, name: str) -> tuple[TrialResult, Files]:
        """Run a trial on as many of the nodes as it needs; raises RayError: one is lost, _Unfit: one can't run it."""
        self.is_at_rest, deadline, files = False, math.inf, Files()
        results: dict[int, TrialResult] = {}  # of each node, in the order of their ends
        calls = self.call("run", request, name)
        while calls and time.monotonic() < deadline:
            for call in self._ray.wait(list(calls), timeout=1.0)[0]:
                rank, answer = calls.pop(call), self._ray.get(call)
                if isinstance(answer, str):
                    raise _Unfit(self.nodes[rank].id, answer)
                results[rank] = answer[0]
                files |= answer[1]
                if results[rank].measurement is None:  # the others may wait for it
                    # The other nodes get this long after the first has failed, as when they lose a connection.
                    deadline = min(deadline, time.monotonic() + 20.0)
        self.is_at_rest = not calls
        outcome = outcome_of_nodes({rank: result.outcome for rank, result in results.items()}, request)
        warnings = tuple(dict.fromkeys(line for result in results.values() for line in result.warnings))
        duration_s = max(result.duration_s for result in results.values())
        return TrialResult(request=request, outcome=outcome, duration_s=duration_s, warnings=warnings), files

    def give_up(self) -> None:
        """End all that runs here, and give the devices back."""
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)


def _refusal(error: Exception) -> AutotuneError:
    """Return the error for the user from one of Ray, or one that an actor has raised, before a trial could begin."""
    from ray import exceptions

    cause = getattr(error, "cause", None) or error
    if "references to the actor were removed" in str(cause):  # they weren't: its calls, without a token, are refused
        way = "start Ray with RAY_AUTH_MODE=token on each, or search with RAY_AUTH_MODE=disabled"
        return InfrastructureError(f"the cluster was started without the token that this machine has: {way}")
    if isinstance(cause, exceptions.RayActorError | exceptions.NodeDiedError | exceptions.WorkerCrashedError):
        what = f"a node of the cluster, or a worker on it, was lost before the first trial ({type(error).__name__})"
        return InfrastructureError(f"{what}; `ray status` shows what is left, and a new search may go well")
    return cause if isinstance(cause, AutotuneError) else InfrastructureError(one_line(cause))


class RayPool(Runner):
    """The places of a cluster, as a pool; `maker` names the function that makes a runner on a node."""

    def __init__(
        self, run_directory: Path, cluster: Cluster, *, maker: str = "autotune.execution.share:local_runner"
    ) -> None:
        self._directory, self._cluster, self._ray, self._maker = run_directory.resolve(), cluster, cluster.ray, maker
        # The search that goes on with this one finds the same directories on the nodes.
        self._search = hashlib.sha256(f"{socket.gethostname()} {self._directory}".encode()).hexdigest()[:12]
        self._trials: set[Future[TrialResult]] = set()
        self._threads = ThreadPoolExecutor(max_workers=1024)
        self._lock = threading.RLock()  # for all of the following
        self._places: list[_Place] = []
        self._idle: list[_Place] = []
        self._starting: list[_Place] = []  # that nobody waits for any more, since another place was idle first
        self._unfit: dict[str, str] = {}  # nodes that can run no trial, and why
        self._nodes: list[Node] = []
        self._looked = -math.inf
        self._has_ended = self._has_told = False

    def __exit__(self, *_: object) -> None:
        """End what runs; leave nothing on the nodes."""
        with self._lock:
            self._has_ended = True
            for place in list(self._places):
                self._give_up(place)
        self._threads.shutdown()
        task = self._ray.remote(max_retries=0, num_cpus=0)(clean)
        with contextlib.suppress(Exception):
            pins = [self._cluster.pinned(node.id) for node in self._nodes]
            cleaning = [task.options(scheduling_strategy=pin).remote(self._search) for pin in pins]
            self._ray.wait(cleaning, num_returns=len(cleaning), timeout=5.0)

    def free(self) -> int:
        return max(0, self._cluster.places(self._present()) - len(self._trials))

    def begin(self, request: TrialRequest) -> None:
        self._trials.add(self._threads.submit(self._trial, request))

    def wait(self) -> TrialResult:
        ended = wait(self._trials, return_when=FIRST_COMPLETED).done.pop()
        self._trials.remove(ended)
        return ended.result()

    def run(self, request: TrialRequest) -> TrialResult:
        """Run a trial alone; all such run at one place, and the others are free for whoever waits for them."""
        assert not self._trials, "a trial that is run alone has to be alone"
        for place in (*self._starting, *self._idle[1:]):
            self._give_up(place)
        self.begin(request)
        return self.wait()

    def network_gb_s(self, request: TrialRequest) -> float:
        """Return the GB/s that a node of a place attains to the others, among all devices of the request's trial.

        InfrastructureError: they don't reach each other, or too few are left.
        """
        with self._before_trials() as place:
            return float(min(self._ray.get(list(place.call("measure_network", request, "network"))))) / 1e9

    def describe(self, request: Inquiry) -> Description:
        """Return what a node finds out about the user's own code; raises as `LocalRunner.describe`."""
        with self._before_trials() as place:
            found, files = self._ray.get(place.actors[0].describe.remote(request))
            self._ray.get(place.keep(files))
        (self._directory / DATA).mkdir(exist_ok=True)
        for name, content in files.items():
            write_bytes(content, self._directory / DATA / name)
        assert isinstance(found, Description)
        return found

    @contextlib.contextmanager
    def _before_trials(self) -> Iterator[_Place]:
        place = self._place()
        try:
            yield place
        except Exception as error:  # of Ray, or of an actor
            self._give_up(place)
            raise _refusal(error) from None
        with self._lock:
            self._idle.append(place)

    def _trial(self, request: TrialRequest) -> TrialResult:
        """Run a trial until it has a result, which is then on disk."""
        from ray import exceptions

        lost: list[str] = []
        while True:
            place, began, files = self._place(), time.monotonic(), Files()
            try:
                result, files = place.run(request, f"trial {request.number} of {self._directory.name}")
                if len(place.nodes) == 1 or not result.is_excused or lost:  # one node has tried again itself
                    break
                lost.append(f"{place.shown}: a device had failed, or others held its memory")
            except _Unfit as error:
                self._unfit.update([error.args])
            except exceptions.OutOfMemoryError as error:
                cause = f"Ray ended it, since memory of the host ran short: {one_line(error)}"
                failure = Failure(status=TrialStatus.OUT_OF_MEMORY, cause=cause)
                result = TrialResult(request=request, outcome=failure, duration_s=time.monotonic() - began)
                break
            except exceptions.RayError as error:
                lost.append(f"{place.shown}: {type(error).__name__}")
                if len(lost) > 1:
                    failure = Failure(status=TrialStatus.CRASHED, cause=f"its worker died 2 times ({'; '.join(lost)})")
                    result = TrialResult(request=request, outcome=failure, duration_s=time.monotonic() - began)
                    break
            self._give_up(place)
        again = tuple(f"it ran again: {why}" for why in lost[:1] if result.status is not TrialStatus.CRASHED)
        began_at = time.time() - result.duration_s  # by this machine's clock
        update = {"place": place.shown, "began": began_at, "warnings": (*result.warnings, *again)}
        result = result.model_copy(update=update)
        directory = trial_directory(self._directory, request.number)
        directory.mkdir(parents=True, exist_ok=True)
        write_value(request, directory / "request.json")
        for name, content in files.items():
            (directory / Path(name).name).write_bytes(content)
        write_value(result, directory / "result.json")
        if place.is_at_rest:
            with self._lock:
                self._idle.append(place)
        else:
            self._give_up(place)
        return result

    def _place(self) -> _Place:
        """Return an idle place, or a new one once Ray has reserved it; InfrastructureError: too few nodes are left."""
        from ray import exceptions

        new: _Place | None = None
        lost, began = 0, time.monotonic()
        while True:
            with self._lock:
                nodes = self._present()
                new = self._starting.pop() if new is None and self._starting else new
                if new is not None and list(new.among.values()) != nodes:
                    self._give_up(new)
                    new = None
                if not (most := self._cluster.places(nodes)):
                    why = "; ".join(dict.fromkeys(self._unfit.values())) or "they have gone"
                    told = f"too few nodes of the cluster are left for trials: {why}"
                    raise InfrastructureError(told + goes_on(self._directory))
                if self._idle:
                    self._starting += [new] if new is not None else []
                    return self._idle.pop(0)
                if new is None and len(self._places) < most:
                    taken = {place.number for place in self._places}
                    number = next(number for number in itertools.count() if number not in taken)
                    kept = self._directory / DATA
                    files = {str(p.relative_to(kept)): p.read_bytes() for p in kept.rglob("*") if p.is_file()}
                    new = _Place(self._cluster, nodes, number, files, search=self._search, maker=self._maker)
                    self._places.append(new)
            if new is None:
                time.sleep(0.1)
                continue
            try:
                if new.is_reserved(wait_s=1.0):
                    return new
                # The user is told that other programs use the nodes once it has waited this long.
                if not self._has_told and time.monotonic() - began > 10.0:
                    self._has_told = True
                    logger.warning("autotune: waiting for %s to be free; `ray status` shows what is used", new.needs)
            except exceptions.RayError as error:  # a node was lost before any trial began there
                self._give_up(new)
                new, lost = None, lost + 1
                if lost > 3 or isinstance(error, exceptions.RayTaskError):
                    raise _refusal(error) from None

    def _present(self) -> list[Node]:
        with self._lock:
            if (now := time.monotonic()) - self._looked > 2.0 or not self._nodes:  # some may have come or gone
                self._looked = now
                self._nodes = [node for node in self._cluster.nodes() if node.id not in self._unfit]
            return [] if self._has_ended else self._nodes

    def _give_up(self, place: _Place) -> None:
        with self._lock:
            self._places = [each for each in self._places if each is not place]
            self._idle = [each for each in self._idle if each is not place]
            self._starting = [each for each in self._starting if each is not place]
            self._looked = -math.inf
        place.give_up()
