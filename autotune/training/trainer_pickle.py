"""Pickles a Trainer, or the function that makes one, so that another process can make it.

A Trainer is pickled without its accelerator, optimizer and other things of this process, which the library's own
constructor makes again there. Attributes of a subclass stay; its constructor isn't called.

The model is on the CPU while a search runs (`model_on_cpu`): trials need the device's memory, whose holder can't fork.
"""

import copyreg
import dataclasses
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autotune.errors import InputError, one_line

# Arguments of the constructor that are attributes of the same name.
_PARTS = (
    "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func", "compute_metrics",
    "preprocess_logits_for_metrics", "optimizer_cls_and_kwargs",
)  # fmt: skip

# Attributes of this process, which the constructor sets.
_OF_THE_PROCESS = (
    "accelerator", "callback_handler", "control", "gather_function", "lr_scheduler", "model_wrapped", "optimizer",
    "state",
)  # fmt: skip


def maker_of(trainer: Any) -> Callable[[], Any]:
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise InputError(f"trainer: expected a transformers.Trainer, not {type(trainer).__name__}")
    args, library = trainer.args, ("transformers.trainer_callback", "transformers.integrations")
    has_trained = type(trainer.optimizer).__name__ == "AcceleratedOptimizer"  # the optimizer is then the Trainer's own
    written = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    written.pop("steps_per_generation", None)  # which TRL derives from generation_batch_size, and refuses beside it
    state = {name: value for name, value in vars(trainer).items() if name not in _OF_THE_PROCESS} | {
        "model": trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
        "optimizers": (None, None) if has_trained else (trainer.optimizer, trainer.lr_scheduler),
        "callbacks": [c for c in trainer.callback_handler.callbacks if not type(c).__module__.startswith(library)],
        "args": (type(args), written | {"hub_token": None}),
    }
    remedy = "use find(make_trainer=...) with a function that makes the Trainer"
    return functools.partial(_made_anew, pickled(trainer, f"trainer: {type(trainer).__name__}", remedy, state=state))


def _made_anew(content: bytes) -> Any:
    from torch import nn
    from transformers import Trainer

    trainer = pickle.loads(content)
    kept = vars(trainer)
    vars(kept["model"]).pop("_is_accelerate_prepared", None)  # by one that has trained, which this one would heed
    afterwards = {name: kept[name] for name in ("label_names", "loss_is_scaled_for_ga") if name in kept}
    (kind, arguments), model_init = kept.pop("args"), kept.get("model_init")
    given = {name: kept.pop(name) for name in ("optimizers", "callbacks")} | {n: kept.get(n) for n in _PARTS}
    model = {"model": kept["model"]} if model_init is None else {"model_init": model_init}
    Trainer.__init__(trainer, args=kind(**arguments), **model, **given)
    for name, value in (kept | afterwards).items():  # a module beside the model, such as a teacher, goes to the device
        is_beside = isinstance(value, nn.Module) and value not in (trainer.model, trainer.model_wrapped)
        setattr(trainer, name, value.to(trainer.args.device) if is_beside else value)
    return trainer


def pickled(
    made: Any, called: str, remedy: str = "make what it needs inside it", *, state: dict[str, Any] | None = None
) -> bytes:
    """Return an object of the user's as bytes for another process; `state` takes the place of its attributes."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
        def reducer_override(self, obj: Any) -> Any:
            if state is not None and obj is made:
                return copyreg.__newobj__, (type(made),), state  # type: ignore[attr-defined]
            return super().reducer_override(obj)

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])  # `__mp_main__`, where multiprocessing has spawned it
    file = io.BytesIO()
    try:
        Pickler(file).dump(made)
    except Exception as error:  # whatever the objects that it refers to raise
        why = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{called} can't be handed to another process: {why}; {remedy}") from error
    return file.getvalue()


@contextmanager
def model_on_cpu(trainer: Any) -> Iterator[None]:
    model: Any = getattr(trainer, "model", None)
    parameters = model.parameters() if hasattr(model, "parameters") else ()
    device = next((p.device for p in parameters), None)
    if device is None or device.type != "cuda":
        yield
        return
    import torch

    model.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)
