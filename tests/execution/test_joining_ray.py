"""Joining a cluster: what is refused at once, and the token."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import InfrastructureError, InputError, MachineError
from autotune.execution.ray_pool import joined, scratch


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    """No cluster and no token of whoever runs the tests."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED",
                 "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def _installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match="expected auto, or host:port"), joined(address):
        pass


@pytest.mark.usefixtures("_installed")
def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InfrastructureError, match=f"the cluster at {address} can't be joined"), joined(address):
            pass


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, None),
        ({"RAY_AUTH_TOKEN": "secret"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "secret"}, "token"),
        ({"a file": "secret"}, "token"),
        ({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}, "disabled"),  # what the user says
    ],
)
def test_a_token_is_shown_where_there_is_one(tmp_path, monkeypatch, given, mode):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name, value in given.items():
        if name == "a file":
            (tmp_path / ".ray").mkdir()
            (tmp_path / ".ray" / "auth_token").write_text(value)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=r"pip install 'autotune-train\[ray\]'"), joined(None):
        pass
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_a_node_keeps_trials_in_a_directory_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert scratch("a").parent.stat().st_mode & 0o777 == 0o700
    own: Path = scratch("a").parent
    own.chmod(0o777)
    with pytest.raises(InfrastructureError, match="not a directory of this user alone"):
        scratch("a")
    own.rename(tmp_path / "theirs")
    own.symlink_to(tmp_path / "theirs")
    with pytest.raises(InfrastructureError, match="not a directory of this user alone"):
        scratch("a")
