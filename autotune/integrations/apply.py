"""Runs a user's unchanged script with the answer of a search in place of its arguments: `autotune script --apply`.

The same arguments and changes of the model as in trials are applied, without those that only a trial needs: the script
saves, evaluates and logs as it says. At the end `AutotuneCallback` compares its throughput with the promised one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune.errors import InputError
from autotune.planning.user_trainer import code_of
from autotune.storage.results import read_result
from autotune.values.result import ResultData
from autotune.values.user_code import OwnCode


class Run(NamedTuple):
    """A script and the answer that is applied to it."""

    code: OwnCode
    result: ResultData


def prepared(answer: Path, command: Sequence[str]) -> Run:
    """Return the script and the answer.

    Raises:
        InputError: The answer can't be read or can't be applied to a script, or there is no script.
    """
    result, code = read_result(answer), code_of(command)
    if not result.best.config.parallelism.is_single:
        raise InputError(f"{answer}: trains on several devices, which a script is started for; see autotune export")
    if result.arguments.quantization is not None:
        raise InputError(f"{answer}: has packed base weights, which a model can't be given once it is made")
    if result.best.config.packing:
        raise InputError(f"{answer}: packs samples, which your script puts into batches by itself")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("the answer is that of one process, and this is one of several (WORLD_SIZE)")
    # Knobs that the code sets itself stay the script's; an answer that was found for a model alone decides all knobs.
    known = result.workload.own_code
    traits = {name: getattr(known, name) for name in ("held", "normalizes")} if known is not None else {}
    return Run(code.model_copy(update=traits or {"normalizes": True}), result)


def run(prepared_run: Run) -> None:
    """Run the script to its end."""
    from autotune.execution.user_overlay import Overlay, overlaid, run_script
    from autotune.integrations.callback import AutotuneCallback
    from autotune.training.adapters import fit_user_model
    from autotune.training.arguments import laid_over, plan
    from autotune.values.hardware import detect

    code, result = prepared_run
    mapping = plan(result.best.config, result.workload, detect("cpu" if result.hardware.is_cpu else "auto"))
    soaked = result.soaked.arguments if result.soaked is not None else {}
    arguments = {**laid_over(mapping, result.workload), **soaked}

    def made(trainer: Any) -> None:
        if result.best.measurement is not None:  # otherwise there is no promise to compare with
            trainer.add_callback(AutotuneCallback(result))

    def fitted(model: Any) -> Any:
        return fit_user_model(model, mapping.model, mapping.adapter, code)

    with overlaid(Overlay(lambda _: arguments, fitted, made)):
        run_script(code)
