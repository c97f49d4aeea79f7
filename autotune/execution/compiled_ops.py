"""Has DeepSpeed compile what a trial is going to need, once and outside of any trial's time and memory.

DeepSpeed compiles its operators where they are first used: the messages of ranks on a CPU, the optimizer of the host
for what is offloaded. That takes a minute and more each, and is kept (`TORCH_EXTENSIONS_DIR`). In a trial it counts
against the limit; and a trial that is killed meanwhile leaves a lock for which all later ones wait. Called by the
runner (`needed`) and entered by its child (`build`). What can't be compiled is for the trial to say.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

from autotune.execution.ranks import own_rank
from autotune.training.parallel_arguments import ZERO_STAGES
from autotune.value import Value, read_value
from autotune.values.trial import TrialRequest

ENTRY = "autotune.execution.compiled_ops:build"
LIMIT_S = 1800.0  # two operators, on a slow machine that does other things as well

_OF_RANKS, _ADAM = "ShareMemCommBuilder", "CPUAdamBuilder"


class Operators(Value):
    """Names of DeepSpeed's builders."""

    names: tuple[str, ...]


def needed(request: TrialRequest) -> tuple[str, ...]:
    """Return what a trial is going to need."""
    spread = request.config.parallelism
    if spread.sharding not in ZERO_STAGES:
        return ()
    found: tuple[str, ...] = (_OF_RANKS,) if request.device == "cpu" else ()
    if spread.offload != "none":
        found += (_ADAM,)
    return found


def build(directory: Path) -> None:
    """Compile what the request in `directory` names; at once if that has been done."""
    find_ninja()
    from deepspeed.accelerator import get_accelerator

    for name in read_value(Operators, directory / "request.json").names:
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            _forget_dead_builder(builder.name)
            builder.load(verbose=False)


def find_ninja() -> None:
    """Put first on the path the ninja that was installed beside DeepSpeed, which need not be there."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def tell_deepspeed(device: str) -> None:
    """Have DeepSpeed know that the ranks have met: on a CPU TrainingArguments leaves that out, and ZeRO-3 asks it."""
    find_ninja()  # where it looks at what it has compiled
    if device == "cpu" and own_rank().is_launched:
        importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")


def _forget_dead_builder(name: str) -> None:
    """Remove the lock of a builder that was killed: nobody else does, and torch would wait for it for ever."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False)) / "lock"
    try:
        if time.time() - lock.stat().st_mtime > LIMIT_S:
            lock.unlink()
    except FileNotFoundError:
        return
