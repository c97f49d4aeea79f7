"""Measures the times of the operators and optimizers of a search's models on its device.

The launcher enters `run_measure` like a trial: operators and optimizers run in the shapes of the models, in turn, so
that each finds the caches about as a training leaves them, the costliest first until the time is spent.
"""

import contextlib
import functools
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.cost.family import Family, Shape
from autotune.cost.meta import bytes_of, runnable
from autotune.cost.profile import ParameterGroup
from autotune.cost.rates import OperatorRequest
from autotune.cost.time import ADDING, CLIPPING, at, parameter_key
from autotune.value import read_value, write_value
from autotune.values.estimate import Timings
from autotune.values.hardware import keep_freed_blocks
from autotune.values.model import ModelSpec, Task

# Times that each operator is run, how often in a row at most and for how long (a GPU is waited for after some), and
# operators that take turns.
_ROUNDS, _RUNS_ON_GPU, _RUN_ON_GPU_S, _TURN = 7, 20, 1e-3, 100

# Parameters of each shape that an optimizer steps over at once.
_COPIES = 4


# Makes the tensors of a piece of work, and returns the work.
_Make = Callable[[], Callable[[], object]]


def block_s(device: torch.device, work: Callable[[], object], runs: int) -> float:
    """Return the seconds of so many runs; on CUDA the clock is stopped when the device has done them all."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    started, processor = time.perf_counter(), time.process_time()
    for _ in range(runs):
        work()
    if on_cuda:
        torch.cuda.synchronize(device)
    taken, computed = time.perf_counter() - started, time.process_time() - processor
    # On a CPU without the time that other processes had the core.
    return max(taken if on_cuda else min(taken, computed), 1e-9)


def run_measure(directory: Path) -> None:
    keep_freed_blocks()
    write_value(timings_of(read_value(OperatorRequest, directory / "request.json")), directory / "answer.json")


def timings_of(request: OperatorRequest) -> Timings:
    device = torch.device(request.device)
    torch.manual_seed(0)
    beside = request.known
    if beside is None:
        # The Trainer's steps with two narrow models, beside their operators and optimizer: by as much as more layers
        # take more, each operator takes time on the host, and the rest is the Trainer's.
        (few_s, few), (more_s, more) = (_narrow(layers, device) for layers in (2, 8))
        operator_s = max(0.0, (more_s - few_s) / (more - few))
        beside = Timings(operator_s=operator_s, micro_step_s=max(0.0, more_s - more * operator_s))
    limits = request.most_bytes, time.monotonic() + request.limit_s
    optimizers = _steps((CLIPPING, ADDING, *request.optimizers), request.parameters, device, *limits)
    operators = _calls(request.calls, device, *limits)
    return beside.model_copy(update={"operators": operators, "optimizers": optimizers})


def _calls(calls: Iterable[str], device: torch.device, *limits: float) -> dict[str, float]:
    pieces = {call: (bytes_of(call), functools.partial(runnable, call, device)) for call in calls}
    return _in_turn(pieces, device, *limits)


def _steps(
    whats: Iterable[str], groups: Iterable[ParameterGroup], device: torch.device, *limits: float
) -> dict[str, float]:
    """Return the seconds of an optimizer's step over one parameter, by `parameter_key`."""
    pieces: dict[str, tuple[float, _Make]] = {}
    for what, group in itertools.product(whats, groups):
        nbytes = 6 * _COPIES * group.nbytes  # states and temporaries count as two each
        pieces[parameter_key(what, group)] = nbytes, functools.partial(_step, what, group, device)
    return {key: taken / _COPIES for key, taken in _in_turn(pieces, device, *limits).items()}


def _in_turn(
    pieces: Mapping[str, tuple[float, _Make]], device: torch.device, most_bytes: float = 1e9, ends_at: float = math.inf
) -> dict[str, float]:
    """Return the seconds of each piece of work, given by the bytes of its tensors and its maker, until time is spent.

    At most `most_bytes` are there at a time. Left out is what can't run here, depends on values, or has more.
    """
    most_runs = 1 if device.type == "cpu" else _RUNS_ON_GPU
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
                    once = block_s(device, work, 1) if most_runs > 1 else math.inf
                    works[name] = work, max(1, min(most_runs, int(_RUN_ON_GPU_S / once)))
            rounds = [[block_s(device, work, n) / n for work, n in works.values()] for _ in range(_ROUNDS)]
            found |= dict(zip(works, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    return found


def _step(what: str, group: ParameterGroup, device: torch.device) -> Callable[[], object]:
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


def _narrow(layers: int, device: torch.device) -> tuple[float, int]:
    """Return a narrow model's seconds of a step beside its operators and optimizer, and how many operators it has."""
    from transformers import PrinterCallback, Trainer, TrainerCallback

    from autotune.cost.profiler import profile
    from autotune.cost.trace import make_inputs
    from autotune.training.build import build_model

    shape, on_cpu = Shape(task=Task.CAUSAL_LM, length=8), device.type == "cpu"
    config = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    spec = ModelSpec(
        reference="narrow", name="narrow", source="directory", model_type="llama", kind="decoder", config=config
    )
    family = Family(device="cpu" if on_cpu else "cuda", dtype="float32", attn_implementation="sdpa")
    traced = profile(spec, family, shape)
    model: Any = build_model(spec, shape.task, dtype="float32", attn_implementation="sdpa", device=str(device))
    model.config.use_cache = False
    sample = {name: tensor[0] for name, tensor in make_inputs(model.config, shape, 1, device="cpu").items()}
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time() if on_cpu else time.perf_counter())

    arguments = _arguments(per_device_train_batch_size=1, max_steps=40, optim="sgd", use_cpu=on_cpu)
    trainer = Trainer(model, arguments, train_dataset=[sample] * 40, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    step_s = statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))
    steps = _steps(("sgd", CLIPPING), traced.parameters, device)
    calls = filter(None, (at(work.call, 1) for work in traced.work))
    seconds = _calls(calls, device) if on_cpu else {}  # a GPU computes while the host goes on
    computing = sum(work.count * seconds.get(at(work.call, 1), 0.0) for work in traced.work)
    groups = [group for group in traced.parameters if group.trained]
    stepped = sum(g.count * steps.get(parameter_key(what, g), 0.0) for what in ("sgd", CLIPPING) for g in groups)
    return step_s - computing - stepped, sum(work.count for work in traced.work)
