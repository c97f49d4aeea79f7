"""The reference of a search: the user's own TrainingArguments, or the Trainer's defaults at the same global batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from autotune.errors import InputError, complaint, suggestion
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.values.config import KNOBS, Parallelism, Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.techniques import Checkpointing, checkpointing_of

TRAINER_MICRO_BATCH = 8  # TrainingArguments.per_device_train_batch_size


class UserArguments(NamedTuple):
    """A user's TrainingArguments, taken apart."""

    searched: dict[str, Any]
    fixed: dict[str, Any]

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step on one device."""
        micro = int(self.searched.get("per_device_train_batch_size", TRAINER_MICRO_BATCH))
        return micro * int(self.searched.get("gradient_accumulation_steps", 1))


_SHARDED = "the baseline of several devices (--devices N) is DDP, and sharding is searched"

# Arguments that a trial can't honour: what to do about each.
_REFUSED = {
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "parallelism_config": _SHARDED,
    "group_by_length": "transformers 5 calls it train_sampling_strategy: group_by_length",
    "auto_find_batch_size": "it would change the batch during a measurement",
    "torchdynamo": "transformers 5 calls it torch_compile_backend",
    "no_cuda": "transformers 5 calls it use_cpu",
    "fp16_opt_level": "apex is gone from transformers 5; use fp16 or bf16",
}
# What is of no effect without one of the refused, though `to_json_string` writes it.
_WITHOUT_EFFECT = frozenset({"fsdp_config"})
# Names of places, and a secret that must not reach the run directory (and that to_json_string masks).
_LEFT_OUT = frozenset({"output_dir", "logging_dir", "run_name", "overwrite_output_dir", "hub_token"})
_POSITIVE = ("per_device_train_batch_size", "gradient_accumulation_steps")


def read_arguments(path: Path) -> UserArguments:
    """Return the TrainingArguments in a JSON file, as `TrainingArguments.to_json_string` or a person writes them.

    Raises:
        InputError: The file can't be read, isn't a JSON object, or holds an argument that can't be honoured.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--baseline {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--baseline {path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"--baseline {path}: expected a JSON object of TrainingArguments")
    for name, reason in _REFUSED.items():
        if document.get(name):
            raise InputError(f"--baseline {path}: {name}: {reason}; remove it")
    for name in _POSITIVE:
        value = document.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"--baseline {path}: {name}: expected a whole number above 0, not {value!r}")
    searched = {k: v for k, v in document.items() if k in SEARCHED_ARGUMENTS}
    ignored = SEARCHED_ARGUMENTS | _LEFT_OUT | _WITHOUT_EFFECT | set(_REFUSED)
    return UserArguments(searched, {k: v for k, v in document.items() if k not in ignored and v is not None})


def unknown_argument(fixed: dict[str, Any], known: frozenset[str]) -> str | None:
    """Return a line about the first argument that TrainingArguments doesn't have, or None."""
    for name in fixed:
        if name not in known:
            return f"--baseline: {name!r} is no argument of the installed TrainingArguments{suggestion(name, known)}"
    return None


def default_micro_batch(global_batch: int | None) -> int:
    """Return the Trainer's micro-batch, or the largest below it that divides the global batch."""
    if global_batch is None:
        return TRAINER_MICRO_BATCH
    return max(d for d in range(1, min(TRAINER_MICRO_BATCH, global_batch) + 1) if global_batch % d == 0)


def _checkpointing(given: dict[str, Any]) -> Checkpointing:
    """Return the kind that the user's arguments ask for, by the newer name or the older.

    Raises:
        InputError: No kind has these options.
    """
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if given.get(name):
            try:
                return checkpointing_of(given.get(f"{name}_kwargs") or {})
            except (ValueError, AttributeError) as error:
                raise InputError(f"--baseline: {name}_kwargs: {error}") from None
    return "none"


def _parallelism(given: dict[str, Any], devices: int) -> Parallelism:
    """Return DDP over `devices`, with what the user has set of it; one device has no use for that."""
    if devices == 1:
        return Parallelism()
    return Parallelism(
        world_size=devices,
        ddp_bucket_cap_mb=given.get("ddp_bucket_cap_mb"),
        ddp_static_graph=bool(given.get("ddp_static_graph")),
    )


def baseline_config(
    arguments: UserArguments | None,
    global_batch: int | None,
    facts: ModelFacts,
    hardware: Hardware,
    *,
    devices: int = 1,
) -> TrainConfig:
    """Return the configuration that the search is compared with.

    Over several devices it is what the Trainer does when torchrun starts it: data parallel without sharding.

    Raises:
        InputError: The user's arguments contradict each other.
    """
    given = arguments.searched if arguments else {}
    if given.get("bf16") and given.get("fp16"):
        raise InputError("--baseline: bf16 and fp16 are both set; the Trainer takes one")
    is_said = {name: known.knob.argument == "always" for name, known in KNOBS.items() if known.knob.argument}
    as_given = {name: value for name, value in given.items() if name in is_said and (value or is_said[name])}
    as_given.setdefault("per_device_train_batch_size", default_micro_batch(global_batch and global_batch // devices))
    if given.get("torch_compile") or "torch_compile_mode" in as_given:
        as_given.setdefault("torch_compile_backend", "inductor")
    if hardware.is_cpu:  # where there is no accelerator the Trainer neither pins nor has a cache to empty
        as_given |= {"dataloader_pin_memory": False, "torch_empty_cache_steps": None}
    try:
        return TrainConfig(
            **as_given,
            precision=Precision.BF16 if given.get("bf16") else Precision.FP16 if given.get("fp16") else Precision.FP32,
            tf32=bool(given.get("tf32")) or (hardware.has_tf32 and hardware.starts_with_tf32),
            checkpointing=_checkpointing(given),
            attn_implementation=facts.attn_implementations[0] if facts.attn_implementations else None,
            experts_implementation=facts.experts_implementations[0] if facts.experts_implementations else None,
            parallelism=_parallelism(given, devices),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"--baseline: {first['loc'][0]}: {complaint(first)}") from None
