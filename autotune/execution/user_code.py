"""Runs a user's own code: a Trainer's or a script until it trains, a loop's function until it has made its step.

The code stays as it is. In this process, `TrainingArguments` take an overlay when they are made (those of trl's
SFTConfig and HfArgumentParser, too), and again when a Trainer gets them, in case the code has set some in between.
`Trainer.train` calls back with the Trainer, and afterwards unwinds the code by an exception that none of its ``except
Exception`` catches. `fitted` makes the model of the code a configuration's.
"""

import functools
import importlib
import inspect
import os
import pickle
import runpy
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from autotune.errors import CodeError, InputError, LoopError, one_line
from autotune.execution import environment
from autotune.execution.outcome import is_out_of_memory
from autotune.training.adapters import own_adapter, put_on
from autotune.training.arguments import OWN_HARNESS, TrainingPlan
from autotune.training.baseline import BY_EVALUATION
from autotune.training.loss import base_model, normalize_loss
from autotune.training.random_weights import quantization_of, quantized_layers
from autotune.value import read_unchanged
from autotune.values.config import Quantization, TrainConfig
from autotune.values.hardware import ALLOCATOR_VARIABLE
from autotune.values.techniques import is_new_weight
from autotune.values.trial import Rendezvous
from autotune.values.workload import ACCUMULATION, CODE_FILE, OWN_STEPS, OwnCode, OwnStep

Found = TypeVar("Found")

# Attributes of TrainingArguments: the code's own values that were laid over, and the values after that.
_OWN, _LAID = "_autotune_own", "_autotune_laid"
# Arguments that stay the code's own until its Trainer gets them.
_LAID_LAST = ("eval_strategy", "save_strategy", "load_best_model_at_end")


class _Reached(BaseException):
    """Unwinds the user's code once its training is over."""


def reached(*_: Any) -> None:
    raise _Reached


def harness(arguments: Any) -> dict[str, Any]:
    """Return the arguments that a trial lays over a code's, so that it trains and does nothing else."""
    schedule = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    return OWN_HARNESS | ({"lr_scheduler_type": "constant"} if str(schedule) in BY_EVALUATION else {})


def own_values(arguments: Any) -> dict[str, Any]:
    """Return the code's own values of the arguments that were laid over."""
    return dict(vars(arguments).get(_OWN, {}))


def as_written(arguments: Any) -> dict[str, Any]:
    """Return the arguments as the code has them, those that it has set since they were laid over included."""
    since = changed_arguments(arguments)
    return {**vars(arguments), **{name: v for name, v in own_values(arguments).items() if name not in since}}


def _as_its_own(event: Callable[..., Any]) -> Callable[..., Any]:
    """Have callbacks read at an event how the code evaluates and saves, on which they may insist."""

    def told(handler: Any, arguments: Any, *args: Any, **kwargs: Any) -> Any:
        own = own_values(arguments)
        with patch.dict(vars(arguments), {name: own[name] for name in _LAID_LAST if name in own}):
            return event(handler, arguments, *args, **kwargs)

    return told


def changed_arguments(arguments: Any) -> list[str]:
    """Return the names of arguments that the code has changed since they were laid over."""
    laid = vars(arguments).get(_LAID)
    return ["all"] if laid is None else [name for name, value in laid.items() if getattr(arguments, name) != value]


def _copied(arguments: Any, made: list[Any]) -> Any:
    """Return which of those `made` code has copied, by `dataclasses.replace` or of `to_dict` as TRL does, or None."""

    def alike(values: Mapping[str, Any]) -> list[bool]:
        return [getattr(arguments, name, None) == value for name, value in values.items()]

    of_trials = [(other, {n: v for n, v in vars(other)[_LAID].items() if n in OWN_HARNESS}) for other in made]
    copied = [other for other, values in of_trials if values and all(alike(values))]
    return max(copied, key=lambda other: sum(alike(vars(other))), default=None)


@contextmanager
def overlaid(
    arguments: Callable[[Any], dict[str, Any]],
    fit: Callable[[Any], Any] = lambda model: model,
    made: Callable[[Any], None] = lambda trainer: None,
) -> Iterator[None]:
    """Lay `arguments(given)` over TrainingArguments made inside; each Trainer, told to `made`, trains `fit(model)`."""
    post_init, init = TrainingArguments.__post_init__, Trainer.__init__
    signature = inspect.signature(init)
    laid_over: list[Any] = []

    def lay(given_to: Any, *, is_last: bool = False) -> None:
        if _OWN not in vars(given_to) and (original := _copied(given_to, laid_over)) is not None:
            vars(given_to).update({name: dict(vars(original)[name]) for name in (_OWN, _LAID)})
        given = {name: v for name, v in arguments(given_to).items() if hasattr(given_to, name)}
        if not is_last:  # code may read them, and other arguments follow from them
            given = {name: value for name, value in given.items() if name not in _LAID_LAST}
        written = as_written(given_to)
        own = vars(given_to).setdefault(_OWN, {})
        for name, value in given.items():
            own[name] = written.get(name, getattr(given_to, name))
            setattr(given_to, name, value)
        post_init(given_to)
        if given_to.deepspeed and given_to.use_cpu and given_to.world_size > 1:  # ZeRO-3 asks for it
            importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
        if given_to.n_gpu > 1:
            given_to._n_gpu = 1  # the Trainer would copy the model to all that it sees (DataParallel), for larger steps
        vars(given_to)[_LAID] = {name: getattr(given_to, name) for name in given}
        laid_over.append(given_to)

    @functools.wraps(init)
    def make(trainer: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(trainer, *args, **kwargs)
        given = bound.arguments
        given["args"] = given.get("args") or TrainingArguments("tmp_trainer")  # which the Trainer would make
        lay(given["args"], is_last=True)
        shared = AcceleratorState._shared_state  # of an Accelerator of the code's own, which has the code's precision
        if "_mixed_precision" in shared and "bf16" in own_values(given["args"]):
            shared["_mixed_precision"] = given["args"].mixed_precision
        if given.get("model") is not None:
            given["model"] = fit(given["model"])
        elif (init_model := given.get("model_init")) is not None:  # the Trainer reads its signature
            given["model_init"] = functools.wraps(init_model)(lambda *args: fit(init_model(*args)))
        init(*bound.args, **bound.kwargs)
        made(trainer)

    heard = ("on_init_end", "on_train_begin")
    events: dict[str, Any] = {name: _as_its_own(getattr(CallbackHandler, name)) for name in heard}
    with (
        patch.object(TrainingArguments, "__post_init__", lay),
        patch.object(Trainer, "__init__", make),
        patch.multiple(CallbackHandler, **events),
    ):
        yield


def _own_environment() -> Any:
    """Heed what code sets for libraries, which are there already; the devices are the trial's, whatever it says."""
    put = type(os.environ).__setitem__

    def heed(environ: Any, name: str, value: str) -> None:
        if name != "CUDA_VISIBLE_DEVICES":
            put(environ, name, value)
        if name in (ALLOCATOR_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF") and torch.cuda.is_available():
            torch._C._accelerator_setAllocatorSettings(value)
        for module in ("huggingface_hub.constants", "datasets.config") if name.startswith("HF_") else ():
            if module in sys.modules:  # which reads where files are kept
                importlib.reload(sys.modules[module])

    return patch.object(type(os.environ), "__setitem__", heed)


def run_until_training(
    code: OwnCode,
    data: Path,
    on_train: Callable[[Any, Callable[[], Any]], Found],
    *,
    most_steps: Callable[[], int] = lambda: OWN_STEPS,
    saved: Callable[[], None] = lambda: None,
) -> Found:
    """Run the code up to its first `Trainer.train`; return the result of `on_train(trainer, train)`.

    Pickled code is in the directory `data`. CodeError: it ended without `train`; LoopError: after optimizer steps,
    or it is about to make more than `most_steps`. Weights of a loop aren't written: `saved` is called instead.
    """
    original, ended, steps = Trainer.train, "it ended", Counter[int]()  # of each optimizer
    found: list[Found] = []
    failed: list[BaseException] = []

    def step(optimizer: Any, *_: Any) -> None:
        nonlocal ended
        if steps[id(optimizer)] == most_steps():
            ended = f"it made {steps[id(optimizer)]} optimizer steps"
            raise _Reached
        steps[id(optimizer)] += 1

    def in_place_of(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def told(*args: Any, **kwargs: Any) -> Any:
            if found or failed:  # by `finally`, say
                raise _Reached
            return saved() if steps else save(*args, **kwargs)

        return told

    def train(trainer: Any, *args: Any, **kwargs: Any) -> None:
        own_steps.remove()
        steps.clear()
        if not found and not failed:
            try:
                with patch.object(Trainer, "train", original):
                    found.append(on_train(trainer, functools.partial(original, trainer)))
            except BaseException as error:
                failed.append(error)  # not into the code, which may have handlers of its own
        raise _Reached

    def spawn(*_: Any, **__: Any) -> None:
        raise CodeError(f"{code.file}: it starts processes itself, by torch.multiprocessing; have torchrun start it")

    saving: list[tuple[Any, str]] = [(torch, "save"), (safetensors.torch, "save_file"), (dcp, "save")]
    saving += [(owner, "save_pretrained") for owner in (PreTrainedModel, PeftModel)]
    saving += [(Accelerator, "save_state"), (Accelerator, "save_model"), (Trainer, "save_model")]
    try:
        with suppress(_Reached), ExitStack() as patches:
            for owner, name in saving:
                patches.enter_context(patch.object(owner, name, in_place_of(getattr(owner, name))))
            patches.enter_context(patch.object(Trainer, "train", train))
            patches.enter_context(patch.object(torch.multiprocessing, "spawn", spawn))
            patches.enter_context(_own_environment())
            own_steps = patches.enter_context(register_optimizer_step_pre_hook(step))
            if torch.distributed.is_initialized():  # the ranks have met, and stay together when the code has ended
                for name in ("init_process_group", "destroy_process_group"):
                    patches.enter_context(patch.object(torch.distributed, name, lambda *args, **kwargs: None))
            if code.kind == "script":
                run_script(code)
            else:
                os.chdir(code.directory)
                made = unpickled(data / CODE_FILE, code.sha256, code.shown)()
                if not isinstance(made, Trainer):
                    raise InputError(f"{code.shown} returned {type(made).__name__}; expected a transformers.Trainer")
                made.train()
    except SystemExit as error:
        ended = f"it ended with exit code {error.code or 0}"
        if isinstance(error.code, str):
            ended = f"it ended: {' '.join(error.code.split())},"
        if error.code == 2:  # argparse's, where a command line can't be read
            ended += ", as with options that it lacks or doesn't know (those of autotune stand before --),"
    if failed:
        raise failed[0]
    if not found:
        untuned = f"{code.file}: {ended} without having called Trainer.train, which is what is tuned; "
        untuned += "for a loop of your own there is autotune.find(step=...)"
        raise LoopError(f"{untuned}, and for its memory --gpu GPU --dry-run") if steps else CodeError(untuned)
    return found[0]


def looked_at(code: OwnCode, directory: Path, on_train: Callable[[Any, Callable[[], Any]], Found]) -> Found:
    """Run the code up to its first `Trainer.train` in a child that asks about it in `directory`, as one process."""
    # With these arguments, TF32 that is on when the code trains has another reason.
    no_tf32 = {"tf32": None, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}
    laid = {**no_tf32, **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed")), "output_dir": str(directory / "trainer")}
    if code.launched is not None:  # it may read its launcher's variables
        listener = socket.create_server((environment.ADDRESS, 0))
        meeting = Rendezvous(address=environment.ADDRESS, port=listener.getsockname()[1])
        os.environ.update(environment.rank_environment(0, 1, meeting, listener.detach()))
        environment.meet("cuda" if torch.cuda.is_available() else "cpu", timeout_s=60.0)
    with overlaid(lambda own: {**harness(own), **laid}):
        return run_until_training(code, directory.parent / "data", on_train)


def run_script(code: OwnCode) -> None:
    """Run a script in this process as python does: with its arguments, its directory and its module path."""
    os.chdir(code.directory)
    sys.argv = list(code.command)
    if code.is_module:
        sys.path.insert(0, code.directory)
        runpy.run_module(code.command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str((Path(code.directory) / code.command[0]).resolve().parent))
        runpy.run_path(str(Path(code.command[0]).absolute()), run_name="__main__")


def unpickled(file: Path, sha256: str, name: str) -> Any:
    try:
        return pickle.loads(read_unchanged(file, sha256))
    except (OSError, pickle.UnpicklingError, ImportError, AttributeError, EOFError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{name} can't be loaded in a trial: {what}") from error


def step_of(own: OwnStep, config: TrainConfig, accumulation_steps: int, file: Path) -> Callable[[], Any]:
    """Return the step that the user's function makes, in the directory that `find` was called in.

    InputError: the function can't be loaded, refuses the configuration, or returns no function.
    """
    sys.path.extend(entry for entry in own.search_path if entry not in sys.path)
    if Path(own.directory).is_dir():
        os.chdir(own.directory)
    make = unpickled(file, own.sha256, own.name)
    try:
        accumulation = {ACCUMULATION: accumulation_steps} if own.takes_accumulation else {}
        step = make(config, **accumulation, **config.own.model_dump())
    except (ValueError, NotImplementedError) as error:  # by which it says that it can't do this
        if is_out_of_memory(error):
            raise
        raise InputError(f"{own.name} refuses it: {error}") from error
    if not callable(step):
        kind = type(step).__name__
        raise InputError(f"{own.name} returned {kind}; it has to return a function that does one optimizer step")
    return step  # type: ignore[no-any-return]


def weights_of(model: nn.Module) -> str:
    """Return the dtype of most weights but those of packed layers and adapters."""
    sizes: Counter[str] = Counter()
    packed = {id(layer.weight) for _, layer in quantized_layers(model)}
    for parameter in (p for p in _without_adapter(model) if id(p) not in packed):
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default="float32")


def counts_of(model: nn.Module) -> dict[str, int]:
    """Return how many parameters there are and how many aren't trained, without an adapter's."""
    counts = {"parameters": 0, "frozen_parameters": 0}
    for parameter in _without_adapter(model):
        packed = getattr(parameter, "quant_state", None)  # bitsandbytes packs two elements into a byte
        size = int(parameter.numel() if packed is None else packed.shape.numel())
        counts["parameters"] += size
        counts["frozen_parameters"] += 0 if parameter.requires_grad else size
    return counts


def is_packed(base: Any) -> bool:
    """Return whether the weights of a model of transformers were quantized when it was loaded."""
    return getattr(base, "quantization_method", None) is not None


def quantization(base: Any) -> Quantization | None:
    """Return the format of the packed weights; None: they aren't, or not by bitsandbytes."""
    found = list(quantized_layers(base)) if is_packed(base) else []
    return cast(Quantization, quantization_of(found[0][1])) if found else None


def checkpointing(base: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for checkpointing that code has switched on without them; empty: there is none."""
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if name in arguments]
    on = [module for module in base.modules() if getattr(module, "gradient_checkpointing", False)]
    if not on or not isinstance(base, PreTrainedModel) or any(arguments[name] for name in names):
        return {}
    options = getattr(getattr(on[0], "_gradient_checkpointing_func", None), "keywords", {})
    return {names[0]: True, f"{names[0]}_kwargs": {n: v for n, v in options.items() if n == "use_reentrant"}}


def not_traced(model: Any, base: Any) -> str | None:
    """Return why a trace would be of another model; None: it would be of this one."""
    has_adapter, packs = hasattr(model, "peft_config"), is_packed(base)
    if has_adapter and own_adapter(model) is None:
        return "the model has several adapters, or one that can't be written down"
    if has_adapter and any(p.requires_grad for p in _without_adapter(model)):
        return "weights are trained beside those of the adapter"
    if packs and quantization(base) is None:
        return "the model has packed weights that aren't those of bitsandbytes"
    return "the model has packed weights and no adapter" if packs and not has_adapter else None


def fitted(model: Any, mapping: TrainingPlan, code: OwnCode) -> Any:
    """Set kernels, precision, adapter and loss of a model that a user's code has made, unless they are held.

    Checkpointing that the code has switched on is switched off if the arguments don't ask for it; if they do, the
    Trainer switches it on as they say. ValueError: the model has nothing that the adapter could be put on.
    """
    wanted, adapter = mapping.model, mapping.adapter
    asked = (mapping.tuned.get(name) for name in ("activation_checkpointing", "gradient_checkpointing"))
    if code.checkpoints and not any(asked):
        base_model(model)._set_gradient_checkpointing(enable=False)
    for name in ("attn_implementation", "experts_implementation"):
        is_ours = name in wanted and name not in code.held and hasattr(model, f"set_{name}")
        if is_ours and getattr(model.config, f"_{name}", None) != wanted[name]:
            getattr(model, f"set_{name}")(wanted[name])
    if wanted.get("dtype") == "bfloat16" and "precision" not in code.held:
        for parameter in model.parameters():  # buffers, such as the frequencies of rotary positions, stay as they are
            if parameter.dtype is torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
    if adapter is not None and not hasattr(model, "peft_config"):  # code may make several Trainers of a model
        model = put_on(model, adapter, mixed=bool(mapping.tuned.get("bf16") or mapping.tuned.get("fp16")))
    return normalize_loss(model) if code.normalizes else model


def _without_adapter(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if not is_new_weight(name))
