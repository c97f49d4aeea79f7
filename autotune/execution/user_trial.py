"""A trial of a user's own training: its code run under the trial's arguments, its Trainer measured as ours are.

Called by the worker, which measures. What a configuration means for arguments comes from the one mapping; what it means
for the model is applied to the model that the code has made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.errors import NoEffectError
from autotune.execution.checking import Reading, arguments_of
from autotune.execution.user_data import OwnData, longest_of, view
from autotune.execution.user_overlay import Overlay, harness, overlaid, reach, strayed, theirs
from autotune.training.arguments import laid_over, plan
from autotune.training.user_model import fitted
from autotune.values.checks import LossTask
from autotune.values.hardware import detect
from autotune.values.trial import Outcome, TrialRequest
from autotune.values.user_code import OwnCode

Measure = Callable[[Any, Callable[[], Any], Reading], Outcome]


def run_own(
    request: TrialRequest,
    code: OwnCode,
    directory: Path,
    *,
    device: str,
    max_steps: int,
    callbacks: list[Any],
    measure: Measure,
) -> Outcome:
    """Run the user's code until it trains, and return what `measure` makes of its training.

    Args:
        request: The trial.
        code: The user's.
        directory: Of the trial.
        device: Of this process.
        max_steps: Optimizer steps that it can need at the most.
        callbacks: Watch the training.
        measure: Gets the Trainer, what trains it, and how it reads samples.

    Raises:
        CodeError: The code ended without training.
        NoEffectError: An argument did not take effect.
    """
    mapping = plan(request.config, request.workload, detect(device))
    wanted = {
        **laid_over(mapping, request.workload),
        "output_dir": str(directory / "trainer"),
        "gradient_accumulation_steps": request.accumulation_steps,
        "max_steps": max_steps,
        "dataloader_drop_last": True,
        **({"train_sampling_strategy": "sequential"} if code.reorders else {}),
        **{name: value for name, value in arguments_of(request.task).items() if name != "seed"},
    }
    data_directory = directory.parent.parent / "data"

    def on_train(trainer: Any, train: Callable[[], Any]) -> Outcome:
        reading = _made_ready(request, code, trainer, callbacks, data_directory, max_steps)
        outcome = measure(trainer, train, reading)
        _check_batches(request, trainer)
        return outcome

    overlay = Overlay(
        arguments=lambda own: {**harness(own), **wanted},
        fit=lambda model: fitted(model, mapping, code),
        made=lambda trainer: None,
    )
    with overlaid(overlay):
        return reach(code, data_directory, on_train)


def _made_ready(
    request: TrialRequest, code: OwnCode, trainer: Any, callbacks: list[Any], data_directory: Path, max_steps: int
) -> Reading:
    """Make a Trainer of the user's the one of a trial."""
    from transformers import set_seed

    if names := strayed(trainer.args):
        raise NoEffectError(f"your code sets {', '.join(names)} again after it has made its Trainer")
    for callback in trainer.callback_handler.callbacks[:]:
        if _waits_or_reports(callback):
            trainer.remove_callback(callback)
    for callback in callbacks:
        trainer.add_callback(callback)
    if isinstance(request.task, LossTask):
        set_seed(request.task.seed)
    if trainer.compute_metrics is not None:
        trainer.compute_metrics = _no_metrics  # predictions are gathered all the same
    saves = theirs(trainer.args).get("save_strategy", "no") != "no"
    not_saved = None if saves else "no checkpoint was saved, as your arguments have it"
    longest = _to_evaluate_on(trainer)
    if not code.reorders:
        return Reading(longest, lambda steps: None, not_saved)
    per_step = request.accumulation_steps * request.config.per_device_train_batch_size
    data = OwnData(request, trainer.train_dataset, data_directory, samples=max_steps * per_step)
    trainer.train_dataset = data.in_order()
    return Reading(longest, data.padding_share, not_saved)


def _no_metrics(*args: Any, **kwargs: Any) -> dict[str, float]:
    return {}


def _to_evaluate_on(trainer: Any) -> Callable[[int], Any] | None:
    """Return what gives the longest samples of the Trainer's evaluation data; None if there are none to be had."""
    from transformers.trainer_utils import has_length

    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    if dataset is None or not has_length(dataset) or not len(dataset):
        return None
    return lambda samples: view(dataset, longest_of(dataset, samples))


def _waits_or_reports(callback: Any) -> bool:
    """Return whether a callback stops by evaluations, of which there are none, or tells a tracker of the training."""
    kind = type(callback)
    return kind.__name__ == "EarlyStoppingCallback" or kind.__module__.startswith("transformers.integrations")


def _check_batches(request: TrialRequest, trainer: Any) -> None:
    """Refuse a trial whose batches were not those that were asked for."""
    made = getattr(trainer.callback_handler.train_dataloader, "total_batch_size", None)
    asked = request.config.per_device_train_batch_size
    if made is not None and made != asked:
        raise NoEffectError(f"a micro-batch of {asked} was asked for, but batches of {made} were made")
