"""What the YAML files of axolotl and LLaMA-Factory, trainers built on transformers, have in common.

Where a tool trains otherwise than was measured and has no setting for it, a line among `lost` says so.
"""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from autotune.errors import InputError
from autotune.exports import launch_files
from autotune.exports.winner import Draft, Winner
from autotune.units import visible
from autotune.values.config import Precision
from autotune.values.model import Task
from autotune.values.techniques import CHECKPOINTING

_LORA_KINDS = ("lora", "rslora", "dora")
_WIDTH = 100  # of lines of YAML


def require_lora_of_causal_lm(winner: Winner, target: str) -> None:
    """Refuse another task than causal language modelling and another adapter than LoRA and its kin.

    Raises:
        InputError: The tool would train something else.
    """
    if winner.workload.task is not Task.CAUSAL_LM:
        raise InputError(f"{target}: it trains causal-lm, not {winner.workload.task}; --to python writes a Trainer")
    adapter = winner.config.adapter
    if adapter is not None and adapter.kind not in _LORA_KINDS:
        raise InputError(f"{target}: it has no adapter {adapter.kind} (only {', '.join(_LORA_KINDS)}); use --to python")


def yaml_draft(
    winner: Winner,
    tool: str,
    name: str,
    *,
    command: str,
    document: dict[str, Any],
    lost: list[str],
    yours: str,
    requires: str,
) -> Draft:
    """Return a tool's file `name`, headed by comments, and DeepSpeed's file beside it where DeepSpeed is used.

    The comments say the `command` that trains with it, what the tool can't express, a line each, the settings that are
    the user's (`yours`) to fill in, and the tool's version, what it `requires` and when that was read.
    """
    lines = [
        f"{winner.workload.model.name} as autotune measured it: {winner.promise}.",
        f"For {tool}: {command}.",
        f"{yours} yours to name; the rest is as it was measured.",
        f"{requires}: not what was measured with, so its speed and memory may differ.",
        *(f"not expressed: {line}" for line in lost),
    ]
    heading = "".join(f"# {part}\n" for line in lines for part in textwrap.wrap(visible(line), _WIDTH))
    files = {name: heading + _settings(document)}
    if "deepspeed" in winner.arguments:
        files[DEEPSPEED_FILE] = launch_files.text_of(launch_files.DEEPSPEED, winner.result)
    return Draft(files, (command,), tuple(lost))


DEEPSPEED_FILE = launch_files.FILE_NAMES[launch_files.DEEPSPEED]


def _settings(document: dict[str, Any]) -> str:
    """Return the settings as YAML, with escapes for all but ASCII if one of its characters can't be printed."""
    for in_own_letters in (True, False):
        found = str(yaml.safe_dump(document, sort_keys=False, width=_WIDTH, allow_unicode=in_own_letters))
        if found.replace("\n", "").isprintable():
            break
    return found


def lost_spacing(winner: Winner) -> list[str]:
    """Return what is lost of memory savers that are no argument, and of balanced micro-batches."""
    kind = winner.config.checkpointing
    is_spaced = kind != "none" and CHECKPOINTING[kind].every > 1
    lost = [f"checkpointing {kind}: every layer is checkpointed"] if is_spaced else []
    lost += ["chunked_loss: all logits are there at once"] * winner.config.chunked_loss
    if winner.config.is_balanced:
        lost.append("train_sampling_strategy batch_rebalance: micro-batches are drawn at random")
    is_bounded = winner.config.activation_memory_budget is not None
    return lost + ["activation_memory_budget: all activations are kept"] * is_bounded


def lost_weights(winner: Winner, tool: str) -> list[str]:
    """Return what is lost of fp32 weights where a tool loads them in the precision of its arithmetic."""
    precision = winner.config.precision
    if precision not in (Precision.BF16, Precision.FP16):
        return []
    return [f"weights in float32 beside {precision} arithmetic: {tool} loads them in {precision}"]


def lost_sharing(winner: Winner) -> list[str]:
    """Return what is lost of tensor parallelism."""
    degree = winner.config.parallelism.tensor_parallel
    return [f"tensor parallel over {degree} devices: each holds all of the model"] if degree > 1 else []


def trainer_arguments(winner: Winner, names: dict[str, str]) -> dict[str, Any]:
    """Return hyperparameters, seed and data loading, by the tool's names of these TrainingArguments."""
    config = winner.config
    loading = {
        "seed": winner.arguments["seed"],
        "dataloader_num_workers": config.dataloader_num_workers,
        "dataloader_pin_memory": config.dataloader_pin_memory,
        "dataloader_prefetch_factor": config.dataloader_prefetch_factor if config.dataloader_num_workers else None,
    }
    values = {**{name: winner.hyperparameter(name) for name in names if name not in loading}, **loading}
    return given({names[name]: value for name, value in values.items()})


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that aren't None: the others are left to the tool."""
    return {name: value for name, value in settings.items() if value is not None}
