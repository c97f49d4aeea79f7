"""What trainers built on transformers say alike: axolotl and LLaMA-Factory, each with its own names.

Pure. Where such a tool trains otherwise than was measured, and nothing can be said to it, a line tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import InputError
from autotune.exports import launch_files
from autotune.exports.winner import Winner
from autotune.values.checkpointing import KINDS
from autotune.values.config import Precision, TrainConfig
from autotune.values.model import Task

# Of adapters, what LoRA's family shares.
LORA_KINDS = ("lora", "rslora", "dora")


def require_causal_lm(winner: Winner, target: str) -> None:
    """Refuse what isn't a causal language model.

    Raises:
        InputError: Another task was measured.
    """
    if winner.workload.task is not Task.CAUSAL_LM:
        raise InputError(f"{target}: it trains causal-lm, not {winner.workload.task}; --to python writes a Trainer")


def require_lora(winner: Winner, target: str) -> None:
    """Refuse an adapter that isn't of LoRA's family: without it another training would be written.

    Raises:
        InputError: Another kind of adapter won.
    """
    adapter = winner.config.adapter
    if adapter is not None and adapter.kind not in LORA_KINDS:
        raise InputError(f"{target}: it has no adapter {adapter.kind} (only {', '.join(LORA_KINDS)}); use --to python")


def lost_knobs(config: TrainConfig, *, but: frozenset[str] = frozenset()) -> list[str]:
    """Return a line for each knob that these trainers don't have, but for those that one of them has."""
    found: dict[str, str | None] = {
        "every_n_layers": f"checkpointing {config.checkpointing}: every layer is checkpointed"
        if config.checkpointing != "none" and KINDS[config.checkpointing].every > 1
        else None,
        "offload": f"checkpointing {config.checkpointing}: layers' inputs stay on the device"
        if config.checkpointing != "none" and KINDS[config.checkpointing].offload
        else None,
        "experts": f"experts_implementation {config.experts_implementation}: the library's default runs"
        if config.experts_implementation is not None
        else None,
        "experts_per_token": f"experts_per_token {config.experts_per_token}: the model's own number is used"
        if config.experts_per_token is not None
        else None,
        "expert_capacity": f"expert_capacity {config.expert_capacity}: the model's own is used"
        if config.expert_capacity is not None
        else None,
    }
    return [line for name, line in found.items() if line is not None and name not in but]


def weights_lost(winner: Winner, tool: str) -> list[str]:
    """Return what a tool that loads weights in the precision of its arithmetic makes of fp32 weights."""
    precision = winner.config.precision
    if precision not in (Precision.BF16, Precision.FP16):
        return []
    return [f"weights in float32 beside {precision} arithmetic: {tool} loads them in {precision}"]


def spread_lost(winner: Winner) -> list[str]:
    """Return what of the devices isn't said."""
    degree = winner.config.parallelism.tensor_parallel
    return [f"tensor parallel over {degree} devices: each holds all of the model"] if degree > 1 else []


def sharding_files(winner: Winner) -> dict[str, str]:
    """Return DeepSpeed's file, which these trainers take as it is; none without DeepSpeed."""
    if "deepspeed" not in winner.arguments:
        return {}
    name = launch_files.DEEPSPEED
    return {launch_files.FILE_NAMES[name]: launch_files.text_of(name, launch_files.measured_of(winner.result))}


def own_settings(winner: Winner, names: Mapping[str, str]) -> dict[str, Any]:
    """Return those of the user's own arguments that a tool has names for, by these."""
    return {names[name]: value for name, value in winner.own_arguments.items() if name in names}


def trainer_arguments(winner: Winner, names: dict[str, str]) -> dict[str, Any]:
    """Return hyperparameters and data loading by a tool's names for them."""
    config = winner.config
    values = {
        **{name: winner.hyperparameter(name) for name in names if name not in _LOADING},
        "seed": winner.arguments["seed"],
        "dataloader_num_workers": config.dataloader_num_workers,
        "dataloader_pin_memory": config.dataloader_pin_memory,
        "dataloader_prefetch_factor": config.dataloader_prefetch_factor if config.dataloader_num_workers else None,
    }
    return {names[name]: value for name, value in values.items() if name in names and value is not None}


_LOADING = ("seed", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")
