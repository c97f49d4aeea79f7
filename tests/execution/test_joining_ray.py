"""Joining a cluster: what is refused at once, and the token."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.errors import InfrastructureError, InputError, MachineError
from autotune.execution import ray_pool
from autotune.execution.ray_nodes import scratch
from autotune.execution.ray_pool import joined


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    """No cluster and no token of whoever runs the tests."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", *ray_pool._ENVIRONMENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_ray_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"pip install 'autotune-train\[ray\]'"), joined(None):
        pass


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match="expected auto, or host:port"):
        ray_pool._check_address(address)


def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, and nobody listens
        with pytest.raises(InfrastructureError, match="nobody answers there"):
            ray_pool._check_address(f"127.0.0.1:{unused.getsockname()[1]}")


def test_a_token_is_shown_where_there_is_one(tmp_path, monkeypatch):
    ray_pool._check_address(None)  # which is left to ray
    assert ray_pool._authentication() == {}
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        with monkeypatch.context() as set_by_user:
            set_by_user.setenv(name, "secret")
            assert ray_pool._authentication() == {"RAY_AUTH_MODE": "token"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert ray_pool._authentication() == {"RAY_AUTH_MODE": "token"}


def test_what_the_user_says_of_authentication_stays(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with pytest.raises(MachineError), joined(None):
        pass
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


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
