"""How a measured configuration is launched: the commands, and the files that launchers and libraries read.

Pure but for `save`. Everything is made of the arguments that were measured (`training_args.plan`); nothing is decided
here. Called by `result` and by the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from autotune.errors import InputError
from autotune.exports.user_launch import apply_command
from autotune.training.parallel_arguments import ZERO_STAGES
from autotune.value import save_text
from autotune.values.config import Precision, TrainConfig, Workload

if TYPE_CHECKING:
    from autotune.values.result import ResultData

SCRIPT = "train.py"  # what the user trains with: `result.training_arguments(...)` and a Trainer
ACCELERATE, DEEPSPEED, FSDP, ARGUMENTS = "accelerate", "deepspeed", "fsdp", "training-args"
FILE_NAMES = {
    ACCELERATE: "accelerate.yaml",
    DEEPSPEED: "deepspeed.json",
    FSDP: "fsdp.json",
    ARGUMENTS: "training_args.json",
}

# TrainingArguments.max_grad_norm, at which the Trainer clips unless the user says otherwise.
_MAX_GRAD_NORM = 1.0

# A model's width, as its config calls it; transformers' own names of it (`attribute_map`) included.
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")


class Measured(NamedTuple):
    """What was measured, as far as launchers have to know it."""

    config: TrainConfig
    workload: Workload
    arguments: dict[str, Any]  # of TrainingArguments
    is_cpu: bool
    cores: int

    @property
    def ranks(self) -> int:
        """Processes of the training."""
        return self.config.parallelism.world_size


def measured_of(result: ResultData) -> Measured:
    """Return what launchers have to know of an answer."""
    return Measured(
        config=result.best.config,
        workload=result.workload,
        arguments=result.arguments.training_arguments,
        is_cpu=result.hardware.is_cpu,
        cores=result.hardware.cores,
    )


def launch_commands(result: ResultData) -> tuple[str, ...]:
    """Return the command lines that start training with the best configuration of an answer."""
    return commands(measured_of(result))


def commands(measured: Measured) -> tuple[str, ...]:
    """Return the command lines that start the training, the one to prefer first."""
    code = measured.workload.own_code
    if code is not None and code.command:
        return (apply_command(code, "best-config.json"),)
    if not needs_launcher(measured.config):
        return (f"python {SCRIPT}",)
    torchrun = f"{_threads(measured)} torchrun --standalone --nproc_per_node {measured.ranks} {SCRIPT}"
    if _why_not_accelerate(measured) is not None:
        return (torchrun,)
    return torchrun, accelerate_command(measured)


def accelerate_command(measured: Measured) -> str:
    """Return the command line of accelerate's launcher, which starts a single process too."""
    return f"{_threads(measured)} accelerate launch --config_file {FILE_NAMES[ACCELERATE]} {SCRIPT}"


def _threads(measured: Measured) -> str:
    """Return what gives each rank its share of the cores, as trials did; launchers give it one unless they are told."""
    return f"OMP_NUM_THREADS={max(1, measured.cores // measured.ranks)}"


def needs_launcher(config: TrainConfig) -> bool:
    """Return whether the training is one of ranks, be it of one: FSDP and DeepSpeed are always."""
    return config.parallelism.world_size > 1 or config.parallelism.sharding != "none"


def formats(measured: Measured) -> tuple[str, ...]:
    """Return the files that there are for a configuration."""
    found = []
    for name, make in _MAKERS.items():
        try:
            make(measured)
        except InputError:
            continue
        found.append(name)
    return tuple(found)


def text_of(name: str, measured: Measured) -> str:
    """Return what a file holds.

    Raises:
        InputError: The configuration has nothing for it.
    """
    document = _MAKERS[name](measured)
    if name == ACCELERATE:
        return str(yaml.safe_dump(document, sort_keys=True))
    return json.dumps(document, indent=2) + "\n"


def save(measured: Measured, directory: Path) -> tuple[Path, ...]:
    """Write every file that there is for a configuration, and the commands; return their paths.

    Raises:
        OSError: The directory can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = {FILE_NAMES[name]: text_of(name, measured) for name in formats(measured)}
    texts["launch.txt"] = "".join(f"{command}\n" for command in commands(measured))
    for name, text in texts.items():
        save_text(text, directory / name)
    return tuple(directory / name for name in texts)


def _training_arguments(measured: Measured) -> dict[str, Any]:
    return measured.arguments


def _fsdp(measured: Measured) -> dict[str, Any]:
    settings: dict[str, Any] | None = measured.arguments.get("fsdp_config")
    if settings is None:
        raise InputError(f"fsdp: the configuration doesn't use it ({measured.config.parallelism.sharding})")
    return settings


def _deepspeed(measured: Measured) -> dict[str, Any]:
    """Return DeepSpeed's configuration with every 'auto' filled in as the Trainer would."""
    given: dict[str, Any] | None = measured.arguments.get("deepspeed")
    if given is None:
        raise InputError(f"deepspeed: the configuration doesn't use it ({measured.config.parallelism.sharding})")
    zero = dict(given["zero_optimization"])
    width = next((measured.workload.model.config[w] for w in _WIDTHS if w in measured.workload.model.config), None)
    if zero["stage"] == 3 and isinstance(width, int):
        zero["stage3_prefetch_bucket_size"] = int(0.9 * width * width)  # `trainer_config_finalize` in transformers
        zero["stage3_param_persistence_threshold"] = 10 * width
    return {
        **given,
        "train_batch_size": measured.workload.samples_per_step(measured.config),
        "train_micro_batch_size_per_gpu": measured.config.per_device_train_batch_size,
        "gradient_accumulation_steps": measured.workload.accumulation_steps(measured.config),
        "gradient_clipping": float(measured.arguments.get("max_grad_norm", _MAX_GRAD_NORM)),
        "zero_optimization": zero,
    }


def _accelerate(measured: Measured) -> dict[str, Any]:
    """Return the configuration file of `accelerate launch`."""
    reason = _why_not_accelerate(measured)
    if reason is not None:
        raise InputError(f"accelerate: {reason}")
    spread, several = measured.config.parallelism, measured.ranks > 1
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if several else "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _MIXED.get(measured.config.precision, "no"),
        "num_machines": 1,
        "num_processes": measured.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": measured.is_cpu and spread.sharding not in ZERO_STAGES,
    }
    if "fsdp_config" in measured.arguments:
        document |= {"distributed_type": "FSDP", "fsdp_config": _fsdp_of_accelerate(measured.arguments["fsdp_config"])}
    if "deepspeed" in measured.arguments:
        # Precision, clipping and offload stand in DeepSpeed's own file; accelerate refuses them beside it.
        del document["mixed_precision"]
        document |= {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": FILE_NAMES[DEEPSPEED],
                "deepspeed_multinode_launcher": "standard",
                "zero3_init_flag": spread.sharding == "zero_3",
            },
        }
    return document


def _why_not_accelerate(measured: Measured) -> str | None:
    if measured.is_cpu and measured.ranks > 1 and measured.config.parallelism.sharding not in ZERO_STAGES:
        return "on a CPU its launcher starts one process whatever its file says; torchrun starts them all"
    return None


def _fsdp_of_accelerate(settings: dict[str, Any]) -> dict[str, Any]:
    """Return FSDP's settings as accelerate's file calls them."""
    return {
        "fsdp_version": settings["version"],
        "fsdp_reshard_after_forward": settings["reshard_after_forward"],
        "fsdp_auto_wrap_policy": settings["auto_wrap_policy"],
        **({"fsdp_min_num_params": settings["min_num_params"]} if "min_num_params" in settings else {}),
        "fsdp_offload_params": settings.get("cpu_offload", False),
        "fsdp_activation_checkpointing": settings.get("activation_checkpointing", False),
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",  # what TrainingArguments has for it
    }


_MIXED = {Precision.BF16: "bf16", Precision.FP16: "fp16"}

_MAKERS: dict[str, Callable[[Measured], dict[str, Any]]] = {
    ARGUMENTS: _training_arguments,
    ACCELERATE: _accelerate,
    FSDP: _fsdp,
    DEEPSPEED: _deepspeed,
}
