"""Joins a Ray cluster, or starts one on this machine, and leaves it again. Called by `autotune.search.backend`.

Ray's token authentication stays as it is where it is on, and is used wherever there is a token.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import InfrastructureError, InputError, MachineError, one_line
from autotune.execution.ray_nodes import Cluster

# What Ray does unless it is told otherwise: send usage statistics, hide GPUs from tasks that ask for none.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

_TOKEN_FILE = Path("~/.ray/auth_token")
_CONNECT_LIMIT_S = 10.0  # Ray itself tries for minutes


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
    """Refuse an address where nobody listens, which Ray would try for minutes.

    Raises:
        InputError: It is no address of a cluster.
        InfrastructureError: Nobody listens there.
    """
    if address is None:
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise InputError(f"--address {address}: expected auto, or host:port of a cluster that this machine belongs to")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise InfrastructureError(f"--address {address}: nobody answers there: {one_line(error)}") from None


def _authentication() -> dict[str, str]:
    """Return what makes Ray show the token that there is, which 2.60 does for a cluster that it finds by itself."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return {"RAY_AUTH_MODE": "token"} if named or _TOKEN_FILE.expanduser().exists() else {}
