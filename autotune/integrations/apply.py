"""Runs a user's unchanged script with the answer of a search in place of its arguments: `autotune script --apply`.

It gets the arguments and changes of the model that trials had, without those that only a trial needs: the script saves,
evaluates and logs as it says. At the end `AutotuneCallback` compares its throughput with the promised one. An answer
for another model, other data or another batch is applied, too, and a line says so; samples a step stay the script's.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.exports.launch_files import launch_commands
from autotune.planning.launchers import code_of, without_launcher
from autotune.storage.run_directory import read_result
from autotune.units import visible
from autotune.values.result import ResultData
from autotune.values.workload import OwnCode

# The arguments that split a step's samples; what generates names its own share of them.
_MICRO_BATCH, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_SPLIT = (_MICRO_BATCH, _ACCUMULATION, "generation_batch_size")


def prepared(answer: Path, command: Sequence[str]) -> tuple[OwnCode, ResultData]:
    """Return the script and the answer; InputError: it can't be read or applied to a script, or there is no script."""
    result, code = read_result(answer), code_of(command)
    config = result.best.config
    too_late = {
        "packed base weights": config.quantization,
        "other experts per token": config.experts_per_token,
        "another expert capacity": config.expert_capacity,
        "a model in parts": config.parallelism.tensor_parallel > 1,
    }
    if lost := next((words for words, value in too_late.items() if value), None):
        raise InputError(f"{answer}: has {lost}, which a model can't be given once it is made")
    known = result.workload.own_code
    if config.packing and not (known is not None and known.packs):
        raise InputError(f"{answer}: packs samples, which your script puts into batches by itself")
    processes = os.environ.get("WORLD_SIZE", str(without_launcher(command).processes or 1))
    if not processes.isdecimal():
        raise InputError(f"WORLD_SIZE={processes[:100]}: expected the number of processes; unset it")
    if not config.parallelism.is_single and "WORLD_SIZE" not in os.environ:
        ours = result.model_copy(update={"workload": result.workload.model_copy(update={"own_code": code})})
        told = launch_commands(ours, str(answer))[0]
        raise InputError(f"{answer}: trains in processes that a launcher starts: {told}")
    if int(processes) != (devices := config.parallelism.world_size):
        here = f"one of {processes} (WORLD_SIZE, or your launcher)"
        raise InputError(f"{answer}: is for {devices} processes, and this is {here}")
    # Knobs that the code sets itself stay the script's; an answer that was found for a model alone decides all knobs.
    traits = {name: getattr(known, name) for name in ("held", "normalizes", "checkpoints")} if known is not None else {}
    return code.model_copy(update=traits or {"normalizes": True}), result


def run(code: OwnCode, result: ResultData) -> None:
    from autotune.execution.user_code import as_written, counts_of, fitted, overlaid, run_script
    from autotune.integrations.callback import AutotuneCallback
    from autotune.training.adapters import prepare_model
    from autotune.training.arguments import training_plan
    from autotune.values.hardware import detect

    mapping = training_plan(result.best.config, result.workload, detect("cpu" if result.hardware.is_cpu else "auto"))
    soaked = result.soaked.arguments if result.soaked is not None else {}
    arguments = {**mapping.overrides(result.workload), **soaked}

    seen: list[int] = []  # parameters of the model as the code made it
    padded = result.best.config.pad_to_multiple_of

    def made(trainer: Any) -> None:
        if padded is not None and hasattr(trainer.data_collator, "pad_to_multiple_of"):
            trainer.data_collator.pad_to_multiple_of = padded
        if others := "; ".join(other_training(result, trainer, seen[-1] if seen else None)):
            sys.stderr.write(visible(f"autotune: the answer was found for another training: {others}") + "\n")
        if result.best.measurement is not None:  # otherwise there is no promise to compare with
            trainer.add_callback(AutotuneCallback(result))

    def fit(model: Any) -> Any:
        seen.append(counts_of(model)["parameters"])
        ready = fitted(model, mapping, code)
        return ready if result.workload.own_code is not None else prepare_model(ready, None, result.best.config)

    def laid(given: Any) -> dict[str, Any]:
        own = as_written(given)
        if _is_same_step(result, own):
            return arguments
        return arguments | {name: own[name] for name in _SPLIT if name in own}

    with overlaid(laid, fit, made):
        run_script(code)


def _is_same_step(result: ResultData, own: dict[str, Any]) -> bool:
    """Whether a script's own arguments, on the baseline's devices or the answer's, give the answer's global batch."""
    numbers = (contender.config.parallelism.world_size for contender in (result.baseline, result.best))
    steps = (own[_MICRO_BATCH] * own[_ACCUMULATION] * number for number in numbers)
    return result.workload.global_batch_size in (None, *steps)  # None: any was allowed


def other_training(result: ResultData, trainer: Any, parameters: int | None) -> Iterator[str]:
    """Yield each difference between a Trainer's training and the one that the answer was found for."""
    from autotune.execution.user_code import as_written, weights_of
    from autotune.execution.user_data import lengths_of

    workload, known = result.workload, result.facts.parameters
    if parameters is not None and known and parameters != known:
        yield f"a model of {known:,} parameters, not {parameters:,}"
    measured = result.arguments.model["dtype"]
    if workload.own_code is None and (weights := weights_of(trainer.model)) != measured:
        yield f"weights in {measured}, not {weights} (dtype of from_pretrained)"
    padded, own = result.best.config.pad_to_multiple_of, as_written(trainer.args)
    if padded not in (None, getattr(trainer.data_collator, "pad_to_multiple_of", None)):
        yield f"batches in multiples of {padded} tokens, which your data collator doesn't make"
    if not _is_same_step(result, own):
        devices = result.best.config.parallelism.world_size
        batch = own[_MICRO_BATCH] * own[_ACCUMULATION] * devices
        split = f"{own[_MICRO_BATCH]} x {own[_ACCUMULATION]}{f' on {devices} devices' * (devices > 1)}"
        yield f"{workload.global_batch_size} samples a step, not {batch} (this training keeps its own, {split})"
    rows, then = trainer.train_dataset, workload.lengths
    if workload.own_code is None or then is None or not hasattr(rows, "__len__"):  # a search by name has other data
        return
    lengths, before = lengths_of(rows), f"{then.samples:,} samples"
    if lengths is not None and (len(rows), lengths.max()) != (then.samples, then.maximum):
        yield f"{before} of up to {then.maximum} tokens, not {len(rows):,} samples of up to {lengths.max()} tokens"
    if lengths is None and len(rows) != then.samples:
        yield f"{before}, not {len(rows):,}"
