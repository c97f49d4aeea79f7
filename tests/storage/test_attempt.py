"""Calls that are waited for only so long."""

import threading

import pytest

from autotune.storage.writer import Attempt


def test_what_a_call_returns_is_there_when_it_has_ended():
    attempt = Attempt(lambda: 42)
    assert attempt.has_ended(60)
    assert attempt.result() == 42


def test_a_call_that_hangs_is_not_waited_for():
    gate = threading.Event()
    attempt = Attempt(gate.wait)
    assert not attempt.has_ended()
    assert not attempt.has_ended(0.01)
    gate.set()
    assert attempt.has_ended(60)
    assert attempt.result() is True


def test_what_a_call_raises_is_raised_to_who_asks():
    attempt = Attempt(lambda: 1 // 0)
    assert attempt.has_ended(60)
    with pytest.raises(ZeroDivisionError):
        attempt.result()
