"""Enforces the memory budget inside a trial's process, and reads the peak.

**CPU.** The budget covers weights, gradients, states and activations, not the imported libraries. A soft RLIMIT_DATA
above what the process holds when training starts enforces it, with room for memory that is mapped and not resident; a
peak over the budget ends the trial as soon as it is known. Both need malloc to give back what is freed, which takes a
fifth of a step, so once the peak is known and before steps are timed the limit goes.

**CUDA.** The budget is of the device's memory: the caching allocator's reservation and the rest, which NVML sees and
torch doesn't: the context, kernels that are loaded at their first launch, the libraries' own, paged states. Torch gives
its cache back and asks again before it fails at *fraction x total memory*. So the cap is the budget less the rest::

    entered    context and channels made, kernels of products loaded; cap = budget - rest - a reserve
    each step  until they are measured: cap = budget - rest; the cache gives back what it holds above that
    measured   the cap stays; `check` and `peak` look again

The reserve is for the first step's own kernels. If the device shares the host's memory, the cap is the budget.
"""

import abc
import contextlib
import resource
import sys
from pathlib import Path
from typing import Self

from autotune.execution.environment import wait_for_all
from autotune.units import show_memory
from autotune.values.conditions import own_used_bytes
from autotune.values.hardware import cuda_used_bytes, gives_blocks_back, keep_freed_blocks, memory_of, nvml_handle
from autotune.values.trial import Memory

# The reserve for the kernels that the first step loads: a guess, since their size differs by GPU and build. A step that
# loads more is over the budget until the cap is set again.
_RESERVE_BYTES = 64 << 20


def memory_guard(device: str, budget_bytes: int) -> "MemoryGuard":
    return CpuGuard(budget_bytes) if device == "cpu" else CudaGuard(device, budget_bytes)


class MemoryGuard(contextlib.AbstractContextManager["MemoryGuard"]):
    """Enforces a budget while entered; `peak` may be read inside and after."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._earlier = Memory()  # the peak before the present attempt

    @abc.abstractmethod
    def peak(self) -> Memory:
        """Return the highest memory use since entering; once relaxed, that until then."""

    @abc.abstractmethod
    def in_use_bytes(self) -> int:
        """Return what counts against the budget now; cached memory is in use, too."""

    @abc.abstractmethod
    def begin_anew(self, known: Memory) -> None:
        """Give an attempt up that did not fit: the peak is `known` again, that before it."""

    def check(self) -> None:
        """Raise MemoryError if the peak is over the budget: the limit leaves room for it."""
        peak = self.peak().peak_bytes
        if peak > self._budget_bytes:
            raise MemoryError(f"needed {show_memory(peak)}, more than the budget of {show_memory(self._budget_bytes)}")

    def is_crowded_out(self, asked_bytes: int) -> bool:
        """Return whether other processes hold memory that the budget has left, and `asked_bytes` were within it."""
        return False

    def step_ended(self) -> None:
        """Adapt the limit, after each step before the measured ones, to the kernels that it has loaded."""

    def relax(self) -> None:
        """Check the peak, take it as final, and cost no time from now on that the user's training wouldn't take."""

    def retries(self) -> int | None:
        """Return how often the allocator had to give its cache back and ask again; None: it doesn't count."""
        return None


class CpuGuard(MemoryGuard):
    """RLIMIT_DATA above the present size of the data segment; the peak is that of the resident set."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._resident_before = self._code_before = 0
        self._limits_before = resource.getrlimit(resource.RLIMIT_DATA)
        self._final: Memory | None = None

    def __enter__(self) -> Self:
        import torch

        # The OpenMP pool's threads are made now: made under the limit, a failure would end the process unheard.
        torch.ones(300, 300) @ torch.ones(300, 300)
        _restart_peak()
        self._resident_before, self._code_before = _status_bytes("VmRSS"), _status_bytes("RssFile")
        soft, hard = self._limits_before
        # The kernels that oneDNN generates lie in mappings of their own, which count as data and are hardly ever
        # resident: 9 MiB of them in a vision transformer of a million weights.
        limit = _status_bytes("VmData") + self._budget_bytes + (16 << 20)
        lowest = min((limit, *(given for given in (soft, hard) if given != resource.RLIM_INFINITY)))
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._limits_before)

    def peak(self) -> Memory:
        return self._final or Memory.worst_of([self._earlier, Memory(resident_bytes=self._growth("VmHWM"))])

    def in_use_bytes(self) -> int:
        return self._growth("VmRSS")

    def _growth(self, key: str) -> int:  # less the libraries' code that was read in since
        code = max(0, _status_bytes("RssFile") - self._code_before)
        return max(0, _status_bytes(key) - self._resident_before - code)

    def begin_anew(self, known: Memory) -> None:
        self._earlier = known
        _restart_peak()

    def relax(self) -> None:
        if not gives_blocks_back():  # training will do as the trial does
            return
        self._final = self.peak()
        self.check()
        resource.setrlimit(resource.RLIMIT_DATA, self._limits_before)
        keep_freed_blocks()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _restart_peak() -> None:  # VmHWM, from the present resident set (proc(5)); where a container forbids it, it goes on
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class CudaGuard(MemoryGuard):
    """A cap on the caching allocator; the peak is torch's, plus the rest.

    NVML has no peak, so the rest is what it sees now beyond torch's reservation: of this process, if the driver tells
    that, otherwise of all since the trial began, less changes that can't be this process's. Paged states are added.
    """

    def __init__(self, device: str, budget_bytes: int) -> None:
        import torch

        super().__init__(budget_bytes)
        self._device, self._cuda = device, torch.cuda
        # NCCL may make the context before this guard is entered: from torch 2.15 on with the process group.
        self._used_before, self._anothers = cuda_used_bytes(device), own_used_bytes(device)
        self._known_rest: int | None = None  # once relaxed
        self._capped_rest = 0  # when the cap was set
        self._entered_rest = 0  # on entering: the context takes no less later on
        self._seen_rest: int | None = None  # at the latest look, where the driver doesn't tell processes apart
        self._is_listed = False  # whether the driver tells what this process takes

    def __enter__(self) -> Self:
        self._cuda.set_device(self._device)
        self._make_context()
        # Seen from a container, a process of the host may have this one's number.
        self._is_listed = self._anothers is None and bool(own_used_bytes(self._device))
        self._seen_rest = self._entered_rest = self._capped_rest = self._rest() or 0
        room = self._budget_bytes - self._capped_rest
        self._cap(room - min(_RESERVE_BYTES, room // 16))
        self._cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the cap: the process ends, and after a device error every call would raise another."""

    def _make_context(self) -> None:
        """Make context and channels, and load the kernels of nearly every training; leave nothing in the allocator."""
        import torch

        device, dtypes = self._device, [torch.float32, torch.float16]
        wait_for_all(torch.ones(1, device=device))
        if torch.cuda.get_device_capability(device) >= (8, 0):
            dtypes.append(torch.bfloat16)
        for dtype in dtypes:
            x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            torch.nn.functional.gelu(x @ x).softmax(-1).sum().backward()  # type: ignore[no-untyped-call]
            del x
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def peak(self) -> Memory:
        reserved, rest = self._cuda.max_memory_reserved(self._device), self._rest()
        allocated, device = self._cuda.max_memory_allocated(self._device), None if rest is None else reserved + rest
        now = Memory(allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device)
        return Memory.worst_of([self._earlier, now])

    def in_use_bytes(self) -> int:
        return self._cuda.memory_reserved(self._device) + (self._rest() or 0)

    def is_crowded_out(self, asked_bytes: int) -> bool:
        # Where the driver doesn't tell processes apart, all growth since the cap was set is others'.
        rest = (self._rest() if self._is_listed else None) or self._capped_rest
        left = self._budget_bytes - self._cuda.memory_reserved(self._device) - rest
        memory = memory_of(nvml_handle(self._device))
        return memory.used is not None and asked_bytes <= left and memory.free + _RESERVE_BYTES < left

    def step_ended(self) -> None:
        self._capped_rest = self._rest() or 0
        cap = self._cap(self._budget_bytes - self._capped_rest)
        if self._cuda.max_memory_reserved(self._device) > cap:  # for a moment: the step itself has loaded kernels
            # These samples may not come again: their allocations have to fit, and with the cache they fill the cap.
            allocated = self._cuda.max_memory_allocated(self._device)
            if allocated > cap:
                self.check()
            full = Memory(allocated_bytes=allocated, reserved_bytes=cap, device_bytes=cap + self._capped_rest)
            self._earlier = Memory.worst_of([self._earlier, full])
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats(self._device)

    def begin_anew(self, known: Memory) -> None:
        self._earlier = known
        self._cuda.reset_peak_memory_stats(self._device)

    def retries(self) -> int:
        return int(self._cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _cap(self, cap_bytes: int) -> int:
        if cap_bytes <= 0:
            raise MemoryError(f"the CUDA context alone exceeds the budget of {show_memory(self._budget_bytes)}")
        total = self._cuda.get_device_properties(self._device).total_memory
        if cap_bytes <= total:  # a rehearsal may take more than the GPU has
            self._cuda.set_per_process_memory_fraction(cap_bytes / total, self._device)
        return cap_bytes

    def relax(self) -> None:
        self.check()
        self._known_rest = self._rest()  # from now on other trials come to the device

    def _rest(self) -> int | None:
        """Return how much of the device this process takes beside the allocator's reservation; None: unknown."""
        if self._known_rest is not None:
            return self._known_rest
        paged, reserved = 0, self._cuda.memory_reserved(self._device)
        functional = sys.modules.get("bitsandbytes.functional")
        if functional is not None and (states := functional.GlobalPageManager.get_instance().paged_tensors):
            # The driver takes some for managed memory: 68 and 84 MiB on an H200 (driver 580.159).
            paged = int(sum(state.nbytes for state in states)) + (64 << 20)
        if self._is_listed and (own := own_used_bytes(self._device)) is not None:
            return max(0, own - reserved) + paged
        if self._used_before is None or (now := cuda_used_bytes(self._device)) is None:
            return None
        rest = max(0, now - self._used_before - reserved - paged)
        # From one look to the next it grows by kernels of a step and channels of NCCL: more is another process's.
        if (seen := self._seen_rest) is not None and not self._entered_rest <= rest <= seen + (512 << 20):
            rest = seen  # others have taken or given back memory
        self._seen_rest = rest
        return rest + paged
