"""Tunes post-training with one of TRL's Trainers: supervised, on preferences, a reward model, or by reinforcement."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from autotune.errors import InputError
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.workload import Subject, model_of, searched_workload
from autotune.training.baseline import UserArguments
from autotune.training.heads import check_task
from autotune.values.config import Precision
from autotune.values.hardware import Hardware
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


class RecipeSubject(Subject):
    """A model that the user names, trained with one of TRL's Trainers.

    Raises:
        InputError: TRL isn't installed, or an option contradicts the recipe.
    """

    def __init__(self, options: SearchOptions) -> None:
        super().__init__(options)
        assert options.recipe is not None
        self.name_of_recipe: RecipeName = options.recipe
        said = f"--recipe {options.recipe}"
        if find_spec("trl") is None:
            raise InputError(f'{said}: needs the package trl: pip install "autotune-train[trl]"')
        for name, reason in _DECIDED.items():
            if getattr(options, name) not in (None, 1):
                raise InputError(f"--{name.replace('_', '-')}: goes with no {said}: {reason}")
        kind = RECIPES[options.recipe]
        for name in ("generations", "reward"):
            if getattr(options, name) is not None and not kind.generates:
                raise InputError(f"--{name}: {options.recipe} generates nothing")
        if options.generations == 1:
            raise InputError("--generations 1: TRL compares the completions of a prompt, which takes two or more")
        if options.check_loss and kind.generates:
            raise InputError(f"--check-loss: goes with no {said}: other completions have other losses")
        if options.reward is not None and not all(options.reward.partition(":")):
            raise InputError(f"--reward {options.reward}: expected MODULE:FUNCTION")
        if options.global_batch == "any" and kind.generates:
            raise InputError(f"--global-batch any: goes with no {said}: prompts and generations of a step are fixed")

    def workload(self, hardware: Hardware, arguments: UserArguments | None, notes: list[str]) -> Workload:
        """Return what every trial trains; a line for each default is added to `notes`.

        Raises:
            InputError: An option can't be used, or the model is no decoder.
        """
        options, name = self.options, self.name_of_recipe
        kind = RECIPES[name]
        spec, _ = model_of(options)
        if spec.kind != "decoder":
            raise InputError(f"--recipe {name}: trains decoders, and {spec.name} is {spec.kind}")
        check_task(spec, kind.task)
        usual = _LENGTH[hardware.kind]
        prompt, completion = options.prompt_len or usual, options.completion_len or usual
        if completion < 2 and not kind.generates:
            raise InputError("--completion-len 1: TRL ends a completion with a token of its own; use 2 or more")
        recipe = Recipe(
            name=name,
            prompt_length=prompt,
            completion_length=completion,
            generations=options.generations or _GENERATIONS.get(name, 1),
            reward=options.reward,
            directory=str(Path.cwd()) if options.reward is not None else None,
        )
        asked = options.model_copy(update={"seq_len": prompt + completion})
        workload = searched_workload(asked, (spec, kind.task), hardware, arguments, notes)
        batch = workload.global_batch_size
        if batch is not None and batch % recipe.generations:
            raise InputError(
                f"--global-batch {batch}: is no multiple of the {recipe.generations} generations of a prompt"
            )
        step = "" if batch is None else f", {recipe.shown(batch)}"
        notes.append(f"TRL's {kind.trainer}: prompts of {prompt} tokens, completions of {completion}{step}")
        if kind.generates:
            notes.append("a sample is a completion, and a step is a whole cycle: generating, scoring and training")
            if find_spec("vllm") is None:
                notes.append("vLLM isn't installed: transformers generates")
        notes.append("no prediction: TRL's phases aren't traced, so memory and time are measured")
        return workload.model_copy(update={"recipe": recipe})

    def planned(self, plan: SearchPlan) -> SearchPlan:
        """Return the plan with TRL's own defaults as the baseline, bf16 and checkpointing, unless the user has one."""
        if self.options.baseline is not None:
            return plan
        checkpointing = "full" if plan.facts.supports_checkpointing else "none"
        precision = Precision.BF16 if plan.hardware.has_bf16 else Precision.FP32
        baseline = plan.baseline.model_copy(update={"checkpointing": checkpointing, "precision": precision})
        return plan.model_copy(update={"baseline": baseline})
