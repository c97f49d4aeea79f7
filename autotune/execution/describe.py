"""Finds out, in a child process, what the search must know of what is trained: facts of the model, lengths of the data.

A named model is built on the meta device, so nothing is allocated, and real data are tokenized once for all trials. A
user's own code is run until it trains: its Trainer, model, data and arguments are looked at, and gradients of a few
samples are computed (`user_limits`). Of a user's loop a few steps are run (`step_facts`).
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import is_torch_tf32_available

from autotune.errors import AutotuneError, InputError, one_line
from autotune.execution import user_limits, user_model
from autotune.execution.gradients import reported_split
from autotune.execution.step_facts import examined
from autotune.execution.user_data import first_batch, has_rows, lengths_of, record_lengths, trained_by, view
from autotune.execution.user_limits import Seen, overrides, split_of_trainer, width_of
from autotune.execution.user_overlay import CodeError, Overlay, harness, overlaid, reach, theirs
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.training.baseline import check_arguments
from autotune.training.build import describe
from autotune.training.facts import facts_of
from autotune.training.heads import HEADS, class_names, kind_of, tasks_for
from autotune.training.loss import base_model
from autotune.training.recipes import checked_data, row_lengths
from autotune.training.texts import prepare, profile_of
from autotune.value import Value, read_value, write_value
from autotune.values.model import ModelFacts, ModelSpec, Task
from autotune.values.trial import DescribeRequest, Description, ExamineRequest, Refusal
from autotune.values.workload import STEP_FILE, LengthProfile, OwnCode, OwnFound

Request = TypeVar("Request", bound=Value)

# Samples of the batch that is looked at.
_FEW = 2

# Multiples up to which collators round the length of a batch.
_ROUNDED_TO = 64

# Knobs that one would expect to be tried: a note says why they stay as they are.
_NOTED = ("optim", "precision")

_ONE_DEVICE = "a training of your own is one process on one device; remove it"
_REFUSED = {"deepspeed": _ONE_DEVICE, "fsdp": _ONE_DEVICE, "parallelism_config": _ONE_DEVICE}

# So that TF32 which is on where the code trains is there for a reason other than its TrainingArguments.
_NO_TF32 = {"tf32": None, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}

# Names of places, secrets, and what a trial sets: nothing that an answer should repeat.
_LEFT_OUT = frozenset({"output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token"})


def run_describe(directory: Path) -> None:
    """Answer the request in `directory`; tokenized data go to the directory `data` beside it."""
    _answer(directory, DescribeRequest, lambda request: _described(request, directory))


def run_examine(directory: Path) -> None:
    """Answer the request in `directory`; the pickled function lies in the directory `data` beside it."""
    _answer(directory, ExamineRequest, lambda request: examined(request, directory.parent / "data" / STEP_FILE))


def _answer(directory: Path, kind: type[Request], described: Callable[[Request], Description]) -> None:
    try:
        answer: Description | Refusal = described(read_value(kind, directory / "request.json"))
    except AutotuneError as error:
        answer = Refusal(error=type(error).__name__, message=str(error))
    write_value(answer, directory / "description.json")


def _described(request: DescribeRequest, directory: Path) -> Description:
    workload = request.workload
    data_directory = directory.parent / "data"
    if workload.own_code is not None:
        return _described_code(workload.own_code, directory, data_directory)
    check_arguments(request.arguments, request.source)
    facts = describe(workload.model, workload.task)
    if workload.recipe is not None:
        facts = facts.model_copy(update={"split_changes": workload.recipe.kind.coupled})
    lengths, notes = (prepare if workload.recipe is None else checked_data)(workload, data_directory)
    return Description(facts=facts, lengths=lengths, notes=notes)


def _described_code(code: OwnCode, directory: Path, data_directory: Path) -> Description:
    """Run the code until it trains, and return what is found there; code that fails before is refused."""
    overlay = Overlay(lambda own: {**harness(own), **_NO_TF32, "output_dir": str(directory / "trainer")})
    output = f"(its output: {directory / 'log.txt'})"
    try:
        with overlaid(overlay):
            return reach(code, data_directory, lambda trainer, _: _looked_at(trainer, code, data_directory))
    except CodeError as error:
        raise InputError(f"{error} {output}") from error
    except AutotuneError:
        raise
    except Exception as error:
        traceback.print_exc()  # into its output
        what = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            what += f"; it runs in the environment of autotune, {sys.prefix}: install it there, or autotune where it is"
        if isinstance(error, EOFError):
            what += "; it runs with an empty standard input, so that it can't ask: give the answer as an option"
        raise InputError(f"{code.shown} failed before it trained: {what} {output}") from error


def _looked_at(trainer: Any, code: OwnCode, data_directory: Path) -> Description:
    arguments = _written(trainer.args)
    _check(trainer, arguments)
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = base_model(model)
    batches = user_limits.user_batches(trainer)
    lengths = lengths_of(trainer.train_dataset) if batches is None else None
    task = _task(base)
    recipe = trained_by(trainer, task)
    tokens = row_lengths(trainer.train_dataset) if recipe is not None and batches is None else lengths
    if tokens is not None:
        tokens = np.minimum(tokens, getattr(trainer.args, "max_length", None) or tokens)
        record_lengths(tokens, data_directory)
    rows = batches is None and has_rows(trainer, lengths)
    batch, width, pads = _batch(trainer, batches, lengths)
    seen = Seen(trainer, model, base, batches, lengths, batch, user_model.weights_of(model))
    normalizes = user_limits.is_normalizable(trainer, base)
    searched = {name: value for name, value in arguments.items() if name in SEARCHED_ARGUMENTS}
    checkpoints = user_model.checkpointing(base, arguments)
    held = user_limits.held(seen)
    if is_torch_tf32_available() and torch.backends.cuda.matmul.fp32_precision == "tf32":
        searched["tf32"], held["tf32"] = True, "your code switches TF32 on, which the Trainer's arguments don't undo"
    facts = _facts(trainer, base, task)
    coupled = facts.batch_coupled is not None
    split = split_of_trainer(  # before anything makes TrainingArguments, which resets the accelerator's state
        trainer, normalizes=normalizes, lengths=lengths, reorders=batches is None, batch_coupled=coupled
    )
    facts, line = reported_split(facts, split, None if normalizes else f"the loss is {_whose_loss(trainer, base)}")
    found = OwnFound(
        spec=_spec(model, base, code),
        task=task,
        sequence_length=max(1, width, 0 if tokens is None else int(tokens.max())),
        target_length=width_of(batch, "labels") if task.has_targets else None,
        arguments={**searched, **checkpoints},
        checkpoints=bool(checkpoints),
        fixed=_fixed(trainer, arguments),
        held=held,
        barred=user_limits.barred(seen),
        weights=seen.weights,
        adapter=user_model.adapter(model),
        quantization=user_model.quantization(base),
        reorders=batches is None,
        pads=pads,
        has_rows=rows,
        normalizes=normalizes,
        not_predicted=user_limits.not_predicted(seen, task),
        generates=hasattr(trainer.args, "steps_per_generation"),
        recipe=recipe,
    )
    profile = None
    if lengths is not None:
        targets = lengths_of(trainer.train_dataset, "labels") if task.has_targets else None
        profile = profile_of(lengths, None if targets is None else float(targets.mean()))
    return Description(
        facts=facts, lengths=profile, notes=(*_notes(trainer, found, profile, batches), *line), own=found
    )


def _written(args: Any) -> dict[str, Any]:
    """Return TrainingArguments as the code has them, without the overlay and without what JSON can't hold."""
    written = {**args.to_dict(), **{k: getattr(v, "value", v) for k, v in theirs(args).items()}}
    return {name: value for name, value in written.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _fixed(trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that no search touches, where they differ from the defaults of TrainingArguments."""
    usual = _written(TrainingArguments(output_dir=str(trainer.args.output_dir), use_cpu=trainer.args.use_cpu))
    left_out = SEARCHED_ARGUMENTS | _LEFT_OUT
    return {n: v for n, v in arguments.items() if n in usual and n not in left_out and v is not None and v != usual[n]}


def _check(trainer: Any, arguments: dict[str, Any]) -> None:
    """Refuse what can't be tuned: several devices, no data, or batches of another size than the arguments say."""
    for name, reason in _REFUSED.items():
        if getattr(trainer.args, name, None):
            raise InputError(f"your TrainingArguments set {name}: {reason}")
    if trainer.train_dataset is None and not overrides(trainer, "get_train_dataloader"):
        raise InputError(f"your {type(trainer).__name__} has no train_dataset, so there is nothing to train on")
    if overrides(trainer, "get_train_dataloader"):
        made = getattr(trainer.get_train_dataloader(), "total_batch_size", None)
        asked = arguments["per_device_train_batch_size"]
        if made is not None and made != asked:
            raise InputError(
                f"your {type(trainer).__name__}.get_train_dataloader makes batches of {made}, whatever "
                f"per_device_train_batch_size says ({asked}); have it follow self._train_batch_size"
            )


def _batch(trainer: Any, batches: str | None, lengths: Any) -> tuple[Any, int, bool]:
    """Return a batch of a few samples, the length of its rows (0: none), and whether that is its longest sample's."""
    samples = trainer.train_dataset
    if batches is None:
        samples = view(samples, np.arange(min(_FEW, len(samples)), dtype=np.int64))
    batch = first_batch(trainer, samples, _FEW)
    width = width_of(batch, "input_ids") or 0
    if lengths is None:
        return batch, width, False
    longest = int(lengths[:_FEW].max())
    return batch, max(width, int(lengths.max())), longest <= width < longest + _ROUNDED_TO


def _task(base: Any) -> Task:
    """Return the task whose head the model is, OWN if it is none that can be built from a name."""
    if isinstance(base, PreTrainedModel):
        heads = (task for task in HEADS if type(base).__name__ in class_names(base.config.model_type, task))
        return next(heads, Task.OWN)
    return Task.OWN


def _spec(model: Any, base: Any, code: OwnCode) -> ModelSpec:
    name = model_type = type(base).__name__
    kind, figures = "own", {}
    if isinstance(base, PreTrainedModel):
        model_type, figures = str(base.config.model_type), json.loads(base.config.to_json_string(use_diff=False))
        figures.pop("quantization_config", None)
        kind = kind_of(base.config, tasks_for(model_type, ()))
    return ModelSpec(
        reference=code.shown, name=name, source="own", model_type=model_type, kind=kind, config=figures,
        frozen=user_model.frozen(model, base),
    )  # fmt: skip


def _facts(trainer: Any, base: Any, task: Task) -> ModelFacts:
    counts = user_model.counts_of(trainer.model)
    if isinstance(base, PreTrainedModel):
        return facts_of(base, task).model_copy(update=counts)
    return ModelFacts(
        task=task,
        **counts,
        attn_implementations=(),
        supports_checkpointing=False,
        has_dropout=any("Drop" in type(m).__name__ and getattr(m, "p", 0) for m in base.modules()),
    )


def _whose_loss(trainer: Any, base: Any) -> str:
    if overrides(trainer, "compute_loss"):
        return f"{type(trainer).__name__}.compute_loss's"
    return "that of a function of your own" if trainer.compute_loss_func is not None else f"{type(base).__name__}'s own"


def _notes(trainer: Any, found: OwnFound, profile: LengthProfile | None, batches: str | None) -> tuple[str, ...]:
    """Return notes: what is tuned, and what the trials leave out."""
    spec = f"{type(trainer).__name__} with {found.spec.name}"
    lines = [
        f"your own training: {spec}; trials end with its training: nothing is pushed or reported to trackers, its "
        "output_dir isn't touched, and only the winner is evaluated and saved, in the run directory"
    ]
    if profile is not None:
        lines.append(profile.shown)
    if batches is not None:
        lines.append(f"{batches}: trials read the samples in that order, the longest not first: peaks may come later")
    if found.not_predicted is not None:
        lines.append(f"no prediction: {found.not_predicted}")
    lines += [f"{knob} stays as it is: {found.held[knob]}" for knob in _NOTED if knob in found.held]
    return tuple(lines)
