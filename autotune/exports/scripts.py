"""Training scripts with a plain Trainer and with TRL's SFTTrainer, and what the loop's script shares with them.

Each is a Jinja template that reads as the script it makes; here its values are put together. The scripts need neither
autotune nor a file beside them. They start with random samples of the size that was measured, for the user to replace;
ids come from the middle half of a vocabulary, where no model has its special ones.
"""

from __future__ import annotations

import inspect
from pathlib import PurePath
from typing import Any

from autotune.errors import InputError
from autotune.exports import launch_files
from autotune.exports.templating import Code, rendered
from autotune.exports.winner import EVALUATING, Draft, Winner, lost_arguments
from autotune.training.adapters import CLASSIFICATION_HEADS
from autotune.training.image_text import VISION_PARTS
from autotune.values.model import Task
from autotune.values.workload import Recipe

TRAIN, TRL = launch_files.SCRIPT, "train_trl.py"

# What SFTConfig decides otherwise than TrainingArguments, or adds to it, as it was measured (TRL 1.16: trainer/
# base_config.py, sft_config.py). Of checkpointing and bf16 the measured arguments say whether they are on.
SFT_DEFAULTS: dict[str, Any] = {"learning_rate": 5e-5, "logging_steps": 500, "packing": False, "loss_type": "nll"}

# Steps of a run, unless the user has said how many.
_STEPS = 100

# Imported names that take more characters than this get a line each.
_IMPORTS_WIDTH = 96

# Distinct samples, which take turns; of images and recordings few, since they are large.
_TEXTS, _DENSE = 512, 8
_MASKED_SHARE = 0.15

# Readers of the library datasets, by kind of file.
_LOADERS = {".csv": "csv", ".parquet": "parquet"}

_TEXT_VOCABULARY = Code("config.get_text_config().vocab_size")


def python(winner: Winner) -> Draft:
    """Return a script with a plain Trainer."""
    arguments, lost = _trainer_arguments(winner)
    made = {**context(winner, TRAIN), "training_arguments": arguments, "lost": lost}
    return Draft({TRAIN: rendered("train.py.j2", made)}, launch(winner, TRAIN), tuple(lost))


def trl(winner: Winner) -> Draft:
    """Return a script with TRL's SFTTrainer.

    Raises:
        InputError: The task isn't causal language modelling.
    """
    if winner.workload.recipe is not None:
        return _recipe(winner, winner.workload.recipe)
    if winner.workload.task is not Task.CAUSAL_LM:
        raise InputError(f"trl: SFTTrainer trains causal-lm, not {winner.workload.task}; --to python writes a Trainer")
    arguments, lost = _trainer_arguments(winner)
    arguments = {
        **SFT_DEFAULTS,
        "max_length": winner.workload.sequence_length,
        "padding_free": winner.config.packing,
        **arguments,
    }
    made = {**context(winner, TRL), "training_arguments": arguments, "weighs": False, "lost": lost}
    return Draft({TRL: rendered("train_trl.py.j2", made)}, launch(winner, TRL), tuple(lost))


def _recipe(winner: Winner, recipe: Recipe) -> Draft:
    """Return a script with the Trainer of TRL that was measured."""
    arguments, lost = _trainer_arguments(winner)
    made, path, kind = context(winner, TRL), winner.workload.dataset, recipe.kind
    is_reward = winner.workload.task is Task.SEQUENCE_CLASSIFICATION
    texts = {
        "prompt": f"text({recipe.prompt_length})",
        "label": "index % 2 == 0",
        **dict.fromkeys(("completion", "chosen", "rejected"), f'" " + text({recipe.completion_length})'),
    }
    if is_reward:
        texts |= dict.fromkeys(kind.columns, f"text({max(1, winner.workload.sequence_length - 2)})")
    length = f"Every completion of a trial had {recipe.completion_length} tokens; yours end by themselves."
    made |= {
        "kind": kind,
        "training_arguments": arguments,
        "lost": lost,
        "model_arguments": {**made["model_arguments"], **({"num_labels": 1} if is_reward else {})},
        "about_lengths": length if kind.generates else "",
        "datasets": "load_dataset" if path else "Dataset",
        "file": path and (_LOADERS.get(PurePath(path).suffix.lower(), "json"), path),
        "row": Code("{" + ", ".join(f'"{name}": {texts[name]}' for name in kind.columns) + "}"),
    }
    return Draft({TRL: rendered("train_recipe.py.j2", made)}, launch(winner, TRL), tuple(lost))


def _trainer_arguments(winner: Winner) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that a script's Trainer is given, and which of the user's own it isn't."""
    # The script trains for `--steps`.
    left_out = EVALUATING | {"num_train_epochs", "max_steps"}
    arguments = {name: value for name, value in winner.arguments.items() if name not in left_out}
    return arguments, lost_arguments(winner, {"seed", *arguments, *user_steps(winner)})


def user_steps(winner: Winner) -> dict[str, int]:
    """Return the user's own `max_steps`, if a script can train for as many: it times all but the first."""
    steps = winner.user_arguments.get("max_steps")
    return {"max_steps": steps} if isinstance(steps, int) and steps > 1 else {}


def launch(winner: Winner, script: str) -> tuple[str, ...]:
    """Return the command that runs a script: torchrun's, or the plain one, which must see one device alone."""
    command = launch_files.launch_commands(winner.result)[0].replace(launch_files.SCRIPT, script)
    plain = not launch_files.needs_launcher(winner.config) and not winner.result.hardware.is_cpu
    return (f"CUDA_VISIBLE_DEVICES=0 {command}" if plain else command,)


def context(winner: Winner, script: str) -> dict[str, Any]:
    """Return the values that every script's template needs."""
    from autotune.training.heads import HEADS

    workload, config = winner.workload, winner.config
    steps = user_steps(winner).get("max_steps", _STEPS)
    return {
        "winner": winner,
        "launch": f"{launch(winner, script)[0]} --steps {steps}",
        "steps": steps,
        "head": HEADS[workload.task][0],
        "model_arguments": _model_arguments(winner),
        "quantization": winner.result.arguments.quantization,
        "peft": winner.peft_arguments,
        "heads": CLASSIFICATION_HEADS,
        "decoder_prefix": workload.task is Task.SEQ2SEQ_LM and bool(config.adapter and config.adapter.prompt_length),
        "needs_padding_id": workload.task is Task.SEQUENCE_CLASSIFICATION and workload.model.kind == "decoder",
        "count_by_loss_type": workload.task in (Task.CAUSAL_LM, Task.IMAGE_TEXT_TO_TEXT),
        "vision_parts": sorted(VISION_PARTS) if workload.model.freeze_vision else None,
        "weighs": winner.samples_per_step > config.per_device_train_batch_size,
        "measured": None if winner.measured is None else round(winner.measured, 3),
        "imports": _imports(winner),
        "chunked_loss": _chunked_loss() if config.chunked_loss else None,
        "activation_memory_budget": config.activation_memory_budget,
        **_collator(winner),
        "masked_share": _MASKED_SHARE,
        "shown": None,
        **_samples(winner),
    }


def _model_arguments(winner: Winner) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`: the measured ones, and what makes it the same model."""
    spec = winner.workload.model
    arguments: dict[str, Any] = dict(winner.result.arguments.model)
    if winner.revision is not None:
        arguments["revision"] = winner.revision
    if spec.trust_remote_code:
        arguments["trust_remote_code"] = True
    if winner.workload.task is Task.CAUSAL_LM and spec.kind == "encoder":
        arguments["is_decoder"] = True
    return arguments


def _chunked_loss() -> Code:
    """Return the code that trials chunked the loss with, without what it imports."""
    from autotune.training import chunked_loss

    _, _, found = inspect.getsource(chunked_loss).partition("import torch\n")
    return Code(found.strip())


def _imports(winner: Winner) -> Any:
    """Return a function that lists what to import from transformers, with bitsandbytes' config where it is used."""
    packed = ("BitsAndBytesConfig",) if winner.result.arguments.quantization is not None else ()

    def listed(*names: str) -> Code:
        wanted = sorted({name for name in (*names, *packed) if name}, key=lambda name: (name[0].islower(), name))
        line = ", ".join(wanted)
        return Code(line if len(line) <= _IMPORTS_WIDTH else "(\n" + "".join(f"    {n},\n" for n in wanted) + ")")

    return listed


def _collator(winner: Winner) -> dict[str, str | Code]:
    """Return the collator's class, the expression that makes it, and what the user has to know of it."""
    if winner.workload.task is Task.IMAGE_TEXT_TO_TEXT:
        about = "for texts of one length; others need the model's own processor, which pads them"
        return {"collator": "", "collate": Code("collate"), "about_collator": about}
    if winner.config.packing:
        name, about = "DataCollatorWithFlattening", "puts the samples of a micro-batch into one row, as was measured"
        return {"collator": name, "collate": Code(f"{name}()"), "about_collator": about}
    padding = {
        Task.CAUSAL_LM: "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
        Task.MASKED_LM: "DataCollatorForLanguageModeling(tokenizer)",
        Task.SEQ2SEQ_LM: "DataCollatorForSeq2Seq(tokenizer, model)",
        Task.SEQUENCE_CLASSIFICATION: "DataCollatorWithPadding(tokenizer)",
    }.get(winner.workload.task)
    about = f"for samples of one length; others need {padding}" if padding else "for samples of one size"
    return {"collator": "default_data_collator", "collate": Code("default_data_collator"), "about_collator": about}


def _samples(winner: Winner) -> dict[str, Any]:
    """Return what templates need for the samples that stand in for the user's: input, labels and a remark."""
    workload, task = winner.workload, winner.workload.task
    if task is Task.IMAGE_TEXT_TO_TEXT:
        return _images_in_texts(winner)
    if not task.takes_text:
        return _images_or_sound(winner)
    lengths, length = workload.lengths, workload.sequence_length
    about = "Yours are tokenized, with `labels`"
    if lengths is None:
        about += f"; the measured ones all had {length} tokens."
    else:
        about += (
            f", and cut at {length} tokens. The throughput was measured with {lengths.minimum} to {lengths.maximum} "
            f"tokens, {lengths.mean:.0f} on average, of {workload.dataset}."
        )
        length = max(2, round(lengths.mean))
    kinds = {Task.CAUSAL_LM: "inputs", Task.MASKED_LM: "masked", Task.SEQUENCE_CLASSIFICATION: "class"}
    labels = {"kind": kinds.get(task, "ids"), "length": _target_length(winner), "vocabulary": _TEXT_VOCABULARY}
    return {"input": _input("input_ids", (length,), _TEXTS, ends=True), "labels": labels, "about_data": about}


def _input(name: str, shape: tuple[int, ...], distinct: int, **more: Any) -> dict[str, Any]:
    """Return an input: its name, the shape of all distinct samples together, and whether and how it is made of ids."""
    usual = {"floats": False, "vocabulary": _TEXT_VOCABULARY, "ends": False}
    return {"name": name, "distinct": distinct, "size": (distinct, *shape), **usual, **more}


def _target_length(winner: Winner) -> int:
    workload = winner.workload
    mean = workload.lengths.mean_target if workload.lengths is not None else None
    return round(mean) if mean is not None else workload.target_length or workload.sequence_length


def _images_in_texts(winner: Winner) -> dict[str, Any]:
    """Return the same for texts with images, whose placeholders stand before the text."""
    from autotune.training.build import build_config
    from autotune.training.image_text import image_text

    workload = winner.workload
    shown = image_text(build_config(workload.model, workload.task), workload.images, workload.image_size)
    about = (
        "Yours are made by the model's own processor, with `labels` that are -100 where an image stands. Measured were "
        f"{workload.sequence_length} tokens a sample, those of its images included."
    )
    return {
        "input": _input("input_ids", (workload.sequence_length,), _TEXTS, ends=True),
        "labels": {"kind": "text beside images"},
        "shown": shown,
        "pixels": (_DENSE, *shown.pixels),
        "about_data": about,
    }


def _images_or_sound(winner: Winner) -> dict[str, Any]:
    """Return the same for images or recordings, whose size the library's config says."""
    from autotune.training.build import build_config
    from autotune.training.inputs import audio_input, image_input, labels_of

    workload, task = winner.workload, winner.workload.task
    config = build_config(workload.model, task)
    about = "Yours are made by the model's own processor, with `labels`."
    if task is Task.IMAGE_CLASSIFICATION:
        name, shape, clusters = image_input(config)
        inputs = _input(name, shape, _DENSE, floats=clusters is None, vocabulary=clusters or 0)
        return {"input": inputs, "labels": {"kind": "class"}, "about_data": about}
    ids = {"kind": "ids", "length": _target_length(winner), "vocabulary": _TEXT_VOCABULARY}
    labels: dict[Task, dict[str, Any]] = {
        Task.AUDIO_CLASSIFICATION: {"kind": "class"},
        Task.SPEECH_SEQ2SEQ: ids,
        Task.SPEECH_CTC: {
            **ids,
            "length": labels_of(workload.sequence_length),
            "vocabulary": Code("config.vocab_size"),
        },
    }
    inputs = _input(*audio_input(config, workload.sequence_length), _DENSE, floats=True)
    return {"input": inputs, "labels": labels[task], "about_data": about}
