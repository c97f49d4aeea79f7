"""optuna-dashboard on a copy of a search's trials, in memory: `autotune dashboard`.

There are two studies of the same trials: one of the speed alone, and one of speed and memory, for which the dashboard
draws the Pareto front. A search that runs is followed by reading its result files, so that it is neither locked nor
written to.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import ipaddress
import math
import socketserver
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import InputError, MachineError
from autotune.planning.plan import SearchPlan
from autotune.space.space import Dimension
from autotune.storage.run_directory import RunDirectory, read_plan
from autotune.units import GIB
from autotune.values.config import TrainConfig
from autotune.values.result import TrialRow
from autotune.values.trial import Purpose, TrialResult, TrialStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication


# The page asks every few seconds; the run directory is read at most this often.
_LOOK_AFTER_S = 3.0


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(run_dir: Path, *, words: Callable[[TrainConfig], str]) -> WSGIApplication:
    """Return the dashboard on a copy of a search's trials; `words` returns a configuration in words.

    Raises:
        RunDirectoryError: There is no search in it.
        MachineError: optuna-dashboard isn't installed.
    """
    directory = RunDirectory.existing(run_dir)
    plan = read_plan(directory.path)
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        hint = "pip install 'autotune-train[dashboard]'"
        raise MachineError(f"dashboard: needs the package optuna-dashboard: {hint}") from None

    shown = ShownStudy(plan, words)
    return Following(wsgi(shown.storage), shown, directory)


@dataclasses.dataclass
class Following:
    """A dashboard that reads new trials when it is asked, so that nothing is done while nobody looks."""

    dashboard: WSGIApplication  # answers the requests
    shown: ShownStudy
    directory: RunDirectory
    clock: Callable[[], float] = time.monotonic
    _look_at_s: float = -math.inf
    _looking: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # each request has a thread

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        with self._looking:
            if self.clock() >= self._look_at_s:
                self.shown.add(self.directory.results())
                self._look_at_s = self.clock() + _LOOK_AFTER_S
        return self.dashboard(environ, start_response)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: the terminal is for what matters."""


def server(host: str, port: int, application: WSGIApplication) -> WSGIServer:
    """Return a server that listens.

    Raises:
        InputError: It can't listen there.
    """
    try:
        return make_server(host, port, application, server_class=_Server, handler_class=_Silent)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"--port {port}: is in use; name another, or 0 for any that is free") from None
        raise InputError(f"--host {host} --port {port}: can't be listened at: {error.strerror}") from None


class ShownStudy:
    """The trials of one search as two studies in `storage`, with the parameters of its search space."""

    def __init__(self, plan: SearchPlan, words: Callable[[TrainConfig], str]) -> None:
        self._plan = plan
        self._words = words
        self._space = plan.search_space()
        self._distributions = {d.name: _distribution(d) for d in self._space.dimensions}
        self._known: set[int] = set()
        self.storage = InMemoryStorage()
        name = plan.workload.model.name
        rate = "samples/s" if plan.objective.run_samples is None else "samples/s over the run"
        self._speed = self._made(name, {rate: "maximize"})
        self._both = self._made(f"{name}: speed and memory", {rate: "maximize", "peak memory GiB": "minimize"})

    def _made(self, name: str, metrics: Mapping[str, Literal["maximize", "minimize"]]) -> optuna.Study:
        """Return a new study with these metrics, by direction."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(study_name=name, storage=self.storage, directions=list(metrics.values()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # names of metrics
            study.set_metric_names(list(metrics))
        study.set_user_attr("device", self._plan.hardware.name)
        study.set_user_attr("memory budget GiB", _gib(self._plan.memory_bytes))
        study.set_user_attr("baseline", self._words(self._plan.baseline))
        return study

    def add(self, results: Iterable[TrialResult]) -> None:
        """Add the trials that aren't there yet; not checks, which train otherwise."""
        for result in results:
            row = TrialRow.of(result)
            if row.number in self._known or row.purpose not in (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL):
                continue
            self._known.add(result.request.number)
            rate = [self._plan.objective.rate(result.measurement)] if result.measurement is not None else []
            both = [*rate, _gib(row.peak_bytes)] if rate and row.peak_bytes is not None else []
            self._speed.add_trial(self._trial(result, row, _state(row.status), rate))
            self._both.add_trial(self._trial(result, row, TrialState.COMPLETE if both else TrialState.FAIL, both))

    def _trial(self, result: TrialResult, row: TrialRow, state: TrialState, values: list[float]) -> FrozenTrial:
        params = self._space.choices_of(row.config)
        trial = optuna.create_trial(
            state=state,
            values=values or None,
            params=params,
            distributions={name: self._distributions[name] for name in params},
            user_attrs=self._attributes(row),
        )
        if result.began is not None:
            trial.datetime_start = datetime.datetime.fromtimestamp(result.began)
            trial.datetime_complete = datetime.datetime.fromtimestamp(result.began + result.duration_s)
        return trial

    def _attributes(self, row: TrialRow) -> dict[str, Any]:
        """Return the user attributes of a trial; numbers can be plotted."""
        attributes = {
            "trial": row.number,
            "purpose": str(row.purpose),
            "status": str(row.status),
            "configuration": self._words(row.config),
            "peak memory GiB": _gib(row.peak_bytes) if row.peak_bytes is not None else None,
            "tokens/s": row.tokens_per_second,
            "predicted samples/s": row.prediction.samples_per_second if row.prediction is not None else None,
            "predicted peak GiB": _gib(row.prediction.peak_bytes) if row.prediction is not None else None,
            "seconds": round(row.duration_s, 1) if row.duration_s is not None else None,
            "cause": row.cause,
        }
        return {name: value for name, value in attributes.items() if value is not None}


def _distribution(dimension: Dimension) -> BaseDistribution:
    """Return an integer scale if all choices are numbers, so that it is drawn as one; otherwise categories."""
    numbers = [choice for choice in dimension.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    if len(numbers) == len(dimension.choices) > 1:
        return IntDistribution(min(numbers), max(numbers), log=min(numbers) > 0)
    return CategoricalDistribution(list(dimension.choices))


def _state(status: TrialStatus) -> TrialState:
    if status is TrialStatus.COMPLETED:
        return TrialState.COMPLETE
    return TrialState.PRUNED if status is TrialStatus.OUT_OF_MEMORY else TrialState.FAIL


def _gib(size: float) -> float:
    return round(size / GIB, 3)
