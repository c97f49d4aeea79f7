"""How an answer is launched: the commands, the files that launchers and libraries read, and a user's own script.

Everything is taken from the arguments that were measured (`training.arguments.training_plan`); nothing is decided here.
"""

import json
import shlex
from typing import Any

import yaml

from autotune.errors import InputError
from autotune.training.arguments import ZERO_STAGES, parallel_variables, training_plan
from autotune.values.config import Precision, TrainConfig
from autotune.values.hardware import ALLOCATOR_VARIABLE
from autotune.values.model import Task
from autotune.values.problem import Change
from autotune.values.result import ANSWER_FILE, ResultData

SCRIPT = "train.py"  # the user's: a Trainer with `result.training_arguments(...)`, or an exported script
ACCELERATE, DEEPSPEED, FSDP, ARGUMENTS = "accelerate", "deepspeed", "fsdp", "training-args"
FILE_NAMES = {
    ARGUMENTS: "training_args.json",
    ACCELERATE: "accelerate.yaml",
    FSDP: "fsdp.json",
    DEEPSPEED: "deepspeed.json",
}

# A name that few of a user's own files have, by which an earlier export is known; others have a line that says so.
MARKS = {ARGUMENTS: "dataloader_persistent_workers", FSDP: "reshard_after", DEEPSPEED: "zero_allow_untested_optimizer"}

# Defaults of TrainingArguments (transformers 5.17 to 5.23) for the hyperparameters.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
}  # fmt: skip

_EXPANDABLE = "expandable_segments:True"

# Stands for the address of one of several machines, in commands that each of them runs.
_FIRST = "FIRST_MACHINE"

# Knobs that are no TrainingArguments, and the code that sets them.
_IN_CODE = {
    "attn_implementation": "model.set_attn_implementation({value!r})",
    "experts_implementation": "model.set_experts_implementation({value!r})",
    "adapter": "peft's {value}",
    "quantization": "base weights in {value}",
    "experts_per_token": "{value} experts per token",
    "expert_capacity": "an expert capacity of {value}",
    "packing": "packed micro-batches",
    "pad_to_multiple_of": "pad_to_multiple_of={value} of the data collator",
    "chunked_loss": "result.prepare_model(model), which has its loss worked out in chunks",
    "activation_memory_budget": "torch._functorch.config.activation_memory_budget = {value}",
    "expandable_segments": f"{ALLOCATOR_VARIABLE}={_EXPANDABLE} in the environment",
}


def launch_commands(result: ResultData, answer: str = ANSWER_FILE) -> tuple[str, ...]:
    """Return the command lines that train with the answer in the file, the best first; none for a Trainer or loop."""
    code, config = result.workload.own_code, result.best.config
    if result.workload.own_step is not None or (code is not None and not code.command):
        return ()
    applied = "" if code is None else f"autotune script --apply {shlex.quote(answer)} -- {code.command_line}"
    if config.parallelism.is_single:
        return (f"{_variables(result)}{applied or f'python {SCRIPT}'}",)
    nodes, each = result.hardware.nodes_of(config.parallelism.world_size)
    what = f"--no-python {applied}" if applied else SCRIPT
    where = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint {_FIRST}:29500"
    torchrun = f"{_rank_variables(result)} torchrun {where} --nproc_per_node {each} {what}"
    return (torchrun,) if applied or _launcher_starts_one(result) else (torchrun, accelerate_command(result))


def on_each_machine(result: ResultData) -> str:
    nodes, _ = result.hardware.nodes_of(result.best.config.parallelism.world_size)
    return f" on each of {nodes} machines" * (nodes > 1)


def accelerate_command(result: ResultData) -> str:
    """Return the command line of accelerate's launcher, which starts a single process too."""
    nodes, _ = result.hardware.nodes_of(result.best.config.parallelism.world_size)
    where = f"--machine_rank NUMBER --main_process_ip {_FIRST} --main_process_port 29500 " * (nodes > 1)
    return f"{_rank_variables(result)} accelerate launch --config_file {FILE_NAMES[ACCELERATE]} {where}{SCRIPT}"


def environment(config: TrainConfig) -> dict[str, str]:
    return ({ALLOCATOR_VARIABLE: _EXPANDABLE} if config.expandable_segments else {}) | parallel_variables(config)


def _variables(result: ResultData) -> str:
    """Return the assignments with which a command line begins: the GPUs that were measured, the answer's variables."""
    config, hardware, chosen = result.best.config, result.hardware, ""
    (nodes, each), seen = hardware.nodes_of(config.parallelism.world_size), hardware.visible
    is_some = seen is not None or hardware.peers is not None  # of the machine's devices
    if hardware.kind == "cuda" and nodes == 1 and (is_some or config.parallelism.is_single):
        like_it = hardware.peers if hardware.peers is not None else [f"cuda:{number}" for number in range(1, each)]
        gpus = [device.removeprefix("cuda:") for device in (hardware.device, *like_it)][:each]
        names = ",".join(gpus if seen is None else [seen[int(gpu)] for gpu in gpus])
        # Training takes the first that it sees. A scheduler's choice stays, unless in it others came first.
        stays = seen is None or gpus == [str(number) for number in range(each)]
        chosen = f"CUDA_VISIBLE_DEVICES={f'${{CUDA_VISIBLE_DEVICES:-{names}}}' if stays else names} "
        chosen = "CUDA_DEVICE_ORDER=PCI_BUS_ID " * (hardware.peers is not None) + chosen  # as NVML counts
    return chosen + "".join(f"{name}={value} " for name, value in environment(config).items())


def _rank_variables(result: ResultData) -> str:
    """Return the answer's variables, and after them each rank's share of the cores; launchers set 1."""
    _, each = result.hardware.nodes_of(result.best.config.parallelism.world_size)
    return f"{_variables(result)}OMP_NUM_THREADS={max(1, result.hardware.cores // each)}"


def _launcher_starts_one(result: ResultData) -> bool:
    """Return whether `accelerate launch` would start one process where there are to be several."""
    spread = result.best.config.parallelism
    return result.hardware.is_cpu and spread.world_size > 1 and spread.sharding not in ZERO_STAGES


def text_of(name: str, result: ResultData) -> str:
    arguments = result.arguments.training_arguments
    if name == ACCELERATE:
        if result.workload.own_code is None:
            return f"# The training as autotune measured it, by accelerate\n{yaml.safe_dump(_accelerate(result))}"
        why = "your own code trains by its TrainingArguments, not by this file"
        raise InputError(f"{name}: {why}; use --to {ARGUMENTS}")
    document = {ARGUMENTS: arguments, FSDP: arguments.get("fsdp_config"), DEEPSPEED: _deepspeed(result)}[name]
    if document is None:
        sharding = result.best.config.parallelism.sharding
        raise InputError(f"{name}: the configuration doesn't use it{f' ({sharding})' * (sharding != 'none')}")
    return json.dumps(document, indent=2) + "\n"


def _deepspeed(result: ResultData) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration with every 'auto' filled in as the Trainer would; None without DeepSpeed."""
    config, workload, arguments = result.best.config, result.workload, result.arguments.training_arguments
    if "deepspeed" not in arguments:
        return None
    zero = dict(arguments["deepspeed"]["zero_optimization"])
    names = ("hidden_size", "d_model", "n_embd", "dim")  # of a width in configs, those of `attribute_map` included
    width = next((workload.model.config[name] for name in names if name in workload.model.config), None)
    if zero["stage"] == 3 and isinstance(width, int):
        zero["stage3_prefetch_bucket_size"] = int(0.9 * width * width)  # `trainer_config_finalize` in transformers
        zero["stage3_param_persistence_threshold"] = 10 * width
    return {
        **arguments["deepspeed"],
        # The Trainer refuses another number than its own, which counts the ranks that share a sample one by one.
        "train_batch_size": workload.samples_per_step(config) if not parallel_variables(config) else "auto",
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size,
        "gradient_accumulation_steps": workload.accumulation_steps(config),
        "gradient_clipping": float(arguments.get("max_grad_norm", DEFAULTS["max_grad_norm"])),
        "zero_optimization": zero,
    }


def _accelerate(result: ResultData) -> dict[str, Any]:
    if _launcher_starts_one(result):
        why = "on a CPU its launcher starts one process whatever its file says; torchrun starts them all"
        raise InputError(f"{ACCELERATE}: {why}")
    config, arguments = result.best.config, result.arguments.training_arguments
    spread = config.parallelism
    document: dict[str, Any] = {
        "distributed_type": "MULTI_GPU" if spread.world_size > 1 else "NO",
        "mixed_precision": config.mixed_precision,
        "num_machines": result.hardware.nodes_of(spread.world_size)[0],
        "num_processes": spread.world_size,
        "same_network": True,
        "use_cpu": result.hardware.is_cpu and spread.sharding not in ZERO_STAGES,
    }
    if "fsdp_config" in arguments:
        # The defaults of TrainingArguments, and over them the measured settings.
        settings: dict[str, Any] = {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": False}
        settings |= {"cpu_offload": False, "activation_checkpointing": False, **arguments["fsdp_config"]}
        by_accelerates_names = {f"fsdp_{'offload_params' if n == 'cpu_offload' else n}": v for n, v in settings.items()}
        document |= {"distributed_type": "FSDP", "fsdp_config": by_accelerates_names}
    if "deepspeed" in arguments:
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


def user_launch(result: ResultData, answer: str) -> list[str]:
    """Return lines that say how the user's own code trains with the answer in the file `answer`; none without code."""
    code = result.workload.own_code
    if code is None:
        return []
    if not code.command:
        return ["train with it: result.training_arguments(output_dir) for the Trainer, result.prepare_model(model)"]
    words, missing = flags(result)
    given, gain = shlex.join(words), gain_of_flags(result)
    left_out = f" (which leave out: {'; '.join(missing)}{'; ' * bool(gain)}{gain})" if missing else ""
    train = f"train with it{on_each_machine(result)}: {launch_commands(result, answer)[0]}"
    if not given and not missing:
        return [train]
    as_flags = f"as flags of the script, if it reads TrainingArguments from its command line: {given or 'none'}"
    return [train, as_flags + left_out]


def flags(result: ResultData) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the answer's changes to the code's own arguments as flags for HfArgumentParser, and the rest in words."""
    code = result.workload.own_code
    assert code is not None
    mapping = training_plan(result.best.config, result.workload, result.hardware)
    left_out = {"use_cpu", "dataloader_pin_memory"}  # the device decides these
    if result.hardware.is_cpu and result.best.config.mixed_precision == "bf16":
        left_out.remove("use_cpu")  # without it transformers refuses bf16 where there is no GPU
    older = {"gradient_checkpointing", "gradient_checkpointing_kwargs"}
    if _switches_off(result):
        left_out |= older | {"activation_checkpointing", "activation_checkpointing_kwargs"}
    elif "activation_checkpointing" in code.arguments:
        left_out |= older
    usual = {"use_reentrant": False}  # arguments of checkpointing where transformers is given none (5.17 to 5.23)
    soaked = result.soaked.arguments if result.soaked is not None else {}
    given, missing = [], []
    for name, value in {**mapping.overrides(result.workload), **soaked}.items():
        before = code.arguments.get(name)
        if name in left_out or value == before or (value, before) == (usual, None):
            continue
        if value is None:  # the code's own has to go
            missing.append(f"without --{name}")
        else:
            shown = json.dumps(value) if isinstance(value, dict) else str(value)
            given += ["--fsdp"] if (name, value) == ("fsdp", True) else [f"--{name}", shown]  # which takes no True
    return tuple(given), (*missing, *in_code(result))


def in_code(result: ResultData) -> tuple[str, ...]:
    code, config = result.workload.own_code, result.best.config
    found = {c.knob: "bfloat16" if c.knob == "precision" else c.after for c in result.best.changes if needs_code(c)}
    if code is None and result.workload.own_step is None:  # nobody knows whether the script does as the baseline
        usual = dict(TrainConfig(per_device_train_batch_size=1))
        kernels = (*result.facts.attn_implementations[:1], *result.facts.experts_implementations[:1])
        told = ((n, v) for n, v in config if n in _IN_CODE and v not in (usual[n], None, *kernels))
        found |= {name: getattr(value, "shown", str(value)) for name, value in told}
        found["precision"] = f"{result.arguments.model['dtype']} (dtype of from_pretrained)"
    lines = [_IN_CODE.get(knob, "weights in {value}").format(value=value) for knob, value in found.items()]
    if config.precision is Precision.FP8:
        lines.append("result.prepare_model(model), whose linear layers multiply in fp8")
    if _switches_off(result):
        lines.append("model.gradient_checkpointing_disable()")
    steps = result.workload.accumulation_steps
    # Whether a script that accumulates as the baseline does has its loss right already.
    known = () if code is None else (steps(result.baseline.config),)
    accumulates_otherwise = steps(config) not in (1, *known)
    counting = (Task.CAUSAL_LM, Task.IMAGE_TEXT_TO_TEXT)  # tasks whose heads take the count of a step's labels
    counts_labels = result.workload.recipe is not None or result.workload.task in counting
    if (not counts_labels if code is None else code.normalizes) and accumulates_otherwise:
        lines.append("autotune.normalize_loss(model), since it accumulates")
    lines += [f"{name}={value!r}, of your loop" for name, value in config.own.model_dump().items()]
    return tuple(lines)


def needs_code(change: Change) -> bool:
    return change.knob in _IN_CODE or (change.knob == "precision" and change.after in ("pure_bf16", "fp8"))


def gain_of_flags(result: ResultData) -> str:
    """Return how much of the answer's speed its flags have without the code; '' if they have all of it."""
    best, base = result.best.config, result.baseline.config
    knobs = [change.knob for change in result.best.changes if needs_code(change)]
    knobs += ["checkpointing"] * _switches_off(result)
    alone = best.model_copy(update={knob: getattr(base, knob) for knob in knobs})
    if alone == best:
        return ""
    if alone == base:
        return "without it nothing of the gain is left"
    rates = {row.config: row.config_samples_per_second for row in result.trials}
    whole, part, usual = rates.get(best), rates.get(alone), rates.get(base)
    if whole is None or part is None or usual is None:
        return "how fast the flags alone are was not measured"
    ratio = whole / usual if result.speedup is None else result.speedup.ratio
    return f"the flags alone have {ratio * part / whole:.2f} of its {ratio:.2f} times the baseline's speed"


def _switches_off(result: ResultData) -> bool:
    """Return whether checkpointing has to be switched off that the user's code switches on beside its arguments."""
    code = result.workload.own_code
    return code is not None and code.checkpoints and result.best.config.checkpointing == "none"
