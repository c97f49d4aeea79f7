"""Measures what a device attains, and what the operators and optimizers of models take on it.

`python -m autotune.cost.measuring` reads a request (`rates.RatesRequest`) as JSON from standard input and prints the
rates as the last line of standard output. What each figure covers:

* **Products**: a linear layer's three, forward and both of the backward pass, on random values (a GPU's power, and so
  its clock, depends on them). Not: attention's many small ones.
* **Bandwidth**: adding two large tensors into a third that is there already; two reads and a write. Not: what the
  caches give to smaller ones, nor, on a CPU, the page faults of a large tensor that is new.
* **The least time of an operator**: a model of tiny layers, forward and backward, over the operators that it runs.
  Views and what only makes room are not counted: their time is in that of the others.
* **Host to device**: a copy from pinned memory; on a CPU within its memory.

For a search the launcher enters `run_measure` like a trial: operators and optimizers are measured in the shapes that
its models have. They run alone, on random numbers, in turn, so that each finds the caches about as a training leaves
them; the costliest first until the time is spent. What a training takes beside its operators, in Python, autograd and
the Trainer, is measured of a model so narrow that its operators have little to do, and held for all others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.cost.calls import bytes_of, runnable
from autotune.cost.family import Family, Shape
from autotune.cost.profile import ParameterGroup
from autotune.cost.rates import NO_DEVICE, OperatorRequest, RatesRequest
from autotune.cost.time import ADDING, CLIPPING, at, parameter_key, stepping
from autotune.value import read_value, write_value
from autotune.values.estimate import Arithmetic, Rates, Timings
from autotune.values.hardware import keep_freed_blocks
from autotune.values.model import ModelSpec, Task

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Times that each operator is run, how often in a row at most and for how long (a GPU is waited for after some), and
# operators that take turns.
_ROUNDS, _RUNS_ON_GPU, _RUN_ON_GPU_S, _TURN = 7, 20, 1e-3, 100

# Parameters of each shape that an optimizer steps over at once.
_COPIES = 4

# Steps of the narrow models that are timed, and bytes of tensors that are there at a time.
_STEPS, _NARROW_BYTES = 40, 1e9

# Makes what is timed; `bytes_of` or the like says how much memory it takes.
_Make = Callable[[], Callable[[], object]]


class Stopwatch:
    """Times work on a device by blocks; on CUDA the clock is stopped when the device has done them all."""

    def __init__(self, device: torch.device, block_s: float = 0.0) -> None:
        self.device = device
        self.block_s = block_s

    def blocks(self, work: Callable[[], object]) -> list[float]:
        """Return the time of one run in each block, after two runs that aren't counted."""
        self.block(work, 1)
        runs = max(1, round(self.block_s / self.block(work, 1)))
        return [self.block(work, runs) / runs for _ in range(5)]

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


def main() -> None:
    """Measure the rates that standard input asks for."""
    request = RatesRequest.model_validate_json(sys.stdin.read())
    device = torch.device(request.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            version = torch.version.cuda
            why = f"its driver is too old for CUDA {version}" if version else "it is a CPU build"
            print(why, file=sys.stderr)  # noqa: T201
            sys.exit(NO_DEVICE)
        torch.cuda.set_device(device)
    print("\n" + rates(Stopwatch(device, request.block_s), request).model_dump_json())  # noqa: T201


def rates(stopwatch: Stopwatch, request: RatesRequest) -> Rates:
    """Return the rates of a device."""
    torch.manual_seed(0)
    device, on_cuda = stopwatch.device, stopwatch.device.type == "cuda"
    warming = _layer(request.products[0], torch.float32, device)
    until = time.perf_counter() + 10 * request.block_s  # so that clocks have risen
    while time.perf_counter() < until:
        stopwatch.block(warming, 1)
    products = {name: matmul_flops(stopwatch, name, request.products) for name in request.arithmetics}
    a, b, total = (torch.ones(request.elements, device=device) for _ in range(3))
    added_s = statistics.median(stopwatch.blocks(lambda: torch.add(a, b, out=total)))
    launch = launch_s(stopwatch)
    here = torch.ones(request.elements, pin_memory=on_cuda)
    copied_s = statistics.median(stopwatch.blocks(lambda: total.copy_(here, non_blocking=on_cuda)))
    return Rates(
        matmul_flops=products,
        bandwidth=3 * a.nbytes / added_s,
        launch_s=launch,
        host_bandwidth=here.nbytes / copied_s,
        source="measured",
    )


def matmul_flops(stopwatch: Stopwatch, arithmetic: Arithmetic, shapes: Iterable[tuple[int, int, int]]) -> float:
    """Return the FLOP/s of large products: the median over the shapes that don't take too long."""
    if stopwatch.device.type == "cuda":
        # Of products themselves: what was set for them, as by the environment, goes before what is set for all.
        torch.backends.cuda.matmul.fp32_precision = "tf32" if arithmetic == "tf32" else "ieee"
    found: list[float] = []
    for shape in shapes:
        flops = 6.0 * math.prod(shape)  # three products
        if found and flops / found[-1] > 0.3:  # seconds
            break
        layer = _layer(shape, _DTYPES[arithmetic], stopwatch.device)
        found.append(flops / statistics.median(stopwatch.blocks(layer)))
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


def launch_s(stopwatch: Stopwatch) -> float:
    """Return the time of an operator that has next to nothing to do, with autograd on."""
    layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, device=stopwatch.device) for _ in range(20))
    x = torch.randn(4, 32, device=stopwatch.device)

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
        counter = _Counter()  # type: ignore[no-untyped-call]
        with counter:
            work()
        # The quickest block: the host's scheduler only ever adds.
        return float(min(stopwatch.blocks(work)) / counter.count)
    finally:
        torch.set_num_threads(threads)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that do more than look at a tensor or make room for one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


def run_measure(directory: Path) -> None:
    """Answer the request in `directory`."""
    keep_freed_blocks()
    write_value(timings_of(read_value(OperatorRequest, directory / "request.json")), directory / "answer.json")


def timings_of(request: OperatorRequest) -> Timings:
    """Return the seconds of the operators and optimizers that were measured within the time."""
    stopwatch = Stopwatch(torch.device(request.device))
    torch.manual_seed(0)
    beside = request.known
    if beside is None:
        # Of the Trainer's steps with two narrow models, without their operators and optimizer, what more layers take
        # more is that of their operators, and the rest the Trainer's.
        (few_s, few), (more_s, more) = (_narrow(layers, stopwatch) for layers in (2, 8))
        operator_s = max(0.0, (more_s - few_s) / (more - few))
        beside = Timings(operator_s=operator_s, micro_step_s=max(0.0, more_s - more * operator_s))
    ends_at = time.monotonic() + request.limit_s
    whats = (CLIPPING, ADDING, *request.optimizers)
    optimizers = _steps(whats, request.parameters, stopwatch, request.most_bytes, ends_at)
    operators = _calls(request.calls, stopwatch, request.most_bytes, ends_at)
    return beside.model_copy(update={"operators": operators, "optimizers": optimizers})


def _calls(
    calls: Iterable[str], stopwatch: Stopwatch, most_bytes: float, ends_at: float = math.inf
) -> dict[str, float]:
    pieces = {call: (bytes_of(call), functools.partial(runnable, call, stopwatch.device)) for call in calls}
    return _in_turn(pieces, stopwatch, most_bytes, ends_at)


def _steps(
    whats: Iterable[str],
    groups: Iterable[ParameterGroup],
    stopwatch: Stopwatch,
    most_bytes: float,
    ends_at: float = math.inf,
) -> dict[str, float]:
    """Return the seconds of an optimizer's step over one parameter, by `parameter_key`."""
    pieces: dict[str, tuple[float, _Make]] = {}
    for what, group in itertools.product(whats, groups):
        nbytes = 6 * _COPIES * group.elements * group.element_bytes  # states and temporaries count as two each
        pieces[parameter_key(what, group)] = nbytes, functools.partial(_step, what, group, stopwatch.device)
    return {key: taken / _COPIES for key, taken in _in_turn(pieces, stopwatch, most_bytes, ends_at).items()}


def _in_turn(
    pieces: Mapping[str, tuple[float, _Make]], stopwatch: Stopwatch, most_bytes: float, ends_at: float
) -> dict[str, float]:
    """Return the seconds of each piece of work, of as many as there is time for.

    Left out are pieces that can't be run here, that depend on values, and those with more than `most_bytes` alone.

    Args:
        pieces: The bytes of the tensors of each, and what makes it.
        stopwatch: Of the device.
        most_bytes: Of the tensors that are there at a time.
        ends_at: When the time is spent.
    """
    most_runs = 1 if stopwatch.device.type == "cpu" else _RUNS_ON_GPU
    pending = [(name, piece) for name, piece in pieces.items() if piece[0] <= most_bytes][::-1]
    found: dict[str, float] = {}
    with torch.no_grad():
        while pending and time.monotonic() < ends_at:
            works: dict[str, tuple[Callable[[], object], int]] = {}
            room = most_bytes
            while pending and len(works) < _TURN and (room := room - pending[-1][1][0]) >= 0:
                name, (_, make) = pending.pop()
                with contextlib.suppress(Exception):
                    work = make()
                    work()
                    once = stopwatch.block(work, 1) if most_runs > 1 else math.inf
                    works[name] = work, max(1, min(most_runs, int(_RUN_ON_GPU_S / once)))
            rounds = [[stopwatch.block(work, n) / n for work, n in works.values()] for _ in range(_ROUNDS)]
            found |= dict(zip(works, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    return found


def _step(what: str, group: ParameterGroup, device: torch.device) -> Callable[[], object]:
    """Return a step over a parameter's copies, as the Trainer makes it."""
    from transformers import Trainer

    dtype = {4.0: torch.float32, 2.0: torch.bfloat16}[group.element_bytes]
    weights = [torch.nn.Parameter(torch.randn(group.shape, device=device).to(dtype)) for _ in range(_COPIES)]
    gradients = [torch.full_like(weight, 1e-3) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    if what == CLIPPING:
        return lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0)
    if what == ADDING:
        return lambda: [gradient.add_(gradient) for gradient in gradients]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(_arguments(optim=what))
    if group.embedding and options.get("optim_bits") == 8:  # states of embeddings stay in 32 bits
        options["optim_bits"] = 32
    step: Callable[[], object] = kind(weights, **options).step
    return step


def _arguments(**changes: Any) -> Any:
    from transformers import TrainingArguments

    quiet: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return TrainingArguments(output_dir=tempfile.gettempdir(), **quiet, **changes)


def _narrow(layers: int, stopwatch: Stopwatch) -> tuple[float, int]:
    """Return a narrow model's seconds of a step beside its operators and its optimizer, and how many operators it has.

    A GPU computes while the host goes on, so there the operators' seconds aren't taken off.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback

    from autotune.cost.profiler import profile
    from autotune.cost.trace import make_inputs
    from autotune.training.build import build_model

    shape, on_cpu = Shape(task=Task.CAUSAL_LM, length=8), stopwatch.device.type == "cpu"
    config = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    spec = ModelSpec(
        reference="narrow", name="narrow", source="directory", model_type="llama", kind="decoder", config=config
    )
    family = Family(device="cpu" if on_cpu else "cuda", dtype="float32", attn_implementation="sdpa")
    traced = profile(spec, family, shape)
    device = str(stopwatch.device)
    model: Any = build_model(spec, shape.task, dtype="float32", attn_implementation="sdpa", device=device)
    model.config.use_cache = False
    sample = {name: tensor[0] for name, tensor in make_inputs(model.config, shape, 1, device="cpu").items()}
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time() if on_cpu else time.perf_counter())

    arguments = _arguments(per_device_train_batch_size=1, max_steps=_STEPS, optim="sgd", use_cpu=on_cpu)
    trainer = Trainer(model, arguments, train_dataset=[sample] * _STEPS, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    step_s = statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))
    steps = _steps(("sgd", CLIPPING), traced.parameters, stopwatch, _NARROW_BYTES)
    timed = Timings(operator_s=0.0, micro_step_s=0.0, optimizers=steps)
    calls = filter(None, (at(work.call, 1) for work in traced.work))
    seconds = _calls(calls, stopwatch, _NARROW_BYTES) if on_cpu else {}
    computing = sum(work.count * seconds.get(at(work.call, 1), 0.0) for work in traced.work)
    stepped = sum(stepping(traced.parameters, what, timed) or 0.0 for what in ("sgd", CLIPPING))
    return step_s - computing - stepped, sum(work.count for work in traced.work)


if __name__ == "__main__":
    main()
