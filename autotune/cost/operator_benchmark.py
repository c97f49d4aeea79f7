"""Measures operators and optimizers in the shapes that models have; entered by the launcher like a trial.

Operators run alone, on random numbers, in turn, so that each finds the caches about as a training leaves them; the
costliest first until the time is spent. What a training takes beside its operators, in Python, autograd and the
Trainer, is measured of a model so narrow that its operators have little to do, and held for all others.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from autotune.cost.benchmark import Stopwatch
from autotune.cost.calibrate import TINY_SIZES
from autotune.cost.calls import bytes_of, runnable
from autotune.cost.family import Family, Shape
from autotune.cost.operators import ADDING, CLIPPING, OperatorRequest, at, parameter_key, stepping
from autotune.cost.profile import ParameterGroup
from autotune.cost.profiler import profile
from autotune.cost.trace import make_inputs
from autotune.training.build import build_model
from autotune.value import read_value, write_value
from autotune.values.estimate import Timings
from autotune.values.hardware import keep_freed_blocks
from autotune.values.model import ModelSpec, Task

# Times that each piece of work is run, and how often in a row: a GPU is waited for after some.
_ROUNDS = 7
_RUNS_ON_GPU = 20
# Pieces that take turns.
_TURN = 100

# Parameters of each shape that an optimizer steps over at once.
_COPIES = 4
_WIDTHS = {torch.float32: 4.0, torch.bfloat16: 2.0}

# Layers of the narrow model, and steps that are timed of it.
_FEW, _MORE = 2, 8
_STEPS = 40
_NARROW_BYTES = 1e9


class _Piece(NamedTuple):
    """A piece of work: what makes it, the bytes of its tensors, and how many of what is asked for it does at once."""

    make: Callable[[], Callable[[], object]]
    nbytes: float
    copies: int = 1


def run_measure(directory: Path) -> None:
    """Answer the request in `directory`."""
    keep_freed_blocks()
    write_value(timings_of(read_value(OperatorRequest, directory / "request.json")), directory / "answer.json")


def timings_of(request: OperatorRequest) -> Timings:
    """Return what was measured within the time."""
    stopwatch = Stopwatch(torch.device(request.device), TINY_SIZES)
    torch.manual_seed(0)
    beside = request.known or _beside(stopwatch)
    ends_at = time.monotonic() + request.limit_s
    whats = (CLIPPING, ADDING, *request.optimizers)
    steps = {parameter_key(what, g): _step(what, g, stopwatch.device) for what in whats for g in request.parameters}
    calls = {call: _Piece(_maker(call, stopwatch.device), bytes_of(call)) for call in request.calls}
    optimizers, operators = (_in_turn(p, stopwatch, request.most_bytes, ends_at) for p in (steps, calls))
    return beside.model_copy(update={"operators": operators, "optimizers": optimizers})


def _in_turn(
    pieces: Mapping[str, _Piece], stopwatch: Stopwatch, most_bytes: float, ends_at: float = math.inf
) -> dict[str, float]:
    """Return the seconds of each piece, of as many as there is time for.

    Left out are pieces that can't be run here, that depend on values, and those with more than `most_bytes` alone.
    """
    runs = 1 if stopwatch.device.type == "cpu" else _RUNS_ON_GPU
    pending = [(name, piece) for name, piece in pieces.items() if piece.nbytes <= most_bytes][::-1]
    found: dict[str, float] = {}
    with torch.no_grad():
        while pending and time.monotonic() < ends_at:
            works: dict[str, Callable[[], object]] = {}
            room = most_bytes
            while pending and len(works) < _TURN and (room := room - pending[-1][1].nbytes) >= 0:
                name, piece = pending.pop()
                with contextlib.suppress(Exception):
                    work = piece.make()
                    work()
                    works[name] = work
            rounds = [[stopwatch.block(work, runs) / runs for work in works.values()] for _ in range(_ROUNDS)]
            for name, times in zip(works, zip(*rounds, strict=True), strict=True):
                found[name] = statistics.median(times) / pieces[name].copies
    return found


def _maker(call: str, device: torch.device) -> Callable[[], Callable[[], object]]:
    return lambda: runnable(call, device)


def _step(what: str, group: ParameterGroup, device: torch.device) -> _Piece:
    """Return a step over a parameter's copies, as the Trainer makes it; states and temporaries count as two each."""

    def make() -> Callable[[], object]:
        dtype = next(dtype for dtype, width in _WIDTHS.items() if width == group.element_bytes)
        weights = [torch.nn.Parameter(torch.randn(group.shape).to(device, dtype)) for _ in range(_COPIES)]
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

    return _Piece(make, 6 * _COPIES * group.elements * group.element_bytes, _COPIES)


def _arguments(**changes: Any) -> TrainingArguments:
    quiet: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return TrainingArguments(output_dir=tempfile.gettempdir(), **quiet, **changes)


def _beside(stopwatch: Stopwatch) -> Timings:
    """Return what a training takes beside its operators and its optimizer, without these.

    Of the Trainer's steps with two narrow models, what more layers take more is that of their operators, and the rest
    the Trainer's.
    """
    few, more = (_narrow(layers, stopwatch) for layers in (_FEW, _MORE))
    operator_s = max(0.0, (more.beside - few.beside) / (more.operators - few.operators))
    return Timings(operator_s=operator_s, micro_step_s=max(0.0, more.beside - more.operators * operator_s))


class _Narrow(NamedTuple):
    """A narrow model: seconds of a step beside its operators and its optimizer, and how many operators it has."""

    beside: float
    operators: int


def _narrow(layers: int, stopwatch: Stopwatch) -> _Narrow:
    """Return what the Trainer's steps take of a model of so many layers."""
    device, shape = stopwatch.device, Shape(task=Task.CAUSAL_LM, length=8)
    on_cpu = device.type == "cpu"
    spec = ModelSpec(
        reference="narrow",
        name="narrow",
        source="directory",
        model_type="llama",
        kind="decoder",
        config={
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
        },
    )
    traced = profile(
        spec, Family(device="cpu" if on_cpu else "cuda", dtype="float32", attn_implementation="sdpa"), shape
    )
    model: Any = build_model(spec, shape.task, dtype="float32", attn_implementation="sdpa", device=str(device))
    model.config.use_cache = False
    sample = {name: tensor[0] for name, tensor in make_inputs(model.config, shape, 1, device="cpu").items()}
    clock = _Clock(time.process_time if on_cpu else time.perf_counter)
    trainer = Trainer(
        model,
        _arguments(
            per_device_train_batch_size=1,
            max_steps=_STEPS,
            optim="sgd",
            use_cpu=on_cpu,
        ),
        train_dataset=[sample] * _STEPS,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    pieces = {parameter_key(w, g): _step(w, g, device) for w in ("sgd", CLIPPING) for g in traced.parameters}
    steps = _in_turn(pieces, stopwatch, _NARROW_BYTES)
    calls = {call: _Piece(_maker(call, device), 0.0) for work in traced.work if (call := at(work.call, 1))}
    seconds = _in_turn(calls, stopwatch, _NARROW_BYTES) if on_cpu else {}  # a GPU computes while the host goes on
    computing = sum(work.count * seconds.get(at(work.call, 1), 0.0) for work in traced.work)
    stepped = sum(stepping(traced.parameters, what, steps) or 0.0 for what in ("sgd", CLIPPING))
    return _Narrow(clock.step_s() - computing - stepped, sum(work.count for work in traced.work))


class _Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Times the Trainer's steps.

    Args:
        now: Reads the clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the time."""
        self._ends.append(self._now())

    def step_s(self) -> float:
        """Return the median of the steps' seconds, the first ones left out."""
        return statistics.median(b - a for a, b in zip(self._ends[2:], self._ends[3:], strict=False))
