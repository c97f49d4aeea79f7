"""Training scripts of an answer: a plain Trainer, a plain loop with accelerate, TRL's SFTTrainer.

Each is a Jinja template that reads as the script it makes; here its values are put together. The scripts need neither
autotune nor a file beside them.
"""

from __future__ import annotations

from typing import Any

from autotune.errors import InputError
from autotune.exports import launch_files
from autotune.exports.draft import Draft
from autotune.exports.loop_optimizers import STAND_IN, loop_optimizer, made
from autotune.exports.stand_ins import stand_ins
from autotune.exports.templating import Code, literal, rendered
from autotune.exports.winner import EVALUATING, Winner, lost_arguments
from autotune.training.arguments import effective_tf32, transformers_version
from autotune.training.peft_arguments import CLASSIFICATION_HEADS
from autotune.values.model import Task

TRAIN, LOOP, TRL = "train.py", "accelerate_loop.py", "train_trl.py"

# What SFTConfig decides otherwise than TrainingArguments, or adds to it, as it was measured (TRL 1.16: trainer/
# base_config.py, sft_config.py). Of checkpointing and bf16 the measured arguments say whether they are on.
SFT_DEFAULTS: dict[str, Any] = {"learning_rate": 5e-5, "logging_steps": 500, "packing": False, "loss_type": "nll"}

# Steps of a run, unless the user has said how many.
_STEPS = 100

# Names to import that take no more are left on one line.
_IMPORTS_WIDTH = 96


def python(winner: Winner) -> Draft:
    """Return a script with a plain Trainer."""
    told, lost = _told(winner)
    context = {**_shared(winner, TRAIN), "training_arguments": told, "lost": lost}
    return Draft({TRAIN: rendered("train.py.j2", context)}, _launch(winner, TRAIN), tuple(lost))


def _told(winner: Winner) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that a script's Trainer is told, and what of the user's own it isn't."""
    told = {name: value for name, value in winner.arguments.items() if name not in EVALUATING}
    for name in ("num_train_epochs", "max_steps"):  # the script trains for `--steps`
        told.pop(name, None)
    return told, lost_arguments(winner, {"seed", *told, *_steps(winner)})


def _steps(winner: Winner) -> dict[str, int]:
    """Return the user's own number of steps, if a script can be told it: the first one isn't timed."""
    steps = winner.own_arguments.get("max_steps")
    return {"max_steps": steps} if isinstance(steps, int) and steps > 1 else {}


def trl(winner: Winner) -> Draft:
    """Return a script with TRL's SFTTrainer.

    Raises:
        InputError: It is no causal language model that is trained.
    """
    if winner.workload.task is not Task.CAUSAL_LM:
        raise InputError(f"trl: SFTTrainer trains causal-lm, not {winner.workload.task}; --to python writes a Trainer")
    told, lost = _told(winner)
    arguments = {
        **SFT_DEFAULTS,
        "max_length": winner.workload.sequence_length,
        "padding_free": winner.config.packing,
        **told,
    }
    context = {**_shared(winner, TRL), "training_arguments": arguments, "weighs": False, "lost": lost}
    return Draft({TRL: rendered("train_trl.py.j2", context)}, _launch(winner, TRL), tuple(lost))


def accelerate_loop(winner: Winner) -> Draft:
    """Return a script with a loop of its own.

    Raises:
        InputError: The training is sharded, which is a matter of libraries and not of a loop.
    """
    spread = winner.config.parallelism
    if spread.sharding != "none" or spread.tensor_parallel > 1 or spread.pipeline_parallel > 1:
        how = spread.sharding if spread.sharding != "none" else "a model in parts"
        raise InputError(f"accelerate-loop: {how} was measured with the Trainer, not in a loop; use --to python")
    lost = lost_arguments(winner, {"seed", *_steps(winner), *_done_in_loop(winner)})
    optimizer = loop_optimizer(winner)
    if optimizer is None:
        lost.append(f"optimizer {_optimizer_words(winner)}: it is more than a class to call; {STAND_IN} in its place")
        optimizer = made(STAND_IN, winner.hyperparameter)
    context = {**_shared(winner, LOOP), **_loop(winner), "optimizer": optimizer, "lost": lost, "weighs": False}
    context["count_by_loss_type"] = False  # the Trainer's
    return Draft({LOOP: rendered("accelerate_loop.py.j2", context)}, _launch(winner, LOOP), tuple(lost))


def _done_in_loop(winner: Winner) -> list[str]:
    """Return the names of the user's own arguments that a plain loop does too, or that a line tells beside the rest."""
    done = {
        "lr_scheduler_kwargs": True,
        "optim_args": True,  # in the optimizer's line
        "liger_kernel_config": winner.config.use_liger_kernel,
        "ddp_find_unused_parameters": winner.config.parallelism.world_size > 1,
    }
    return [name for name, is_done in done.items() if is_done]


def _optimizer_words(winner: Winner) -> str:
    own = winner.arguments.get("optim_args")
    return winner.config.optim + (f" with {own}" if own else "")


def _launch(winner: Winner, script: str) -> tuple[str, ...]:
    """Return the command that runs a script: torchrun's, or the plain one, which must see one device alone."""
    command = launch_files.launch_commands(winner.result)[0].replace(launch_files.SCRIPT, script)
    plain = command.startswith("python ") and not winner.result.hardware.is_cpu
    return (f"CUDA_VISIBLE_DEVICES=0 {command}" if plain else command,)


def _shared(winner: Winner, script: str) -> dict[str, Any]:
    """Return what every script needs."""
    workload, config = winner.workload, winner.config
    return {
        "title": workload.model.name,
        "promise": winner.promise,
        "launch": f"{_launch(winner, script)[0]} --steps {_steps(winner).get('max_steps', _STEPS)}",
        "lost": [],
        "steps": _steps(winner).get("max_steps", _STEPS),
        "reference": winner.reference,
        "head": _head(workload.task),
        "model_arguments": _model_arguments(winner),
        "quantization": winner.result.arguments.quantization,
        "peft": winner.peft_arguments,
        "trains_biases": winner.trains_biases,
        "heads": CLASSIFICATION_HEADS,
        "decoder_prefix": workload.task is Task.SEQ2SEQ_LM and bool(config.adapter and config.adapter.prompt_length),
        "needs_padding_id": workload.task is Task.SEQUENCE_CLASSIFICATION and workload.model.kind == "decoder",
        "count_by_loss_type": workload.task is Task.CAUSAL_LM,
        "shifts_labels": winner.shifts_labels,
        "sums_its_loss": winner.sums_its_loss,
        "weighs": winner.samples_per_step > config.per_device_train_batch_size,
        "tensor_parallel": config.parallelism.tensor_parallel > 1,
        "samples_per_step": winner.samples_per_step,
        "measured": None if winner.measured is None else round(winner.measured, 3),
        "imports": _imports(winner),
        **_collator(winner),
        **stand_ins(winner)._asdict(),
    }


def _head(task: Task) -> str:
    from autotune.training.facts import HEADS

    return HEADS[task][0]


def _model_arguments(winner: Winner) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`: the measured ones, and what makes it the same model."""
    spec = winner.workload.model
    own: dict[str, Any] = dict(winner.result.arguments.model)
    if spec.revision is not None and spec.source != "directory":
        own["revision"] = spec.revision
    if spec.trust_remote_code:
        own["trust_remote_code"] = True
    if winner.workload.task is Task.CAUSAL_LM and spec.kind == "encoder":
        own["is_decoder"] = True
    return own


def _imports(winner: Winner) -> Any:
    """Return a function that lists what to import from transformers, with bitsandbytes' config where it is used."""
    packed = ("BitsAndBytesConfig",) if winner.result.arguments.quantization is not None else ()

    def listed(*names: str) -> Code:
        wanted = sorted({name for name in (*names, *packed) if name}, key=lambda name: (name[0].islower(), name))
        line = ", ".join(wanted)
        return Code(line if len(line) <= _IMPORTS_WIDTH else "(\n" + "".join(f"    {n},\n" for n in wanted) + ")")

    return listed


def _collator(winner: Winner) -> dict[str, str | Code]:
    """Return the collator's class, how it is made, and what the user has to know of it."""
    if winner.config.packing:
        name, about = "DataCollatorWithFlattening", "puts the samples of a micro-batch into one row, as was measured"
        return {"collator": name, "collate": Code(f"{name}()"), "about_collator": about}
    padding = {
        Task.CAUSAL_LM: "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
        Task.MASKED_LM: "DataCollatorForLanguageModeling(tokenizer)",
        Task.SEQ2SEQ_LM: "DataCollatorForSeq2Seq(tokenizer, model)",
        Task.SEQUENCE_CLASSIFICATION: "DataCollatorWithPadding(tokenizer)",
    }.get(winner.workload.task)
    about = f"for samples of one length; others need {padding}" if padding else "for samples of one size"
    return {"collator": "default_data_collator", "collate": Code("default_data_collator"), "about_collator": about}


def _loop(winner: Winner) -> dict[str, Any]:
    """Return what a loop does that the Trainer reads off its arguments."""
    config, arguments = winner.config, winner.arguments
    warmup = winner.hyperparameter("warmup_steps")
    ddp, compiled = _ddp(winner), _compile(winner)
    classes = ["Accelerator"] + ["DistributedDataParallelKwargs"] * bool(ddp)
    utilities = ["GradientAccumulationPlugin"] + ["TorchDynamoPlugin"] * bool(compiled) + ["set_seed"]
    return {
        "accelerate_imports": Code(", ".join(classes)),
        "accelerate_utilities": Code(", ".join(utilities)),
        "is_cpu": winner.result.hardware.is_cpu,
        "seed": arguments["seed"],
        "tf32": effective_tf32(config, winner.result.hardware),
        "mixed_precision": winner.mixed_precision,
        "compile": compiled,
        "ddp": ddp,
        "liger": config.use_liger_kernel,
        "liger_config": arguments.get("liger_kernel_config"),
        "checkpointing": _checkpointing(winner),
        "micro_batch": config.per_device_train_batch_size,
        "accumulation": winner.accumulation,
        "weight_decay": winner.hyperparameter("weight_decay"),
        "max_grad_norm": winner.hyperparameter("max_grad_norm"),
        "scheduler": winner.hyperparameter("lr_scheduler_type"),
        "scheduler_arguments": arguments.get("lr_scheduler_kwargs"),
        "warmup_share": 0 < warmup < 1,
        "warmup": Code(f"math.ceil({literal(warmup)} * options.steps)") if 0 < warmup < 1 else int(warmup),
        "by_length": config.train_sampling_strategy == "group_by_length",
        "shuffle": config.train_sampling_strategy == "random",
        "pin_memory": config.dataloader_pin_memory,
        "workers": config.dataloader_num_workers,
        "prefetch": config.dataloader_prefetch_factor,
    }


def _compile(winner: Winner) -> Code:
    config = winner.config
    if config.torch_compile_backend is None:
        return Code("")
    mode = f", mode={literal(config.torch_compile_mode)}" if config.torch_compile_mode is not None else ""
    return Code(f"backend={literal(config.torch_compile_backend)}{mode}")


def _ddp(winner: Winner) -> Code:
    """Return what the Trainer tells DDP (`_build_accelerator_args`); nothing for one process."""
    config, arguments = winner.config, winner.arguments
    if config.parallelism.world_size == 1:
        return Code("")
    looks = config.checkpointing == "none" or winner.peft_arguments is not None
    told = {"find_unused_parameters": arguments.get("ddp_find_unused_parameters", looks)}
    told |= {own: arguments[f"ddp_{own}"] for own in ("bucket_cap_mb", "static_graph") if f"ddp_{own}" in arguments}
    return Code(", ".join(f"{name}={literal(value)}" for name, value in told.items()))


def _checkpointing(winner: Winner) -> Code:
    """Return the call that switches checkpointing on, as the Trainer calls it; empty without."""
    if winner.config.checkpointing == "none":
        return Code("")
    version = transformers_version(winner.result.hardware)
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in winner.arguments)
    options = dict(winner.arguments[f"{name}_kwargs"])
    own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    told = "".join(f", {key}={literal(value)}" for key, value in own.items())
    assert version >= (5, 23) or not own, "older versions have no such kinds"
    return Code(f"{name}_enable({literal(options)}{told})")
