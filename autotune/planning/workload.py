"""Makes the workload of a search from the user's options; recipes are trained with one of TRL's Trainers.

`notes` receives a line for the user on every default that was chosen. An InputError refuses unusable options.
"""

from importlib.util import find_spec
from pathlib import Path

from autotune.errors import InputError
from autotune.planning.options import SearchOptions, WorkloadOptions
from autotune.training.baseline import UserArguments
from autotune.training.build import build_config
from autotune.training.inputs import fixed_frames, image_or_sound, image_text, least_frames
from autotune.training.resolve import check_task, default_task, head_notes, resolve
from autotune.values.config import LARGEST_BATCH
from autotune.values.model import ModelSpec, Task
from autotune.values.workload import LONGEST_SAMPLE, RECIPES, Recipe, Workload

DEFAULT_GLOBAL_BATCH = {"cuda": 64, "cpu": 8}
# Types whose positions begin behind the padding's id; ProphetNet looks one further (`training.facts` finds them so).
_BEHIND_PADDING = {
    "camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "prophetnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
_USUAL_LENGTH = {"cuda": 256, "cpu": 32}  # tokens of a recipe's prompts, and of its completions


def workload_of(
    options: WorkloadOptions, kind: str, notes: list[str], model: tuple[ModelSpec, Task] | None = None
) -> Workload:
    """Return the workload on a kind of device ('cuda', 'cpu') with a free global batch."""
    recipe, asked = None, options.seq_len
    if options.recipe is None:
        spec, task = model or _model_of(options)
    else:
        spec, task, recipe = _recipe_of(options, kind)
        asked = recipe.prompt_length + recipe.completion_length
    if asked is not None and not task.takes_text and not task.takes_audio:
        raise InputError(f"--seq-len {asked}: the task {task} has images alone, whose size the model's config says")
    notes += head_notes(spec, task, options.recipe) if task is not Task.OWN else []
    shown, edge, usual = None, None, {"cuda": 512, "cpu": 64}[kind]
    if task is Task.IMAGE_CLASSIFICATION:
        *_, height, width = 1, *image_or_sound(build_config(spec, task), usual)[1]  # ImageGPT's are a row of pixels
        edge = width if height == width else None
        notes.append(f"images of {width} x {height} pixels (image_size in config.json, else 224)")
    if task is Task.IMAGE_TEXT_TO_TEXT:
        config = build_config(spec, task)
        shown = image_text(config, options.images, options.image_size)
        notes.append(f"{shown.described} (--images, --image-size)")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        usual = min(usual + shown.tokens, positions or LONGEST_SAMPLE)
        if not shown.tokens + 2 <= (asked or usual) <= LONGEST_SAMPLE:
            limits = f"use at least {shown.tokens + 2}, and at most {LONGEST_SAMPLE}"
            raise InputError(f"--seq-len {asked or usual}: a sample's images take {shown.tokens} tokens; {limits}")
    if task.takes_text and asked is None:
        positions, wished = spec.config.get("max_position_embeddings", spec.config.get("n_positions")), usual
        if spec.model_type in _BEHIND_PADDING:
            config = build_config(spec, task)
            positions = config.max_position_embeddings - config.pad_token_id - 1 - hasattr(config, "ngram")
        usual = min(usual, positions) if isinstance(positions, int) and positions > 0 else usual
        notes.append(f"sequence length {usual}{', the longest that the model has' * (usual < wished)} (--seq-len)")
    length = asked or usual
    if task.takes_audio:
        fixed, least = fixed_frames(spec.model_type, spec.config), least_frames(spec.model_type, spec.config)
        if fixed is not None and asked not in (None, fixed):
            raise InputError(f"--seq-len {asked}: {spec.name} takes {fixed} frames of sound and no other length")
        if fixed is None and length < least:
            raise InputError(f"--seq-len {length}: {spec.name} hides spans of {least} frames in training; use as many")
        length = fixed or length
        notes += [f"samples of {length} frames of sound{'' if fixed else ' (--seq-len)'}"] if asked is None else []
    if (target := options.target_len) and not task.has_targets:
        raise InputError(f"--target-len: the task {task} has no decoder targets of their own")
    if task.has_targets and target is None:
        spoken = min(128, int(spec.config.get("max_target_positions", 128)))  # 30 s hold some 75 words
        target = spoken if task.takes_audio else length
        notes.append(f"target length {target} (--target-len)")
    return Workload(
        model=spec,
        task=task,
        sequence_length=length,
        target_length=target,
        images=shown.images if shown else None,
        image_size=shown.image.size if shown else edge,
        global_batch_size=None,
        recipe=recipe,
    )


def _model_of(options: WorkloadOptions) -> tuple[ModelSpec, Task]:
    spec = resolve(options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)
    try:
        task = default_task(spec) if options.task is None else Task(options.task)
    except ValueError:
        raise InputError(f"--task {options.task}: expected one of {', '.join(Task.heads())}") from None
    check_task(spec, task)
    asked = {"--images": options.images, "--image-size": options.image_size, "--freeze-vision": options.freeze_vision}
    if task is not Task.IMAGE_TEXT_TO_TEXT and (given := next((name for name, value in asked.items() if value), None)):
        raise InputError(f"{given}: the task {task} has no images beside texts")
    return spec.model_copy(update={"freeze_vision": options.freeze_vision}), task


def check_recipe(options: WorkloadOptions) -> None:
    given = {name: value for name, value in options if value is not None}
    if options.recipe is None:
        for name in ("prompt_len", "completion_len", "generations", "reward"):
            if name in given:
                raise InputError(f"--{name.replace('_', '-')}: needs --recipe, which trains with TRL")
        return
    said, kind = f"--recipe {options.recipe}", RECIPES[options.recipe]
    if find_spec("trl") is None:
        raise InputError(f'{said}: needs the package trl: pip install "autotune-train[trl]"')
    for name, reason in (
        ("task", "the recipe decides it"),
        ("seq_len", "a recipe has --prompt-len and --completion-len"),
        ("target_len", "a recipe has --prompt-len and --completion-len"),
        ("text_field", "TRL knows its columns by their names"),
        ("devices", "a recipe is tuned on one device"),
    ):
        if name in given and not (name == "devices" and given[name] in ((), (1,), 1)):
            raise InputError(f"--{name.replace('_', '-')}: can't be used with {said}: {reason}")
    for name in ("generations", "reward"):
        if name in given and not kind.generates:
            raise InputError(f"--{name}: {options.recipe} generates nothing")
    if kind.generates and {"data", "prompt_len"} <= given.keys():
        raise InputError("--prompt-len: the prompts of --data are as long as they are; leave one of the two out")
    if options.global_batch == "any" and kind.generates:
        raise InputError(f"--global-batch any: can't be used with {said}: prompts and generations of a step are fixed")
    if given.get("check_loss") and kind.generates:
        raise InputError(f"--check-loss: can't be used with {said}: other completions have other losses")
    if not all(given.get("reward", "a:b").partition(":")):
        raise InputError(f"--reward {given['reward']}: expected MODULE:FUNCTION")


def with_arguments_of_trl(options: SearchOptions, device: str, arguments: UserArguments) -> SearchOptions:
    """Return the options with the lengths and the generations that the user's arguments give a recipe's Trainer."""
    given: dict[str, int] = {}
    fixed, source = arguments.fixed, arguments.source
    if options.recipe is not None and RECIPES[options.recipe].generates:
        for option, name in (("generations", "num_generations"), ("completion_len", "max_completion_length")):
            given |= {option: fixed[name]} if name in fixed else {}
            if (asked := getattr(options, option)) not in (None, own := given.get(option, asked)):
                raise InputError(
                    f"{source}: {name} {own} and --{option.replace('_', '-')} {asked}: drop one of the two"
                )
    elif options.recipe is not None and (longest := fixed.get("max_length")) is not None:
        usual = _USUAL_LENGTH[device]
        together = (options.prompt_len or usual) + (options.completion_len or usual)
        if together > longest or (options.data is not None and together < longest):  # a file's samples are cut there
            if options.prompt_len or options.completion_len:
                both = f"--prompt-len and --completion-len, together {together}"
                raise InputError(f"{source}: max_length {longest} and {both}: drop one of the two")
            given = {"prompt_len": longest // 2, "completion_len": longest - longest // 2}
    return options.model_copy(update=given)


def _recipe_of(options: WorkloadOptions, device: str) -> tuple[ModelSpec, Task, Recipe]:
    assert options.recipe is not None
    kind = RECIPES[options.recipe]
    spec, _ = _model_of(options)
    if spec.kind != "decoder":
        raise InputError(f"--recipe {options.recipe}: trains decoders, and {spec.name} is of kind {spec.kind}")
    check_task(spec, kind.task)
    if kind.task is Task.SEQUENCE_CLASSIFICATION:  # a reward is one number
        figures = {n: value for n, value in spec.config.items() if n not in ("num_labels", "id2label", "label2id")}
        spec = spec.model_copy(update={"config": {**figures, "num_labels": 1}})
    usual = _USUAL_LENGTH[device]
    prompt, completion = options.prompt_len or usual, options.completion_len or usual
    if completion < 2 and not kind.generates:
        raise InputError("--completion-len 1: TRL ends a completion with a token of its own; use 2 or more")
    reward = getattr(options, "reward", None)
    recipe = Recipe(
        name=options.recipe,
        prompt_length=prompt,
        completion_length=completion,
        generations=options.generations or {"grpo": 8, "rloo": 2}.get(options.recipe, 1),  # TRL's defaults
        **({} if reward is None else {"reward": reward, "directory": str(Path.cwd())}),
    )
    return spec, kind.task, recipe


def with_batch(workload: Workload, batch: int | None, notes: list[str]) -> Workload:
    """Return the workload with so many samples in a step, which has to hold whole prompts."""
    if (recipe := workload.recipe) is not None:
        if batch is not None and batch % recipe.generations:
            each = recipe.generations
            raise InputError(f"--global-batch {batch}: is no multiple of the {each} generations of a prompt")
        if batch == 1 and recipe.name == "kto":
            raise InputError("--global-batch 1: kto compares the samples of a micro-batch; use 2 or more")
        prompts = f"prompts of {recipe.prompt_length} tokens" if workload.dataset is None else "your prompts"
        lengths = f"{prompts}, completions of {recipe.completion_length}"
        if workload.dataset is not None and not recipe.kind.generates:
            lengths = "your prompts and completions"
        notes.append(f"TRL's {recipe.kind.trainer}: {lengths}{'' if batch is None else f', {recipe.shown(batch)}'}")
        if recipe.kind.generates:
            notes.append("a sample is a completion, and a step is a whole cycle: generating, scoring and training")
    return workload.model_copy(update={"global_batch_size": batch})


def global_batch_of(options: WorkloadOptions, usual: int, notes: list[str], *, together: bool = False) -> int | None:
    """Return the global batch of the options, or `usual`, of all devices `together`; None if it is free ('any')."""
    asked = options.global_batch
    if asked == "any":
        notes.append("the global batch is free: throughputs of different batches are compared, which learn differently")
        return None
    if asked is None:
        usual = -(-usual // (options.generations or 1)) * (options.generations or 1)  # whole prompts
        notes.append(f"global batch {usual} samples{', all devices together' * together} (--global-batch)")
        return usual
    return check_batch(asked, "--global-batch")


def check_batch(samples: int, source: str) -> int:
    """Return a global batch that `source` says; InputError: it is larger than `LARGEST_BATCH`."""
    if samples > LARGEST_BATCH:
        raise InputError(f"{source} {samples}: use at most {LARGEST_BATCH} samples a step; nobody has published more")
    return samples
