"""The two ways to a trial's Trainer: one made for a named model, and the one that a user's own code makes.

Both train under the arguments of the one mapping (`training.arguments.plan`), and both are measured by `trial.trained`.
A user's code is run under the trial's arguments until it trains; what a configuration means for the model is applied to
the model that the code has made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import has_length

from autotune.errors import AutotuneError, NoEffectError
from autotune.execution import user_model
from autotune.execution.checking import EvaluationData, Reading, arguments_of, keeps_predictions
from autotune.execution.effects import EffectsProbe
from autotune.execution.environment import tell_deepspeed
from autotune.execution.failures import is_out_of_memory
from autotune.execution.trial import Trial, trained
from autotune.execution.user_data import RowCount, distinct_samples, longest_of, ordered, view
from autotune.execution.user_overlay import Overlay, harness, overlaid, reach, strayed, theirs
from autotune.training.adapters import prepare_model
from autotune.training.arguments import TrainingPlan, building_device, laid_over, parallel_variables, plan
from autotune.training.batches import STEPS_TO_PEAK, padding_share
from autotune.training.build import build_model
from autotune.training.dataset import Repeated, token_lengths, training_data
from autotune.training.random_weights import quick_weights
from autotune.training.recipes import StepCount, head_figures, recipe_trainer
from autotune.values.budget import LossTask
from autotune.values.hardware import detect
from autotune.values.trial import Measurement, Outcome
from autotune.values.workload import OwnCode


def run_named_model(trial: Trial) -> Outcome:
    """Train a model that is built from its name, with random weights, by the real Trainer.

    Raises:
        AutotuneError: A library refuses the configuration before training starts.
        NoEffectError: An argument did not take effect.
    """
    hardware, per_step, recipe = detect(trial.device), trial.samples_per_step, trial.request.workload.recipe
    probe = EffectsProbe(trial.request.config, hardware)
    try:
        trainer = _trainer_of(trial, plan(trial.request.config, trial.request.workload, hardware), probe)
    except (ValueError, ImportError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise AutotuneError(f"{type(error).__name__}: {error}") from error
    rows, model_config = trainer.train_dataset, trainer.model.config
    if recipe is not None:
        if recipe.kind.generates:
            reading = Reading(None, not_evaluated="not evaluated, which would generate completions")
        elif trial.request.config.precompute_ref_log_probs:
            reading = Reading(None, not_evaluated="not evaluated: the reference ran before training")
        else:  # on the samples that it trains on, the longest first
            reading = Reading(EvaluationData(lambda samples: rows.select([i % len(rows) for i in range(samples)])))
        count = StepCount(trainer, recipe, per_step)
        outcome = trained(trial, probe, trainer, trainer.train, reading)
        if isinstance(outcome, Measurement):
            outcome = outcome.model_copy(update={"effects": {**outcome.effects, "recipe": count.checked()}})
        return outcome

    def padding(steps: int) -> float | None:  # steps of the longest samples left out
        last = min(steps * per_step, len(rows))
        timed = np.arange(min(STEPS_TO_PEAK * per_step, last - per_step), last)
        return padding_share(token_lengths(rows, timed), trial.request.config, per_step)

    longest = EvaluationData(lambda samples: data_of(trial, model_config, samples, longest_first=samples)[0])
    return trained(trial, probe, trainer, trainer.train, Reading(longest, padding))


def _trainer_of(trial: Trial, mapping: TrainingPlan, probe: EffectsProbe) -> Any:
    """Return the Trainer with model, data and arguments: `tuned` and `harness`, from the one mapping."""
    trial.stopwatch.enter("trainer_s")
    os.environ.update(parallel_variables(trial.request.config))
    if "deepspeed" in mapping.tuned:
        tell_deepspeed(trial.device)
    # The order of the samples was made beforehand, for its sampler: see `batches`.
    arguments = {**mapping.tuned, **mapping.harness, **_of_trial(trial)}
    if not trial.request.config.is_balanced:
        arguments["train_sampling_strategy"] = "sequential"
    workload, per_step, callbacks = trial.request.workload, trial.samples_per_step, [probe, trial.timer]
    made = TrainingArguments(**arguments) if workload.recipe is None else None
    trial.stopwatch.enter("model_s")
    config, to_compare = trial.request.config, isinstance(trial.request.task, LossTask)
    with nullcontext() if to_compare else quick_weights():  # losses that are compared need a truly initialised model
        model = build_model(
            workload.model,
            workload.task,
            device=building_device(config, trial.device, to_compare=to_compare),
            quantization=mapping.quantization,
            whole_first=to_compare,
            **{**mapping.model, **head_figures(workload)},
        )
    trial.stopwatch.enter("data_s")
    samples = trial.max_steps * per_step
    if made is None:
        in_full = workload.samples_per_step(config)

        def precomputed(seconds: float) -> None:
            trial.timer.added_s = seconds * in_full

        return recipe_trainer(
            workload,
            mapping,
            arguments,
            model,
            directory=trial.data_directory,
            samples=samples,
            distinct=distinct_samples(trial.request, samples)[0],
            longest_first=per_step,
            callbacks=callbacks,
            precomputed=precomputed,
        )
    model = prepare_model(
        model,
        mapping.adapter,
        chunked_loss=config.chunked_loss,
        activation_memory_budget=config.activation_memory_budget,
    )
    dataset, collator = data_of(trial, model.config, samples, longest_first=per_step)
    trial.stopwatch.enter("trainer_s")
    return _InOrder(model=model, args=made, train_dataset=dataset, data_collator=collator, callbacks=callbacks)


class _InOrder(Trainer):  # type: ignore[misc]  # transformers is untyped
    """Takes the samples of each step in the order of its data, where its sampler balances micro-batches as well."""

    def _get_train_sampler(self, *args: Any) -> Any:
        sampler = super()._get_train_sampler(*args)
        if isinstance(sampler, BatchRebalanceSampler):
            sampler.shuffle = False
        return sampler


def _of_trial(trial: Trial) -> dict[str, Any]:
    """Return the arguments that say how long a trial trains, and where it writes."""
    return {
        "output_dir": str(trial.directory / "trainer"),
        "gradient_accumulation_steps": trial.request.accumulation_steps,
        "max_steps": trial.max_steps,
        **arguments_of(trial.request.task),
    }


def data_of(trial: Trial, model_config: Any, samples: int, *, longest_first: int) -> tuple[Any, Any]:
    """Return so many samples and what makes batches of them, the longest of the first `longest_first` first."""
    distinct, config = distinct_samples(trial.request, samples)
    dataset, collator = training_data(
        trial.request.workload,
        model_config,
        samples=distinct,
        directory=trial.data_directory,
        longest_first=longest_first,
        config=config,
    )
    return Repeated(dataset, samples), collator


def run_user_code(trial: Trial, code: OwnCode) -> Outcome:
    """Run a user's code until it trains, and measure its training.

    Raises:
        CodeError: The code ended without training.
        NoEffectError: An argument did not take effect.
    """
    trial.stopwatch.enter("trainer_s")
    request, hardware = trial.request, detect(trial.device)
    mapping = plan(request.config, request.workload, hardware)
    probe = EffectsProbe(request.config, hardware, theirs=frozenset(code.held))
    of_trial = {n: v for n, v in _of_trial(trial).items() if n != "seed"}  # which is set once the code's model is made
    wanted = {**laid_over(mapping, request.workload), **of_trial, "dataloader_drop_last": True}
    if code.reorders:
        wanted["train_sampling_strategy"] = "sequential"

    def on_train(trainer: Any, train: Callable[[], Any]) -> Outcome:
        reading = _made_ready(trial, code, trainer, probe)
        rows = RowCount(trainer, request.config.per_device_train_batch_size)
        trial.timer.is_whole = lambda: rows.is_whole
        outcome = trained(trial, probe, trainer, train, reading)
        if code.has_rows:
            rows.check()
        asked = request.config.per_device_train_batch_size
        made = getattr(trainer.callback_handler.train_dataloader, "total_batch_size", None)
        if made not in (None, asked):
            raise NoEffectError(f"a micro-batch of {asked} was asked for, but batches of {made} were made")
        return outcome

    overlay = Overlay(
        lambda own: {**harness(own), **wanted},
        lambda model: user_model.fitted(model, mapping, code),
    )
    with overlaid(overlay):
        return reach(code, trial.data_directory, on_train)


def _made_ready(trial: Trial, code: OwnCode, trainer: Any, probe: EffectsProbe) -> Reading:
    """Make a Trainer of the user's the one of a trial."""
    if names := strayed(trainer.args):
        raise NoEffectError(f"your code sets {', '.join(names)} again after it has made its Trainer")
    for callback in trainer.callback_handler.callbacks[:]:  # those that wait for evaluations or tell a tracker
        kind = type(callback)
        if kind.__name__ == "EarlyStoppingCallback" or kind.__module__.startswith("transformers.integrations"):
            trainer.remove_callback(callback)
    trainer.add_callback(probe)
    trainer.add_callback(trial.timer)
    if isinstance(trial.request.task, LossTask):
        set_seed(trial.request.task.seed)
    saves = theirs(trainer.args).get("save_strategy", "no") != "no"
    not_saved = None if saves else "no checkpoint was saved, as your arguments have it"
    evaluation = _to_evaluate_on(trainer)
    if not code.reorders:
        return Reading(evaluation, not_saved=not_saved)
    samples = trial.max_steps * trial.samples_per_step
    trainer.train_dataset, padding_share = ordered(
        trial.request, trainer.train_dataset, trial.data_directory, samples=samples
    )
    return Reading(evaluation, padding_share, not_saved)


def _to_evaluate_on(trainer: Any) -> EvaluationData | None:
    """Return the Trainer's evaluation data, the largest if there are several; None if there are none to be had."""
    found = trainer.eval_dataset
    sized = [d for d in (found.values() if isinstance(found, dict) else [found]) if d is not None and has_length(d)]
    dataset = max(sized, key=len, default=None)
    if dataset is None or not len(dataset):
        return None
    kept = len(dataset) if keeps_predictions(trainer) else None
    return EvaluationData(lambda samples: view(dataset, longest_of(dataset, samples)), kept)
