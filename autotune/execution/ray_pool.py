"""Runs trials on the nodes of a Ray cluster, as a pool.

A trial reserves a placement group of Ray's with a bundle on each node that it is spread over; Ray finds nodes by their
labels, and waits while others use them. In each bundle a task runs the node's ranks. Its worker keeps a launcher, which
has imported everything, for the next trial that Ray gives it. A trial that loses a worker or a node runs again, once.
The search stays in one process, with a thread for each trial that runs.
"""

import contextlib
import hashlib
import logging
import math
import os
import pkgutil
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from autotune.errors import AutotuneError, InfrastructureError, one_line
from autotune.execution.cluster import Cluster, Node
from autotune.execution.network import measure_network
from autotune.execution.outcome import outcome_of_nodes
from autotune.execution.places import goes_on
from autotune.execution.runner import LocalRunner, Runner, end_left_behind, trial_directory
from autotune.value import write_bytes, write_value
from autotune.values.hardware import detect
from autotune.values.trial import Description, Failure, Inquiry, Rendezvous, TrialRequest, TrialResult, TrialStatus

Files = dict[str, bytes]  # by name

DATA = "data"  # directory in a run directory with the user's pickled code, and all else that trials share

logger = logging.getLogger(__name__)

# On a node: what its tasks do, each by a runner in a directory of its worker process.

_runners: dict[tuple[str | None, ...], LocalRunner] = {}  # of this worker: the last one, by search and visible GPUs


def scratch(search: str) -> Path:
    """Return the node's directory of a search, in one that nobody else can write to; otherwise InfrastructureError."""
    own = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InfrastructureError(f"{own}: not a directory of this user alone (mode 700); remove it, or set TMPDIR")
    return own / search


def clean(search: str) -> None:
    """End and remove what the workers of a search have left on this node."""
    for own in scratch(search).glob("*"):
        end_left_behind(own)
    shutil.rmtree(scratch(search), ignore_errors=True)


def local_runner(directory: Path, device: str) -> LocalRunner:
    return LocalRunner(directory, detect(device))


def at_node(do: Callable[..., Any], search: str, maker: str, device: str, files: Files, request: Any) -> Any:
    """Do it by the runner that `maker` makes, once for all tasks of this worker, with the files of the search."""
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: the processors of the task, which a user's training wouldn't have
    directory = scratch(search) / f"{socket.gethostname()}-{os.getpid()}"
    (directory / DATA).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not (kept := directory / DATA / name).exists():  # since its first task
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(content)
    made_for = (search, maker, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if made_for not in _runners:
        for runner in _runners.values():
            runner.__exit__(None, None, None)
        _runners.clear()
        for other in directory.parent.glob(f"{socket.gethostname()}-*"):
            if not psutil.pid_exists(int(other.name.rpartition("-")[2])):  # its worker was killed
                end_left_behind(other)
        # It is left when Ray ends this process, with which its launcher ends.
        _runners[made_for] = pkgutil.resolve_name(maker)(directory, device).__enter__()
    return do(_runners[made_for], directory, request)


def free_port(runner: LocalRunner, own: Path, request: TrialRequest) -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def run_ranks(runner: LocalRunner, own: Path, request: TrialRequest) -> tuple[TrialResult, Files]:
    """Run a trial, or this node's ranks of one; return its result and files."""
    result, directory = runner.run(request), trial_directory(own, request.number)
    left = [path for path in directory.glob("*") if path.suffix in (".txt", ".json")]
    files = {path.name: path.read_bytes() for path in left if path.name not in ("request.json", "result.json")}
    shutil.rmtree(directory, ignore_errors=True)
    return result, files


def describe(runner: LocalRunner, own: Path, request: Inquiry) -> tuple[Description, Files]:
    """Return the description of a workload, and files that trials need of it; raises as `LocalRunner.describe`."""
    kept, found = set((own / DATA).iterdir()), runner.describe(request)
    return found, {p.name: p.read_bytes() for p in (own / DATA).iterdir() if p not in kept}


# In the search.


class _Lost(Exception):
    """A node of a trial has gone, or the search has ended."""


class _Place(NamedTuple):
    """Nodes that are reserved for a trial by a placement group of Ray's, with a bundle on each."""

    group: Any
    bundle: dict[str, float]
    nodes: list[Node]  # of the bundles


class RayPool(Runner):
    """The nodes of a cluster, as a pool; `maker` names the function that makes a runner on a node."""

    def __init__(
        self, run_directory: Path, cluster: Cluster, *, maker: str = "autotune.execution.ray_pool:local_runner"
    ) -> None:
        self._directory, self._cluster, self._ray, self._maker = run_directory.resolve(), cluster, cluster.ray, maker
        # The search that goes on with this one finds the same directories on the nodes.
        self._search = hashlib.sha256(f"{socket.gethostname()} {self._directory}".encode()).hexdigest()[:12]
        self._trials: set[Future[TrialResult]] = set()
        self._threads = ThreadPoolExecutor(max_workers=1024)
        self._files: Any = None  # of the search, as Ray keeps them; None: they aren't sent yet
        self._home: list[Node] = []  # where a trial has run alone
        self._unfit: dict[str, str] = {}  # nodes that can run no trial, and why
        self._lock = threading.Lock()  # for the following
        self._nodes: list[Node] = []
        self._looked = -math.inf
        self._has_ended = self._has_told = False

    def __exit__(self, *_: object) -> None:
        """End what runs; leave nothing on the nodes."""
        self._has_ended = True
        self._threads.shutdown()  # as soon as each has seen it
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
        """Run a trial alone; all such run on the same nodes, as long as these are there."""
        assert not self._trials, "a trial that is run alone has to be alone"
        self._trials.add(self._threads.submit(self._trial, request, is_alone=True))
        return self.wait()

    def network_gb_s(self, request: TrialRequest) -> float:
        """Return the GB/s that a node attains to the others, among all devices of the request's trial.

        InfrastructureError: they don't reach each other, or too few are left.
        """
        with self._before_trials() as place:
            return float(min(self._each(place, measure_network, request, "network").values())) / 1e9

    def describe(self, request: Inquiry) -> Description:
        """Return what a node finds out about the user's own code; raises as `LocalRunner.describe`."""
        with self._before_trials() as place:
            found, files = self._answer(place, 0, self._call(place, 0, describe, request, "description"))
        (self._directory / DATA).mkdir(exist_ok=True)
        for name, content in files.items():
            write_bytes(content, self._directory / DATA / name)
        self._files = None
        assert isinstance(found, Description)
        return found

    @contextlib.contextmanager
    def _before_trials(self) -> Iterator[_Place]:
        """Yield a place; raise what went wrong there, in Ray or in its nodes' tasks, as an error for the user."""
        try:
            with self._reserved() as place:
                yield place
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, AutotuneError):
                raise cause from None
            raise InfrastructureError(
                f"before the first trial the cluster lost a node, or what ran on it ({type(error).__name__}: "
                f"{one_line(cause)}); `ray status` shows what is left, and a new search may go well"
            ) from None

    def _trial(self, request: TrialRequest, *, is_alone: bool = False) -> TrialResult:
        """Run a trial until it has a result, which is then on disk."""
        from ray import exceptions

        lost: list[str] = []
        result, files, shown = None, Files(), ""
        while result is None:
            with self._reserved(is_alone=is_alone) as place:
                began, shown = time.monotonic(), " + ".join(f"{node.address} ({node.id[:6]})" for node in place.nodes)
                try:
                    result, files = self._ranks(place, request)
                    if len(place.nodes) > 1 and result.is_excused and not lost:  # one node has tried again itself
                        lost.append(f"{shown}: a device had failed, or others held its memory")
                        result = None
                    continue
                except exceptions.RayTaskError:  # of a node that can run no trial
                    continue
                except exceptions.OutOfMemoryError as error:
                    status, why = TrialStatus.OUT_OF_MEMORY, "Ray ended it, since memory of the host ran short: "
                    why += one_line(error)
                except (exceptions.RayError, _Lost) as error:
                    lost.append(f"{shown}: {type(error).__name__.strip('_')}")
                    if len(lost) == 1:
                        continue
                    status, why = TrialStatus.CRASHED, f"its worker died 2 times ({'; '.join(lost)})"
            failure, duration_s = Failure(status=status, cause=why), time.monotonic() - began
            result = TrialResult(request=request, outcome=failure, duration_s=duration_s)
        again = tuple(f"it ran again: {why}" for why in lost[:1] if result.status is not TrialStatus.CRASHED)
        began_at = time.time() - result.duration_s  # by this machine's clock
        update = {"place": shown, "began": began_at, "warnings": (*result.warnings, *again)}
        result = result.model_copy(update=update)
        directory = trial_directory(self._directory, request.number)
        directory.mkdir(parents=True, exist_ok=True)
        write_value(request, directory / "request.json")
        for name, content in files.items():
            (directory / Path(name).name).write_bytes(content)
        write_value(result, directory / "result.json")
        return result

    def _ranks(self, place: _Place, request: TrialRequest) -> tuple[TrialResult, Files]:
        """Return the result and the files of a trial on as many nodes as it needs; raises as `_each`."""
        answers = self._each(place, run_ranks, request, f"trial {request.number} of {self._directory.name}")
        results = {rank: result for rank, (result, _) in answers.items()}
        outcome = outcome_of_nodes({rank: result.outcome for rank, result in results.items()}, request)
        warnings = tuple(dict.fromkeys(line for result in results.values() for line in result.warnings))
        duration_s = max(result.duration_s for result in results.values())
        merged = TrialResult(request=request, outcome=outcome, duration_s=duration_s, warnings=warnings)
        return merged, {name: content for _, files in answers.values() for name, content in files.items()}

    def _each(self, place: _Place, do: Callable[..., Any], request: TrialRequest, name: str) -> dict[int, Any]:
        """Have as many nodes as a trial needs do it; return their answers by rank, in the order in which they came.

        Nodes that wait for one whose ranks have failed are left out. Raises RayTaskError: a node can run no trial;
        another RayError, or _Lost: it or its worker is lost.
        """
        needed, _ = place.nodes[0].hardware.nodes_of(request.config.parallelism.world_size)
        meeting, calls, answers, deadline = None, {}, dict[int, Any](), math.inf
        if needed > 1:
            port = self._answer(place, 0, self._call(place, 0, free_port, request, "port"))
            meeting = Rendezvous(address=place.nodes[0].address, port=port, nodes=needed)
        for rank in range(needed):
            own = meeting and meeting.model_copy(update={"node_rank": rank})
            calls[self._call(place, rank, do, request.model_copy(update={"rendezvous": own}), name)] = rank
        while calls and time.monotonic() < deadline:
            for call in self._ready(place, calls):
                rank = calls.pop(call)
                answers[rank] = self._answer(place, rank, call)
                if do is run_ranks and answers[rank][0].measurement is None:
                    # The other nodes get this long after the first has failed, as when they lose a connection.
                    deadline = min(deadline, time.monotonic() + 20.0)
        return answers

    def _answer(self, place: _Place, index: int, call: Any) -> Any:
        """Wait for a node's answer; where it raises an error no trial can be run, nor is begun any more."""
        from ray import exceptions

        while not self._ready(place, [call]):
            pass
        try:
            return self._ray.get(call)
        except exceptions.RayTaskError as error:
            self._unfit[place.nodes[index].id], self._looked = one_line(error.cause), -math.inf
            raise

    def _ready(self, place: _Place, calls: Iterable[Any]) -> list[Any]:
        """Return the calls that have ended, within a second; _Lost: a node of the place has gone meanwhile."""
        ready: list[Any] = self._ray.wait(list(calls), timeout=1.0)[0]
        if not ready and not {node.id for node in place.nodes} <= {node.id for node in self._present()}:
            raise _Lost
        return ready

    def _call(self, place: _Place, index: int, do: Callable[..., Any], request: Any, name: str) -> Any:
        """Have a node of a place do it; return Ray's reference to its answer."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._files is None:
            kept = self._directory / DATA
            files = {str(p.relative_to(kept)): p.read_bytes() for p in kept.rglob("*") if p.is_file()}
            self._files = self._ray.put(files)
        bundle = PlacementGroupSchedulingStrategy(place.group, index)
        # By default a worker that had a GPU ends with its task.
        task = self._ray.remote(max_retries=0, max_calls=0)(at_node)
        needs = {"num_cpus": place.bundle["CPU"], "num_gpus": place.bundle.get("GPU", 0)}
        task = task.options(scheduling_strategy=bundle, name=name, **needs)
        return task.remote(do, self._search, self._maker, place.nodes[0].hardware.device, self._files, request)

    @contextlib.contextmanager
    def _reserved(self, *, is_alone: bool = False) -> Iterator[_Place]:
        """Yield nodes once Ray has reserved them for a trial; InfrastructureError: too few are left."""
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        count, began, nodes = self._cluster.fleet.nodes, time.monotonic(), list[Node]()
        group: Any = None
        try:
            while True:
                among = self._present()
                if not self._cluster.places(among):
                    why = "; ".join(dict.fromkeys(self._unfit.values())) or "they have gone"
                    told = f"too few nodes of the cluster are left for trials: {why}"
                    raise InfrastructureError(told + goes_on(self._directory))
                waited_s = time.monotonic() - began
                # After a minute on any: others may use those for hours.
                if is_alone and waited_s < 60.0 and all(node in among for node in self._home):
                    among = self._home or among
                if among != nodes:
                    if group is not None:
                        remove_placement_group(group)
                    cpus, gpus = (min(demand) for demand in zip(*(node.demand for node in among), strict=True))
                    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
                    labels = [{"ray.io/node-id": f"in({','.join(node.id for node in among)})"}] * count
                    group = placement_group([bundle] * count, "STRICT_SPREAD", bundle_label_selector=labels)
                    nodes = among
                if group.wait(1):
                    by_id, ids = {node.id: node for node in nodes}, placement_group_table(group)["bundles_to_node_id"]
                    if ids.keys() == set(range(count)) and set(ids.values()) <= by_id.keys():
                        break
                # The user is told that other programs use the nodes once it has waited this long.
                elif waited_s > 10.0 and not self._has_told:
                    self._has_told = True
                    needs = " and ".join(f"{n:g} {what}" for what, n in bundle.items())
                    told = f"waiting for {needs} on each of {count} node(s) to be free; `ray status` shows what is used"
                    logger.warning("autotune: %s", told)
            place = _Place(group, bundle, [by_id[ids[index]] for index in range(count)])
            self._home = place.nodes if is_alone else self._home
            yield place
        finally:
            if group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(group)

    def _present(self) -> list[Node]:
        with self._lock:
            if (now := time.monotonic()) - self._looked > 2.0 or not self._nodes:  # some may have come or gone
                self._looked = now
                self._nodes = [node for node in self._cluster.nodes() if node.id not in self._unfit]
            return [] if self._has_ended else self._nodes
