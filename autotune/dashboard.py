"""Serves optuna-dashboard on a copy of a search's trials; `autotune dashboard` starts it.

A search that runs is followed by reading its result files, so that it is neither locked nor written to.
"""

from __future__ import annotations

import errno
import ipaddress
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from autotune.config import TrainConfig
from autotune.errors import InputError, MachineError
from autotune.rundir import RunDirectory
from autotune.search_plan import read_plan
from autotune.units import GIB

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

    from autotune.search.shown_study import ShownStudy

# The page asks every few seconds; the run directory is looked at no more often than this.
_LOOK_AFTER_S = 3.0


def is_loopback(host: str) -> bool:
    """Whether `host` is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(run_dir: Path, *, words: Callable[[TrainConfig], str]) -> WSGIApplication:
    """Return the dashboard on a copy of a search's trials.

    Args:
        run_dir: Of the search.
        words: Says a configuration in words.

    Raises:
        RunDirectoryError: There is no search in it.
        MachineError: The dashboard isn't installed.
    """
    directory = RunDirectory.existing(run_dir)
    plan = read_plan(directory.path)
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        hint = "pip install 'autotune-train[dashboard]'"
        raise MachineError(f"dashboard: needs the package optuna-dashboard: {hint}") from None
    from autotune.search.shown_study import ShownStudy

    shown = ShownStudy(
        plan.workload.model.name,
        plan.search_space(),
        objective=plan.objective,
        words=words,
        about={
            "device": plan.hardware.name,
            "memory budget GiB": round(plan.memory_bytes / GIB, 3),
            "baseline": words(plan.baseline),
        },
    )
    return Following(wsgi(shown.storage), shown, directory)


class Following:
    """A dashboard that looks for new trials when it is asked, so that nothing is done while nobody looks.

    Args:
        dashboard: What answers.
        shown: Its studies.
        directory: Of the search.
        clock: Seconds from some moment on.
    """

    def __init__(
        self,
        dashboard: WSGIApplication,
        shown: ShownStudy,
        directory: RunDirectory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dashboard = dashboard
        self._shown = shown
        self._directory = directory
        self._clock = clock
        self._look_at_s = clock()
        self._looking = threading.Lock()  # requests are answered in threads of their own

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        with self._looking:
            if self._clock() >= self._look_at_s:
                self._shown.add(self._directory.results())
                self._look_at_s = self._clock() + _LOOK_AFTER_S
        return self._dashboard(environ, start_response)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


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
