"""Tunes post-training with one of TRL's Trainers: supervised, on preferences, a reward model, or by reinforcement."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from autotune.errors import InputError
from autotune.planning.options import SearchOptions, WorkloadOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.workload import Subject, model_of, searched_workload
from autotune.training.baseline import UserArguments
from autotune.training.heads import check_task
from autotune.values.config import Precision, TrainConfig
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts, ModelSpec, Task
from autotune.values.workload import RECIPES, Recipe, RecipeName, Workload

_LENGTH = {"cuda": 256, "cpu": 32}  # tokens of a prompt, and of a completion
_GENERATIONS: dict[RecipeName, int] = {"grpo": 8, "rloo": 2}  # TRL's defaults

# Options that a recipe decides, with the reason of the refusal.
_DECIDED = {
    "task": "the recipe decides it",
    "seq_len": "a recipe has --prompt-len and --completion-len",
    "target_len": "a recipe has --prompt-len and --completion-len",
    "text_field": "TRL knows its columns by their names",
    "devices": "a recipe is tuned on one device",
}


def check_recipe(options: WorkloadOptions) -> None:
    """Refuse options that contradict the recipe, or that need one.

    Raises:
        InputError: TRL isn't installed, or an option contradicts the recipe.
    """
    if options.recipe is None:
        for name in ("prompt_len", "completion_len", "generations", "reward"):
            if getattr(options, name, None) is not None:
                raise InputError(f"--{name.replace('_', '-')}: needs --recipe, which trains with TRL")
        return
    said, kind = f"--recipe {options.recipe}", RECIPES[options.recipe]
    if find_spec("trl") is None:
        raise InputError(f'{said}: needs the package trl: pip install "autotune-train[trl]"')
    for name, reason in _DECIDED.items():
        if getattr(options, name, None) not in (None, 1):
            raise InputError(f"--{name.replace('_', '-')}: can't be used with {said}: {reason}")
    for name in ("generations", "reward"):
        if getattr(options, name, None) is not None and not kind.generates:
            raise InputError(f"--{name}: {options.recipe} generates nothing")
    if options.generations == 1:
        raise InputError("--generations 1: TRL compares the completions of a prompt, which takes two or more")
    if options.global_batch == "any" and kind.generates:
        raise InputError(f"--global-batch any: can't be used with {said}: prompts and generations of a step are fixed")


def recipe_of(options: WorkloadOptions, device: str) -> tuple[ModelSpec, Task, Recipe]:
    """Return the model, its head and the recipe on a kind of device ('cuda', 'cpu').

    Raises:
        InputError: The model is no decoder, or a length can't be.
    """
    assert options.recipe is not None
    kind = RECIPES[options.recipe]
    spec, _ = model_of(options)
    if spec.kind != "decoder":
        raise InputError(f"--recipe {options.recipe}: trains decoders, and {spec.name} is {spec.kind}")
    check_task(spec, kind.task)
    if kind.task is Task.SEQUENCE_CLASSIFICATION:  # a reward is one number
        classes = {"num_labels", "id2label", "label2id"}
        figures = {name: value for name, value in spec.config.items() if name not in classes}
        spec = spec.model_copy(update={"config": {**figures, "num_labels": 1}})
    prompt, completion = options.prompt_len or _LENGTH[device], options.completion_len or _LENGTH[device]
    if completion < 2 and not kind.generates:
        raise InputError("--completion-len 1: TRL ends a completion with a token of its own; use 2 or more")
    recipe = Recipe(
        name=options.recipe,
        prompt_length=prompt,
        completion_length=completion,
        generations=options.generations or _GENERATIONS.get(options.recipe, 1),
    )
    return spec, kind.task, recipe


def recipe_notes(recipe: Recipe, batch: int | None) -> list[str]:
    """Return what a step of so many samples is.

    Raises:
        InputError: It holds no whole prompts.
    """
    if batch is not None and batch % recipe.generations:
        raise InputError(f"--global-batch {batch}: is no multiple of the {recipe.generations} generations of a prompt")
    step = "" if batch is None else f", {recipe.shown(batch)}"
    lengths = f"prompts of {recipe.prompt_length} tokens, completions of {recipe.completion_length}"
    notes = [f"TRL's {recipe.kind.trainer}: {lengths}{step}"]
    if recipe.kind.generates:
        notes.append("a sample is a completion, and a step is a whole cycle: generating, scoring and training")
    return notes


def recipe_baseline(baseline: TrainConfig, facts: ModelFacts, hardware: Hardware) -> TrainConfig:
    """Return a baseline with TRL's own defaults: bf16, and checkpointing of all layers."""
    checkpointing = "full" if facts.supports_checkpointing else "none"
    precision = Precision.BF16 if hardware.has_bf16 else Precision.FP32
    return baseline.model_copy(update={"checkpointing": checkpointing, "precision": precision})


class RecipeSubject(Subject):
    """A model that the user names, trained with one of TRL's Trainers.

    Raises:
        InputError: An option contradicts the recipe.
    """

    def __init__(self, options: SearchOptions) -> None:
        super().__init__(options)
        check_recipe(options)
        said = f"--recipe {options.recipe}"
        assert options.recipe is not None
        if options.check_loss and RECIPES[options.recipe].generates:
            raise InputError(f"--check-loss: can't be used with {said}: other completions have other losses")
        if options.reward is not None and not all(options.reward.partition(":")):
            raise InputError(f"--reward {options.reward}: expected MODULE:FUNCTION")

    def workload(self, hardware: Hardware, arguments: UserArguments | None, notes: list[str]) -> Workload:
        """Return what every trial trains; a line for each default is added to `notes`.

        Raises:
            InputError: An option can't be used, or the model is no decoder.
        """
        options = self.options
        spec, task, recipe = recipe_of(options, hardware.kind)
        if options.reward is not None:
            recipe = recipe.model_copy(update={"reward": options.reward, "directory": str(Path.cwd())})
        asked = options.model_copy(update={"seq_len": recipe.prompt_length + recipe.completion_length})
        workload = searched_workload(asked, (spec, task), hardware, arguments, notes)
        notes += recipe_notes(recipe, workload.global_batch_size)
        if recipe.kind.generates:
            why = (
                "it isn't installed"
                if find_spec("vllm") is None
                else "it loads weights by name, and a trial's are random"
            )
            notes.append(f"not tried: generating with vLLM (use_vllm), as {why}; transformers generates")
        return workload.model_copy(update={"recipe": recipe})

    def planned(self, plan: SearchPlan) -> SearchPlan:
        """Return the plan with TRL's own defaults as the baseline, unless the user has one."""
        if self.options.baseline is not None:
            return plan
        return plan.model_copy(update={"baseline": recipe_baseline(plan.baseline, plan.facts, plan.hardware)})
