"""How a user's own training is started with the answer of its search: command lines, and what they can't say.

Pure; called by `launch_files` and by the command line's table.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from autotune.training.arguments import laid_over, plan

if TYPE_CHECKING:
    from autotune.values.result import ResultData
    from autotune.values.user_code import OwnCode

# Of the device, and so no business of a command line.
_UNSAID = frozenset({"use_cpu", "dataloader_pin_memory"})
_OLDER = frozenset({"gradient_checkpointing", "gradient_checkpointing_kwargs"})  # names of what has newer ones

# What transformers checkpoints by where it isn't told (5.17 to 5.23).
_USUAL_KIND = {"use_reentrant": False}

# What of a configuration no TrainingArguments say, and how code says it.
_BEYOND = {
    "attn_implementation": "model.set_attn_implementation({value!r})",
    "experts_implementation": "model.set_experts_implementation({value!r})",
    "adapter": "peft's {value}",
}


def apply_command(code: OwnCode, answer: str) -> str:
    """Return the command line that runs the unchanged script with the answer laid over it."""
    return f"autotune script --apply {shlex.quote(answer)} -- {code.command_line}"


def flags(result: ResultData) -> tuple[str, ...]:
    """Return the flags that say the answer to a script whose arguments HfArgumentParser reads."""
    code = result.workload.own_code
    assert code is not None
    found = []
    for name, value in _changed(result, code).items():
        if value is not None:
            found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return tuple(found)


def unsaid(result: ResultData) -> tuple[str, ...]:
    """Return what of the answer flags can't say, a few words each."""
    code = result.workload.own_code
    assert code is not None
    lines = [f"without --{name}" for name, value in _changed(result, code).items() if value is None]
    for change in result.best.changes:
        if change.knob in _BEYOND:
            lines.append(_BEYOND[change.knob].format(value=change.after))
    if any(c.knob == "precision" and c.after == "pure_bf16" for c in result.best.changes):
        lines.append("weights in bfloat16")
    if code.normalizes and _accumulates_otherwise(result):
        lines.append("autotune.normalize_loss(model), since it accumulates")
    return tuple(lines)


def _accumulates_otherwise(result: ResultData) -> bool:
    steps = result.workload.accumulation_steps
    return steps(result.best.config) not in (1, steps(result.baseline.config))


def _changed(result: ResultData, code: OwnCode) -> dict[str, Any]:
    """Return the arguments that are other than the code's own."""
    mapping = plan(result.best.config, result.workload, result.hardware)
    unsaid_here = _UNSAID | (_OLDER if "activation_checkpointing" in code.arguments else frozenset())
    decided = {n: v for n, v in laid_over(mapping, result.workload).items() if n not in unsaid_here}
    own = {name: code.arguments.get(name) for name in decided}
    return {n: value for n, value in decided.items() if value != own[n] and (value, own[n]) != (_USUAL_KIND, None)}


def lines(result: ResultData, answer: str) -> list[str]:
    """Say how the answer is trained with."""
    code = result.workload.own_code
    if code is None:
        return []
    if not code.command:
        return ["train with it: result.training_arguments(output_dir) for the Trainer, result.prepare_model(model)"]
    given = shlex.join(flags(result))
    missing = unsaid(result)
    beside = f" (which leave out: {'; '.join(missing)})" if missing else ""
    said = f"as flags of the script, if it reads TrainingArguments from its command line: {given or 'none'}{beside}"
    return [f"train with it: {apply_command(code, answer)}", said]
