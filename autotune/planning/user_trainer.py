"""Tunes the user's own Trainer, a function that makes one, or a script that trains with one.

Before the first trial, the code is run up to the beginning of its training (`execution.describe`). Its own arguments
are the baseline; what the code itself decides is not varied.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import Start, Subject, default_space, draft, finished
from autotune.planning.workload import check_batch
from autotune.space.file import load_space
from autotune.training.baseline import UserArguments, baseline_config
from autotune.training.trainer_pickle import maker_of, pickled
from autotune.value import sha256_of
from autotune.values.config import Precision
from autotune.values.model import ModelSpec, Task
from autotune.values.trial import DescribeRequest
from autotune.values.workload import CODE_FILE, Held, OwnCode, Traits, Workload

if TYPE_CHECKING:
    from autotune.execution.runner import LocalRunner

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
    """The user's own Trainer, the function that makes it, which is pickled, or the command line of its script.

    Raises:
        InputError: The Trainer, function or script can't be used, or an option contradicts it.
    """

    def __init__(
        self,
        options: SearchOptions,
        *,
        trainer: Any = None,
        make_trainer: Callable[[], Any] | None = None,
        script: Sequence[str] | None = None,
    ) -> None:
        given = "script" if script is not None else "trainer" if trainer is not None else "make_trainer"
        for name, reason in DECIDED_BY_CODE.items():
            value = getattr(options, name)
            if value not in (None, "", False, "local") and (name, value) not in (("devices", 1), ("workers", 1)):
                raise InputError(f"{name}: can't be used with {given}: {reason.format(given=given)}; leave it out")
        if script is not None:
            self.code = code_of(script)
            super().__init__(options, self.code.name)
            return
        make = maker_of(trainer) if trainer is not None else make_trainer
        if not callable(make):
            raise InputError(f"make_trainer: expected a function that returns a Trainer, not {type(make).__name__}")
        called = type(trainer).__name__ if trainer is not None else getattr(make, "__qualname__", type(make).__name__)
        content = pickled(make, f"{given}: {called}")
        shown, here = f"{given} {called}", str(Path.cwd())
        self.code = OwnCode(kind="pickle", shown=shown, directory=here, sha256=sha256_of(content))
        super().__init__(options, self.code.name, {CODE_FILE: content})

    def plan(self, start: Start, ready: Callable[[], LocalRunner]) -> SearchPlan:
        """Return the plan of the workload found in the code, whose arguments are the baseline.

        Knobs that the code decides stay at their values in the baseline. The trials are not recorded for later
        searches, as the code may have changed by then.
        """
        shown = self.code.shown
        spec = ModelSpec(reference=shown, name=shown, source="own", model_type="your own code", kind="own", config={})
        workload = Workload(
            model=spec,
            task=Task.OWN,
            sequence_length=1,
            global_batch_size=None,
            seed=self.options.seed,
            own_code=self.code,
        )
        space = load_space(self.options.space or default_space(start.hardware))
        about = ready().describe(DescribeRequest(workload=workload))
        found = about.own
        assert found is not None
        arguments = UserArguments(found.arguments, found.fixed, "your TrainingArguments")
        batch = arguments.global_batch_size
        check_batch(batch, "your TrainingArguments: the global batch")
        baseline = baseline_config(arguments, batch, about.facts, start.hardware)
        if found.weights == "bfloat16" and baseline.precision is Precision.FP32:
            baseline = baseline.model_copy(update={"precision": Precision.PURE_BF16})
        known = {name: getattr(found, name) for name in Traits.model_fields} | {"held": {}}
        for knob, reason in found.held.items():
            value = getattr(baseline, knob)  # a member of an enumeration is held as its text
            known["held"][knob] = Held(value=str(value) if isinstance(value, str) else value, reason=reason)
        workload = workload.model_copy(
            update={
                "model": found.spec,
                "task": found.task,
                "sequence_length": found.sequence_length,
                "target_length": found.target_length,
                "global_batch_size": batch,
                "fixed_arguments": found.fixed,
                "own_code": self.code.model_copy(update=known),
            }
        )
        start.notes.append(f"global batch {batch} samples, that of your own arguments, which are the baseline")
        plan = draft(start, workload, about, space, arguments)
        return finished(plan.model_copy(update={"baseline": baseline, "record": False}), self.options)


def code_of(command: Sequence[str]) -> OwnCode:
    """Return the script that a command line runs.

    Raises:
        InputError: The command line runs no script, or runs it by a launcher or another Python than this one.
    """
    words = list(command)
    if not words:
        raise InputError("no script: write its command line after --, as `autotune script -- python train.py`")
    shown, first = " ".join(words), words[0]
    if Path(first).name in _LAUNCHERS:
        raise InputError(
            f"{first}: a script is tuned on one device, in a process of autotune's own; write `python` and the "
            "script in place of the launcher"
        )
    if Path(first).name.startswith("python"):
        found = shutil.which(words.pop(0))
        here = Path(sys.executable).absolute().parent
        if "/" in first and (found is None or Path(found).absolute().parent != here):  # a bare name means this one
            raise InputError(f"{first}: another Python than autotune's ({sys.executable}); install autotune there")
        while words and words[0] in _HARMLESS_FLAGS:
            words.pop(0)
    is_module = bool(words) and words[0] == "-m"
    words = words[1:] if is_module else words
    if not words or (words[0].startswith("-") and not is_module):
        raise InputError(f"{shown}: expected a script, as `python train.py` or `python -m package.train`")
    if not is_module and not Path(words[0]).is_file():
        raise InputError(f"{words[0]}: no such script")
    return OwnCode(kind="script", shown=shown, command=tuple(words), is_module=is_module, directory=str(Path.cwd()))
