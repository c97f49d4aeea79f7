"""Pickles what makes a Trainer, or what a Trainer was made of, so that another process can make it.

A Trainer itself can't be pickled: it holds an accelerator and open devices. Its parts can: class, model, data,
collator, callbacks, arguments. The other process makes a Trainer of the same class with the library's own constructor
and sets the attributes that the class has added; the class's constructor, whose arguments aren't known, isn't called.

The model is on the CPU while a search runs (`aside`): trials need the device's memory, and the process that holds it
could not be forked.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autotune.errors import InputError, one_line

# Arguments of the constructor that are attributes of the same name.
_PARTS = (
    "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func", "compute_metrics",
    "preprocess_logits_for_metrics", "optimizer_cls_and_kwargs",
)  # fmt: skip

# Attributes that the library sets in its constructor, and code may change afterwards.
_SET_AFTERWARDS = ("label_names", "loss_is_scaled_for_ga")

_TRAINER, _ACCELERATOR = "the trainer", "its accelerator"

_THEIR_OWN = ("transformers.trainer_callback", "transformers.integrations")  # modules of the library's callbacks

_MAKE_ANEW = "use find(make_trainer=...) with a function that makes it, and the Trainer, anew"


def maker_of(trainer: Any) -> Callable[[], Any]:
    """Return a picklable function that makes a Trainer like this one.

    Raises:
        InputError: It is no Trainer, or one of its parts can't be pickled.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise InputError(f"trainer: expected a transformers.Trainer, not {type(trainer).__name__}")
    parts = {name: getattr(trainer, name, None) for name in _PARTS}
    args = trainer.args
    has_trained = type(trainer.optimizer).__name__ == "AcceleratedOptimizer"  # the optimizer is then the Trainer's own
    parts |= {
        "model": trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
        "model_init": trainer.model_init,
        "optimizers": (None, None) if has_trained else (trainer.optimizer, trainer.lr_scheduler),
        "callbacks": [c for c in trainer.callback_handler.callbacks if not type(c).__module__.startswith(_THEIR_OWN)],
        "args_class": type(args),
        "args": {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init} | {"hub_token": None},
        **{f"attribute {name}": value for name, value in _added_attributes(trainer).items()},
    }
    kind = _pickled_parts({"class": type(trainer)}, trainer)
    return functools.partial(_made_anew, kind, _pickled_parts(parts, trainer))


def _added_attributes(trainer: Any) -> dict[str, Any]:
    """Return the attributes that a subclass, or its user, has added to the library's own."""
    from transformers import Trainer

    methods = (f for kind in Trainer.__mro__ for f in vars(kind).values() if hasattr(f, "__code__"))
    library = {i.argval for method in methods for i in dis.get_instructions(method) if i.opname == "STORE_ATTR"}
    return {n: value for n, value in vars(trainer).items() if n not in library or n in _SET_AFTERWARDS}


def _pickled_parts(parts: dict[str, Any], trainer: Any) -> bytes:
    """Return the parts pickled together, since they share objects.

    Raises:
        InputError: One of them can't be; the message names it.
    """
    try:
        return _dumps(parts, trainer)
    except Exception as error:  # whatever the objects raise
        for name, part in parts.items():
            try:
                _dumps(part, trainer)
            except Exception as cause:
                raise _unpicklable(f"the Trainer's {name}", cause) from cause
        raise _unpicklable("the Trainer", error) from error


def _dumps(value: Any, trainer: Any) -> bytes:
    """Return a pickled value; where it refers to the Trainer or its accelerator, it will refer to the new ones."""
    import cloudpickle

    known = {id(trainer): _TRAINER, id(trainer.accelerator): _ACCELERATOR}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
        def persistent_id(self, obj: Any) -> str | None:
            return known.get(id(obj))

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _unpicklable(what: str, error: Exception, remedy: str = _MAKE_ANEW) -> InputError:
    why = f"{type(error).__name__}: {one_line(error)}"
    return InputError(f"{what} can't be handed to another process: {why}; {remedy}")


def _made_anew(pickled_class: bytes, pickled_parts: bytes) -> Any:
    """Return the Trainer, made out of its pickled class and parts."""
    from torch import nn
    from transformers import Trainer

    kind, accelerator = pickle.loads(pickled_class)["class"], _Later()
    trainer = kind.__new__(kind)
    unpickler = pickle.Unpickler(io.BytesIO(pickled_parts))
    unpickler.persistent_load = {_TRAINER: trainer, _ACCELERATOR: accelerator}.__getitem__  # type: ignore[method-assign]
    parts = unpickler.load()
    arguments = parts["args_class"](**parts["args"])
    given = {name: parts[name] for name in (*_PARTS, "optimizers", "callbacks")}
    init = parts["model_init"]
    model = {"model": parts["model"]} if init is None else {"model_init": init}
    Trainer.__init__(trainer, args=arguments, **model, **given)
    accelerator.found = trainer.accelerator
    for name, value in parts.items():
        if name.startswith("attribute "):  # a module beside the model, such as a teacher, belongs on the device
            on_device = value.to(trainer.args.device) if isinstance(value, nn.Module) else value
            setattr(trainer, name.removeprefix("attribute "), on_device)
    return trainer


class _Later:
    """A proxy for the accelerator until there is one."""

    found: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.found, name)


def pickled(function: Callable[..., Any], what: str) -> bytes:
    """Return a function of the user's as bytes for another process.

    Raises:
        InputError: It can't be pickled; the message begins with `what`.
    """
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects that it refers to raise
        raise _unpicklable(what, error, "make what it needs inside it") from error
    return content


@contextmanager
def aside(trainer: Any) -> Iterator[None]:
    """Keep the model of a Trainer, if it has one, on the CPU while entered."""
    import torch

    model = getattr(trainer, "model", None)
    device = next((p.device for p in model.parameters()), None) if isinstance(model, torch.nn.Module) else None
    if model is None or device is None or device.type != "cuda":
        yield
        return
    model.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)
