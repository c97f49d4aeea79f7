"""Sets a trial's training up: the real Trainer with arguments, model and samples, as its request asks.

Called by the worker. A user's own code sets up its own (`own_trial`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from autotune.execution.environment import trial_device
from autotune.execution.ranks import own_rank, tell_deepspeed
from autotune.values.checks import LossTask
from autotune.values.stopwatch import Stopwatch
from autotune.values.trial import TrialRequest

# An fp16 scaler starts at 2^16 and halves at each overflow: it may skip that many steps before the first real one.
SCALER_STEPS = 17


def trainer_of(request: TrialRequest, directory: Path, callbacks: list[Any], stopwatch: Stopwatch) -> Any:
    """Return the Trainer with model, data and arguments: `tuned` and `harness`, from the one mapping."""
    from transformers import Trainer, TrainingArguments

    from autotune.execution.checking import arguments_of
    from autotune.training.arguments import plan
    from autotune.values.hardware import detect

    stopwatch.enter("trainer_s")
    config, workload = request.config, request.workload
    mapping = plan(config, workload, detect(device_of(request)))
    if "deepspeed" in mapping.tuned:
        tell_deepspeed(request.device)
    max_steps = most_steps(request)
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
    per_step = samples_per_step(request)
    dataset, collator = data_of(request, directory, model.config, samples=max_steps * per_step, longest_first=per_step)
    stopwatch.enter("trainer_s")
    return Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=callbacks)


def device_of(request: TrialRequest) -> str:
    """Return the device of this process."""
    return trial_device(request.device, own_rank().number)


def most_steps(request: TrialRequest) -> int:
    """Return the optimizer steps that a trial can need."""
    from autotune.execution.measure import EXTRA_DISCARDED_STEPS

    limits = request.limits
    return limits.discarded_steps + EXTRA_DISCARDED_STEPS + limits.measure_steps + SCALER_STEPS


def samples_per_step(request: TrialRequest) -> int:
    """Return the samples of a step as it is run, those of all ranks; each is dealt every so many of their batches."""
    config = request.config
    return request.accumulation_steps * config.per_device_train_batch_size * config.parallelism.data_parallel


def data_of(
    request: TrialRequest, directory: Path, model_config: Any, *, samples: int, longest_first: int
) -> tuple[Any, Any]:
    """Return samples and what makes batches of them; a loss run goes over the same few again and again."""
    from autotune.training.dataset import Repeated, training_data

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


def longest_first_of(request: TrialRequest, directory: Path, model_config: Any) -> Callable[[int], Any]:
    """Return a function that gives so many samples, the longest first."""
    return lambda samples: data_of(request, directory, model_config, samples=samples, longest_first=samples)[0]


def _model(request: TrialRequest, mapping: Any) -> Any:
    from autotune.training.adapters import prepare_model
    from autotune.training.build import build_model
    from autotune.training.parallel_arguments import building_device
    from autotune.training.random_weights import quick_weights

    spec, task = request.workload.model, request.workload.task
    to_compare = isinstance(request.task, LossTask)
    # Losses that are compared are those of a truly initialised model.
    with nullcontext() if to_compare else quick_weights():
        model = build_model(
            spec,
            task,
            device=building_device(request.config, device_of(request), to_compare=to_compare),
            quantization=mapping.quantization,
            whole_first=to_compare,
            **mapping.model,
        )
    return prepare_model(model, mapping.adapter)


def padding_share_of(request: TrialRequest, trainer: Any, steps: int) -> float | None:
    """Return how much of the batches was padding, the first step with its longest samples left out."""
    from autotune.training.batches import padding_share

    per_step = samples_per_step(request)
    last = min(steps * per_step, len(trainer.train_dataset))
    return padding_share(trainer.train_dataset, request.config, min(per_step, last - per_step), last)
