"""What happens inside a trial's process: build, train a few steps with the real Trainer, write the outcome.

Entered by `launch` in a forked child, once per process, which may be one of several ranks (see `ranks`). Whatever goes
wrong becomes a :class:`Failure` in the outcome file of that rank; a process that dies without one is judged by the
runner.
"""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from autotune.checks import LossTask, SoakTask
from autotune.errors import AutotuneError
from autotune.execution.environment import cold_compile_cache, trial_device
from autotune.execution.guard import MemoryGuard, is_out_of_memory, memory_guard
from autotune.execution.outcome_files import outcome_file
from autotune.execution.ranks import agree, meet, own_rank, tell_deepspeed
from autotune.files import read_value, write_value
from autotune.statistics import rate_interval
from autotune.stopwatch import Stopwatch
from autotune.trial import Failure, Measurement, Outcome, Phases, TrialRequest, TrialStatus

# An fp16 scaler starts at 2^16 and halves at each overflow: it may skip that many steps before the first real one.
SCALER_STEPS = 17


class _Refused(Exception):
    """A library refuses the configuration before training starts."""


def run_trial(directory: Path) -> None:
    """Run the request in `directory` and write the outcome beside it."""
    stopwatch, rank = Stopwatch("prepare_s"), own_rank().number
    request = read_value(TrialRequest, directory / "request.json")
    with cold_compile_cache(directory, rank) if request.cold_compile else nullcontext():
        outcome = _guarded(request, directory, stopwatch)
    outcome = outcome.model_copy(update={"phases": Phases(**stopwatch.laps())})
    write_value(outcome, directory / outcome_file(rank))


def _guarded(request: TrialRequest, directory: Path, stopwatch: Stopwatch) -> Outcome:
    """Run the trial under its memory budget and turn every error into a failure."""
    device = _device(request)
    guard = memory_guard(device, request.limits.memory_bytes)
    try:
        import torch

        torch.manual_seed(request.workload.seed)
        meet(device, timeout_s=request.limits.timeout_s)
        with guard:
            return _measure(request, directory, stopwatch, guard)
    except Exception as error:
        return _failure(error, guard)


def _failure(error: Exception, guard: MemoryGuard) -> Failure:
    from autotune.execution.no_effect import NoEffectError

    traceback.print_exc()  # into the trial's log
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    if is_out_of_memory(error):
        status, cause = TrialStatus.OUT_OF_MEMORY, first_line
    elif isinstance(error, NoEffectError | _Refused | AutotuneError):
        status, cause = TrialStatus.INVALID, first_line
    else:
        status, cause = TrialStatus.CRASHED, f"{type(error).__name__}: {first_line}"
    try:
        memory = guard.peak()
    except Exception:
        memory = None
    return Failure(status=status, cause=cause, memory=memory)


def _measure(request: TrialRequest, directory: Path, stopwatch: Stopwatch, guard: MemoryGuard) -> Outcome:
    from autotune.execution import checking, noise
    from autotune.execution.effects import EffectsProbe
    from autotune.execution.measure import CudaClock, HostClock, StepTimer

    full_steps = request.workload.accumulation_steps(request.config)
    timer = StepTimer(
        request.limits,
        request.accumulation_steps,
        full_steps,
        clock=HostClock() if request.device == "cpu" else CudaClock(),
        started_at=stopwatch.started_at,
        stopwatch=stopwatch,
        watch=noise.watch(_device(request), ranks=own_rank().is_launched),
        afterwards="closing_s" if request.task is None else "check_s",
        # A soak looks at memory to its very end, and the losses of a loss run are what counts of it.
        relax=guard.relax if request.device == "cpu" and not isinstance(request.task, SoakTask | LossTask) else None,
        agree=agree,
    )
    probe = EffectsProbe(request.config)
    try:
        trainer = _trainer(request, directory, [probe, timer], stopwatch)
    except (ValueError, ImportError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise _Refused(f"{type(error).__name__}: {error}") from error
    with checking.around_training(request.task, trainer) as found:
        loss = float(trainer.train().training_loss)
    effects = probe.verify(trainer, trainer.model)
    if not math.isfinite(loss):
        return Failure(
            status=TrialStatus.INVALID,
            cause=f"the loss became {loss}: not trainable like this",
            memory=guard.peak(),
        )
    times = timer.step_times_s()
    if not times:
        return Failure(
            status=TrialStatus.INVALID,
            cause=f"the loss scaler skipped the first {SCALER_STEPS} steps and more",
            memory=guard.peak(),
        )
    longest = _longest_first(request, directory, trainer.model.config)
    found.update(checking.findings(request.task, trainer, longest, guard.peak))
    found["padding_share"] = _padding_share(request, trainer)
    return _measurement(request, timer, times, loss, effects, guard).model_copy(update=found)


def _padding_share(request: TrialRequest, trainer: Any) -> float | None:
    """Return how much of the batches was padding, the first step with its longest samples left out."""
    from autotune.batches import padding_share

    per_step = _samples_per_step(request)
    last = min(trainer.state.global_step * per_step, len(trainer.train_dataset))
    return padding_share(trainer.train_dataset, request.config, min(per_step, last - per_step), last)


def _measurement(
    request: TrialRequest,
    timer: Any,
    times: list[float],
    loss: float,
    effects: dict[str, str],
    guard: MemoryGuard,
) -> Measurement:
    samples = request.workload.samples_per_step(request.config)
    rate = samples / statistics.fmean(times)
    tokens = request.workload.tokens_per_sample
    return Measurement(
        step_times_s=tuple(times),
        accumulation_steps=request.accumulation_steps,
        samples_per_second=rate,
        samples_per_second_interval=rate_interval(times, samples),
        tokens_per_second=None if tokens is None else rate * tokens,
        memory=guard.peak(),
        startup_s=timer.startup_s,
        first_step_s=timer.first_step_s,
        data_wait_share=timer.data_wait_share(),
        loss=loss,
        effects=effects,
        conditions=timer.conditions,
    )


def _trainer(request: TrialRequest, directory: Path, callbacks: list[Any], stopwatch: Stopwatch) -> Any:
    """Return the Trainer with model, data and arguments: `tuned` and `harness`, from the one mapping."""
    from transformers import Trainer, TrainingArguments

    from autotune.execution.checking import arguments_of
    from autotune.execution.measure import EXTRA_DISCARDED_STEPS
    from autotune.hardware import detect
    from autotune.training_args import plan

    stopwatch.enter("trainer_s")
    config, workload, limits = request.config, request.workload, request.limits
    mapping = plan(config, workload, detect(_device(request)))
    if "deepspeed" in mapping.tuned:
        tell_deepspeed(request.device)
    max_steps = limits.discarded_steps + EXTRA_DISCARDED_STEPS + limits.measure_steps + SCALER_STEPS
    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        **{
            **mapping.tuned,
            **mapping.harness,
            "gradient_accumulation_steps": request.accumulation_steps,
            "max_steps": max_steps,
            "train_sampling_strategy": "sequential",  # the order was made beforehand, for its sampler: see `batches`
            **arguments_of(request.task),
        },
    )
    stopwatch.enter("model_s")
    model = _model(request, mapping)
    stopwatch.enter("data_s")
    per_step = _samples_per_step(request)
    dataset, collator = _data(request, directory, model.config, samples=max_steps * per_step, longest_first=per_step)
    stopwatch.enter("trainer_s")
    return Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=callbacks)


def _device(request: TrialRequest) -> str:
    return trial_device(request.device, own_rank().number)


def _samples_per_step(request: TrialRequest) -> int:
    """Return the samples of a step as it is run, those of all ranks; each is dealt every so many of their batches."""
    config = request.config
    return request.accumulation_steps * config.per_device_train_batch_size * config.parallelism.data_parallel


def _data(
    request: TrialRequest, directory: Path, model_config: Any, *, samples: int, longest_first: int
) -> tuple[Any, Any]:
    """Return samples and what makes batches of them; a loss run goes over the same few again and again."""
    from autotune.data import Repeated, training_data

    own, config = samples, request.config
    if isinstance(request.task, LossTask):
        own = min(samples, request.task.pass_steps * request.workload.samples_per_step(config))
        # Losses are those of the same samples in the same order, whatever the sampler that is tried.
        config = config.model_copy(update={"train_sampling_strategy": "random"})
    # The tokenized rows are shared by all trials of a search: <run>/data beside <run>/trials/NNNN.
    dataset, collator = training_data(
        request.workload,
        model_config,
        samples=own,
        directory=directory.parent.parent / "data",
        longest_first=longest_first,
        config=config,
    )
    return Repeated(dataset, samples), collator


def _longest_first(request: TrialRequest, directory: Path, model_config: Any) -> Callable[[int], Any]:
    """Return a function that gives so many samples, the longest first."""
    return lambda samples: _data(request, directory, model_config, samples=samples, longest_first=samples)[0]


def _model(request: TrialRequest, mapping: Any) -> Any:
    from autotune.adapters import prepare_model
    from autotune.depth import shallower
    from autotune.models import build_config, build_model
    from autotune.parallel_arguments import building_device
    from autotune.quick_weights import quick_weights

    spec, task = request.workload.model, request.workload.task
    to_compare = isinstance(request.task, LossTask)
    # Losses that are compared are those of a truly initialised model.
    with nullcontext() if to_compare else quick_weights():
        model = build_model(
            spec,
            task,
            device=building_device(request.config, _device(request), to_compare=to_compare),
            quantization=mapping.quantization,
            config=shallower(build_config(spec, task), request.depths) if request.depths else None,
            whole_first=to_compare,
            **mapping.model,
        )
    return prepare_model(model, mapping.adapter)
