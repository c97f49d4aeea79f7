"""Runs a user's own code until it trains, and has its TrainingArguments and its Trainer take other arguments.

The code stays as it is. In this process, `TrainingArguments` take an overlay when they are made (subclasses such as
trl's SFTConfig and HfArgumentParser do so, too), and once more when a Trainer gets them, in case the code has set some
in between. `Trainer.train` calls back with the Trainer, and afterwards unwinds the code by an exception that none of
its ``except Exception`` catches.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from autotune.errors import InputError, one_line
from autotune.training.arguments import OWN_HARNESS
from autotune.training.baseline import BY_EVALUATION
from autotune.value import read_unchanged
from autotune.values.workload import CODE_FILE, OwnCode

Found = TypeVar("Found")

# Exit code of argparse where a command line can't be read.
_USAGE = 2

# Attributes of TrainingArguments that remember what the code had asked for, and what was made of what was laid over it.
_THEIRS, _LAID = "_autotune_theirs", "_autotune_laid"

# What a code may read before it makes its Trainer, to which it may then give no evaluation data: laid over it there.
_READ = ("eval_strategy",)


class Reached(BaseException):
    """Unwinds the user's code once its training is over; no error of it or of ours."""


class CodeError(InputError):
    """The user's code ended before it trained; the message says how."""


class Overlay(NamedTuple):
    """What is laid over a user's code."""

    arguments: Callable[[Any], dict[str, Any]]  # from the arguments as the code has them
    fit: Callable[[Any], Any] = lambda model: model  # from a model as the code made it to the one that is trained
    made: Callable[[Any], None] = lambda trainer: None  # called with a Trainer when it is made


def harness(arguments: Any) -> dict[str, Any]:
    """Return what a trial lays over a code's arguments so that it trains and does nothing else."""
    schedule = arguments.lr_scheduler_type
    waits = str(getattr(schedule, "value", schedule)) in BY_EVALUATION
    return {**OWN_HARNESS, **({"lr_scheduler_type": "constant"} if waits else {})}


def theirs(arguments: Any) -> dict[str, Any]:
    """Return what the code had asked for in place of what was laid over it."""
    return dict(vars(arguments).get(_THEIRS, {}))


def as_written(arguments: Any) -> dict[str, Any]:
    """Return the arguments as the code has them, with those that it has set after something was laid over them."""
    since = strayed(arguments)
    return {**vars(arguments), **{name: v for name, v in theirs(arguments).items() if name not in since}}


def strayed(arguments: Any) -> list[str]:
    """Return the names of arguments that are no longer as they were laid over the code's own."""
    laid: dict[str, Any] | None = vars(arguments).get(_LAID)
    if laid is None:
        return ["all"]
    return [name for name, value in laid.items() if getattr(arguments, name) != value]


@contextmanager
def overlaid(overlay: Overlay) -> Iterator[None]:
    """Have every TrainingArguments and every Trainer that is made inside take what is laid over it."""
    from transformers import Trainer, TrainingArguments

    post_init, init = TrainingArguments.__post_init__, Trainer.__init__
    signature = inspect.signature(init)

    def lay(arguments: Any, *, leave: tuple[str, ...] = _READ) -> None:
        laid = overlay.arguments(arguments)
        given = {name: v for name, v in laid.items() if hasattr(arguments, name) and name not in leave}
        written = as_written(arguments)
        own = vars(arguments).setdefault(_THEIRS, {})
        for name, value in given.items():
            own[name] = written.get(name, getattr(arguments, name))
            setattr(arguments, name, value)
        post_init(arguments)
        vars(arguments)[_LAID] = {name: getattr(arguments, name) for name in given}

    @functools.wraps(init)
    def make(trainer: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(trainer, *args, **kwargs)
        given = bound.arguments
        if given.get("args") is not None:
            lay(given["args"], leave=())
        if given.get("model") is not None:
            given["model"] = overlay.fit(given["model"])
        elif (model_init := given.get("model_init")) is not None:

            @functools.wraps(model_init)  # the Trainer reads the signature
            def fitted(*args: Any) -> Any:
                return overlay.fit(model_init(*args))

            given["model_init"] = fitted
        init(*bound.args, **bound.kwargs)
        overlay.made(trainer)

    with patch.object(TrainingArguments, "__post_init__", lay), patch.object(Trainer, "__init__", make):
        yield


def reach(code: OwnCode, data_directory: Path, on_train: Callable[[Any, Callable[[], Any]], Found]) -> Found:
    """Run the code up to its first `Trainer.train`, and return what `on_train` makes of it there.

    Args:
        code: The user's.
        data_directory: Where pickled code is.
        on_train: Gets the Trainer, and what really trains it.

    Raises:
        CodeError: It ended without training, or failed before.
    """
    from transformers import Trainer

    original, ended = Trainer.train, "it ended"
    found: list[Found] = []
    failed: list[BaseException] = []

    def train(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not found and not failed:
            try:
                with patch.object(Trainer, "train", original):
                    found.append(on_train(trainer, functools.partial(original, trainer)))
            except BaseException as error:
                failed.append(error)  # not into the code, which may have handlers of its own
        raise Reached

    try:
        with patch.object(Trainer, "train", train):
            if code.kind == "script":
                run_script(code)
            else:
                os.chdir(code.directory)
                made = unpickled(data_directory / CODE_FILE, code.sha256, code.shown)()
                if not isinstance(made, Trainer):
                    raise InputError(f"{code.shown} returned {type(made).__name__}; expected a transformers.Trainer")
                made.train()
    except Reached:
        pass
    except SystemExit as error:
        ended = f"it ended with exit code {error.code}"
        if error.code == _USAGE:
            ended += ", as with options that it doesn't know (those of autotune stand before --),"
    if failed:
        raise failed[0]
    if not found:
        raise CodeError(
            f"{code.shown}: {ended} without having called Trainer.train, which is what is tuned; "
            "for a loop of your own there is autotune.find(step=...)"
        )
    return found[0]


def run_script(code: OwnCode) -> None:
    """Run a script in this process as python does: its arguments, its directory, its place among the modules."""
    os.chdir(code.directory)
    sys.argv = list(code.command)
    if code.is_module:
        sys.path.insert(0, code.directory)
        runpy.run_module(code.command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str((Path(code.directory) / code.command[0]).resolve().parent))
        runpy.run_path(code.command[0], run_name="__main__")


def unpickled(file: Path, sha256: str, name: str) -> Any:
    """Return the function of the user's that was pickled into `file`, which is to have this digest."""
    try:
        return pickle.loads(read_unchanged(file, sha256))
    except (OSError, pickle.UnpicklingError, ImportError, AttributeError, EOFError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{name} can't be loaded in a trial: {what}") from error
