"""Post-training with TRL's Trainers: what one is made of, for a model with random weights.

Synthetic texts have exactly the tokens that the recipe says, by a tokenizer whose words are the ids of the model's
vocabulary. Generated completions all have the recipe's length, since random weights rarely stop. TRL loads the weights
of a reference model by name; in a trial they are a copy of the policy's.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from autotune.errors import AutotuneError, InputError, NoEffectError, one_line
from autotune.training.adapters import peft_config
from autotune.training.arguments import TrainingPlan
from autotune.training.batches import STEPS_TO_PEAK, row_lengths
from autotune.training.corpus import load_tokenizer
from autotune.training.text_file import check_columns, checked_path, quiet_datasets, read_rows
from autotune.values.model import Task
from autotune.values.workload import Recipe, Workload

_ROWS = "recipe"  # folder of the rows of a user's file
_MOST_ROWS = 1024  # of a user's file, drawn at random: TRL tokenizes them in each trial
_LONGEST_ROWS = 16  # of the whole file, which come on top: one decides how long a padded micro-batch is
_SYNTHETIC_ROWS = 128  # different ones

_PAD, _END = "<pad>", "</s>"


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

    recipe = _recipe(workload)
    trainer_class = getattr(trl, recipe.kind.trainer)
    config = getattr(trl, recipe.kind.config)(**arguments)
    given: dict[str, Any] = {"reward_funcs": [reward_function(recipe)]} if recipe.kind.generates else {}
    if mapping.adapter is not None:
        given["peft_config"] = peft_config(mapping.adapter)
        if given["peft_config"] is None:
            raise AutotuneError("TRL takes adapters of peft, which has no BitFit")
    rows = _rows(workload, model.config, directory)
    with quiet_datasets(), _copied_reference(trainer_class, model), _timed(trainer_class, precomputed):
        trainer = trainer_class(
            model=model,
            args=config,
            train_dataset=rows,
            processing_class=_tokenizer(workload, model.config),
            callbacks=list(callbacks),
            **given,
        )
    order = _order(trainer.train_dataset, longest_first, workload)[: distinct // recipe.generations]
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


def checked_data(workload: Workload, directory: Path) -> tuple[str, ...]:
    """Put the rows of the user's file where trials find them; return notes.

    Raises:
        InputError: The file, the tokenizer or the reward function can't be used.
    """
    recipe = _recipe(workload)
    if recipe.kind.generates:
        reward_function(recipe)
    if workload.dataset is None:
        return ()
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch, quiet_datasets():
        rows = read_rows(checked_path(workload.dataset), workload.dataset, Path(scratch))
        check_columns(rows.features, recipe, workload.dataset)
        drawn = np.random.default_rng(workload.seed).permutation(len(rows))[:_MOST_ROWS]
        longest = np.argsort(-row_lengths(rows), kind="stable")[:_LONGEST_ROWS]
        kept = np.concatenate([drawn, np.setdiff1d(longest, drawn)])
        rows.select(kept).save_to_disk(str(directory / _ROWS))
    said = f"{len(kept):,} of the {len(rows):,} rows of {workload.dataset}, the longest of all first"
    cut = (
        "" if recipe.kind.generates else f", cut to {workload.sequence_length} tokens (--prompt-len, --completion-len)"
    )
    notes = [said + cut]
    if load_tokenizer(workload.model, notes)[0].eos_token is None:
        raise InputError(f"--data {workload.dataset}: the tokenizer of {workload.model.name} has no end of text")
    return tuple(notes)


def reward_function(recipe: Recipe) -> Callable[..., list[float]]:
    """Return the user's reward function, or one that counts unlike tokens.

    Raises:
        InputError: The user's can't be imported.
    """
    if recipe.reward is None:
        return _unlike_tokens
    module, _, name = recipe.reward.partition(":")
    if recipe.directory is not None and recipe.directory not in sys.path:
        sys.path.insert(0, recipe.directory)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise InputError(f"--reward {recipe.reward}: {type(error).__name__}: {one_line(error)}") from error
    if not callable(found):
        raise InputError(f"--reward {recipe.reward}: {type(found).__name__} is no function")
    return found  # type: ignore[no-any-return]


def _unlike_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]


def _rows(workload: Workload, config: Any, directory: Path) -> Any:
    """Return the rows of the user's file, or synthetic ones, as a `datasets.Dataset`."""
    import datasets

    recipe = _recipe(workload)
    if workload.dataset is not None:
        return datasets.load_from_disk(str(directory / _ROWS))
    random = np.random.default_rng(workload.seed)
    names, size, (pad, end) = recipe.kind.columns, config.get_text_config().vocab_size, _special(config)
    ids = np.setdiff1d(np.arange(size), [pad, end])
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row, name in itertools.product(range(_SYNTHETIC_ROWS), names):
        if name == "label":
            columns[name].append(row % 2 == 0)
            continue
        length = recipe.prompt_length
        if name != "prompt":  # one token is the end that TRL adds
            length = recipe.completion_length - 1 + (0 if "prompt" in names else recipe.prompt_length)
        text = " ".join(f"w{i}" for i in random.choice(ids, length))
        columns[name].append(text if name == "prompt" or "prompt" not in names else f" {text}")
    return datasets.Dataset.from_dict(columns)


def _tokenizer(workload: Workload, config: Any) -> Any:
    """Return the model's own tokenizer for a user's file, otherwise one whose words are the ids of its vocabulary."""
    if workload.dataset is not None:
        return load_tokenizer(workload.model, [])[0]
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = _special(config)
    names = {pad: _PAD, end: _END}
    words = {names.get(i, f"w{i}"): i for i in range(config.get_text_config().vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END)


def _special(config: Any) -> tuple[int, int]:
    """Return the ids of padding and of the end of a text, which differ."""
    text = config.get_text_config()
    end = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    end = end if isinstance(end, int) and 0 <= end < text.vocab_size else 1
    pad = text.pad_token_id
    if not isinstance(pad, int) or not 0 <= pad < text.vocab_size or pad == end:
        pad = 0 if end != 0 else 1
    return pad, end


def _order(dataset: Any, longest_first: int, workload: Workload) -> Any:
    """Return the numbers of rows in the order in which they are read, the longest first."""
    order = np.resize(np.random.default_rng(workload.seed).permutation(len(dataset)), max(len(dataset), _MOST_ROWS))
    if workload.dataset is None:
        return order
    longest = np.argsort(-row_lengths(dataset), kind="stable")[:longest_first]
    return np.concatenate([np.tile(longest, STEPS_TO_PEAK), order])


def _recipe(workload: Workload) -> Recipe:
    assert workload.recipe is not None
    return workload.recipe


def head_figures(workload: Workload) -> dict[str, int]:
    """Return the fields of the model's config that a recipe needs: a reward model has one label."""
    is_reward = workload.recipe is not None and workload.task is Task.SEQUENCE_CLASSIFICATION
    return {"num_labels": 1} if is_reward else {}
