"""From the user's words to the workload and what is maximised; every default is said."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import InputError
from autotune.planning.devices import check_global_batch, default_global_batch
from autotune.planning.options import SearchOptions
from autotune.training.baseline import UserArguments
from autotune.training.build import check_task, default_task
from autotune.training.inputs import fixed_frames, least_frames
from autotune.values.config import LARGEST_BATCH, LONGEST_SAMPLE, Workload
from autotune.values.hardware import Hardware
from autotune.values.model import ModelSpec, Task
from autotune.values.problem import Objective

DEFAULT_SEQUENCE_LENGTH = {"cuda": 512, "cpu": 128}
TRANSCRIPT_LENGTH = 128  # tokens of the half minute that Whisper hears: some 75 spoken words
DEFAULT_GLOBAL_BATCH = {"cuda": 64, "cpu": 16}


def task_of(options: SearchOptions, spec: ModelSpec) -> Task:
    """Return the head that is trained.

    Raises:
        InputError: There is no such task, or the model has no head for it.
    """
    if options.task is None:
        return default_task(spec)
    try:
        task = Task(options.task)
    except ValueError:
        raise InputError(f"--task {options.task}: expected one of {', '.join(Task.heads())}") from None
    check_task(spec, task)
    return task


def workload_of(
    options: SearchOptions,
    hardware: Hardware,
    spec: ModelSpec,
    task: Task,
    arguments: UserArguments | None,
    notes: list[str],
) -> Workload:
    """Return what every trial trains; defaults are said in `notes`.

    Raises:
        InputError: Something in `options` can't be used.
    """
    for option, asked in (("--seq-len", options.seq_len), ("--target-len", options.target_len)):
        if asked is not None and asked > LONGEST_SAMPLE:
            raise InputError(f"{option} {asked}: use at most {LONGEST_SAMPLE}, which is what the longest contexts have")
    length = _length(options, hardware, spec, task, notes)
    if options.data and not Path(options.data).is_file():
        raise InputError(f"--data {options.data}: no such file")
    if options.text_field and not options.data:
        raise InputError("--text-field: needs --data FILE")
    if options.target_len and not task.has_targets:
        raise InputError(f"--target-len: the task {task} has no decoder targets of their own")
    return Workload(
        model=spec,
        task=task,
        sequence_length=length,
        target_length=(options.target_len or _usual_target(spec, task, length)) if task.has_targets else None,
        global_batch_size=_global_batch(options, hardware, arguments, notes),
        dataset=str(Path(options.data).resolve()) if options.data else None,
        text_field=options.text_field,
        seed=options.seed,
        fixed_arguments=arguments.fixed if arguments else {},
    )


def _length(options: SearchOptions, hardware: Hardware, spec: ModelSpec, task: Task, notes: list[str]) -> int:
    """Return the length of a sample, in tokens or frames of sound; images have none, and keep the default."""
    length = options.seq_len or DEFAULT_SEQUENCE_LENGTH[hardware.kind]
    if task.takes_text and options.seq_len is None:
        notes.append(f"sequence length {length} (--seq-len)")
    if not task.takes_audio:
        return length
    fixed = fixed_frames(spec.model_type, spec.config)
    if fixed is not None:
        if options.seq_len not in (None, fixed):
            raise InputError(f"--seq-len {length}: {spec.name} takes {fixed} frames of sound and no other length")
        return fixed
    if length < (least := least_frames(spec.model_type, spec.config)):
        raise InputError(f"--seq-len {length}: {spec.name} hides spans of {least} frames in training; use as many")
    if options.seq_len is None:
        notes.append(f"samples of {length} frames of sound (--seq-len)")
    return length


def _usual_target(spec: ModelSpec, task: Task, length: int) -> int:
    """Return the usual length of what a decoder predicts: that of the source, for speech that of a transcript."""
    if not task.takes_audio:
        return length
    return min(TRANSCRIPT_LENGTH, int(spec.config.get("max_target_positions", TRANSCRIPT_LENGTH)))


def _global_batch(
    options: SearchOptions, hardware: Hardware, arguments: UserArguments | None, notes: list[str]
) -> int | None:
    asked = options.global_batch
    if asked == "any":
        notes.append("the global batch is free: throughputs of different batches are compared, which learn differently")
        return None
    ranks = hardware.count or 1
    if asked is not None:
        check_batch(asked, "--global-batch")
    if arguments is not None:
        own = arguments.global_batch_size * ranks
        if asked is not None and asked != own:
            raise InputError(
                f"--global-batch {asked}: the baseline's is {own} (per_device_train_batch_size x "
                f"gradient_accumulation_steps{f' x {ranks} devices' * (ranks > 1)}); drop one of the two"
            )
        check_batch(own, "--baseline: the global batch")
        return own
    if asked is None:
        asked = default_global_batch(DEFAULT_GLOBAL_BATCH[hardware.kind], ranks)
        notes.append(f"global batch {asked} samples{', all devices together' * (ranks > 1)} (--global-batch)")
    check_global_batch(asked, ranks)
    return asked


def check_batch(samples: int, what: str) -> None:
    """Refuse a global batch beyond what anybody trains with.

    Raises:
        InputError: It is.
    """
    if samples > LARGEST_BATCH:
        raise InputError(f"{what} {samples}: use at most {LARGEST_BATCH} samples a step; nobody has published more")


def objective_of(options: SearchOptions, workload: Workload) -> Objective:
    """Return what is maximised: over a run of a given length the start counts too.

    Raises:
        InputError: The length is one of tokens, and there are none.
    """
    if options.train_steps is not None:
        return Objective(run_samples=options.train_steps * (workload.global_batch_size or 1))
    if options.train_tokens is None:
        return Objective()
    if workload.tokens_per_sample is None:
        raise InputError(f"--train-tokens: {workload.task} has no tokens; use --train-steps")
    return Objective(run_samples=options.train_tokens / workload.tokens_per_sample)
