"""The rates that a device should attain by its data sheet: the share of each peak that published benchmarks reach.

Each share has its source. Operators that a search measures in its models' shapes (`cost.measuring`) go first.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import get_args

import psutil
from pydantic import Field

from autotune.cost.profile import ParameterGroup
from autotune.value import Value
from autotune.values.catalogue import Gpu, gpu_of, gpus
from autotune.values.estimate import Arithmetic, Rates, Timings
from autotune.values.hardware import Hardware

# Measures operators and optimizers, in a process of the launcher.
ENTRY = "autotune.cost.measuring:run_measure"


def rates_by_table(hardware: Hardware) -> Rates:
    """Return the rates that the device should attain, by the sheet of another where the table of GPUs lacks it.

    An instance of MIG has the share of its GPU's rates that it has of the memory. Any other device takes the sheet of
    the GPU nearest in compute capability, then in memory, of several the slowest: half or twice its rates are possible.
    """
    if hardware.is_cpu:
        # Two threads of a core share its vector units.
        physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
        share = min(physical / logical, 1.0) if physical and logical else 1.0
        return cpu_rates(hardware.features, hardware.cores * share, _frequency_hz(hardware.name))
    if (gpu := gpu_of(hardware.name)) is not None:
        return sheet_rates(gpu)
    if (whole := gpu_of(hardware.name.partition(" MIG ")[0])) is not None:
        like, share, source = whole, min(1.0, hardware.memory_bytes / whole.memory_bytes), f"its share of {whole.name}"
    else:

        def distance(gpu: Gpu) -> tuple[float, ...]:
            (major, minor), (major_there, minor_there) = hardware.capability or (0, 0), gpu.capability or (-99, 0)
            memory = abs(math.log(gpu.memory_bytes / hardware.memory_bytes))
            return abs(major - major_there), abs(minor - minor_there), round(memory, 1), max(gpu.peak_flops.values())

        like, share = min(gpus(), key=distance), 1.0
        source = f"the data sheet of {like.name}, the nearest to {hardware.name} of the table"
    rates = sheet_rates(like)
    attained = {arithmetic: share * flops for arithmetic, flops in rates.matmul_flops.items()}
    changed = {"matmul_flops": attained, "bandwidth": share * rates.bandwidth, "peak_flops": {}, "source": source}
    return rates.model_copy(update=changed)


def sheet_rates(gpu: Gpu) -> Rates:
    """Return the rates that a GPU of the table should attain; arithmetics that no training uses are left out."""
    capability = gpu.capability
    # fp32 where the data sheet counts two units of which one also does the integers (Ampere and Ada for graphics,
    # consumer Blackwell): cuBLAS reaches 23.2 of the RTX A6000's 38.7 TFLOP/s, https://siboehm.com/articles/22/CUDA-MMM
    has_shared_units = capability in {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}
    peaks = {name: gpu.peak_flops[name] for name in get_args(Arithmetic) if name in gpu.peak_flops}

    def share(arithmetic: str) -> float:
        """Return the share of the dense peak that large matrix products reach.

        The best shapes reach 87 % (A100 SXM, 271 of 312 TFLOP/s), 81 % (A100 PCIe), 84 % (GH200) and 80 % (H100 SXM,
        795 of 989), all in bf16, AMD's matrix cores 51 % (MI300X), 60 % (MI325X) and in its older part 77 % (MI250X):
        https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table
        A model's shapes are not the best ones, hence less: 74 % (A100) and 76 % (V100) in
        https://github.com/mli/transformers-benchmarks. tf32 and fp16 are taken to be like bf16, and so is fp32.
        """
        # In fp8 products reach less of it: 8 H100 or B200 train Llama 3 8B 1.25 times as fast as in bf16, MI300X 1.15
        # times (torchao's docs/source/workflows/training.md); these shares, and the casts, make it 1.26 and 1.16.
        if arithmetic == "fp8":
            return share("bf16") * (0.69 if capability is None else 0.86)
        if gpu.name == "t4":  # held to 70 W: https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462
            return 0.37
        if capability is None:
            return 0.5
        if not has_shared_units:
            return 0.75
        if arithmetic == "fp32":
            return 0.6
        # GeForce cards accumulate in fp32 at half their tensor cores' rate, which is the one that is entered here and
        # about twice that of fp32: they reach nearly all of it (3090 Ti: 81 of 80 TFLOP/s). Their kin for workstations
        # and servers have the whole rate, four times that of fp32, and less bandwidth to feed it: RTX A6000, 95 of 155.
        return 0.95 if peaks.get("bf16", 0.0) <= 2.2 * peaks["fp32"] else 0.61

    # Bytes/s of 16 lanes, one way, of a generation's slot: Volta 3.0, Ampere 4.0, Hopper 5.0; AMD 4.0 or more.
    slot = 31.5e9 if capability is None or (8, 0) <= capability < (9, 0) else 63.0e9
    if capability is not None and capability < (8, 0):
        slot = 15.75e9
    # Copying or adding reaches 87 % of the memory's bandwidth on an H100 (2.90 of 3.35 TB/s,
    # https://github.com/aigatech/vpbenchmarking), 83 % on a GH200 (3.30 of 4.0 TB/s, BabelStream's add,
    # https://github.com/UoB-HPC/BabelStream/issues/194). Other memories are taken to be like these.
    # Seconds of the host for each operator of a model in eager mode, with its part of Python and autograd; one alone
    # takes 7 us on an H100 (https://github.com/meta-pytorch/autoparallel/pull/146). Llama-3.2-1B with one sample of 512
    # tokens and checkpointing: 2,407 operators in 48.8 ms on a B200, 12.6 ms compiled
    # (https://github.com/stas00/ml-engineering/tree/master/training/performance).
    # Pinned memory to the device: 54.8 GB/s of PCIe 5.0's 63 on an H100 (https://github.com/aigatech/vpbenchmarking).
    return Rates(
        matmul_flops={arithmetic: peak * share(arithmetic) for arithmetic, peak in peaks.items()},
        peak_flops=peaks,
        bandwidth=gpu.bandwidth * 0.85,
        launch_s=20e-6,
        host_bandwidth=slot * 0.87,
        source=f"the data sheet of {gpu.name}",
    )


def cpu_rates(features: Sequence[str], cores: float, frequency_hz: float) -> Rates:
    """Return the rates that a processor of physical `cores` should attain; it has no peak by a data sheet."""
    # Share of cores x frequency x FLOP/cycle that large products reach. MKL and oneDNN come near 1 where the frequency
    # is the guaranteed one (0.9 to 1.2 on that EPYC, which boosts); all cores of a laptop stay far below its highest.
    cycles = cores * frequency_hz * 0.7
    # FLOP a core does in a cycle in fp32: https://stackoverflow.com/questions/15655835. AVX-512 counts as AVX2: many
    # processors that have it do it in two halves (Zen 4) or with one unit (Intel's smaller ones).
    fp32 = cycles * (32.0 if {"avx2", "avx512f"} & set(features) else 8.0)
    # In bf16. AVX512-BF16: 32 products a cycle; an EPYC of Zen 4 does 2.2 times its fp32 (torch 2.13). AMX: 1,024 FLOP
    # by the instruction set, but "3x to 10x" of AVX-512's 64 in models: 3x is taken
    # (https://docs.pytorch.org/tutorials/recipes/amx.html).
    native = {"amx_bf16": 192.0, "avx512_bf16": 64.0}
    bf16 = cycles * max((per_cycle for name, per_cycle in native.items() if name in features), default=0.0)
    # Emulated, as a share of fp32. With AVX-512 oneDNN converts on the way: 0.4 on that EPYC held to AVX512_CORE, 0.5
    # on a Xeon 4114 (https://github.com/intel/intel-extension-for-pytorch/issues/178). Without, torch's own loops run:
    # 1/44 and worse (https://github.com/pytorch/pytorch/issues/146508).
    emulated = fp32 * (0.4 if "avx512f" in features else 1 / 45)
    # A core waits for memory with 10 line buffers of 64 bytes, some 80 ns each: 8 GB/s
    # (https://stackoverflow.com/questions/39260020). All cores together get what two channels of DDR4-3200 give, 51.2
    # GB/s, at the 79 % that STREAM reaches of a data sheet (https://github.com/aigatech/vpbenchmarking).
    bandwidth = min(cores * 8e9, 40e9)
    return Rates(
        matmul_flops={"fp32": fp32, "bf16": bf16 or emulated},
        bandwidth=bandwidth,
        # Between "approx 2 us" for x*x without autograd and 7 us for 2*x with it:
        # https://github.com/pytorch/pytorch/issues/41383
        launch_s=4e-6,
        host_bandwidth=bandwidth / 2,  # a copy reads and writes each byte
        source="the processor's cores, frequency and vector extensions",
    )


@functools.cache
def _frequency_hz(name: str) -> float:
    """Return a processor's frequency: as in its name (`@ 2.20GHz`), otherwise as the host tells, read once."""
    match = re.search(r"@\s*([\d.]+)\s*GHz", name)
    if match:
        return float(match[1]) * 1e9
    frequency = psutil.cpu_freq()
    mhz = (frequency.max or frequency.current) if frequency else 0.0
    return mhz * 1e6 or 2e9  # where the host doesn't tell; server processors are seldom guaranteed less


class OperatorRequest(Value):
    """The operators and optimizers to measure."""

    device: str
    calls: tuple[str, ...] = Field(description="as `meta` writes them, the costliest first")
    parameters: tuple[ParameterGroup, ...] = Field(default=(), description="of the models")
    optimizers: tuple[str, ...] = Field(default=(), description="by transformers' names, to step over these")
    limit_s: float = Field(gt=0, description="nothing is begun after this")
    most_bytes: float = Field(description="of the tensors that are there at a time")
    known: Timings | None = Field(default=None, description="its times that are those of all models are kept")
