"""optuna-dashboard on the study of a run directory: `autotune dashboard`.

The dashboard follows a search that runs, and writes notes to its study. It asks for no password, so a request counts
only if it names this server as its host, and if it isn't sent by a page from elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import socketserver
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from autotune.errors import InputError, MachineError, RunDirectoryError
from autotune.storage.record import Record
from autotune.storage.run_directory import STUDY_FILE, RunDirectory, read_plan

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(run_dir: Path, host: str) -> WSGIApplication:
    """Return the dashboard of a search, for requests to `host`; MachineError: optuna-dashboard isn't installed.

    RunDirectoryError: there is no search in it, or it has no study yet; RecordError: the study can't be read.
    """
    study = RunDirectory.existing(run_dir).path / STUDY_FILE
    read_plan(run_dir)
    if not study.exists():
        raise RunDirectoryError(f"{run_dir}: has no study yet (no {STUDY_FILE}); `autotune resume {run_dir}` makes it")
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        hint = "pip install 'autotune-train[dashboard]'"
        raise MachineError(f"dashboard: needs the package optuna-dashboard: {hint}") from None
    opened = Record(study)
    opened.searches()  # a damaged file is told now
    return Guard(wsgi(opened.storage), host)


class Guard:
    """Answers those requests alone that a browser on the dashboard's own page sends.

    A page from elsewhere could otherwise have the browser delete trials, or read them through a name of its own that
    leads to this machine (DNS rebinding).
    """

    def __init__(self, dashboard: WSGIApplication, host: str) -> None:
        self._dashboard, self._host = dashboard, host

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        asked = environ.get("HTTP_HOST", "")
        origin = environ.get("HTTP_ORIGIN")
        is_foreign = origin is not None and urlsplit(origin).netloc != asked
        if is_foreign or environ.get("HTTP_SEC_FETCH_SITE") in ("cross-site", "same-site") or not self._is_ours(asked):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"autotune dashboard: asked for under another name, or by a page from elsewhere\n"]
        return self._dashboard(environ, start_response)

    def _is_ours(self, asked: str) -> bool:
        name = asked.rpartition(":")[0] if re.search(r":\d+$", asked) else asked
        name = name.strip("[]").lower()
        if is_loopback(name) or name == self._host.lower():
            return True
        if is_loopback(self._host):
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name in (socket.gethostname().lower(), socket.getfqdn().lower())


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: the terminal is for what matters."""


def server(host: str, port: int, application: WSGIApplication) -> WSGIServer:
    """Return a server that listens; InputError: it can't listen there."""
    try:
        return make_server(host, port, application, server_class=_Server, handler_class=_Silent)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"--port {port}: is in use; name another, or 0 for any that is free") from None
        raise InputError(f"--host {host} --port {port}: can't be listened at: {error.strerror}") from None
    except (UnicodeError, TypeError):  # TypeError: Python's own words for a name that can't be encoded
        raise InputError("--host: is no name of a host") from None
