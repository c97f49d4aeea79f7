"""The rates of a device: as its data sheet lets expect, or measured in a process of its own.

By its data sheet a device attains the share of each peak that published benchmarks reach, each with its source.
`calibrate` replaces these rates by measured ones: `autotune.cost.measuring` runs in a process of its own, so that the
caller's never starts a thread pool or a CUDA context. Measured rates hold for this device with these drivers, libraries
and cores, by which `Hardware.fingerprint` tells devices apart.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import get_args

import psutil
from pydantic import Field

from autotune.cost.profile import ParameterGroup
from autotune.errors import InfrastructureError, MachineError
from autotune.units import show_rate
from autotune.value import Value
from autotune.values.catalogue import Gpu, gpu_of
from autotune.values.estimate import Arithmetic, Rates, Timings
from autotune.values.hardware import Hardware

NO_DEVICE = 3  # exit code of a measuring process whose device torch can't use
_TIME_LIMIT_S = 240

# Measures operators and optimizers, in a process of the launcher.
ENTRY = "autotune.cost.measuring:run_measure"


def rates_by_table(hardware: Hardware) -> Rates:
    """Return the rates that the device should attain; a MachineError if no data sheet of it is known."""
    if (rates := known_rates(hardware)) is None:
        raise MachineError(f"{hardware.name}: its data sheet isn't known: autotune doctor --calibrate measures it")
    return rates


def known_rates(hardware: Hardware) -> Rates | None:
    """Return the rates that the device should attain; None if no data sheet of it is known."""
    if hardware.is_cpu:
        # Two threads of a core share its vector units.
        physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
        share = min(physical / logical, 1.0) if physical and logical else 1.0
        return cpu_rates(hardware.features, hardware.cores * share, _frequency_hz(hardware.name))
    gpu = gpu_of(hardware.name)
    return None if gpu is None else sheet_rates(gpu)


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

    # Bytes/s of 16 lanes, one way, of the slot that a generation is made for: Volta 3.0, Ampere 4.0, Hopper 5.0; AMD
    # 4.0 or more.
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
        source="table",
    )


def cpu_rates(features: Sequence[str], cores: float, frequency_hz: float) -> Rates:
    """Return the rates that a processor of physical `cores` should attain; it has no peak by a data sheet."""
    # Share of cores x frequency x FLOP/cycle that large products reach. MKL and oneDNN come near 1 where the frequency
    # is the guaranteed one (0.9 to 1.2 on that EPYC, which boosts); all cores of a laptop together stay far below its
    # highest.
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
        source="table",
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


def calibrate(hardware: Hardware) -> Rates:
    """Return the measured rates of a device of this machine; takes seconds, with the device to itself.

    MachineError: torch can't use it; InfrastructureError: measuring fails, or gives more than its data sheet allows.
    """
    there = {"fp32": True, "tf32": hardware.has_tf32, "fp16": not hardware.is_cpu, "bf16": hardware.has_bf16}
    # Of each of the three tensors of an addition: far beyond the caches, and a quarter of the free memory at most.
    elements = min(64 << 20, hardware.free_bytes // (4 * 3 * 4))
    asked = [hardware.device, str(elements), *(arithmetic for arithmetic, is_there in there.items() if is_there)]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
    try:
        done = subprocess.run(
            # -P: the present directory is not searched for modules.
            [sys.executable, "-P", "-m", "autotune.cost.measuring", *asked],
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"measuring {hardware.device} took more than {_TIME_LIMIT_S} s") from None
    except OSError as error:
        raise InfrastructureError(f"measuring {hardware.device}: no process could be started: {error}") from None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode} without a word"
    if done.returncode == NO_DEVICE:
        raise MachineError(f"torch can't use {hardware.device}: {last}")
    if done.returncode:
        raise InfrastructureError(f"measuring {hardware.device} failed: {last}")
    rates = Rates.model_validate_json(last)
    if too_much := beyond_data_sheet(rates, hardware):
        raise InfrastructureError(f"measuring {hardware.device} gave {too_much}: not stored, other work was timed")
    known = known_rates(hardware)
    return rates.model_copy(update={"peak_flops": known.peak_flops if known is not None else {}})


def beyond_data_sheet(rates: Rates, hardware: Hardware) -> str | None:
    """Say which rate no such GPU can have, beside its data sheet's peak; None: none, or no data sheet is known."""
    gpu = None if hardware.is_cpu else gpu_of(hardware.name)
    if gpu is None:
        return None
    peaks = {**gpu.peak_flops, "bandwidth": gpu.bandwidth}
    rows: list[tuple[str, float]] = [*rates.matmul_flops.items(), ("bandwidth", rates.bandwidth)]
    for what, rate in rows:
        # Peaks of data sheets hold at the boost clock that the vendor names; a device may run faster: an H100 SXM at
        # 1,980 MHz instead of 1,830, cards that are overclocked when sold by a tenth.
        if what in peaks and rate > 1.15 * peaks[what]:
            scale, unit = (1e9, "GB/s of bandwidth") if what == "bandwidth" else (1e12, f"TFLOP/s in {what}")
            sheet = f"the data sheet of {gpu.name} has {show_rate(peaks[what] / scale)}"
            return f"{show_rate(rate / scale)} {unit}, where {sheet}"
    return None
