"""The memory guard on CUDA: a cap on the caching allocator that leaves room for what lies beside it.

The budget is of the device's memory, of which the allocator's reservation is a part. Beside it lie the context, the
kernels that CUDA loads when they are first launched, what libraries allocate themselves, and paged optimizer states.
Whenever torch (2.11) asks the driver for more, it holds what it reserves against *fraction x total memory*; if that
would be exceeded it gives its cache back and asks again (a retry), and only then it fails. The rest it doesn't see, and
NVML does. So the cap is the budget less the rest, and follows it::

    entered    context and channels made, kernels of products loaded; cap = budget - rest - what is held back
    each step  until they are measured: cap = budget - rest; what the cache holds above that is given back
    measured   the cap stays; `check` and `peak` look again

What is held back is for the first step's own kernels. It costs nothing where the optimizer makes its states at the end
of that step, since the second one peaks then.

Where the device shares the host's memory, the rest can't be told: the cap is the budget, and torch's figures count.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from autotune.execution.ranks import open_channels
from autotune.units import show_memory
from autotune.values.trial import Memory, worst_memory

# Of what the allocator may have, for what the first step loads before the rest is read again: a guess, since how much
# that is differs by GPU and build. A step that loads more is over the budget for a moment, and the cap makes up for it.
_HELD_BACK_BYTES, _HELD_BACK_SHARE = 64 << 20, 16


class CudaGuard:
    """A cap on the caching allocator; the peak is torch's, and NVML's beyond what torch reserves.

    NVML knows no peak, so the device's is the highest reserved memory plus what NVML sees beyond torch's reservation
    when it is read. What NCCL takes for several ranks is there before the cap is set.
    """

    def __init__(self, device: str, budget_bytes: int) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._used_before: int | None = None
        self._known = Memory()  # peaks before the present attempt

    def __enter__(self) -> Self:
        import torch

        from autotune.values.hardware import cuda_used_bytes

        self._used_before = cuda_used_bytes(self._device)
        torch.cuda.set_device(self._device)
        open_channels(torch.ones(1, device=self._device))  # creates the context, too
        _load_kernels(self._device)
        room = self._budget_bytes - (self._beside() or 0)
        self._cap(room - min(_HELD_BACK_BYTES, room // _HELD_BACK_SHARE))
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the cap: the process ends, and after a device error every call would raise another."""

    def peak(self) -> Memory:
        """Return torch's peaks and the device's."""
        import torch

        reserved, beside = torch.cuda.max_memory_reserved(self._device), self._beside()
        now = Memory(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=reserved,
            device_bytes=None if beside is None else reserved + beside,
        )
        return worst_memory([self._known, now])

    def in_use_bytes(self) -> int:
        """Return what counts against the budget now: cached memory is in use, for anybody else."""
        import torch

        return torch.cuda.memory_reserved(self._device) + (self._beside() or 0)

    def check(self) -> None:
        """Fail if the peak is over the budget: what lies beside the allocator has grown since the cap was set."""
        peak = self.peak().peak_bytes
        if peak > self._budget_bytes:
            raise MemoryError(f"needed {show_memory(peak)}, more than the budget of {show_memory(self._budget_bytes)}")

    def step_ended(self) -> None:
        """Set the cap by what lies beside the allocator by now; give back what the cache holds above it."""
        import torch

        cap = self._cap(self._budget_bytes - (self._beside() or 0))
        if torch.cuda.max_memory_reserved(self._device) > cap:  # for a moment, by what the step itself has loaded
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def begin_anew(self, known: Memory) -> None:
        """Forget the peak but for `known`: that of an attempt which did not fit, and is given up."""
        import torch

        self._known = known
        torch.cuda.reset_peak_memory_stats(self._device)

    def relax(self) -> None:
        """Nothing: the cap costs no time."""

    def retries(self) -> int:
        """Return how often so far the allocator had to give its cache back and ask again."""
        import torch

        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _cap(self, cap_bytes: int) -> int:
        import torch

        if cap_bytes <= 0:
            raise MemoryError(f"the CUDA context alone exceeds the budget of {show_memory(self._budget_bytes)}")
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), self._device)
        return cap_bytes

    def _beside(self) -> int | None:
        """Return what this process takes of the device beside the allocator's reservation; None: it can't be told."""
        import torch

        from autotune.values.hardware import cuda_used_bytes

        now = cuda_used_bytes(self._device)
        if now is None or self._used_before is None:
            return None
        return max(0, now - self._used_before - torch.cuda.memory_reserved(self._device))


def _load_kernels(device: str) -> None:
    """Have CUDA load what nearly every training needs, and leave nothing of it in the allocator."""
    import torch

    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    for dtype in (torch.float32, torch.float16, *((torch.bfloat16,) if has_bf16 else ())):
        x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        torch.nn.functional.gelu(x @ x).softmax(-1).sum().backward()  # type: ignore[no-untyped-call]
        del x
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
