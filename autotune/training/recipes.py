"""Post-training with TRL's Trainers: the rows that they train on, and Trainers of models with random weights.

Rows are those of the user's file, whose texts a reward function sees and TRL tokenizes, or synthetic ones. These have
exactly the tokens that the recipe says, by a tokenizer whose words are the ids of the model's vocabulary. Generated
completions all have the recipe's length, since random weights rarely stop. TRL loads the weights of a reference model
by name; in a trial they are a copy of the policy's.
"""

import copy
import importlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InputError, NoEffectError, one_line
from autotune.training.adapters import peft_config
from autotune.training.arguments import OWN_HARNESS, TrainingPlan, arguments_class
from autotune.training.dataset import PLAIN, row_order
from autotune.training.inputs import special_ids
from autotune.training.texts import check_columns, load_tokenizer, profile_of, quiet_datasets, rows_of_file
from autotune.values.model import Task
from autotune.values.workload import LengthProfile, Recipe, Workload

_ROWS = "recipe"  # folder of the rows of a user's file
_MOST_ROWS = 1024  # of a user's file, drawn at random: TRL tokenizes them in each trial
_LONGEST_ROWS = 16  # of the whole file, which come on top: one decides how long a padded micro-batch is

# Columns that become tokens; a reward reads others.
_READ = {"prompt", "completion", "chosen", "rejected", "messages", "text"}

_PAD, _END = "<pad>", "</s>"


def checked_data(workload: Workload, directory: Path) -> tuple[LengthProfile | None, tuple[str, ...]]:
    """Put the rows of the user's file where trials find them; return the lengths of samples in tokens, and notes."""
    recipe = cast(Recipe, workload.recipe)
    if recipe.kind.generates:
        reward_function(recipe)
    if workload.dataset is None:
        return None, ()
    with rows_of_file(workload.dataset, directory) as rows:
        text = workload.fixed_arguments.get("dataset_text_field", "text")
        check_columns(rows.features, recipe, workload.dataset, text=text)
        drawn = np.random.default_rng(workload.seed).permutation(len(rows))[:_MOST_ROWS]
        longest = np.argsort(-row_lengths(rows), kind="stable")[:_LONGEST_ROWS]
        kept = np.concatenate([drawn, np.setdiff1d(longest, drawn)])
        rows.select(kept).save_to_disk(str(directory / _ROWS))
    notes = [f"{len(kept):,} of the {len(rows):,} rows of {workload.dataset}, the longest of all first"]
    if not recipe.kind.generates:
        how = "without those above" if recipe.name == "reward" else "cut to"  # RewardTrainer leaves them out
        notes[0] += f", {how} {workload.sequence_length} tokens (--prompt-len, --completion-len)"
    if load_tokenizer(workload.model, notes)[0].eos_token is None:
        raise InputError(f"--data {workload.dataset}: the tokenizer of {workload.model.name} has no end of text")
    try:
        lengths = _tokens(workload, directory)
    except Exception as error:  # whatever TRL and the tokenizer raise
        what = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"--data {workload.dataset}: TRL can't use it: {what}") from error
    if not len(lengths):
        raise InputError(f"--data {workload.dataset}: all rows are too long (--prompt-len, --completion-len)")
    if recipe.kind.generates and lengths.min() <= recipe.completion_length:
        raise InputError(f"--data {workload.dataset}: a prompt is empty, from which nothing can be generated")
    profile = profile_of(lengths)
    return profile, (*notes, profile.shown)


def _tokens(workload: Workload, directory: Path) -> NDArray[np.int64]:
    """Return the tokens of each sample of a file as TRL makes them, with a model of no size in place of the user's."""
    import transformers
    import trl

    recipe, rows = cast(Recipe, workload.recipe), rows_of(workload, None, directory)
    tokenizer = tokenizer_of(workload, None)
    if recipe.kind.generates:
        chat = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
        ids = ((tokenizer if isinstance(prompt, str) else chat)(prompt)["input_ids"] for prompt in rows["prompt"])
        return np.array([len(found) + recipe.completion_length for found in ids], dtype=np.int64)
    one = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_labels"), 1)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, **one)
    is_reward = recipe.kind.task is Task.SEQUENCE_CLASSIFICATION
    model = (transformers.LlamaForSequenceClassification if is_reward else transformers.LlamaForCausalLM)(config)
    trainer_class = getattr(trl, recipe.kind.trainer)
    given = {"ref_model": copy.deepcopy(model)} if recipe.kind.reference else {}
    with tempfile.TemporaryDirectory(dir=directory) as scratch, quiet_datasets():
        plain = {"train_sampling_strategy": "sequential", "bf16": False, "use_cpu": True, "output_dir": scratch}
        own = {**workload.fixed_arguments, "max_length": workload.sequence_length}
        arguments = arguments_class(recipe)(**{**own, **OWN_HARNESS, **plain})
        made = trainer_class(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **given)
    return np.minimum(row_lengths(made.train_dataset), workload.sequence_length)


def reward_function(recipe: Recipe) -> Callable[..., list[float]]:
    """Return the user's reward function, or one that counts unlike tokens."""
    if recipe.reward is None:
        return lambda completion_ids, **_: [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]
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


def rows_of(workload: Workload, config: Any, directory: Path) -> Any:
    import datasets

    recipe = cast(Recipe, workload.recipe)
    if workload.dataset is not None:
        return datasets.load_from_disk(str(directory / _ROWS))
    random = np.random.default_rng(workload.seed)
    names, size, (pad, end) = recipe.kind.columns, config.get_text_config().vocab_size, _special(config)
    ids = np.setdiff1d(np.arange(size), [pad, end])
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row, name in itertools.product(range(128), names):
        if name == "label":
            columns[name].append(row % 2 == 0)
            continue
        length = recipe.prompt_length
        if name != "prompt":  # one token is the end that TRL adds
            length = recipe.completion_length - 1 + (0 if "prompt" in names else recipe.prompt_length)
        text = " ".join(f"w{i}" for i in random.choice(ids, length))
        columns[name].append(text if name == "prompt" or "prompt" not in names else f" {text}")
    return datasets.Dataset.from_dict(columns)


def tokenizer_of(workload: Workload, config: Any) -> Any:
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
    known = range(config.get_text_config().vocab_size)
    end = next((i for i in special_ids(config, "eos_token_id")[:1] if i in known), 1)
    pad = next((i for i in special_ids(config, "pad_token_id") if i in known and i != end), 0 if end else 1)
    return pad, end


def row_lengths(dataset: Any) -> NDArray[np.int64]:
    """Return the length of each row in ids or characters: of its prompt and of the longest that follows it."""

    def size(value: Any) -> int:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return sum(len(str(message.get("content") or "")) for message in value)
        return len(value) if isinstance(value, list | str) else 0

    columns = dataset.column_names
    names = [name for name in columns if name.endswith("_ids")] or _READ.intersection(columns) or columns
    found = {name: np.array([size(value) for value in dataset[name]], dtype=np.int64) for name in names}
    none = np.zeros(len(dataset), dtype=np.int64)
    prompt: NDArray[np.int64] = sum((found.pop(name) for name in ("prompt", "prompt_ids") if name in found), start=none)
    return prompt + np.max([none, *found.values()], axis=0)  # type: ignore[no-any-return]


def recipe_trainer(
    workload: Workload,
    mapping: TrainingPlan,
    arguments: dict[str, Any],  # of TRL's configuration
    model: Any,  # with random weights, without an adapter
    *,
    directory: Path,  # where `checked_data` put the rows of a file
    samples: int,  # of all steps; with generations, completions
    distinct: int,  # different ones among them, after which the first follows again
    longest_first: int,
    callbacks: Sequence[Any] = (),
) -> tuple[Any, float]:
    """Return TRL's Trainer, and the seconds that the reference took for each sample before training."""
    import torch
    import trl

    recipe = cast(Recipe, workload.recipe)
    trainer_class = getattr(trl, recipe.kind.trainer)
    given: dict[str, Any] = {"reward_funcs": [reward_function(recipe)]} if recipe.kind.generates else {}
    if mapping.adapter is not None:
        given["peft_config"] = peft_config(mapping.adapter)
    rows = rows_of(workload, model.config, directory)
    precompute: Any = getattr(trainer_class, "_precompute_ref_logps", None)
    sample_s = 0.0

    def copied(*_: Any, dtype: Any = None, **__: Any) -> Any:  # the policy for a reference that TRL would load by name
        reference = copy.deepcopy(model)
        return reference.to(dtype) if isinstance(dtype, torch.dtype) else reference

    def timed(trainer: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sample_s
        first = dataset.select(range(min(len(dataset), trainer.args.per_device_train_batch_size)))
        precompute(trainer, first, *args, **kwargs)  # loads the kernels
        began = time.perf_counter()
        made = precompute(trainer, dataset, *args, **kwargs)  # the results are on the host
        sample_s = (time.perf_counter() - began) / len(dataset)
        return made

    with (
        quiet_datasets(),
        patch.object(sys.modules[trainer_class.__module__], "create_model_from_path", copied, create=True),
        patch.object(trainer_class, "_precompute_ref_logps", timed, create=True),
    ):
        given |= {"processing_class": tokenizer_of(workload, model.config), "callbacks": list(callbacks)}
        trainer = trainer_class(model=model, args=arguments_class(recipe)(**arguments), train_dataset=rows, **given)
    prompts = samples // recipe.generations
    longest = longest_first // recipe.generations if workload.dataset is not None else 0  # others have one length
    order = row_order(row_lengths(trainer.train_dataset), workload, PLAIN, longest_first=longest, rows=prompts)
    rows = np.resize(order[: distinct // recipe.generations], prompts)
    trainer.train_dataset = trainer.train_dataset.select(rows)
    return trainer, sample_s


class StepCount:
    """Counts the samples of a Trainer's steps; with generations the prompts, and the completions of each."""

    def __init__(self, trainer: Any, recipe: Recipe, per_step: int) -> None:
        self._trainer, self._recipe, self._per_step = trainer, recipe, per_step
        self.samples = 0
        generated, trained = ("_generate_and_score_completions", self._generated), ("training_step", self._trained)
        name, counted = generated if recipe.kind.generates else trained
        self._original = getattr(trainer, name)
        setattr(trainer, name, counted)

    def _generated(self, inputs: Any) -> Any:
        prompts, each = [row["prompt"] for row in inputs], self._recipe.generations
        groups = [prompts[start : start + each] for start in range(0, len(prompts), each)]
        if any(len(group) != each or any(prompt != group[0] for prompt in group) for group in groups):
            raise NoEffectError(f"{each} generations a prompt were asked for, but a group has other prompts")
        made = self._original(inputs)
        self.samples += len(made["completion_ids"])
        shortest, wanted = int(made["completion_mask"].sum(dim=1).min()), self._recipe.completion_length
        if shortest != wanted:
            raise NoEffectError(f"completions of {wanted} tokens were asked for, but one has {shortest}")
        return made

    def _trained(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(inputs["input_ids" if "input_ids" in inputs else "completion_input_ids"])
        self.samples += rows // self._recipe.kind.sequences
        return self._original(model, inputs, *args, **kwargs)

    def checked(self) -> str:
        shown, steps = self._recipe.shown(self._per_step), self._trainer.state.global_step
        if self.samples != steps * self._per_step:
            trained = f"{self.samples} samples were trained on in {steps} steps"
            raise NoEffectError(f"{shown} were asked for, but {trained}")
        return shown
