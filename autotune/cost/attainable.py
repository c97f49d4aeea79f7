"""The rates that a device should attain by its data sheet, for devices of which nothing has been measured.

A rate is a peak of the data sheet times the share of it that published benchmarks reach, each with its source.
`autotune doctor --calibrate` replaces them all by measured rates. Pure functions of figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from autotune.values.estimate import Arithmetic, Rates

# Share of the dense peak that large matrix products reach on tensor cores. The best shapes reach 87 % (A100 SXM, 271 of
# 312 TFLOP/s), 81 % (A100 PCIe), 84 % (GH200) and 80 % (H100 SXM, 795 of 989), all in bf16:
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table
# A model's shapes are not the best ones, hence less: 74 % (A100) and 76 % (V100) in
# https://github.com/mli/transformers-benchmarks. tf32 and fp16 are taken to be like bf16, and so is fp32.
_MATMUL_SHARE = 0.75

# Of graphics chips by the same table. GeForce cards accumulate in fp32 at half their tensor cores' rate, which is the
# one that is entered here: they reach nearly all of it (3090 Ti: 81 of 80 TFLOP/s). Their kin for workstations
# and servers have the whole rate, and less bandwidth to feed it: RTX A6000, 95 of 155.
_HALVED_SHARE, _WHOLE_SHARE = 0.95, 0.61
_HALVED_RATIO = 2.2  # of the peaks in 16 bits and in fp32, where the rate is halved; else it is 4

# Of AMD's matrix cores, by the same table: 51 % (MI300X), 60 % (MI325X), in its older part 77 % (MI250X).
_AMD_MATMUL_SHARE = 0.5

# A T4 is held to 70 W: 24 of its 65 TFLOP/s, https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462
_POWER_CAPPED_SHARE = {"t4": 0.37}

# fp32 where the data sheet counts two units of which one also does the integers (Ampere and Ada for graphics, consumer
# Blackwell): cuBLAS reaches 23.2 of the RTX A6000's 38.7 TFLOP/s, https://siboehm.com/articles/22/CUDA-MMM
_SHARED_UNITS = frozenset({(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)})
_SHARED_UNITS_FP32_SHARE = 0.6

# Share of the memory bandwidth that copying or adding reaches: 87 % on an H100 (2.90 of 3.35 TB/s,
# https://github.com/aigatech/vpbenchmarking), 83 % on a GH200 (3.30 of 4.0 TB/s, BabelStream's add,
# https://github.com/UoB-HPC/BabelStream/issues/194). Other memories are taken to be like these.
_BANDWIDTH_SHARE = 0.85

# Seconds of the host for each operator of a model in eager mode, with its part of Python and autograd; one alone takes
# 7 us on an H100 (https://github.com/meta-pytorch/autoparallel/pull/146). Llama-3.2-1B with one sample of 512 tokens
# and checkpointing: 2,407 operators in 48.8 ms on a B200, 12.6 ms compiled
# (https://github.com/stas00/ml-engineering/tree/master/training/performance).
_CUDA_LAUNCH_S = 20e-6

# Pinned memory to the device: 54.8 GB/s of PCIe 5.0's 63 on an H100 (https://github.com/aigatech/vpbenchmarking).
_PCIE_SHARE = 0.87
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63.0e9  # bytes/s of 16 lanes, one way

# FLOP a core does in a cycle in fp32: https://stackoverflow.com/questions/15655835. AVX-512 counts as AVX2: many
# processors that have it do it in two halves (Zen 4) or with one unit (Intel's smaller ones).
_VECTOR_FP32 = 32.0
_PLAIN_FP32 = 8.0

# In bf16. AVX512-BF16: 32 products a cycle; an EPYC of Zen 4 does 2.2 times its fp32 (torch 2.13). AMX: 1,024 FLOP by
# the instruction set, but "3x to 10x" of AVX-512's 64 in models: 3x is taken
# (https://docs.pytorch.org/tutorials/recipes/amx.html).
_BF16 = {"amx_bf16": 192.0, "avx512_bf16": 64.0}

# Emulated bf16, as a share of fp32. With AVX-512 oneDNN converts on the way: 0.4 on that EPYC held to AVX512_CORE, 0.5
# on a Xeon 4114 (https://github.com/intel/intel-extension-for-pytorch/issues/178). Without, torch's own loops run: 1/44
# and worse (https://github.com/pytorch/pytorch/issues/146508).
_EMULATED_AVX512, _EMULATED = 0.4, 1 / 45

# Share of cores x frequency x FLOP/cycle that large products reach. MKL and oneDNN come near 1 where the frequency is
# the guaranteed one (0.9 to 1.2 on that EPYC, which boosts); all cores of a laptop together stay far below its highest.
_CPU_SHARE = 0.7

# A core waits for memory with 10 line buffers of 64 bytes, some 80 ns each: 8 GB/s
# (https://stackoverflow.com/questions/39260020). All cores together get what two channels of DDR4-3200 give, 51.2 GB/s,
# at the 79 % that STREAM reaches of a data sheet (https://github.com/aigatech/vpbenchmarking).
_CORE_BANDWIDTH, _HOST_BANDWIDTH = 8e9, 40e9

# Between "approx 2 us" for x*x without autograd and 7 us for 2*x with it:
# https://github.com/pytorch/pytorch/issues/41383
_CPU_LAUNCH_S = 4e-6


def table_rates(
    peak_flops: Mapping[Any, float], bandwidth: float, capability: tuple[int, int] | None, *, name: str = ""
) -> Rates:
    """Return what a GPU should attain.

    Args:
        peak_flops: Dense peaks by arithmetic, of the data sheet, FLOP/s; other arithmetics than ours are left out.
        bandwidth: Of the memory, by the data sheet, bytes/s.
        capability: CUDA compute capability, None for AMD.
        name: As in the GPU table; some devices are known to do worse than their kind.
    """
    peaks = _known(peak_flops)
    return Rates(
        matmul_flops={
            arithmetic: peak * _POWER_CAPPED_SHARE.get(name, _matmul_share(arithmetic, capability, peaks))
            for arithmetic, peak in peaks.items()
        },
        peak_flops=peaks,
        bandwidth=bandwidth * _BANDWIDTH_SHARE,
        launch_s=_CUDA_LAUNCH_S,
        host_bandwidth=_pcie(capability) * _PCIE_SHARE,
        source="table",
    )


def cpu_rates(features: Sequence[str], cores: float, frequency_hz: float) -> Rates:
    """Return what a processor should attain; it has no peak by a data sheet.

    Args:
        features: Vector extensions, as in `Hardware.features`.
        cores: Physical ones.
        frequency_hz: That of the processor.
    """
    cycles = cores * frequency_hz * _CPU_SHARE
    fp32 = cycles * (_VECTOR_FP32 if {"avx2", "avx512f"} & set(features) else _PLAIN_FP32)
    native = [per_cycle for name, per_cycle in _BF16.items() if name in features]
    emulated = fp32 * (_EMULATED_AVX512 if "avx512f" in features else _EMULATED)
    bandwidth = min(cores * _CORE_BANDWIDTH, _HOST_BANDWIDTH)
    return Rates(
        matmul_flops={"fp32": fp32, "bf16": cycles * max(native) if native else emulated},
        bandwidth=bandwidth,
        launch_s=_CPU_LAUNCH_S,
        host_bandwidth=bandwidth / 2,  # a copy reads and writes each byte
        source="table",
    )


def _known(peak_flops: Mapping[Any, float]) -> dict[Arithmetic, float]:
    """Return those of `peak_flops` whose arithmetic is one of ours."""
    return {arithmetic: peak_flops[arithmetic] for arithmetic in get_args(Arithmetic) if arithmetic in peak_flops}


def _matmul_share(
    arithmetic: Arithmetic, capability: tuple[int, int] | None, peaks: Mapping[Arithmetic, float]
) -> float:
    if capability is None:
        return _AMD_MATMUL_SHARE
    if capability not in _SHARED_UNITS:
        return _MATMUL_SHARE
    if arithmetic == "fp32":
        return _SHARED_UNITS_FP32_SHARE
    return _HALVED_SHARE if peaks.get("bf16", 0.0) <= _HALVED_RATIO * peaks["fp32"] else _WHOLE_SHARE


def _pcie(capability: tuple[int, int] | None) -> float:
    """Return the rate of the slot that a generation is made for: Volta 3.0, Ampere 4.0, Hopper 5.0; AMD 4.0 or more."""
    if capability is None:
        return _PCIE_4
    if capability < (8, 0):
        return _PCIE_3
    return _PCIE_4 if capability < (9, 0) else _PCIE_5
