"""A training script with a loop of its own, which takes the step of the Trainer with accelerate.

Its optimizers are those of `trainer_optimizer.py` in transformers 5.23; a test compares each with what the Trainer has.
Optimizers that project gradients, step inside the backward pass or schedule themselves are more than a class with
arguments: :data:`STAND_IN` takes their place, and the script says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autotune.errors import InputError
from autotune.exports import scripts
from autotune.exports.launch_files import mixed_precision
from autotune.exports.scripts import Code, literal, rendered
from autotune.exports.winner import Draft, Winner, lost_arguments
from autotune.training.arguments import effective_tf32
from autotune.values.techniques import OPTIMIZERS

LOOP = "accelerate_loop.py"

# In place of an optimizer that a loop can't make.
STAND_IN = "adamw_torch_fused"


def accelerate_loop(winner: Winner) -> Draft:
    """Return a script with a loop of its own.

    Raises:
        InputError: The training is sharded, which libraries do and not a loop.
    """
    spread = winner.config.parallelism
    if spread.sharding != "none" or spread.tensor_parallel > 1:
        how = spread.sharding if spread.sharding != "none" else "a model in parts"
        raise InputError(f"accelerate-loop: {how} was measured with the Trainer, not in a loop; use --to python")
    config, arguments, of = winner.config, winner.arguments, winner.hyperparameter
    said = {"seed", "lr_scheduler_kwargs", "optim_args", *scripts.user_steps(winner)}
    said |= {"liger_kernel_config"} if config.use_liger_kernel else set()
    said |= {"ddp_find_unused_parameters"} if spread.world_size > 1 else set()
    lost = lost_arguments(winner, said)
    if config.optim in NAMES and "optim_args" not in arguments:
        optimizer = loop_optimizer(config.optim, of)
    else:
        given = f" with {arguments['optim_args']}" if arguments.get("optim_args") else ""
        lost.append(f"optimizer {config.optim}{given}: it is more than a class to call; {STAND_IN} in its place")
        optimizer = loop_optimizer(STAND_IN, of)
    warmup, ddp, compiled = of("warmup_steps"), _ddp(winner), Code("")
    if config.torch_compile_backend is not None:
        mode = f", mode={literal(config.torch_compile_mode)}" if config.torch_compile_mode is not None else ""
        compiled = Code(f"backend={literal(config.torch_compile_backend)}{mode}")
    classes = ["Accelerator"] + ["DistributedDataParallelKwargs"] * bool(ddp)
    utilities = ["GradientAccumulationPlugin"] + ["TorchDynamoPlugin"] * bool(compiled) + ["set_seed"]
    context = {
        **scripts.context(winner, LOOP),
        "accelerate_imports": Code(", ".join(classes)),
        "accelerate_utilities": Code(", ".join(utilities)),
        "tf32": effective_tf32(config, winner.result.hardware),
        "mixed_precision": mixed_precision(config),
        "compile": compiled,
        "ddp": ddp,
        "checkpointing": _checkpointing(winner),
        "liger_config": arguments.get("liger_kernel_config"),
        "scheduler_arguments": arguments.get("lr_scheduler_kwargs"),
        "warmup_share": 0 < warmup < 1,
        "warmup": Code(f"math.ceil({literal(warmup)} * options.steps)") if 0 < warmup < 1 else int(warmup),
        "optimizer": optimizer,
        "lost": lost,
        "weighs": False,
        "count_by_loss_type": False,  # it is the Trainer that counts labels by it
    }
    return Draft({LOOP: rendered("accelerate_loop.py.j2", context)}, scripts.launch(winner, LOOP), tuple(lost))


def _ddp(winner: Winner) -> Code:
    """Return what the Trainer tells DDP (`_build_accelerator_args`); nothing for one process."""
    config, arguments = winner.config, winner.arguments
    if config.parallelism.world_size == 1:
        return Code("")
    looks = config.checkpointing == "none" or winner.peft_arguments is not None
    options = {"find_unused_parameters": arguments.get("ddp_find_unused_parameters", looks)}
    for name in ("bucket_cap_mb", "static_graph"):
        if f"ddp_{name}" in arguments:
            options[name] = arguments[f"ddp_{name}"]
    return Code(", ".join(f"{name}={literal(value)}" for name, value in options.items()))


def _checkpointing(winner: Winner) -> Code:
    """Return the call that switches checkpointing on, with the Trainer's arguments; empty without."""
    if winner.config.checkpointing == "none":
        return Code("")
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in winner.arguments)
    options = dict(winner.arguments[f"{name}_kwargs"])
    own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    more = "".join(f", {key}={literal(value)}" for key, value in own.items())
    return Code(f"{name}_enable({literal(options)}{more})")


class LoopOptimizer(NamedTuple):
    """An optimizer in a loop."""

    module: str
    name: str
    arguments: dict[str, Any]  # without the parameters

    @property
    def is_8bit(self) -> bool:
        """Whether bitsandbytes keeps its states in 8 bits; those of embeddings stay in 32."""
        return self.arguments.get("optim_bits") == 8


# Optimizers that are a class with arguments.
NAMES = tuple(
    name
    for name, facts in OPTIMIZERS.items()
    if facts.class_name.startswith(("torch.optim.", "bitsandbytes.", "torchao.", "transformers.optimization."))
)

# Arguments of a library's classes that the Trainer gives them beside hyperparameters.
_OWN: dict[str, dict[str, Any]] = {
    "transformers": {"scale_parameter": False, "relative_step": False},
    "torchao": {"block_size": 256, "bf16_stochastic_round": False},
}


def loop_optimizer(name: str, of: Callable[[str], Any]) -> LoopOptimizer:
    """Return one of `NAMES`; `of` gives a hyperparameter by its name in TrainingArguments."""
    facts = OPTIMIZERS[name]
    library, *_, class_name = facts.class_name.split(".")
    betas = (of("adam_beta1"), of("adam_beta2"))
    arguments = {"lr": of("learning_rate")}
    if class_name.startswith("AdamW"):
        arguments |= {"betas": betas, "eps": of("adam_epsilon")}
    elif class_name == "AdEMAMix":
        arguments |= {"betas": (*betas, 0.9999), "alpha": 5.0, "eps": of("adam_epsilon")}
    elif class_name == "Lion":
        arguments |= {"betas": betas}
    arguments |= {**_OWN.get(library, {}), **{key: value for key, value in facts.attributes if value is not None}}
    if library == "bitsandbytes" and class_name != "RMSprop":  # which has no such argument
        arguments.setdefault("is_paged", False)
    return LoopOptimizer("transformers" if library == "transformers" else f"{library}.optim", class_name, arguments)
