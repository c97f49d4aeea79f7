"""The command line of a user's script: what it runs, and what its launcher adds (torchrun, `accelerate launch`).

Trials start their processes themselves. Of a launcher they take the number of processes and the arguments that it sets
by variables where the script's TrainingArguments don't.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from autotune.errors import InputError, MachineError, one_line
from autotune.values.workload import OwnCode

# Options of launchers that say more than how many processes there are, with the values that don't.
_LEFT_TO_AUTOTUNE: dict[str, tuple[Any, ...]] = {
    **{"gpu_ids": ("all",), "mixed_precision": ("no", "bf16", "fp16")},
    **dict.fromkeys(("use_megatron_lm", "use_parallelism_config", "tpu"), (False,)),
    **dict.fromkeys((f"dynamo_use_{how}" for how in ("fullgraph", "dynamic", "regional_compilation")), (False,)),
}
_OF_PYTHON = ("-u", "-B", "-s")  # options that don't change what a script computes

# Launchers that are started as modules.
_LAUNCHER_MODULES = {
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), ("torchrun",)),
    "accelerate.commands.launch": ("accelerate", "launch"),
}


class Launched(NamedTuple):
    """A command line without torchrun or `accelerate launch`, and what these add."""

    words: list[str]
    processes: int | Literal["all"] | None = None  # on all machines; None: there is no launcher
    nodes: int = 1  # machines
    arguments: Mapping[str, Any] = MappingProxyType({})  # of the Trainer: precision, FSDP or DeepSpeed
    variables: Mapping[str, str] = MappingProxyType({})  # by which it tells an `Accelerator` of the script's own


def without_launcher(command: Sequence[str]) -> Launched:
    """Return a command line without its launcher; InputError: it can't read its options, or trials can't have them."""
    words, said = list(command), io.StringIO()
    at = next((at for at, word in enumerate(words) if at and word not in _OF_PYTHON), len(words))
    if words[at : at + 1] == ["-m"] and (launcher := _LAUNCHER_MODULES.get("".join(words[at + 1 : at + 2]))):
        words[: at + 2] = launcher
    words[:1] = [Path(word).name if Path(word).name in ("torchrun", "accelerate") else word for word in words[:1]]
    if words[:1] != ["torchrun"] and words[:2] != ["accelerate", "launch"]:
        return Launched(words)
    try:
        with contextlib.redirect_stderr(said):
            if words[0] == "torchrun":
                from torch.distributed.run import get_args_parser

                told = get_args_parser().parse_args(words[1:])
            else:
                from accelerate.commands.launch import _validate_launch_command, launch_command_parser

                told, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        of_torch = words[0] == "torchrun"
        number = str(told.nproc_per_node if of_torch else told.num_processes or 1).replace("cpu", str(os.cpu_count()))
        each: int | Literal["all"] = "all" if number in ("auto", "gpu") else int(number)
        machines = str(told.nnodes if of_torch else told.num_machines or 1)
        least, _, most = machines.partition(":")
        nodes = int(least)
        if most not in ("", least) or nodes < 1:
            raise ValueError(f"{machines} machines: name one number of them")
        if each == "all" and nodes > 1:
            raise ValueError(f"nproc_per_node {number}: say how many processes each of the {nodes} machines has")
        if each != "all" and each < 1:
            raise ValueError(f"{number} processes")
        processes = each if each == "all" or not of_torch else each * nodes
    except ImportError as error:  # torch's CUDA build without NVIDIA's libraries, as for a rehearsal
        instead = "leave the launcher out: --devices N -- python SCRIPT"
        raise MachineError(f"{words[0]}: its options can't be read here ({one_line(error)}); {instead}") from None
    except (SystemExit, ValueError, OSError) as error:
        why = said.getvalue().strip().rpartition("error: ")[2] or one_line(error)
        raise InputError(f"{words[0]}: {why}") from None
    for name, usual in _LEFT_TO_AUTOTUNE.items():
        if (value := getattr(told, name, None)) not in (None, *usual):
            where = "CUDA_VISIBLE_DEVICES has devices, and your TrainingArguments how they train"
            raise InputError(f"{words[0]}: {name} {value}: autotune starts the processes itself; {where}")
    kind = [] if getattr(told, "no_python", False) else ["python", *["-m"] * bool(told.module)]
    script = [*kind, told.training_script, *told.training_script_args]
    if of_torch:
        return Launched(script, processes, nodes)
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = _asked_of_accelerate(told)
    told.machine_rank, told.main_process_ip, told.main_process_port = 0, "localhost", 0  # any: nothing listens there
    try:
        made = prepare_multi_gpu_env(told).items()
    except ValueError as error:
        raise InputError(f"accelerate: {one_line(error)}") from None
    variables = {name: value for name, value in made if name.startswith(("ACCELERATE_", "FSDP_"))}
    return Launched(script, processes, nodes, given, variables)


def _asked_of_accelerate(told: argparse.Namespace) -> dict[str, Any]:
    """Return the Trainer's arguments for what `accelerate launch` sets by variables."""
    given: dict[str, Any] = {} if told.mixed_precision in (None, "no") else {told.mixed_precision: True}
    if (backend := told.dynamo_backend.lower()) != "no":
        mode = None if told.dynamo_mode == "default" else told.dynamo_mode
        given |= {"torch_compile": True, "torch_compile_backend": backend, "torch_compile_mode": mode}
    if told.use_fsdp:
        settings = {
            "version": int(told.fsdp_version),
            "reshard_after_forward": told.fsdp_reshard_after_forward,
            "cpu_offload": told.fsdp_offload_params,
            "activation_checkpointing": told.fsdp_activation_checkpointing,
            "auto_wrap_policy": told.fsdp_auto_wrap_policy or "NO_WRAP",
        }
        if settings["auto_wrap_policy"] == "SIZE_BASED_WRAP":
            settings["min_num_params"] = told.fsdp_min_num_params
        if units := told.fsdp_transformer_layer_cls_to_wrap:
            settings["transformer_layer_cls_to_wrap"] = units.split(",")
        if settings["version"] == 1:
            raise InputError("accelerate: fsdp_version 1: trials train by FSDP2; `accelerate to-fsdp2` rewrites it")
        given |= {"fsdp": True, "fsdp_config": settings}
    if told.use_deepspeed:
        places = {"optimizer": told.offload_optimizer_device, "param": told.offload_param_device}
        zero: dict[str, Any] = {f"offload_{what}": {"device": place} for what, place in places.items() if place}
        zero["stage"] = 2 if told.zero_stage is None else told.zero_stage  # as accelerate does
        given["deepspeed"] = told.deepspeed_config_file or {"zero_optimization": zero}
    return given


def code_of(command: Sequence[str]) -> OwnCode:
    """Return the script that a command line runs; InputError: it runs none, or by another launcher or Python."""
    words, processes, _, arguments, variables = without_launcher(command)
    if not words:
        raise InputError("no script: write its command line after --, as `autotune script -- python train.py`")
    shown, first = " ".join(command), words[0]
    is_program = shutil.which(first) is not None and not Path(first).is_file() and not first.startswith("python")
    if is_program or Path(first).name in ("accelerate", "deepspeed", "mpirun", "srun", "uv", "poetry"):
        raise InputError(f"{first}: write `python` and the script in its place; --devices N starts N processes")
    if Path(first).name.startswith("python"):
        found = shutil.which(words.pop(0))
        here = Path(sys.executable).absolute().parent
        if "/" in first and (found is None or Path(found).absolute().parent != here):  # a bare name means this one
            raise InputError(f"{first}: another Python than autotune's ({sys.executable}); install autotune there")
        while words and words[0] in _OF_PYTHON:
            words.pop(0)
    is_module = bool(words) and words[0] == "-m"
    words = words[1:] if is_module else words
    if not words or (words[0].startswith("-") and not is_module):
        raise InputError(f"{shown}: expected a script, as `python train.py` or `python -m package.train`")
    if not is_module and not Path(words[0]).is_file():
        raise InputError(f"{words[0]}: no such script")
    where = {"is_module": is_module, "directory": str(Path.cwd()), "variables": dict(variables)}
    launched = dict(arguments) if arguments or processes not in (None, 1) else None
    return OwnCode(kind="script", shown=shown, command=tuple(words), launched=launched, **where)
