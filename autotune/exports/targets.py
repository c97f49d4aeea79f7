"""The targets of an export: one table, what is done with all of them alike, and the lines of a shell that train.

A target is a function from the answer to a :class:`Draft`. What it can't express of the answer is listed in its files
and in the draft; an answer that it can't train at all is refused. The script with a loop of its own takes the step of
the Trainer with accelerate, whose optimizers a test compares with the Trainer's; those that are more than a class with
arguments are replaced (:data:`STAND_IN`), and the script says so.
"""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from autotune.errors import InputError, suggestion
from autotune.exports import launch_files, scripts
from autotune.exports.scripts import Code, Draft, hyperparameter, literal, lost_arguments
from autotune.training.adapters import BITFIT
from autotune.training.arguments import ZERO_STAGES, effective_tf32
from autotune.value import check_savable, save_bytes
from autotune.values.config import OF_DDP
from autotune.values.result import ANSWER_FILE, ResultData
from autotune.values.techniques import OPTIMIZERS

ALL = "all"

# In place of an optimizer that a loop can't make.
STAND_IN = "adamw_torch_fused"


def accelerate_loop(result: ResultData) -> Draft:
    spread = result.best.config.parallelism
    if spread.sharding != "none" or spread.tensor_parallel > 1:
        how = spread.sharding if spread.sharding != "none" else "a model in parts"
        raise InputError(f"accelerate-loop: {how} was measured with the Trainer, not in a loop; use --to python")
    config, arguments, of = result.best.config, result.arguments.training_arguments, partial(hyperparameter, result)
    said = {"seed", "lr_scheduler_kwargs", "optim_args", "logging_nan_inf_filter", *scripts.user_steps(result)}
    said |= {"liger_kernel_config"} if config.use_liger_kernel else set()
    of_ddp = (*OF_DDP, "ddp_static_graph") if spread.world_size > 1 else ()
    lost = lost_arguments(result, said.union(of_ddp))
    if config.optim in NAMES and "optim_args" not in arguments:
        optimizer = loop_optimizer(config.optim, of)
    else:
        given = f" with {arguments['optim_args']}" if arguments.get("optim_args") else ""
        lost.append(f"optimizer {config.optim}{given}: it is more than a class to call; {STAND_IN} in its place")
        optimizer = loop_optimizer(STAND_IN, of)
    warmup, ddp, compiled, checkpointing = of("warmup_steps"), Code(""), Code(""), Code("")
    if spread.world_size > 1:  # what the Trainer tells DDP (`_build_accelerator_args`)
        adapter = result.arguments.adapter
        looks = config.checkpointing == "none" or (adapter is not None and adapter.get("peft_type") != BITFIT)
        options = {"ddp_find_unused_parameters": looks} | {n: arguments[n] for n in of_ddp if n in arguments}
        ddp = Code(", ".join(f"{name.removeprefix('ddp_')}={literal(value)}" for name, value in options.items()))
    if config.checkpointing != "none":  # the call that switches it on, with the Trainer's arguments
        name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in arguments)
        options = dict(arguments[f"{name}_kwargs"])
        own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
        more = "".join(f", {key}={literal(value)}" for key, value in own.items())
        checkpointing = Code(f"{name}_enable({literal(options)}{more})")
    if config.torch_compile_backend is not None:
        mode = f", mode={literal(config.torch_compile_mode)}" if config.torch_compile_mode is not None else ""
        compiled = Code(f"backend={literal(config.torch_compile_backend)}{mode}")
    is_share = 0 < warmup < 1
    return scripts.script(
        result, "accelerate_loop.py", "accelerate_loop.py.j2", lost,
        tf32=effective_tf32(config, result.hardware), mixed_precision=config.mixed_precision, compile=compiled,
        ddp=ddp, checkpointing=checkpointing, optimizer=optimizer, warmup_share=is_share,
        warmup=Code(f"math.ceil({literal(warmup)} * options.steps)") if is_share else int(warmup),
        weighs=False, count_by_loss_type=False,  # it is the Trainer that counts labels by it
    )  # fmt: skip


class LoopOptimizer(NamedTuple):
    """The class that a loop makes its optimizer of, and its arguments beside the parameters."""

    module: str
    name: str
    arguments: dict[str, Any]

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


def loop_optimizer(name: str, of: Callable[[str], Any]) -> LoopOptimizer:
    """Return one of `NAMES`; `of` gives a hyperparameter by its name in TrainingArguments."""
    facts = OPTIMIZERS[name]
    library, *_, class_name = facts.class_name.split(".")
    betas = (of("adam_beta1"), of("adam_beta2"))
    arguments: dict[str, Any] = {"lr": of("learning_rate")}
    if class_name.startswith("AdamW"):
        arguments |= {"betas": betas, "eps": of("adam_epsilon")}
    elif class_name == "AdEMAMix":
        arguments |= {"betas": (*betas, 0.9999), "alpha": 5.0, "eps": of("adam_epsilon")}
    elif class_name == "Lion":
        arguments |= {"betas": betas}
    # The Trainer gives a library's classes arguments beside hyperparameters.
    arguments |= {"scale_parameter": False, "relative_step": False} if library == "transformers" else {}
    arguments |= {"block_size": 256, "bf16_stochastic_round": False} if library == "torchao" else {}
    arguments |= {key: value for key, value in facts.attributes if value is not None}
    if library == "bitsandbytes" and class_name != "RMSprop":  # which has no such argument
        arguments.setdefault("is_paged", False)
    return LoopOptimizer("transformers" if library == "transformers" else f"{library}.optim", class_name, arguments)


class Exported(NamedTuple):
    """The files written for a target."""

    paths: tuple[Path, ...]
    launch: tuple[str, ...]  # command lines, the preferred one first
    not_expressed: tuple[str, ...]  # what the target can't express of the answer, a line each


def _launch_file(name: str, result: ResultData) -> Draft:
    launch = (launch_files.accelerate_command(result),) if name == launch_files.ACCELERATE else ()
    lost = launch_files.in_code(result) if name == launch_files.ARGUMENTS else ()
    if lost and result.workload.own_code is not None and (gain := launch_files.gain_of_flags(result)):
        lost = (*lost, gain)
    if name == launch_files.ACCELERATE and result.best.config.parallelism.sharding in ZERO_STAGES:
        lost = (f"{launch_files.FILE_NAMES[launch_files.DEEPSPEED]}, which it names: --to deepspeed writes it",)
    return Draft(launch_files.FILE_NAMES[name], launch_files.text_of(name, result), launch, lost)


TARGETS: dict[str, Callable[[ResultData], Draft]] = {
    launch_files.ARGUMENTS: partial(_launch_file, launch_files.ARGUMENTS),
    "python": scripts.trainer,
    launch_files.ACCELERATE: partial(_launch_file, launch_files.ACCELERATE),
    "accelerate-loop": accelerate_loop,
    launch_files.DEEPSPEED: partial(_launch_file, launch_files.DEEPSPEED),
    launch_files.FSDP: partial(_launch_file, launch_files.FSDP),
    "trl": scripts.trl,
}


def draft(result: ResultData, target: str, answer: str = ANSWER_FILE) -> Draft:
    """Return the file of a target, without writing it, and command lines that name the file `answer`."""
    if target not in TARGETS:
        known = (*TARGETS, ALL)
        raise InputError(f"{target}: expected {', '.join(known[:-1])} or {ALL}{suggestion(target, known)}")
    if result.workload.is_users_own and target not in launch_files.FILE_NAMES:
        commands = launch_files.launch_commands(result, answer)
        way = f"it trains by: {commands[0]}" if commands else f"--to {launch_files.ARGUMENTS} writes its arguments"
        raise InputError(f"{target}: your own code makes the model, which no exported file can; {way}")
    recipe = result.workload.recipe
    if recipe is not None and target not in ("trl", launch_files.ARGUMENTS):
        raise InputError(f"{target}: {recipe.kind.trainer} trained it; --to trl writes a script with it")
    if _is_ulysses(result) and target not in launch_files.FILE_NAMES:
        why = "sequence parallel takes position_ids in each batch"
        raise InputError(f"{target}: {why}; {launch_files.SCRIPT} is yours")
    made = TARGETS[target](result)
    return made if made.launch else made._replace(launch=launch_files.launch_commands(result, answer))


def drafts(result: ResultData, target: str = ALL, answer: str = ANSWER_FILE) -> tuple[dict[str, Draft], dict[str, str]]:
    """Return the draft of a target, or of all that can train the answer, and the reasons why the others can't."""
    if target != ALL:
        return {target: draft(result, target, answer)}, {}
    made, left_out = {}, {}
    for name in TARGETS:
        try:
            made[name] = draft(result, name, answer)
        except InputError as error:
            left_out[name] = str(error)
    if {launch_files.ACCELERATE, launch_files.DEEPSPEED} <= made.keys():
        made[launch_files.ACCELERATE] = made[launch_files.ACCELERATE]._replace(lost=())
    return made, left_out


def write(
    result: ResultData, target: str, found: dict[str, Draft], directory: Path, answer: str = ANSWER_FILE
) -> Exported:
    """Write the drafts of a target into a directory, which is made; for all targets command lines get a file too."""
    files = {one.name: one.text for one in found.values()}
    source = "trl" if target == ALL and result.workload.recipe is not None else target  # the script of a recipe
    launch = launch_files.launch_commands(result, answer) if source == ALL else found[source].launch
    if target == ALL and launch:
        first = "# Each line trains as autotune measured it, the first is the preferred one\n"
        files["launch.txt"] = first + "".join(f"{command}\n" for command in launch)
    directory.mkdir(parents=True, exist_ok=True)
    marks = {one.name: launch_files.MARKS[name] for name, one in found.items() if name in launch_files.MARKS}
    for name in files:
        check_savable(directory / name, marks.get(name, " as autotune measured it, "))
    for name, text in files.items():
        save_bytes(text.encode(), directory / name)
    lost = tuple(f"{f'{name}: ' * (target == ALL)}{line}" for name, one in found.items() for line in one.lost)
    return Exported(tuple(directory / name for name in files), launch, lost)


def to_train(result: ResultData, answer: str) -> tuple[str, ...]:
    """Return lines of a shell that train with the answer in the file `answer`; they write a script if there is none."""
    commands = launch_files.launch_commands(result, answer)
    if not commands:
        what = "training_arguments(output_dir)" if result.workload.own_code is not None else "best.config"
        return (f"# in your own code: autotune.load({answer!r}).{what}",)
    if result.workload.own_code is not None:
        return commands
    return (commands[0],) if _is_ulysses(result) else (_writes_script(result, answer), commands[0])


def missing_script(result: ResultData, answer: str, made: Exported) -> str:
    """Return a remark on `train.py` in the command lines if it isn't among the files written; '' if it is."""
    script = launch_files.SCRIPT
    is_named = result.workload.own_code is None and any(script in command.split() for command in made.launch)
    if not is_named or any(path.name == script for path in made.paths):
        return ""
    ours = "" if _is_ulysses(result) else f", or that of: {_writes_script(result, answer)}"
    return f"{script} is a script of yours that takes these arguments{ours}"


def _is_ulysses(result: ResultData) -> bool:
    """Return whether DeepSpeed shares sequences, for which no script is written."""
    spread = result.best.config.parallelism
    return spread.sequence_parallel > spread.context_parallel


def _writes_script(result: ResultData, answer: str) -> str:
    target = "python" if result.workload.recipe is None else "trl"
    return f"autotune export {shlex.quote(answer)} --to {target} --output {launch_files.SCRIPT}"
