"""The rates of a device: measured in a process of its own, or as data sheets let expect.

`calibrate` runs `autotune.cost.benchmark` in a process of its own, so that the caller's never starts a thread pool or
a CUDA context. The rates hold for this device with these drivers, libraries and cores, by which
`Hardware.fingerprint` tells devices apart.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import psutil
from pydantic import Field

from autotune.cost.attainable import cpu_rates, table_rates
from autotune.errors import InfrastructureError, MachineError
from autotune.units import show_rate
from autotune.value import Value
from autotune.values.estimate import Arithmetic, Rates
from autotune.values.hardware import Hardware

NO_DEVICE = 3  # exit code of a benchmark whose device torch can't use
_TIME_LIMIT_S = 240

# Peaks of data sheets hold at the boost clock that the vendor names; a device may run faster: an H100 SXM at 1,980 MHz
# instead of 1,830, cards that are overclocked when sold by a tenth.
_CLOCK_MARGIN = 0.15

_UNKNOWN_FREQUENCY_HZ = 2e9  # where the host doesn't tell; server processors are seldom guaranteed less


class BenchmarkSizes(Value):
    """How much work a benchmark does."""

    products: tuple[tuple[int, int, int], ...] = Field(description="tokens, inputs and outputs of layers, rising")
    product_limit_s: float = Field(description="products that would take longer are left out, but for the first")
    elements: int = Field(description="of each of the three tensors of an addition, far beyond the caches")
    layers: int = Field(description="of the model of tiny operators")
    repeats: int = Field(description="blocks, whose median counts")
    block_s: float = Field(description="time of a block at the least")
    warm_up_s: float = Field(description="work before the first block, so that clocks have risen")


CPU_SIZES = BenchmarkSizes(
    products=((1024, 512, 512), (1024, 768, 3072), (2048, 1024, 2048), (4096, 4096, 4096)),
    product_limit_s=0.3,
    elements=64 << 20,
    layers=20,
    repeats=5,
    block_s=0.05,
    warm_up_s=0.5,
)
CUDA_SIZES = CPU_SIZES.model_copy(update={"products": ((4096, 2048, 2048), (8192, 4096, 4096), (8192, 2048, 8192))})
TINY_SIZES = BenchmarkSizes(
    products=((32, 16, 16),), product_limit_s=1.0, elements=1 << 10, layers=1, repeats=1, block_s=0.0, warm_up_s=0.0
)


class BenchmarkRequest(Value):
    """What the benchmark reads from its standard input."""

    device: str
    arithmetics: tuple[Arithmetic, ...]
    sizes: BenchmarkSizes


def calibrate(hardware: Hardware, sizes: BenchmarkSizes | None = None) -> Rates:
    """Return the measured rates of a device; takes seconds, with the device to itself.

    Args:
        hardware: The device, which must be of this machine.
        sizes: How much work; by default what the kind of device needs.

    Raises:
        MachineError: torch can't use the device.
        InfrastructureError: The measuring process failed, took minutes, or gave more than the device can do.
    """
    request = BenchmarkRequest(
        device=hardware.device,
        arithmetics=_arithmetics(hardware),
        sizes=_fitting(sizes or (CPU_SIZES if hardware.is_cpu else CUDA_SIZES), hardware),
    )
    try:
        done = subprocess.run(
            # -P: the present directory is not searched for modules.
            [sys.executable, "-P", "-m", "autotune.cost.benchmark"],
            input=request.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            env=_environment(),
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
    too_much = beyond_data_sheet(rates, hardware)
    if too_much is not None:
        raise InfrastructureError(
            f"measuring {hardware.device} gave {too_much}: not stored, its work was not what was timed"
        )
    known = known_rates(hardware)
    return rates.model_copy(update={"peak_flops": known.peak_flops if known is not None else {}})


def beyond_data_sheet(rates: Rates, hardware: Hardware) -> str | None:
    """Return which rate no such GPU can have, and its data sheet's peak; None: none, or no data sheet is known."""
    from autotune.values.catalogue.gpus import gpu_of

    gpu = None if hardware.is_cpu else gpu_of(hardware.name)
    if gpu is None:
        return None
    measured: list[tuple[str, float]] = [*rates.matmul_flops.items(), ("bandwidth", rates.bandwidth)]
    peaks = {**gpu.peak_flops, "bandwidth": gpu.bandwidth}
    for what, rate in measured:
        if what in peaks and rate > (1 + _CLOCK_MARGIN) * peaks[what]:
            scale, unit = (1e9, "GB/s of bandwidth") if what == "bandwidth" else (1e12, f"TFLOP/s in {what}")
            peak = show_rate(peaks[what] / scale)
            return f"{show_rate(rate / scale)} {unit}, where the data sheet of {gpu.name} has {peak}"
    return None


def rates_by_table(hardware: Hardware) -> Rates:
    """Return what the device should attain.

    Raises:
        MachineError: No data sheet of this GPU is known.
    """
    if hardware.is_cpu:
        return cpu_rates(hardware.features, hardware.cores * _cores_per_thread(), _frequency_hz(hardware.name))
    from autotune.values.catalogue.gpus import gpu_of

    gpu = gpu_of(hardware.name)
    if gpu is None:
        raise MachineError(f"{hardware.name}: its data sheet isn't known: autotune doctor --calibrate measures it")
    return table_rates(gpu.peak_flops, gpu.bandwidth, gpu.capability, name=gpu.name)


def known_rates(hardware: Hardware) -> Rates | None:
    """Return what the device should attain; None if no data sheet of it is known."""
    try:
        return rates_by_table(hardware)
    except MachineError:
        return None


def _arithmetics(hardware: Hardware) -> tuple[Arithmetic, ...]:
    """Return the arithmetics that training on a device can use."""
    offered: dict[Arithmetic, bool] = {
        "fp32": True,
        "tf32": hardware.has_tf32,
        "fp16": not hardware.is_cpu,
        "bf16": hardware.has_bf16,
    }
    return tuple(name for name, there in offered.items() if there)


def _fitting(sizes: BenchmarkSizes, hardware: Hardware) -> BenchmarkSizes:
    """Return `sizes` with tensors that take at most a quarter of the free memory."""
    return sizes.model_copy(update={"elements": min(sizes.elements, hardware.free_bytes // (4 * 3 * 4))})


def _environment() -> dict[str, str]:
    """Return the environment of the benchmark: the parent's, devices counted as the driver does, its module path."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONPATH": path}


def _cores_per_thread() -> float:
    """Return the physical cores of this host for each logical one: two threads of a core share its vector units."""
    physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
    return min(physical / logical, 1.0) if physical and logical else 1.0


@functools.cache
def _frequency_hz(name: str) -> float:
    """Return a processor's frequency: as in its name (`@ 2.20GHz`), otherwise as the host tells, read once."""
    match = re.search(r"@\s*([\d.]+)\s*GHz", name)
    if match:
        return float(match[1]) * 1e9
    frequency = psutil.cpu_freq()
    mhz = (frequency.max or frequency.current) if frequency else 0.0
    return mhz * 1e6 or _UNKNOWN_FREQUENCY_HZ
