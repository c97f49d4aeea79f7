"""The reference of a search: the user's own TrainingArguments, or the Trainer's defaults at the same global batch."""

import dataclasses
import json
import math
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from autotune.errors import InputError, complaint, one_line, suggestion
from autotune.training.arguments import (
    FSDP_BY_SIZE,
    OF_TRL,
    OWN_HARNESS,
    SEARCHED_ARGUMENTS,
    ZERO_STAGES,
    arguments_class,
)
from autotune.values.config import KNOBS, LARGEST_BATCH, LARGEST_SEED, OF_DDP, Parallelism, Precision, TrainConfig
from autotune.values.hardware import Hardware, allocator_settings
from autotune.values.model import ModelFacts
from autotune.values.techniques import checkpointing_of
from autotune.values.workload import Recipe

TRAINER_MICRO_BATCH = 8  # TrainingArguments.per_device_train_batch_size


class UserArguments(NamedTuple):
    """A user's TrainingArguments: those that the search decides, and those that stay."""

    searched: dict[str, Any]
    fixed: dict[str, Any]
    source: str = "--baseline"  # where they stand, as errors name it

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step on one device."""
        micro = int(self.searched.get("per_device_train_batch_size", TRAINER_MICRO_BATCH))
        return micro * int(self.searched.get("gradient_accumulation_steps", 1))


NOTHING_GIVEN = UserArguments({}, {})

# Arguments that a trial can't honour, with the reason or the remedy.
_REFUSED = {
    "parallelism_config": "it is searched (--devices N), and the baseline is DDP, FSDP or ZeRO",
    "group_by_length": "transformers 5 calls it train_sampling_strategy: group_by_length",
    "auto_find_batch_size": "it would change the batch during a measurement",
    "torchdynamo": "transformers 5 calls it torch_compile_backend",
    "no_cuda": "transformers 5 calls it use_cpu",
    "fp16_opt_level": "apex is gone from transformers 5; use fp16 or bf16",
    "use_vllm": "transformers generates in trials",
    "num_iterations": "a step is a whole cycle of generating and training",
    **dict.fromkeys(("packing", "padding_free"), "a recipe is tuned with a row for each sample"),
    "model_init_kwargs": "the search decides how the model is made",
}
# Learning-rate schedules that wait for evaluations, of which a trial has none.
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
# Arguments of TRL that a workload is made of.
_COUNTS_OF_TRL = ("max_length", "num_generations", "max_completion_length", "steps_per_generation")
# Arguments that neither a run directory nor an answer repeats.
_PLACES = {"output_dir", "logging_dir", "run_name", "overwrite_output_dir", "resume_from_checkpoint"}
PLACES_AND_SECRETS = frozenset({*_PLACES, "hub_token", "push_to_hub_token"})

# Settings of FSDP2 that a configuration has a field for, and all, as TrainingArguments have them by themselves.
_FSDP_KEPT = {"reshard_after_forward": True, "cpu_offload": False, "activation_checkpointing": False}
_FSDP_DEFAULTS = _FSDP_KEPT | {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "min_num_params": 0,
    "cpu_ram_efficient_loading": False,
    "state_dict_type": "FULL_STATE_DICT",
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), False),
}
# What the older way to switch it on, `--fsdp "shard_grad_op offload"`, says in settings.
_FSDP_WORDS: dict[str, dict[str, bool]] = {
    **{word: {} for word in ("true", "auto_wrap", "full_shard")},
    "shard_grad_op": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
}

# Settings of a DeepSpeed file that stay the Trainer's or change no number: trials have them as `arguments` writes them.
_ZERO_OTHERS = frozenset({
    "allgather_bucket_size", "allgather_partitions", "bf16", "contiguous_gradients", "fp16",
    "gradient_accumulation_steps", "gradient_clipping",
    "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "steps_per_print", "sub_group_size",
    "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "zero_allow_untested_optimizer",
})  # fmt: skip

# Least and most values of arguments that no library checks: seeds have 32 bits, a negative norm flips gradients.
_RANGES = {
    "seed": (0, LARGEST_SEED),
    "data_seed": (0, LARGEST_SEED),
    "max_grad_norm": (0, math.inf),
    "label_smoothing_factor": (0, 1),
    "neftune_noise_alpha": (0, math.inf),
    "per_device_eval_batch_size": (1, LARGEST_BATCH),
}


def read_arguments(path: Path) -> UserArguments:
    """Return the TrainingArguments in a JSON file, as `TrainingArguments.to_json_string` or a person writes them."""
    source = f"--baseline {path}"
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))  # without the byte-order mark of Windows editors
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not JSON: {one_line(error)}") from None
    if not isinstance(document, dict):
        raise InputError(f"{source}: expected a JSON object of TrainingArguments")
    for name, reason in _REFUSED.items():
        if document.get(name) and (name, document[name]) != ("num_iterations", 1):
            raise InputError(f"{source}: {name}: {reason}; remove it")
    # `to_json_string` masks all tokens, those of a tokenizer too.
    document = {name: value for name, value in document.items() if value != f"<{name.upper()}>"}
    counts = (name for name in _COUNTS_OF_TRL if document.get(name) is not None)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", *counts):
        value = document.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{source}: {name}: expected a whole number above 0, not {value!r}")
    if steps := document.pop("steps_per_generation", None):  # another way to say how many are generated at once
        at_once = steps * document.get("per_device_train_batch_size", TRAINER_MICRO_BATCH)
        document["generation_batch_size"] = document.get("generation_batch_size") or at_once
    for name, value in document.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{source}: {name}: expected a finite number, not {value}")
    decided = SEARCHED_ARGUMENTS | OF_TRL
    searched = {k: v for k, v in document.items() if k in decided}
    ignored = decided | PLACES_AND_SECRETS | set(_REFUSED)
    return UserArguments(searched, {k: v for k, v in document.items() if k not in ignored and v is not None}, source)


def check_arguments(given: dict[str, Any], source: str, recipe: Recipe | None = None) -> None:
    """Refuse values that the installed TrainingArguments (TRL's of a recipe), torch's AdamW or the schedule refuse."""
    theirs = arguments_class(recipe)
    known, types = [field.name for field in dataclasses.fields(theirs)], get_type_hints(theirs)
    for name, value in given.items():
        if name not in known:
            near = suggestion(name, known)
            raise InputError(f"{source}: {name!r} is no argument of the installed {theirs.__name__}{near}")
        is_taken = value is None or name in ("fsdp", "loss_type")  # whose types aren't all that they take
        reason = None if is_taken else _mistyped(types[name], value)
        least, most = _RANGES.get(name, (-math.inf, math.inf))
        if reason is None and isinstance(value, int | float) and not least <= value <= most:
            reason = f"expected {least:.10g} or more" if most == math.inf else f"expected {least:.10g} to {most:.10g}"
        if name == "lr_scheduler_type" and value in BY_EVALUATION:
            raise InputError(f"{source}: {name}: {value} waits for evaluations, of which a trial has none")
        if reason is not None:
            raise InputError(f"{source}: {name}: {reason}, not {json.dumps(value)[:100]}")
    left_out = SEARCHED_ARGUMENTS | OF_TRL | {"ddp_backend"}  # where there is one process, it can't be told
    fixed = {name: value for name, value in given.items() if name not in left_out}
    try:
        _try_out(theirs, fixed)
    except Exception as whole:
        for name, value in fixed.items():  # whichever it is is named
            try:
                _try_out(theirs, {name: value})
            except Exception as error:
                raise InputError(f"{source}: {name}: {one_line(error)}") from None
        raise InputError(f"{source}: {one_line(whole)}") from None


def _mistyped(kind: Any, value: Any) -> str | None:
    """Return an argument's expectation that `value` fails; None: it has its type, or the type can't be checked."""
    choices = [c for c in (kind, *get_args(kind)) if isinstance(c, type) and issubclass(c, Enum)]
    if isinstance(value, str) and choices:  # beside them some take any text, and refuse it later
        names = [str(member.value) for choice in choices for member in choice]
        listed = ", ".join(names) if len(names) <= 16 else "one of the names that transformers has"
        return None if value in names else f"expected {listed}{suggestion(value, names)}"
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        several = dict.fromkeys(complaint(e).removeprefix("expected ") for e in error.errors())
        return "expected " + " or ".join(several)
    except PydanticUserError:
        return None
    return None


def _try_out(theirs: Any, given: dict[str, Any]) -> None:
    """Make arguments, optimizer and schedule of a trial; raises whatever the libraries raise."""
    import torch
    from transformers import get_scheduler

    of_trial = {**OWN_HARNESS, "use_cpu": True, "bf16": False, "output_dir": "."}
    of_trial["per_device_train_batch_size"] = given.get("num_generations", TRAINER_MICRO_BATCH)  # all of one prompt
    made = theirs(**{**given, **of_trial})
    rates = {"lr": made.learning_rate, "eps": made.adam_epsilon, "weight_decay": made.weight_decay}
    optimizer = torch.optim.AdamW([torch.zeros(1)], betas=(made.adam_beta1, made.adam_beta2), **rates)
    schedule, more = made.lr_scheduler_type, made.lr_scheduler_kwargs
    get_scheduler(schedule, optimizer, made.get_warmup_steps(100), 100, scheduler_specific_kwargs=more)


def baseline_config(
    arguments: UserArguments, global_batch: int | None, facts: ModelFacts, hardware: Hardware, *, least: int = 1
) -> TrainConfig:
    """Return the configuration to compare with: over several devices FSDP or ZeRO if given, else DDP as by torchrun.

    `least`: samples of a micro-batch that the arguments don't give.
    """
    given, source, devices = arguments.searched, arguments.source, hardware.count or 1
    if given.get("bf16") and given.get("fp16"):
        raise InputError(f"{source}: bf16 and fp16 are both set; the Trainer takes one")
    if hardware.is_cpu and arguments.fixed.get("activation_offloading"):
        raise InputError(f"{source}: activation_offloading: moves activations from a GPU, and this is a CPU; remove it")
    loading = arguments.fixed.get("accelerator_config") or {}
    if isinstance(loading, str):  # which TrainingArguments have read
        loading = _in_text_or_file(loading)
    if devices > 1 and isinstance(loading, dict) and loading.get("split_batches"):
        raise InputError(f"{source}: split_batches deals a micro-batch out to all devices; remove it")
    is_said = {name: known.argument == "always" for name, known in KNOBS.items() if known.argument}
    as_given = {name: value for name, value in given.items() if name in is_said and (value or is_said[name])}
    as_given |= {name: given[name] for name in OF_TRL if given.get(name) not in (None, "auto")}
    if global_batch is not None and given.get("generation_batch_size") == global_batch:
        as_given["generation_batch_size"] = None  # all of a step, as they are by default
    each = TRAINER_MICRO_BATCH if global_batch is None else global_batch // devices
    divisors = [size for size in range(least, each + 1) if each % size == 0]
    usual = [size for size in divisors if size <= TRAINER_MICRO_BATCH]
    as_given.setdefault("per_device_train_batch_size", max(usual or divisors[:1]))
    if given.get("torch_compile") or "torch_compile_mode" in as_given:
        as_given.setdefault("torch_compile_backend", "inductor")
    if hardware.is_cpu:  # where there is no accelerator the Trainer neither pins nor has a cache to empty
        as_given |= {"dataloader_pin_memory": False, "torch_empty_cache_steps": None}
    kind, named = "none", ("activation_checkpointing", "gradient_checkpointing")
    split = _fsdp(given, source) or zero_of(given, source)
    if split and devices == 1:
        way = "fsdp" if given.get("fsdp") else "deepspeed"
        raise InputError(f"{source}: {way}: one device has nothing to split; remove it, or use --devices N")
    if split.pop("checkpoints", False):
        kind = "full"
    elif (name := next((name for name in named if given.get(name)), None)) is not None:
        try:
            kind = checkpointing_of(given.get(f"{name}_kwargs") or {})
        except (ValueError, AttributeError) as error:
            raise InputError(f"{source}: {name}_kwargs: {error}") from None
    ddp = {name: given.get(name) for name in OF_DDP if devices > 1}  # what the user has set of it
    try:
        return TrainConfig(
            **as_given,
            expandable_segments=not hardware.is_cpu and "expandable_segments:True" in (allocator_settings() or ""),
            precision=Precision.BF16 if given.get("bf16") else Precision.FP16 if given.get("fp16") else Precision.FP32,
            tf32=bool(given.get("tf32")) or (hardware.has_tf32 and hardware.starts_with_tf32),
            checkpointing=kind,
            attn_implementation=facts.attn_implementations[0] if facts.attn_implementations else None,
            experts_implementation=facts.experts_implementations[0] if facts.experts_implementations else None,
            parallelism=Parallelism(world_size=devices, **(split or ddp)),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{source}: {first['loc'][0]}: {complaint(first)}") from None


def _fsdp(given: dict[str, Any], source: str) -> dict[str, Any]:
    """Return FSDP's fields of `Parallelism` and `checkpoints`, none without it; InputError: a setting can't be used."""
    words, settings = given.get("fsdp"), given.get("fsdp_config") or {}
    if not words:
        return {}
    if not isinstance(settings, dict):
        given_as = json.dumps(settings)[:100]
        raise InputError(f"{source}: fsdp_config: expected an object of FSDP's settings, not {given_as}")
    said = dict(_FSDP_DEFAULTS)
    for name, value in settings.items():
        as_text = {"true": True, "false": False} if isinstance(value, str) else {}
        said[name.removeprefix("fsdp_")] = as_text.get(value, value)
    for word in words if isinstance(words, list) else str(words).lower().split():
        said |= _FSDP_WORDS.get(word, {word: True})
    by_size = said["auto_wrap_policy"] == "SIZE_BASED_WRAP"
    usual = {**_FSDP_DEFAULTS, **(FSDP_BY_SIZE if by_size else {})}
    kept = {name for name in _FSDP_KEPT if isinstance(said[name], bool)}
    if other := sorted(name for name in said.keys() - kept if said[name] != usual.get(name)):
        raise InputError(f"{source}: fsdp: {', '.join(other)}: is not among the settings that are searched; remove it")
    return {
        "sharding": "fsdp_full" if said["reshard_after_forward"] else "fsdp_grad_op",
        "wrapping": "size" if by_size else "layers",
        "offload": "parameters" if said["cpu_offload"] else "none",
        "checkpoints": said["activation_checkpointing"],
    }


def _in_text_or_file(document: str) -> Any:
    """Return the JSON that an argument is, or that stands in the file which it names."""
    return json.loads(document if document.lstrip().startswith("{") else Path(document).read_bytes().decode())


def zero_of(given: dict[str, Any], source: str) -> dict[str, Any]:
    """Return DeepSpeed's fields of `Parallelism`, none without it; InputError: its file or a setting can't be used."""
    document = given.get("deepspeed")
    if not document:
        return {}
    if not isinstance(document, dict):
        try:
            document = _in_text_or_file(document)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{source}: deepspeed {document}: {one_line(error)}") from None
    zero = document.get("zero_optimization") if isinstance(document, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in ZERO_STAGES.values():
        raise InputError(f"{source}: deepspeed: expected a zero_optimization of stage 1, 2 or 3; without it, remove it")
    ways = {f"offload_{what}": zero.get(f"offload_{what}") or {} for what in ("optimizer", "param")}
    places = [str(way.get("device", "none") if isinstance(way, dict) else way) for way in ways.values()]
    kinds = {("none", "none"): "none", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "parameters"}
    if (offload := kinds.get((places[0], places[1]))) is None:
        raise InputError(f"{source}: deepspeed: offload to {' and '.join(places)} isn't searched: cpu, or none")
    if others := {*document, *zero} - _ZERO_OTHERS - ways.keys() - {"zero_optimization", "stage"}:
        named = ", ".join(sorted(others))
        raise InputError(f"{source}: deepspeed: {named}: is not among the settings that are searched; remove it")
    for half in ("bf16", "fp16"):
        said = document.get(half)
        if not given.get(half) and (said.get("enabled") if isinstance(said, dict) else said) is True:
            raise InputError(f"{source}: deepspeed: {half} is enabled there alone: set it for the Trainer, too")
    return {"sharding": next(name for name, stage in ZERO_STAGES.items() if stage == zero["stage"]), "offload": offload}
