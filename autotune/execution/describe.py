"""Finds out, in a child process, what a search must know of a training: facts of the model, lengths of the data.

A named model is built on the meta device, so nothing is allocated, and real data are tokenized once for all trials. A
user's own code runs until it trains; then its Trainer, model, data and arguments are looked at, which of them can be
changed from outside, and whether its gradient depends on the micro-batch (`gradients`, which runs a loop's step too).
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import is_torch_tf32_available

from autotune.errors import AutotuneError, CodeError, InputError, MachineError, one_line
from autotune.execution import environment, user_code
from autotune.execution.gradients import reported_split, split_of_loop, split_of_trainer
from autotune.execution.runner import DESCRIBE_LIMIT_S
from autotune.execution.user_code import looked_at, own_values
from autotune.execution.user_data import batch_size, collated_lengths, ends, first_batch, has_rows, lengths_of, view
from autotune.training.adapters import own_adapter
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.training.baseline import PLACES_AND_SECRETS, check_arguments
from autotune.training.build import describe, frozen_paths
from autotune.training.facts import facts_of
from autotune.training.inputs import fixed_frames
from autotune.training.loss import base_model
from autotune.training.random_weights import quantized_layers
from autotune.training.recipes import checked_data, row_lengths
from autotune.training.resolve import HEADS, class_names, kind_of, tasks_for
from autotune.training.texts import prepare, profile_of, write_lengths
from autotune.value import write_value
from autotune.values.hardware import allocator_settings
from autotune.values.model import ModelFacts, ModelSpec, Task
from autotune.values.techniques import CHECKPOINTING
from autotune.values.trial import Description, ExamineRequest, Inquiry, Refusal
from autotune.values.workload import LENGTHS_FILE, RECIPES, STEP_FILE, Barred, OwnCode, OwnFound

_ALLOCATOR = allocator_settings()  # before code sets others
_UNITS = "transformer_layer_cls_to_wrap"  # FSDP's
_FEW = 2  # samples of the batch that is looked at
_ONE_ROW = "batches are one row, of which eager attention would hold the scores of every sample against all others"


def run_describe(directory: Path) -> None:
    """Answer the request in `directory`; data and pickled code of trials are in the directory `data` beside it."""
    requests: TypeAdapter[Inquiry] = TypeAdapter(Inquiry)
    request = requests.validate_json((directory / "request.json").read_bytes())
    workload, data = request.workload, directory.parent / "data"
    environment.meet("cuda" if torch.cuda.is_available() else "cpu", timeout_s=DESCRIBE_LIMIT_S)  # ranks of a loop
    answer: Description | Refusal
    try:
        if isinstance(request, ExamineRequest):
            facts, notes = reported_split(request.facts, split_of_loop(request, data / STEP_FILE), None)
            answer = Description(facts=facts, notes=notes)
        elif workload.own_code is not None:
            answer = _described_code(workload.own_code, directory, data)
        else:
            check_arguments(request.arguments, request.source, workload.recipe)
            facts = describe(workload.model, workload.task, workload.recipe)
            lengths, notes = (prepare if workload.recipe is None else checked_data)(workload, data)
            answer = Description(facts=facts, lengths=lengths, notes=notes)
        environment.gathered(None)  # one that refuses ends at once, and the others with it
    except AutotuneError as error:
        answer = Refusal(error=type(error).__name__, message=str(error))
    write_value(answer, directory / "description.json")


def _described_code(code: OwnCode, directory: Path, data: Path) -> Description:
    output = f"(its output: {directory / 'log.txt'})"
    try:
        return looked_at(code, directory, lambda trainer, _: Training(trainer, code).described(data))
    except CodeError as error:
        raise type(error)(f"{error} {output}") from error
    except AutotuneError:
        raise
    except Exception as error:
        traceback.print_exc()  # into its output
        what = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            what += f"; it runs in the environment of autotune, {sys.prefix}: install it there, or autotune where it is"
        if isinstance(error, EOFError):
            what += "; it runs with an empty standard input, so that it can't ask: give the answer as an option"
        if "Unknown cusolver error number" in what or "not supported by the stand-in" in what:
            what = what.partition(" This error may appear")[0]  # torch's guess at cuDNN's reason
            raise MachineError(f"{code.file}: its memory can't be told without a GPU: {what} {output}") from error
        raise InputError(f"{code.file} failed before it trained: {what} {output}") from error


class Training:
    """A user's Trainer as it stands when it is about to train."""

    def __init__(self, trainer: Any, code: OwnCode) -> None:
        self.trainer, self.code, self.name = trainer, code, type(trainer).__name__
        self.arguments = _launched(_written(trainer.args), code.launched or {})
        self._check()
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.base = base_model(self.model)  # inside an adapter's wrapper
        self.is_of_library = isinstance(self.base, PreTrainedModel)
        samples = trainer.train_dataset
        # Why the order of the samples is the code's own; None: trials may set it.
        self.batches = self.overrides("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
        if self.batches is None and (isinstance(samples, IterableDataset) or not has_length(samples)):
            self.batches = "the samples come as a stream"
        # Tokens of the samples, as a column has them or the collator makes them, and what trials order the samples by.
        self.lengths = self.sizes = column = lengths_of(samples) if self.batches is None else None
        self.has_column = column is not None
        self.weights = user_code.weights_of(self.model)
        if self.batches is None:
            samples = view(samples, np.arange(min(_FEW, len(samples)), dtype=np.int64))
        self.batch = first_batch(trainer, samples, _FEW)
        made = next((name for name in ("input_ids", "input_values") if self._width(name)), None)
        if self.batches is None and column is None and made is not None and not self._of_trl():
            self.sizes = collated_lengths(trainer, made)
            self.lengths = self.sizes if made == "input_ids" else None
            if self.sizes is None:
                self.batches = "the lengths of your samples can't be read"
        order = self.arguments.get("train_sampling_strategy")
        if self.batches is None and (order == "batch_rebalance" or (order == "group_by_length" and self.sizes is None)):
            self.batches = f"your arguments have the samples sampled by {order}"
        # Whether the collator makes one row of all samples.
        rows = self.batch["input_ids"] if self.lengths is not None and self._width("input_ids") else ()
        self.packs = len(rows) == 1 < len(trainer.train_dataset)
        self.task = Task.OWN
        if self.is_of_library:
            name, kind = type(self.base).__name__, self.base.config.model_type
            self.task = next((task for task in HEADS if name in class_names(kind, HEADS[task][1])), Task.OWN)

    def described(self, data_directory: Path) -> Description:
        trainer, base, lengths = self.trainer, self.base, self.lengths
        recipe = self._recipe()
        tokens = row_lengths(trainer.train_dataset) if recipe is not None and self.batches is None else self.sizes
        if tokens is not None:
            tokens = np.minimum(tokens, getattr(trainer.args, "max_length", None) or tokens)
            write_lengths(tokens, data_directory / LENGTHS_FILE)
        rows = self.batches is None and has_rows(trainer, lengths)
        width, pads = self._width("input_ids") or 0, False
        if lengths is not None:
            longest = int(lengths[:_FEW].max())
            # Collators round the length of a batch up, to multiples of 64 at most.
            pads = longest <= width < longest + 64
            width = int(lengths.max()) if self.packs else max(width, int(lengths.max()))
        whose = self._whose_loss()
        searched = {name: value for name, value in self.arguments.items() if name in SEARCHED_ARGUMENTS}
        checkpoints, held = user_code.checkpointing(base, self.arguments), self._held()
        if searched.get("fsdp"):
            searched["fsdp_config"] = self._fsdp_settings(searched.get("fsdp_config") or {})
        if is_torch_tf32_available() and torch.backends.cuda.matmul.fp32_precision == "tf32":
            searched["tf32"] = True
            held["tf32"] = "your code switches TF32 on, which the Trainer's arguments don't undo"
        facts = self._facts()
        split = split_of_trainer(  # before anything makes TrainingArguments, which resets the accelerator's state
            trainer,
            normalizes=whose is None,
            lengths=lengths,
            reorders=self.batches is None,
            batch_coupled=facts.batch_coupled is not None,
        )
        facts, split_note = reported_split(facts, split, whose)
        found = OwnFound(
            spec=self._spec(),
            task=self.task,
            sequence_length=(self.task.takes_audio and fixed_frames(base.config.model_type, base.config.to_dict()))
            or max(1, width, 0 if tokens is None else int(tokens.max())),
            target_length=self._width("labels") if self.task.has_targets else None,
            arguments={**searched, **checkpoints},
            checkpoints=bool(checkpoints),
            fixed=self._fixed(),
            held=held,
            barred=self._barred(),
            weights=self.weights,
            adapter=own_adapter(self.model),
            quantization=user_code.quantization(base),
            reorders=self.batches is None,
            pads=pads,
            packs=self.packs,
            has_rows=rows,
            normalizes=whose is None,
            own_loss=self._has_own_loss(),
            not_predicted=self._not_predicted(),
            generates=hasattr(trainer.args, "steps_per_generation"),
            recipe=recipe,
        )
        profile = None
        notes = [
            f"your own training: {self.name} with {found.spec.name}; trials end with its training: nothing is pushed "
            "or reported to trackers, its output_dir isn't touched, and only the winner is evaluated and saved, in the "
            "run directory"
        ]
        if lengths is not None:
            targets = lengths_of(trainer.train_dataset, "labels") if self.task.has_targets else None
            profile = profile_of(lengths, None if targets is None else float(targets.mean()))
            notes.append(profile.shown)
        if searched.get("deepspeed"):
            notes.append("of your DeepSpeed file the stage and what is offloaded stay; its buckets are autotune's")
        if self.batches is not None:
            notes.append(f"{self.batches}: trials keep that order, the longest not first: peaks may come later")
        notes += [] if found.not_predicted is None else [f"no prediction: {found.not_predicted}"]
        # Of knobs that one would expect to be tried.
        notes += [f"{knob} stays as it is: {held[knob]}" for knob in ("optim", "precision") if knob in held]
        return Description(facts=facts, lengths=profile, notes=(*notes, *split_note), own=found)

    def overrides(self, *methods: str, libraries: tuple[str, ...] = ("transformers.",)) -> str | None:
        """Return the first of these methods that the code has overridden, as '... has a ... of its own'; None: none."""
        kind = type(self.trainer)
        for name in methods:
            if not getattr(kind, name).__module__.startswith(libraries) or name in vars(self.trainer):
                return f"{kind.__name__} has a {name} of its own"
        return None

    def _check(self) -> None:
        if getattr(self.trainer.args, "parallelism_config", None):
            searched = "it is searched (--devices N), and the baseline is DDP, FSDP or ZeRO; remove it"
            raise InputError(f"your TrainingArguments set parallelism_config: {searched}")
        if not self.overrides("get_train_dataloader"):
            if (rows := self.trainer.train_dataset) is None or (has_length(rows) and not len(rows)):
                raise InputError(f"your {self.name} has no train_dataset, or an empty one: nothing to train on")
            return
        made = batch_size(self.trainer, self.trainer.get_train_dataloader())
        asked = self.arguments["per_device_train_batch_size"]
        if made is not None and made != asked:
            raise InputError(
                f"your {self.name}.get_train_dataloader makes batches of {made}, whatever "
                f"per_device_train_batch_size says ({asked}); have it follow self._train_batch_size"
            )

    def _whose_loss(self) -> str | None:
        """Return whose loss it is; None: the library model's own, whose way to count labels is known."""
        trainer, kind = self.trainer, type(self.base)
        if self.overrides("compute_loss"):
            return f"the loss is {self.name}.compute_loss's"
        if trainer.compute_loss_func is not None:
            return "the loss is that of a function of your own"
        is_known = self.is_of_library and kind.__module__.startswith("transformers.") and not trainer.label_smoother
        return None if is_known else f"the loss is {kind.__name__}'s own"

    def _has_own_loss(self) -> bool:
        where = vars(self.trainer).get("compute_loss", type(self.trainer).compute_loss).__module__
        is_of_recipe = {kind.trainer for kind in RECIPES.values()} >= {*self._of_trl()[:1]}
        is_known = where.startswith(("transformers.", "trl.")) and is_of_recipe
        return self.task is Task.OWN or not is_known or self.trainer.compute_loss_func is not None

    def _held(self) -> dict[str, str]:
        """Return the knobs that no search can change, and why."""
        trainer, base, name = self.trainer, self.base, type(self.base).__name__
        made, pads = "the model is made by your code already", "your data collator pads as it does"
        own_optimizer = trainer.optimizer is not None
        hands_one = own_optimizer or trainer.optimizer_cls_and_kwargs is not None
        ways = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")
        # The last of sentence-transformers asks the Trainer's for the same optimizer of its losses' weights, too.
        makes_one = self.overrides(*ways, libraries=("transformers.", "sentence_transformers."))
        has_adapter = hasattr(self.model, "peft_config") or getattr(base, "_hf_peft_config_loaded", False)
        can_switch = getattr(base, "_can_set_attn_implementation", lambda: False)()
        loader = self.batches if self.overrides("get_train_dataloader") else None
        is_prepared = hasattr(trainer.model, "_is_accelerate_prepared")  # by the Trainer's own if it has evaluated
        is_prepared &= trainer.model not in trainer.accelerator._models
        table: tuple[tuple[str, object, str | None], ...] = (  # the first reason that holds is told
            ("expandable_segments", allocator_settings() != _ALLOCATOR, "your code sets torch's allocator up itself"),
            ("packing", True, "your code puts its samples into batches"),
            ("pad_to_multiple_of", getattr(trainer.data_collator, "pad_to_multiple_of", 0) is not None, pads),
            *((knob, True, made) for knob in ("quantization", "experts_per_token", "expert_capacity")),
            ("adapter", has_adapter, "the model has an adapter of its own already"),
            ("adapter", not self.is_of_library, f"{name} is no model of transformers"),
            ("adapter", own_optimizer, "your code hands the Trainer an optimizer, of the weights as they are"),
            ("precision", user_code.is_packed(base), "packed weights compute in what your code says"),
            ("precision", is_prepared, "your Accelerator prepares the model"),
            ("precision", self.weights != "float32", f"the weights are {self.weights}, as your code makes them"),
            ("optim", hands_one, "your code hands the Trainer an optimizer"),
            ("optim", makes_one, makes_one),
            ("attn_implementation", not can_switch, f"{name} can't switch its attention once it is made"),
            ("train_sampling_strategy", self.batches, self.batches),
            *((knob, loader, loader) for knob in ("dataloader_num_workers", "dataloader_prefetch_factor")),
            ("chunked_loss", True, "your code's own model and loss stay as they are"),
            ("activation_memory_budget", True, "what your code compiles keeps what torch decides"),
            ("use_liger_kernel", not hasattr(base, "config"), "Liger's kernels are for models of transformers"),
        )
        return {knob: reason for knob, is_held, reason in reversed(table) if is_held and reason}

    def _barred(self) -> tuple[Barred, ...]:
        found = []
        if not self.is_of_library:
            reason = f"{type(self.base).__name__} is no model of transformers: whether it casts its inputs isn't known"
            found.append(Barred(knob="precision", value="pure_bf16", reason=reason))
        if not self.has_column or not ends(self.trainer.train_dataset):
            reason = "the samples have no input_ids whose lengths could be read in short time"
            if self.has_column:
                reason = "your dataset raises no IndexError beyond its last sample, so that reading lengths never ends"
            found.append(Barred(knob="train_sampling_strategy", value="group_by_length", reason=reason))
        if self.packs:
            found.append(Barred(knob="attn_implementation", value="eager", reason=_ONE_ROW))
        if any(kind.generates or kind.precomputes for kind in RECIPES.values() if kind.trainer in self._of_trl()):
            reason = "TRL switches it off in each step, and on again for all layers"  # for the reference, to generate
            partial = [name for name, kind in CHECKPOINTING.items() if kind.every > 1 or kind.offload]
            found += [Barred(knob="checkpointing", value=name, reason=reason) for name in partial]
        return tuple(found)

    def _of_trl(self) -> list[str]:
        """Return the classes of TRL's that the Trainer is made from, its own one first."""
        return [kind.__name__ for kind in type(self.trainer).__mro__ if kind.__module__.startswith("trl.")]

    def _recipe(self) -> Any:
        """Return the recipe whose Trainer of TRL's this is, with its usual loss and reference; None: it is another."""
        names, args = self._of_trl()[:1], self.trainer.args
        if getattr(args, "precompute_ref_log_probs", False):
            return None
        is_other_loss = self.trainer.compute_loss_func is not None
        if "SFTTrainer" in names and (args.loss_type != "nll" or is_other_loss):
            return None
        kinds = (n for n, k in RECIPES.items() if k.trainer in names and k.task is self.task and not k.generates)
        return next(kinds, None)

    def _not_predicted(self) -> str | None:
        if self._has_own_loss() and (reason := self.overrides("training_step")):
            return reason
        if self.task is Task.OWN:
            return "the model has packed weights" if any(quantized_layers(self.base)) else None
        if (reason := user_code.not_traced(self.model, self.base)) is not None:
            return reason
        if self.packs and self.base.config._attn_implementation == "eager":
            return _ONE_ROW
        if self.weights not in ("float32", "bfloat16", "float16"):
            return f"weights in {self.weights}"
        has_ids = not self.task.takes_text or self._width("input_ids") is not None
        return None if has_ids else "batches have no rows of input_ids"

    def _width(self, name: str) -> int | None:
        tensor = self.batch.get(name) if hasattr(self.batch, "get") else None
        return int(tensor.shape[1]) if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 else None

    def _fixed(self) -> dict[str, Any]:
        """Return the arguments that no search touches, where they differ from the defaults of TrainingArguments."""
        args, left_out = self.trainer.args, SEARCHED_ARGUMENTS | PLACES_AND_SECRETS
        usual = _written(TrainingArguments(output_dir=str(args.output_dir), use_cpu=args.use_cpu))
        told = {n: v for n, v in self.arguments.items() if n in usual and n not in left_out and v is not None}
        return {name: value for name, value in told.items() if value != usual[name]}

    def _fsdp_settings(self, given: dict[str, Any] | str) -> dict[str, Any]:
        """Return the settings of FSDP, which a command line has as JSON or as a file; usual units are left out."""
        if isinstance(given, str):
            given = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
        assert isinstance(given, dict)
        settings = {name.removeprefix("fsdp_"): value for name, value in given.items()}
        units, usual = settings.get(_UNITS), getattr(self.base, "_no_split_modules", None) or ()
        if units is not None and {*([units] if isinstance(units, str) else units)} == set(usual):
            del settings[_UNITS]
        return settings

    def _spec(self) -> ModelSpec:
        name = model_type = type(self.base).__name__
        kind, figures = "own", {}
        if self.is_of_library:
            config = self.base.config
            model_type, figures = str(config.model_type), json.loads(config.to_json_string(use_diff=False))
            figures.pop("quantization_config", None)
            kind = kind_of(config, tasks_for(model_type, ()))
        return ModelSpec(
            reference=self.code.shown, name=name, source="own", model_type=model_type, kind=kind, config=figures,
            frozen=() if hasattr(self.model, "peft_config") else frozen_paths(self.base),
        )  # fmt: skip

    def _facts(self) -> ModelFacts:
        counts = user_code.counts_of(self.trainer.model)
        if self.is_of_library:
            return facts_of(self.base, self.task).model_copy(update=counts)
        return ModelFacts(
            task=self.task,
            **counts,
            attn_implementations=(),
            supports_checkpointing=False,
            not_fsdp="its units are the layers that a class of transformers names",
            has_dropout=any("Drop" in type(m).__name__ and getattr(m, "p", 0) for m in self.base.modules()),
        )


def _written(args: Any) -> dict[str, Any]:
    """Return TrainingArguments as the code has them, as far as JSON can hold them."""
    written = {}
    for name, value in {**args.to_dict(), **{k: getattr(v, "value", v) for k, v in own_values(args).items()}}.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value, allow_nan=False)
            written[name] = value
    return written


def _launched(written: dict[str, Any], launched: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with those of a launcher, which hold where the code says nothing of their kind."""
    for switches, settings in ((("bf16", "fp16"), ()), (("fsdp",), ("fsdp_config",)), (("deepspeed",), ())):
        if not any(map(written.get, switches)):
            written |= {name: launched[name] for name in (*switches, *settings) if name in launched}
    return written
