"""Post-training with TRL's Trainers: what one is made of, for a model with random weights.

Generated completions all have the recipe's length, since random weights rarely stop. TRL loads the weights of a
reference model by name; in a trial they are a copy of the policy's.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from autotune.errors import AutotuneError, NoEffectError
from autotune.training.adapters import peft_config
from autotune.training.arguments import TrainingPlan
from autotune.training.recipe_data import order_of, recipe_in, reward_function, rows_of, tokenizer_of
from autotune.training.texts import quiet_datasets
from autotune.values.model import Task
from autotune.values.workload import Recipe, Workload


def recipe_trainer(
    workload: Workload,
    mapping: TrainingPlan,
    arguments: dict[str, Any],
    model: Any,
    *,
    directory: Path,
    samples: int,
    distinct: int,
    longest_first: int,
    callbacks: Sequence[Any] = (),
    precomputed: Callable[[float], None] = lambda seconds: None,
) -> Any:
    """Return TRL's Trainer for a workload.

    Args:
        workload: Has a recipe.
        mapping: Says the adapter.
        arguments: Of TRL's configuration.
        model: With random weights, without an adapter.
        directory: Where `checked_data` put the rows of a file.
        samples: Of all steps; with generations, completions.
        distinct: Different ones among them, after which the first follows again.
        longest_first: Number of the longest rows that come first.
        callbacks: Of the Trainer.
        precomputed: Gets the seconds for each sample that the reference took before training.
    """
    import trl

    recipe = recipe_in(workload)
    trainer_class = getattr(trl, recipe.kind.trainer)
    config = getattr(trl, recipe.kind.config)(**arguments)
    given: dict[str, Any] = {"reward_funcs": [reward_function(recipe)]} if recipe.kind.generates else {}
    if mapping.adapter is not None:
        given["peft_config"] = peft_config(mapping.adapter)
        if given["peft_config"] is None:
            raise AutotuneError("TRL takes adapters of peft, which has no BitFit")
    rows = rows_of(workload, model.config, directory)
    with quiet_datasets(), _copied_reference(trainer_class, model), _timed(trainer_class, precomputed):
        trainer = trainer_class(
            model=model,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer_of(workload, model.config),
            callbacks=list(callbacks),
            **given,
        )
    order = order_of(trainer.train_dataset, longest_first, workload)[: distinct // recipe.generations]
    trainer.train_dataset = trainer.train_dataset.select(np.resize(order, samples // recipe.generations))
    return trainer


@contextmanager
def _copied_reference(trainer_class: Any, model: Any) -> Iterator[None]:
    """Have TRL take a copy of the policy for its reference model, which it would load by name."""
    import torch

    def copied(*_: Any, dtype: Any = None, **__: Any) -> Any:
        reference = copy.deepcopy(model)
        return reference.to(dtype) if isinstance(dtype, torch.dtype) else reference

    with patch.object(sys.modules[trainer_class.__module__], "create_model_from_path", copied, create=True):
        yield


@contextmanager
def _timed(trainer_class: Any, precomputed: Callable[[float], None]) -> Iterator[None]:
    """Tell `precomputed` how long the reference takes for a sample, where it runs before training."""
    original = getattr(trainer_class, "_precompute_ref_logps", None)

    def timed(trainer: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        made = original(trainer, dataset, *args, **kwargs)  # type: ignore[misc]  # the results are on the host
        precomputed((time.perf_counter() - began) / len(dataset))
        return made

    with patch.object(trainer_class, "_precompute_ref_logps", timed, create=True):
        yield


class StepCount:
    """Counts the samples of a Trainer's steps; with generations the prompts, and the completions of each.

    Args:
        trainer: Before it trains.
        recipe: Of its workload.
        per_step: Samples of a step.
    """

    def __init__(self, trainer: Any, recipe: Recipe, per_step: int) -> None:
        self._trainer, self._recipe, self._per_step = trainer, recipe, per_step
        self.samples = 0
        if recipe.kind.generates:
            self._original = trainer._generate_and_score_completions
            trainer._generate_and_score_completions = self._generated
        else:
            self._original = trainer.training_step
            trainer.training_step = self._trained

    def _generated(self, inputs: Any) -> Any:
        prompts, each = [row["prompt"] for row in inputs], self._recipe.generations
        groups = [prompts[start : start + each] for start in range(0, len(prompts), each)]
        if any(len(group) != each or any(prompt != group[0] for prompt in group) for group in groups):
            raise NoEffectError(f"{each} generations a prompt were asked for, but a group has other prompts")
        made = self._original(inputs)
        self.samples += len(made["completion_ids"])
        lengths = made["completion_mask"].sum(dim=1)
        if int(lengths.min()) != self._recipe.completion_length:
            raise NoEffectError(
                f"completions of {self._recipe.completion_length} tokens were asked for, but one has {lengths.min()}"
            )
        return made

    def _trained(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(inputs["input_ids" if "input_ids" in inputs else "completion_input_ids"])
        self.samples += rows // self._recipe.kind.sequences
        return self._original(model, inputs, *args, **kwargs)

    def checked(self) -> str:
        """Return in words what a step trained on.

        Raises:
            NoEffectError: It was something else than the workload says.
        """
        expected = self._trainer.state.global_step * self._per_step
        if self.samples != expected:
            raise NoEffectError(
                f"{self._recipe.shown(self._per_step)} were asked for, but {self.samples} samples were trained on in "
                f"{self._trainer.state.global_step} steps"
            )
        return self._recipe.shown(self._per_step)


def head_figures(workload: Workload) -> dict[str, int]:
    """Return the fields of the model's config that a recipe needs: a reward model has one label."""
    is_reward = workload.recipe is not None and workload.task is Task.SEQUENCE_CLASSIFICATION
    return {"num_labels": 1} if is_reward else {}
