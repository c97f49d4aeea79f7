"""Enforces the memory budget inside a trial's process, reads the peak, and recognises running out of memory.

On CUDA the caching allocator is capped: see `cuda_guard`. On the CPU the operating system enforces the budget: a soft
RLIMIT_DATA above what the process holds when training starts, so that running out is real. It has room for what is
mapped and not resident, so a peak over the budget ends the trial, too, as soon as it is known. Both the limit and the
peak need malloc to give back what is freed, which costs time that a user's own training doesn't take (in processor time
of a step: DistilBERT a fifth, small models three quarters). So once the peak is known, and before steps are timed, the
guard is relaxed: the limit goes and malloc keeps freed blocks as it usually does. The budget on the CPU stands for a
device's memory: it covers weights, gradients, states and activations, and not the imported libraries. Data-loader
workers each inherit the limit, and their memory isn't in the figure.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from autotune.execution.cuda_guard import CudaGuard
from autotune.execution.environment import MMAP_THRESHOLD, OWN_MMAP_THRESHOLD
from autotune.execution.shortage import with_causes
from autotune.units import show_memory
from autotune.values.trial import Memory, worst_memory

# What libraries say when an allocation fails, all seen under RLIMIT_DATA; CUDA has an exception class of its own.
_ALLOCATION_MESSAGES = (
    "defaultcpuallocator: can't allocate memory",
    "could not execute a primitive",  # oneDNN hides the failed allocation of its scratchpad
    "could not create a primitive",
    "cuda out of memory",
    "cuda error: out of memory",  # a library's own allocation, beside torch's
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "[errno 12]",
    "cannot allocate memory",
    "std::bad_alloc",
    "memoryerror",  # wrapped by the compilers' own exceptions
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

# The kernels that oneDNN generates lie in mappings of their own, which count as data and are hardly ever resident: 9
# MiB of them in a vision transformer of a million weights.
_CODE_BYTES = 16 << 20

# Last words of processes that end without raising, seen under the same limit.
_FATAL_MESSAGES = (
    "libgomp: thread creation failed: resource temporarily unavailable",
    "cannot allocate memory for thread-local data: abort",
    "terminate called after throwing an instance of 'std::bad_alloc'",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error`, or one that caused it, is an allocation that failed, in any of its disguises."""
    for current in with_causes(error):
        if isinstance(current, MemoryError) or type(current).__name__ == "OutOfMemoryError":
            return True
        text = str(current).lower()
        if any(message in text for message in _ALLOCATION_MESSAGES):
            return True
    return False


def is_out_of_memory_log(tail: str) -> bool:
    """Return whether the log of a process that died without a word of its own ends in a failed allocation."""
    text = tail.lower()
    return any(message in text for message in _FATAL_MESSAGES)


class MemoryGuard(Protocol):
    """Enforces a budget while entered; `peak` may be read inside and after."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def peak(self) -> Memory:
        """Return the highest memory use since entering, or until relaxed."""
        ...

    def check(self) -> None:
        """Fail if the peak is over the budget.

        Raises:
            MemoryError: It is.
        """
        ...

    def in_use_bytes(self) -> int:
        """Return what counts against the budget now."""
        ...

    def step_ended(self) -> None:
        """Hold the budget against what the step has loaded; called until steps are measured."""
        ...

    def begin_anew(self, known: Memory) -> None:
        """Forget the peak but for `known`, what it was before an attempt that did not fit, and is given up."""
        ...

    def relax(self) -> None:
        """Take the peak as known, and no more of the trial's time than the user's own training would.

        Raises:
            MemoryError: It is over the budget.
        """
        ...

    def retries(self) -> int | None:
        """Return how often so far the allocator had to give its cache back and ask again; None: it doesn't count."""
        ...


def memory_guard(device: str, budget_bytes: int) -> MemoryGuard:
    """Return the guard for `device` ('cpu' or 'cuda:N')."""
    return CpuGuard(budget_bytes) if device == "cpu" else CudaGuard(device, budget_bytes)


def _status_bytes(key: str) -> int:
    """Return one memory figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


class CpuGuard:
    """RLIMIT_DATA above the present size of the data segment; the peak is that of the resident set."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._resident_before = self._code_before = 0
        self._limits_before = resource.getrlimit(resource.RLIMIT_DATA)
        self._known: Memory | None = None  # and no longer read
        self._earlier = Memory()  # before the present attempt
        self._tells = True  # the present peak

    def __enter__(self) -> Self:
        import torch

        # The OpenMP pool's threads are made now: made under the limit, a failure would end the process unheard.
        torch.ones(300, 300) @ torch.ones(300, 300)
        with contextlib.suppress(OSError):  # a fresh fork's starts there anyway, if a container forbids it
            _restart_peak()
        self._resident_before, self._code_before = _status_bytes("VmRSS"), _status_bytes("RssFile")
        soft, hard = self._limits_before
        limit = _status_bytes("VmData") + self._budget_bytes + _CODE_BYTES
        lowest = min((limit, *(given for given in (soft, hard) if given != resource.RLIM_INFINITY)))
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._limits_before)

    def check(self) -> None:
        """Fail if the peak is over the budget: the limit leaves room beyond it."""
        peak = self.peak().peak_bytes
        if self._tells and peak > self._budget_bytes:
            raise MemoryError(f"needed {show_memory(peak)}, more than the budget of {show_memory(self._budget_bytes)}")

    def peak(self) -> Memory:
        """Return the growth of the resident set at its highest, less the libraries' code that was read in since."""
        if self._known is not None:
            return self._known
        now = Memory(resident_bytes=self._growth("VmHWM"))
        return worst_memory([self._earlier, now]) if self._tells else self._earlier

    def in_use_bytes(self) -> int:
        """Return the present growth of the resident set."""
        return self._growth("VmRSS")

    def _growth(self, key: str) -> int:
        code = max(0, _status_bytes("RssFile") - self._code_before)
        return max(0, _status_bytes(key) - self._resident_before - code)

    def step_ended(self) -> None:
        """Nothing: the limit is on all memory."""

    def begin_anew(self, known: Memory) -> None:
        """Start again from the present resident set; where a container forbids it, the limit alone is enforced."""
        self._earlier = known
        try:
            _restart_peak()
        except OSError:
            self._tells = False

    def relax(self) -> None:
        """Lift the limit and let malloc keep what is freed, unless the user's environment says otherwise."""
        if os.environ.get(MMAP_THRESHOLD) != OWN_MMAP_THRESHOLD:
            return
        self._known = self.peak()
        self.check()
        resource.setrlimit(resource.RLIMIT_DATA, self._limits_before)
        _keep_freed_blocks()

    def retries(self) -> None:
        """Nothing is counted: malloc has no cache of that kind."""


def _restart_peak() -> None:
    """Let VmHWM start again from the present resident set; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def _keep_freed_blocks() -> None:
    """Set what glibc's malloc comes to by itself when blocks of up to 32 MiB are freed (mallopt(3))."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
        with contextlib.suppress(AttributeError):  # another C library, which has no such thresholds
            libc.mallopt(parameter, value)
