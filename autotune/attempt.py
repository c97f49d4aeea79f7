"""A call that may take longer than anybody can wait, such as to a server that doesn't answer.

It runs in a thread of its own, which ends with the process, whatever it waits for. The caller waits as long as suits it
and looks again later. Called by `autotune.keeping`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Attempt(Generic[T]):
    """A call that has been started.

    Args:
        call: What is called; whatever it raises is raised again by :meth:`result`.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="autotune attempt", daemon=True).start()

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # told to whoever asks for the result
            self._error = error
        finally:
            self._ended.set()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the call has ended, or does within so many seconds."""
        return self._ended.wait(within_s)

    def result(self) -> T:
        """Return what the call returned; it has ended."""
        if self._error is not None:
            raise self._error
        return self._values[0]
