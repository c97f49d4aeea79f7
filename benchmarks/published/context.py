"""What a process takes of a device beside torch's allocator, by device and generation of torch.

One constant each, measured by others on an idle process; nothing here is fitted to the rows that are scored. It is the
CUDA context with kernels loaded:

- torch up to 1.12 loads all of its kernels at once. 1,343 MiB on a V100 (the guide's own reading, transformers
  `perf_train_gpu_one.mdx`), 1.78 GiB on an A100 (torch 1.10.2; stas00/ml-engineering, `training/performance`).
- torch from 1.13 on (CUDA 11.7) loads a kernel when it is first used: 0.47 GiB with none, 0.92 GiB with all of them
  (A100, torch 2.1.1; the same source). A training run loads many of torch's, and those of flash attention, Triton and
  bitsandbytes besides: 0.92 GiB is taken.

Workspaces of cuBLAS come out of torch's allocator.
"""

from __future__ import annotations

from autotune.values.catalogue.gpus import Gpu
from published.software import Version

_GIB = float(1 << 30)
_LAZY_SINCE = (1, 13)


def context_bytes(gpu: Gpu, torch_version: Version) -> float:
    """Return the bytes that are taken beside the allocator."""
    if torch_version >= _LAZY_SINCE:
        return 0.92 * _GIB
    return (1.78 if gpu.capability and gpu.capability >= (8, 0) else 1343 / 1024) * _GIB
