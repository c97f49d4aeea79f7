"""Tunes the user's own Trainer, a function that makes one, or a script that trains with one.

Before the first trial, the code is run up to the beginning of its training (`execution.user_facts`). Its own arguments
are the baseline; what the code itself decides is not varied.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.workload import Outline, Subject, check_batch, keep_pickle
from autotune.training.baseline import UserArguments, baseline_config
from autotune.value import sha256_of
from autotune.values.config import Precision
from autotune.values.hardware import Hardware
from autotune.values.model import ModelSpec, Task
from autotune.values.trial import Description
from autotune.values.workload import CODE_FILE, Held, OwnCode, Traits, Workload

# Options that contradict the user's code, with the reason of the refusal.
_THEIRS = "your code decides it"
_ONE_DEVICE = "a {given} is tuned on one device of this machine"
DECIDED_BY_CODE: dict[str, str] = {
    **dict.fromkeys(("model", "task", "data", "text_field", "seq_len", "target_len", "revision"), _THEIRS),
    **dict.fromkeys(("trust_remote_code", "images", "image_size", "freeze_vision"), _THEIRS),
    "global_batch": "it is that of your own TrainingArguments",
    "baseline": "your own TrainingArguments are the baseline",
    **dict.fromkeys(("recipe", "prompt_len", "completion_len", "generations", "reward"), _THEIRS),
    **dict.fromkeys(("devices", "workers", "engine", "address", "kind"), _ONE_DEVICE),
}

_LAUNCHERS = frozenset({"accelerate", "torchrun", "deepspeed", "mpirun", "srun", "uv", "poetry"})
_HARMLESS_FLAGS = frozenset({"-u", "-B", "-s"})  # flags of Python that don't change what a script computes


class UserTrainer(Subject):
    """The user's own Trainer, the function that makes it, which is `pickled`, or the script that does."""

    def __init__(self, options: SearchOptions, code: OwnCode, pickled: bytes | None = None) -> None:
        super().__init__(options)
        self.code = code
        self._pickled = pickled

    @classmethod
    def of(
        cls,
        options: SearchOptions,
        *,
        trainer: Any = None,
        make_trainer: Callable[[], Any] | None = None,
        script: Sequence[str] | None = None,
    ) -> UserTrainer:
        """Return what is tuned, from the one of the three arguments that is given.

        Raises:
            InputError: The argument can't be used, or an option contradicts it.
        """
        given = "script" if script is not None else "trainer" if trainer is not None else "make_trainer"
        for name, reason in DECIDED_BY_CODE.items():
            value = getattr(options, name)
            if value not in (None, "", False, "local") and (name, value) not in (("devices", 1), ("workers", 1)):
                raise InputError(f"{name}: can't be used with {given}: {reason.format(given=given)}; leave it out")
        if script is not None:
            return cls(options, code_of(script))
        from autotune.training import trainer_pickle

        make = trainer_pickle.maker_of(trainer) if trainer is not None else make_trainer
        if not callable(make):
            raise InputError(f"make_trainer: expected a function that returns a Trainer, not {type(make).__name__}")
        called = type(trainer).__name__ if trainer is not None else getattr(make, "__qualname__", type(make).__name__)
        content = trainer_pickle.pickled(make, f"{given}: {called}")
        shown, here = f"{given} {called}", str(Path.cwd())
        return cls(options, OwnCode(kind="pickle", shown=shown, directory=here, sha256=sha256_of(content)), content)

    @property
    def name(self) -> str:
        """The name from which the default run directory is made."""
        return self.code.name

    def workload(self, hardware: Hardware, arguments: UserArguments | None, notes: list[str]) -> Workload:
        """Return a placeholder for the workload, which `settled` replaces once the code has been looked at."""
        shown = self.code.shown
        spec = ModelSpec(reference=shown, name=shown, source="own", model_type="your own code", kind="own", config={})
        seed = self.options.seed
        return Workload(
            model=spec, task=Task.OWN, sequence_length=1, global_batch_size=None, seed=seed, own_code=self.code
        )

    def keep(self, run_directory: Path) -> None:
        """Write the pickled function into the run directory; a script stays where it is."""
        if self._pickled is not None:
            keep_pickle(self._pickled, run_directory, CODE_FILE)

    def settled(self, outline: Outline, description: Description) -> Outline:
        """Return the outline with the workload found in the code, and its arguments as the baseline.

        Raises:
            InputError: The arguments can't be used as a baseline.
        """
        found = description.own
        assert found is not None
        arguments = UserArguments(found.arguments, found.fixed, "your TrainingArguments")
        batch = arguments.global_batch_size
        check_batch(batch, "your TrainingArguments: the global batch")
        baseline_config(arguments, batch, description.facts, outline.hardware)
        known = {name: getattr(found, name) for name in Traits.model_fields}
        known["held"] = {knob: Held(value=None, reason=reason) for knob, reason in found.held.items()}
        workload = outline.workload.model_copy(
            update={
                "model": found.spec,
                "task": found.task,
                "sequence_length": found.sequence_length,
                "target_length": found.target_length,
                "global_batch_size": batch,
                "lengths": description.lengths,
                "fixed_arguments": found.fixed,
                "own_code": self.code.model_copy(update=known),
            }
        )
        note = f"global batch {batch} samples, that of your own arguments, which are the baseline"
        return dataclasses.replace(outline, workload=workload, arguments=arguments, notes=(*outline.notes, note))

    def planned(self, plan: SearchPlan) -> SearchPlan:
        """Return the plan with the knobs that the code decides held at their values in the baseline.

        The trials are not recorded for later searches, as the code may have changed by then.
        """
        code, baseline = plan.workload.own_code, plan.baseline
        assert code is not None
        if code.weights == "bfloat16" and baseline.precision is Precision.FP32:
            baseline = baseline.model_copy(update={"precision": Precision.PURE_BF16})
        held = {knob: Held(value=_plain(getattr(baseline, knob)), reason=h.reason) for knob, h in code.held.items()}
        workload = plan.workload.model_copy(update={"own_code": code.model_copy(update={"held": held})})
        return plan.model_copy(update={"baseline": baseline, "workload": workload, "record": False})


def aside(trainer: Any) -> AbstractContextManager[None]:
    """Return a context in which the model of a Trainer is moved out of device memory; it does nothing for None."""
    if trainer is None:
        return nullcontext()
    from autotune.training import trainer_pickle

    return trainer_pickle.aside(trainer)


def code_of(command: Sequence[str]) -> OwnCode:
    """Return the script that a command line runs.

    Raises:
        InputError: The command line runs no script, or runs it by a launcher or another Python than this one.
    """
    words = list(command)
    if not words:
        raise InputError("no script: write its command line after --, as `autotune script -- python train.py`")
    shown = " ".join(words)
    name = Path(words[0]).name
    if name in _LAUNCHERS:
        raise InputError(
            f"{words[0]}: a script is tuned on one device, in a process of autotune's own; write `python` and the "
            "script in place of the launcher"
        )
    if name.startswith("python"):
        _check_python(words.pop(0))
        while words and words[0] in _HARMLESS_FLAGS:
            words.pop(0)
    is_module = bool(words) and words[0] == "-m"
    words = words[1:] if is_module else words
    if not words or (words[0].startswith("-") and not is_module):
        raise InputError(f"{shown}: expected a script, as `python train.py` or `python -m package.train`")
    if not is_module and not Path(words[0]).is_file():
        raise InputError(f"{words[0]}: no such script")
    return OwnCode(kind="script", shown=shown, command=tuple(words), is_module=is_module, directory=str(Path.cwd()))


def _check_python(word: str) -> None:
    """Refuse a Python of another environment; a name without a path is taken for this one."""
    if "/" not in word:
        return
    found = shutil.which(word)
    if found is None or Path(found).absolute().parent != Path(sys.executable).absolute().parent:
        raise InputError(f"{word}: another Python than autotune's ({sys.executable}); install autotune there")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value  # a string in place of a member of an enumeration
