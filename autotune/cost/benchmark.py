"""Measures what a device attains, in a process of its own: `python -m autotune.cost.benchmark`.

Reads a request (`calibrate.BenchmarkRequest`) as JSON from standard input and prints the rates as the last line of
standard output.

What each figure covers:

* **Products**: a linear layer's three, forward and both of the backward pass, on random values (a GPU's power, and so
  its clock, depends on them). Not: attention's many small ones.
* **Bandwidth**: adding two large tensors into a third that is there already; two reads and a write. Not: what the
  caches give to smaller ones, nor, on a CPU, the page faults of a large tensor that is new.
* **The least time of an operator**: a model of tiny layers, forward and backward, over the operators that it runs.
  Views and what only makes room are not counted: their time is in that of the others.
* **Host to device**: a copy from pinned memory; on a CPU within its memory.

On CUDA the clock is stopped after a block of runs, when the device has done them all.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.cost.calibrate import NO_DEVICE, BenchmarkRequest, BenchmarkSizes
from autotune.values.estimate import Arithmetic, Rates

_DTYPES: dict[Arithmetic, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_TINY_WIDTH = 32


def main() -> None:
    """Measure what standard input asks for."""
    request = BenchmarkRequest.model_validate_json(sys.stdin.read())
    device = torch.device(request.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = (
                f"its driver is too old for CUDA {torch.version.cuda}" if torch.version.cuda else "it is a CPU build"
            )
            print(build, file=sys.stderr)  # noqa: T201
            sys.exit(NO_DEVICE)
        torch.cuda.set_device(device)
    print("\n" + measure(device, request).model_dump_json())  # noqa: T201


def measure(device: torch.device, request: BenchmarkRequest) -> Rates:
    """Return the rates of a device."""
    torch.manual_seed(0)
    stopwatch = Stopwatch(device, request.sizes)
    stopwatch.warm_up()
    return Rates(
        matmul_flops={name: matmul_flops(stopwatch, name) for name in request.arithmetics},
        bandwidth=element_wise_bandwidth(stopwatch),
        launch_s=launch_s(stopwatch),
        host_bandwidth=host_bandwidth(stopwatch),
        source="measured",
    )


class Stopwatch:
    """Times work on a device by blocks."""

    def __init__(self, device: torch.device, sizes: BenchmarkSizes) -> None:
        self.device = device
        self.sizes = sizes

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the time of one run of `work`: the median over blocks of runs."""
        return statistics.median(self._blocks(work))

    def least_seconds(self, work: Callable[[], object]) -> float:
        """Return the time of one run of `work` in the quickest block: the host's scheduler only ever adds."""
        return min(self._blocks(work))

    def warm_up(self) -> None:
        """Keep the device busy until its clocks have risen."""
        work = _layer(self.sizes.products[0], torch.float32, self.device)
        until = time.perf_counter() + self.sizes.warm_up_s
        while time.perf_counter() < until:
            self.block(work, 1)

    def _blocks(self, work: Callable[[], object]) -> list[float]:
        """Return the time of one run in each block, after two runs that aren't counted."""
        self.block(work, 1)
        runs = max(1, round(self.sizes.block_s / self.block(work, 1)))
        return [self.block(work, runs) / runs for _ in range(self.sizes.repeats)]

    def block(self, work: Callable[[], object], runs: int) -> float:
        """Return the seconds of so many runs of `work`, one after another."""
        self._wait()
        started, processor = time.perf_counter(), time.process_time()
        for _ in range(runs):
            work()
        self._wait()
        taken, computed = time.perf_counter() - started, time.process_time() - processor
        # On a CPU without the time that other processes had the core.
        return max(min(taken, computed) if self.device.type == "cpu" else taken, 1e-9)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def matmul_flops(stopwatch: Stopwatch, arithmetic: Arithmetic) -> float:
    """Return the FLOP/s of large products: the median over the sizes that don't take too long."""
    if stopwatch.device.type == "cuda":
        # Of products themselves: what was set for them, as by the environment, goes before what is set for all.
        torch.backends.cuda.matmul.fp32_precision = "tf32" if arithmetic == "tf32" else "ieee"
    found: list[float] = []
    for shape in stopwatch.sizes.products:
        tokens, inputs, outputs = shape
        flops = 6.0 * tokens * inputs * outputs  # three products
        if found and flops / found[-1] > stopwatch.sizes.product_limit_s:
            break
        found.append(flops / stopwatch.seconds(_layer(shape, _DTYPES[arithmetic], stopwatch.device)))
    return statistics.median(found)


def _layer(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a linear layer's work: the output, and the gradients of input and weight."""
    tokens, inputs, outputs = shape
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    gradient = torch.randn(tokens, outputs, device=device, dtype=dtype)

    def work() -> None:
        torch.nn.functional.linear(x, weight)
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return work


def element_wise_bandwidth(stopwatch: Stopwatch) -> float:
    """Return the bytes/s, read and written, of adding large tensors."""
    count = stopwatch.sizes.elements
    a, b, total = (torch.ones(count, device=stopwatch.device) for _ in range(3))
    return 3 * a.nbytes / stopwatch.seconds(lambda: torch.add(a, b, out=total))


def launch_s(stopwatch: Stopwatch) -> float:
    """Return the time of an operator that has next to nothing to do, with autograd on."""
    layers = torch.nn.ModuleList(
        torch.nn.Linear(_TINY_WIDTH, _TINY_WIDTH, device=stopwatch.device) for _ in range(stopwatch.sizes.layers)
    )
    x = torch.randn(4, _TINY_WIDTH, device=stopwatch.device)

    def work() -> None:
        y = x
        for layer in layers:
            y = y + layer(torch.nn.functional.silu(y) * y)
        y.sum().backward()  # type: ignore[no-untyped-call]
        for parameter in layers.parameters():
            parameter.grad = None

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operators aren't split; a library that tries would wait for the other core
    try:
        with _Counter() as counter:
            work()
        return float(stopwatch.least_seconds(work) / counter.count)
    finally:
        torch.set_num_threads(threads)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it if it does more than look at a tensor or make room for one."""
        if not func.is_view and "empty" not in func._schema.name:
            self.count += 1
        return func(*args, **(kwargs or {}))


def host_bandwidth(stopwatch: Stopwatch) -> float:
    """Return the bytes/s of a large copy to the device."""
    cuda = stopwatch.device.type == "cuda"
    there = torch.ones(stopwatch.sizes.elements, device=stopwatch.device)
    here = torch.ones(stopwatch.sizes.elements, pin_memory=cuda)
    return float(here.nbytes / stopwatch.seconds(lambda: there.copy_(here, non_blocking=cuda)))


if __name__ == "__main__":
    main()
