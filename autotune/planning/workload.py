"""Makes the workload from the user's options, and defines what is tuned (`Subject`).

A search tunes a model that the user names (`Subject`), the user's own Trainer or script (`user_trainer.UserTrainer`),
or the user's own loop (`user_loop.UserLoop`). Notes tell the user every default that was chosen.
Options that can't be used are refused by an InputError that says why.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import InputError
from autotune.planning.options import SearchOptions, WorkloadOptions
from autotune.planning.plan import SearchPlan
from autotune.space.file import SpaceFile, load_space
from autotune.training.baseline import UserArguments
from autotune.training.build import build_config
from autotune.training.heads import check_task, default_task, head_notes
from autotune.training.image_text import image_text
from autotune.training.inputs import fixed_frames, least_frames
from autotune.training.resolve import resolve
from autotune.training.text_file import checked_path
from autotune.value import write_bytes
from autotune.values.budget import Budget
from autotune.values.config import LARGEST_BATCH
from autotune.values.hardware import Hardware
from autotune.values.model import ModelSpec, Task
from autotune.values.problem import Objective
from autotune.values.trial import DescribeRequest, Description
from autotune.values.workload import LONGEST_SAMPLE, Workload

if TYPE_CHECKING:
    from autotune.execution.runner import LocalRunner

DEFAULT_SPACE = {"cuda": "default", "cpu": "cpu"}
SPACE_OF_SEVERAL = "parallel"  # default space for several devices
DEFAULT_SEQUENCE_LENGTH = {"cuda": 512, "cpu": 64}
TRANSCRIPT_LENGTH = 128  # tokens; the 30 s of a Whisper sample hold some 75 spoken words
DEFAULT_GLOBAL_BATCH = {"cuda": 64, "cpu": 8}


@dataclasses.dataclass(frozen=True)
class Outline:
    """The part of a plan that is settled before the model or the user's code has been looked at."""

    subject: Subject
    hardware: Hardware
    workload: Workload
    memory_bytes: int
    budget: Budget
    space: SpaceFile
    arguments: UserArguments | None  # the user's own, which are the baseline
    notes: tuple[str, ...]
    is_shared: bool = False


class Subject:
    """What is tuned: a model that the user names, trained with the Trainer. Subclasses tune the user's own code.

    Planning calls the methods in the order of their definition.
    """

    def __init__(self, options: SearchOptions) -> None:
        self.options = options

    @property
    def name(self) -> str:
        """The name from which the default run directory is made."""
        return self.options.model

    def workload(self, hardware: Hardware, arguments: UserArguments | None, notes: list[str]) -> Workload:
        """Return what every trial trains; a line for each default is added to `notes`."""
        return searched_workload(self.options, model_of(self.options), hardware, arguments, notes)

    def space(self, hardware: Hardware) -> SpaceFile:
        """Return the search space.

        Raises:
            SearchSpaceError: The file of the space can't be read.
        """
        return load_space(self.options.space or default_space(hardware))

    def keep(self, run_directory: Path) -> None:
        """Write the user's pickled code, if there is any, into the run directory."""

    def described(self, outline: Outline, asker: LocalRunner) -> Description:
        """Return the facts about the model and the data."""
        given = outline.arguments
        if given is None:
            return asker.describe(DescribeRequest(workload=outline.workload))
        arguments = {**given.searched, **given.fixed}
        return asker.describe(DescribeRequest(workload=outline.workload, arguments=arguments, source=given.source))

    def settled(self, outline: Outline, description: Description) -> Outline:
        """Return the outline with what the description adds to it.

        Raises:
            InputError: The user's code can't be tuned.
        """
        workload = outline.workload.model_copy(update={"lengths": description.lengths})
        return dataclasses.replace(outline, workload=workload)

    def planned(self, plan: SearchPlan) -> SearchPlan:
        """Return the plan adapted to this subject."""
        return plan

    def examined(self, plan: SearchPlan, asker: LocalRunner) -> SearchPlan:
        """Return the plan with the facts that need a step to be run, if there are any."""
        return plan


def keep_pickle(content: bytes, run_directory: Path, name: str) -> None:
    """Write the user's pickled code to `data/` in the run directory, from where trials load it."""
    folder = run_directory / "data"
    folder.mkdir(exist_ok=True)
    write_bytes(content, folder / name)


def default_space(hardware: Hardware) -> str:
    """Return the name of the built-in space that is searched if the user names none."""
    return SPACE_OF_SEVERAL if (hardware.count or 1) > 1 else DEFAULT_SPACE[hardware.kind]


def model_of(options: WorkloadOptions) -> tuple[ModelSpec, Task]:
    """Return the model and the task, which decides on its head."""
    spec = resolve(options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)
    try:
        task = default_task(spec) if options.task is None else Task(options.task)
    except ValueError:
        raise InputError(f"--task {options.task}: expected one of {', '.join(Task.heads())}") from None
    check_task(spec, task)
    asked = {"--images": options.images, "--image-size": options.image_size, "--freeze-vision": options.freeze_vision}
    if task is not Task.IMAGE_TEXT_TO_TEXT and (given := next((name for name, value in asked.items() if value), None)):
        raise InputError(f"{given}: the task {task} has no images beside texts")
    return spec.model_copy(update={"freeze_vision": options.freeze_vision}), task


def searched_workload(
    options: SearchOptions,
    model: tuple[ModelSpec, Task],
    hardware: Hardware,
    arguments: UserArguments | None,
    notes: list[str],
) -> Workload:
    """Return what every trial of a search trains; a line for each default is added to `notes`."""
    if options.text_field and not options.data:
        raise InputError("--text-field: needs --data FILE")
    workload = workload_of(options, model, hardware.kind, notes)
    changes = {
        "global_batch_size": _searched_batch(options, hardware, arguments, notes),
        "dataset": str(checked_path(options.data)) if options.data else None,
        "text_field": options.text_field,
        "seed": options.seed,
        "fixed_arguments": arguments.fixed if arguments else {},
    }
    return workload.model_copy(update=changes)


def workload_of(options: WorkloadOptions, model: tuple[ModelSpec, Task], kind: str, notes: list[str]) -> Workload:
    """Return the workload on a kind of device ('cuda', 'cpu') with a free global batch.

    A line for each default is added to `notes`.
    """
    spec, task = model
    notes += head_notes(spec, task, options.recipe) if task is not Task.OWN else []
    for option, asked in (("--seq-len", options.seq_len), ("--target-len", options.target_len)):
        if asked is not None and asked > LONGEST_SAMPLE:
            raise InputError(f"{option} {asked}: use at most {LONGEST_SAMPLE}, which is what the longest contexts have")
    shown, usual = None, DEFAULT_SEQUENCE_LENGTH[kind]
    if task is Task.IMAGE_TEXT_TO_TEXT:
        config = build_config(spec, task)
        shown = image_text(config, options.images, options.image_size)
        notes.append(f"{shown.described} (--images, --image-size)")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        usual = min(usual + shown.tokens, positions or LONGEST_SAMPLE)
    length = _length(options, usual, spec, task, notes, shown.tokens if shown else 0)
    if options.target_len and not task.has_targets:
        raise InputError(f"--target-len: the task {task} has no decoder targets of their own")
    target = (options.target_len or _usual_target(spec, task, length)) if task.has_targets else None
    if task.has_targets and options.target_len is None:
        notes.append(f"target length {target} (--target-len)")
    return Workload(
        model=spec,
        task=task,
        sequence_length=length,
        target_length=target,
        images=shown.images if shown else None,
        image_size=shown.image.size if shown else None,
        global_batch_size=None,
    )


def _length(options: WorkloadOptions, usual: int, spec: ModelSpec, task: Task, notes: list[str], of_images: int) -> int:
    """Return the tokens of a sample, those `of_images` included, or frames of sound; without text it means nothing."""
    length = options.seq_len or usual
    if of_images and not of_images + 2 <= length <= LONGEST_SAMPLE:
        limits = f"use at least {of_images + 2}, and at most {LONGEST_SAMPLE}"
        raise InputError(f"--seq-len {length}: a sample's images take {of_images} tokens; {limits}")
    if task.takes_text and options.seq_len is None:
        notes.append(f"sequence length {length} (--seq-len)")
    if not task.takes_audio:
        return length
    fixed = fixed_frames(spec.model_type, spec.config)
    if fixed is not None and options.seq_len not in (None, fixed):
        raise InputError(f"--seq-len {length}: {spec.name} takes {fixed} frames of sound and no other length")
    if fixed is None and length < (least := least_frames(spec.model_type, spec.config)):
        raise InputError(f"--seq-len {length}: {spec.name} hides spans of {least} frames in training; use as many")
    if options.seq_len is None:
        notes.append(f"samples of {fixed or length} frames of sound{'' if fixed else ' (--seq-len)'}")
    return fixed or length


def _usual_target(spec: ModelSpec, task: Task, length: int) -> int:
    """Return the default length of decoder targets: that of the source, or for speech that of a transcript."""
    if not task.takes_audio:
        return length
    return min(TRANSCRIPT_LENGTH, int(spec.config.get("max_target_positions", TRANSCRIPT_LENGTH)))


def _searched_batch(
    options: SearchOptions, hardware: Hardware, arguments: UserArguments | None, notes: list[str]
) -> int | None:
    """Return the global batch: of the options, else of the user's arguments, else the default; None if it is free."""
    ranks = hardware.count or 1
    if arguments is not None and options.global_batch != "any":
        asked, own = options.global_batch, arguments.global_batch_size * ranks
        if asked is not None and asked != own:
            check_batch(asked, "--global-batch")
            raise InputError(
                f"--global-batch {asked}: the baseline's is {own} (per_device_train_batch_size x "
                f"gradient_accumulation_steps{f' x {ranks} devices' * (ranks > 1)}); drop one of the two"
            )
        check_batch(own, f"{arguments.source}: the global batch")
        return own
    found = global_batch_of(
        options, default_global_batch(DEFAULT_GLOBAL_BATCH[hardware.kind], ranks), notes, together=ranks > 1
    )
    if found is not None:
        check_global_batch(found, ranks)
    return found


def check_global_batch(asked: int, ranks: int) -> None:
    """Refuse a global batch that the ranks can't share evenly; the error names the nearest that they can."""
    if asked % ranks == 0:
        return
    below, above = asked // ranks * ranks, -(-asked // ranks) * ranks
    nearest = f"{below} and {above} do" if below else f"{above} does"
    raise InputError(f"--global-batch {asked}: {ranks} devices can't share it evenly; {nearest}")


def default_global_batch(usual: int, ranks: int) -> int:
    """Return the smallest global batch of at least `usual` samples that the ranks can share evenly."""
    return -(-usual // ranks) * ranks


def global_batch_of(options: WorkloadOptions, usual: int, notes: list[str], *, together: bool = False) -> int | None:
    """Return the global batch of the options, or `usual`; None if it is free ('any').

    `notes` receive a line if the default is taken, of all devices `together`, or the global batch is free.
    """
    asked = options.global_batch
    if asked == "any":
        notes.append("the global batch is free: throughputs of different batches are compared, which learn differently")
        return None
    if asked is None:
        notes.append(f"global batch {usual} samples{', all devices together' * together} (--global-batch)")
        return usual
    check_batch(asked, "--global-batch")
    return asked


def check_batch(samples: int, what: str) -> None:
    """Refuse a global batch beyond `LARGEST_BATCH`; `what` names its source in the message."""
    if samples > LARGEST_BATCH:
        raise InputError(f"{what} {samples}: use at most {LARGEST_BATCH} samples a step; nobody has published more")


def objective_of(options: SearchOptions, workload: Workload) -> Objective:
    """Return the objective: the throughput of the steady state, or of a run of given length with its start."""
    if options.train_steps is not None:
        return Objective(run_samples=options.train_steps * (workload.global_batch_size or 1))
    if options.train_tokens is None:
        return Objective()
    if workload.tokens_per_sample is None:
        raise InputError(f"--train-tokens: {workload.task} has no tokens; use --train-steps")
    return Objective(run_samples=options.train_tokens / workload.tokens_per_sample)
