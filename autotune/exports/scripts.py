"""The scripts of an export: with a plain Trainer, with TRL's Trainers, and the parts that the loop's script shares.

Each is a Jinja template that reads as the script it makes; here its values are put together, from the arguments that
were measured. Where the user said nothing, the defaults of `TrainingArguments` are written out, since other tools have
others. The scripts need neither autotune nor a file beside them. They start with random samples of the size that was
measured, for the user to replace; ids come from the middle half of a vocabulary, where no model has its special ones. A
template writes a value between braces as a literal of Python, so that nothing in a result becomes code; :class:`Code`
alone is written as it stands.
"""

import dataclasses
import functools
import glob
import json
import math
import re
import shlex
import textwrap
from collections.abc import Collection
from importlib import resources
from pathlib import PurePath
from typing import Any, NamedTuple, Self

import jinja2
from markupsafe import Markup

from autotune.errors import InputError
from autotune.exports import launch_files
from autotune.exports.launch_files import DEFAULTS
from autotune.training.adapters import BITFIT, CLASSIFICATION_HEADS, casts_in_vain
from autotune.training.build import build_config
from autotune.training.inputs import VISION_PARTS, image_or_sound, image_text, labels_of
from autotune.training.resolve import HEADS
from autotune.training.texts import READERS
from autotune.units import visible
from autotune.values.config import KNOBS
from autotune.values.model import VOCABULARIES, Task
from autotune.values.result import ResultData
from autotune.values.workload import Recipe

TRL = "train_trl.py"

# Distinct samples, which take turns; of images and recordings few, since they are large.
_TEXTS, _DENSE = 512, 8

# The line of `training.loss` after which the code stands that trials chunk the loss with.
_EXPORTED = "# A script that `autotune export` writes has all that follows.\n"


class Code(Markup):
    """Text of our own that a template writes as it stands."""


class Draft(NamedTuple):
    """The file of one target, before it is written."""

    name: str
    text: str
    launch: tuple[str, ...] = ()  # command lines, the preferred one first
    lost: tuple[str, ...] = ()  # what the target can't express, a line each

    def placed(self, path: PurePath) -> Self:
        """Return the draft under the path that its file is written to, which command lines and its text then name."""

        def renamed(within: str, other: str) -> str:
            return re.sub(rf"(?<![\w./-]){re.escape(self.name)}(?![\w/-])", lambda _: shlex.quote(other), within)

        # A name that would have to be escaped within a script's docstring or a comment is left out of it.
        is_plain = path.name.isprintable() and not set(path.name) & set('\\"')
        text = renamed(self.text, path.name) if is_plain else self.text
        launch = tuple(renamed(line, str(path)) for line in self.launch)
        return self._replace(name=path.name, text=text, launch=launch)


# Collators for the user's samples where their lengths differ.
_PADDING = {
    Task.CAUSAL_LM: "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
    Task.MASKED_LM: "DataCollatorForLanguageModeling(tokenizer)",
    Task.SEQ2SEQ_LM: "DataCollatorForSeq2Seq(tokenizer, model)",
    Task.SEQUENCE_CLASSIFICATION: "DataCollatorWithPadding(tokenizer)",
}


def trl(result: ResultData) -> Draft:
    """Return a script with TRL's SFTTrainer, or with the Trainer of the recipe that was measured."""
    if (recipe := result.workload.recipe) is not None:
        made = trainer(result, TRL, "train_recipe.py.j2", **_recipe(result, recipe))
        own = (f"--reward {recipe.reward}: import it in place of the function `reward`",) if recipe.reward else ()
        return made._replace(lost=(*made.lost, *own))
    if result.workload.task is not Task.CAUSAL_LM:
        raise InputError(f"trl: SFTTrainer trains causal-lm, not {result.workload.task}; --to python writes a Trainer")
    # Defaults of SFTConfig that differ from TrainingArguments' or add to them, as they were measured (TRL 1.16:
    # trainer/base_config.py, sft_config.py). Of checkpointing and bf16 the measured arguments say whether they are on.
    sft: dict[str, Any] = {"learning_rate": 5e-5, "logging_steps": 500, "packing": False, "loss_type": "nll"}
    config, longest = result.best.config, result.workload.sequence_length
    # TRL cuts no samples that it doesn't pad.
    sft |= {"max_length": None if config.packing else longest, "padding_free": config.packing}
    sft["pad_to_multiple_of"] = config.pad_to_multiple_of
    figures = build_config(result.workload.model, result.workload.task).get_text_config()
    if not getattr(figures, "output_router_logits", True):
        sft["router_aux_loss_coef"] = 0.0  # or TRL would add the routers' loss, which the config doesn't ask for
    return trainer(result, TRL, "train_trl.py.j2", sft)


def trainer(
    result: ResultData,
    name: str = launch_files.SCRIPT,
    template: str = "train.py.j2",
    defaults: dict[str, Any] | None = None,
    **values: Any,
) -> Draft:
    """Return a script whose Trainer, a plain one by default, gets the measured arguments, laid over `defaults`."""
    # The script trains for `--steps`, and has no samples to evaluate on, without which a Trainer refuses these.
    evaluating = {"eval_strategy", "eval_on_start", "do_eval", "do_predict", "load_best_model_at_end"}
    left_out = {"num_train_epochs", "max_steps", *evaluating}
    arguments = {n: value for n, value in result.arguments.training_arguments.items() if n not in left_out}
    lost = lost_arguments(result, {"seed", *arguments, *user_steps(result)})
    return script(result, name, template, lost, training_arguments={**(defaults or {}), **arguments}, **values)


def _recipe(result: ResultData, recipe: Recipe) -> dict[str, Any]:
    path, arguments = result.workload.dataset, _model_arguments(result)
    kind = recipe.kind.weighing(result.workload.fixed_arguments.get("beta"))
    texts = {
        "prompt": f"text({recipe.prompt_length})",
        "label": "index % 2 == 0",
        **dict.fromkeys(("completion", "chosen", "rejected"), f'" " + text({recipe.completion_length})'),
    }
    if result.workload.task is Task.SEQUENCE_CLASSIFICATION:  # a reward model
        texts |= dict.fromkeys(kind.columns, f"text({max(1, result.workload.sequence_length - 2)})")
        arguments["num_labels"] = 1
    return {
        "model_arguments": arguments,
        "kind": kind,
        "file": path and (*READERS[PurePath(path).suffix.lower()], glob.escape(path)),
        "row": Code("{" + ", ".join(f'"{name}": {texts[name]}' for name in kind.columns) + "}"),
    }


def user_steps(result: ResultData) -> dict[str, int]:
    """Return the user's own `max_steps`, if it is two or more: a script times all steps but the first."""
    steps = result.arguments.training_arguments.get("max_steps")
    return {"max_steps": steps} if isinstance(steps, int) and steps > 1 else {}


def hyperparameter(result: ResultData, name: str) -> Any:
    """Return a hyperparameter of TrainingArguments: the user's, or the default, of the kind of the default."""
    default = DEFAULTS[name]
    value = result.arguments.training_arguments.get(name, default)
    expected: tuple[type, ...] = (str,) if isinstance(default, str) else (int, float)
    if not isinstance(value, expected) or isinstance(value, bool):
        raise InputError(f"{name}: expected {'text' if expected == (str,) else 'a number'}, not {value!r}")
    return value


def lost_arguments(result: ResultData, said: Collection[str]) -> list[str]:
    """Return a line for each argument that isn't the default and that a target doesn't express.

    These are the user's own, and those of knobs that targets can't say otherwise. A target expresses the `said` ones
    and, as every target, the hyperparameters.
    """
    measured = result.arguments.training_arguments
    own = {name: measured.get(name, value) for name, value in result.workload.fixed_arguments.items()}
    # Every target translates these.
    translated = {"use_liger_kernel", "torch_compile_backend", "torch_compile_mode", "dataloader_prefetch_factor"}
    of_knobs = (n for n, knob in KNOBS.items() if knob.argument == "unless default" and n not in translated)
    plain = {**own, **{name: measured[name] for name in of_knobs if name in measured}}
    given = {n: value for n, value in plain.items() if n not in said and n not in DEFAULTS}
    usual = _default_arguments() if given else ()
    lost = {n: value for n, value in given.items() if all(u.get(n, u) != value for u in usual)}
    return [f"{'your own argument ' * (n in own)}{n}={value!r}" for n, value in lost.items()]


@functools.cache
def _default_arguments() -> tuple[dict[str, Any], ...]:
    """Return the defaults of TrainingArguments, twice: as declared, and as `to_json_string` writes them."""
    from transformers import TrainingArguments

    declared = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    return declared, json.loads(TrainingArguments("out", use_cpu=True, disable_tqdm=False).to_json_string())


def script(result: ResultData, name: str, template: str, lost: list[str], **values: Any) -> Draft:
    """Return the script `name` that a template makes of `values` and of those that every script needs, as `c`."""
    workload, config, adapter = result.workload, result.best.config, result.arguments.adapter
    trains_biases = adapter is not None and adapter.get("peft_type") == BITFIT
    command = launch_files.launch_commands(result)[0].replace(launch_files.SCRIPT, name)
    steps, spec, measured = user_steps(result).get("max_steps", 100), workload.model, result.best.measurement
    loss = (resources.files("autotune.training") / "loss.py").read_text(encoding="utf-8")
    correction = result.best.correction
    rate = f"{measured.shown_rate(correction)} samples/s" if measured is not None else "not measured"
    versions = result.hardware.versions
    found = ", ".join(f"{package} {versions[package]}" for package in ("torch", "transformers") if package in versions)
    devices = f"{config.parallelism.world_size} x " if config.parallelism.world_size > 1 else ""
    per_step, is_causal = workload.samples_per_step(config), workload.task in (Task.CAUSAL_LM, Task.IMAGE_TEXT_TO_TEXT)
    known = {
        "config": config,
        "workload": workload,
        "arguments": result.arguments.training_arguments,
        "hyperparameter": functools.partial(hyperparameter, result),
        "is_cpu": result.hardware.is_cpu,
        "one_gpu": result.hardware.kind == "cuda" and config.parallelism.is_single,
        "promise": f"{rate} on {devices}{result.hardware.name} ({found or 'unknown versions'})",
        "reference": spec.path if spec.source == "directory" and spec.path is not None else spec.name,
        "samples_per_step": per_step,
        # Adapters that put tokens with ignored labels before the sample leave something that predicts the first one.
        "shifts_labels": is_causal
        and result.facts.shifts_labels
        and (config.adapter is None or config.adapter.kind not in ("prompt", "p-tuning")),
        # The loss of a micro-batch may be a sum, so that those of a step simply add up.
        "sums_its_loss": workload.task is Task.SPEECH_CTC and spec.config.get("ctc_loss_reduction", "sum") == "sum",
        "trains_biases": trains_biases,
        "launch": f"{command} --steps {steps}",
        "steps": steps,
        "head": HEADS[workload.task][0],
        "model_arguments": _model_arguments(result),
        "quantization": result.arguments.quantization,
        "peft": None if trains_biases else adapter,
        "casts_in_vain": adapter is not None and config.mixed_precision != "no" and casts_in_vain(adapter),
        "heads": CLASSIFICATION_HEADS,
        "decoder_prefix": workload.task is Task.SEQ2SEQ_LM and bool(config.adapter and config.adapter.prompt_length),
        "needs_padding_id": workload.task is Task.SEQUENCE_CLASSIFICATION and spec.kind == "decoder",
        "count_by_loss_type": is_causal,
        "vision_parts": sorted(VISION_PARTS) if spec.freeze_vision else None,
        "weighs": per_step > config.per_device_train_batch_size,
        "measured": None if measured is None else round(measured.samples_per_second * correction, 3),
        "imports": functools.partial(_imported, result.arguments.quantization is not None),
        "chunked_loss": Code(loss.partition(_EXPORTED)[2].strip()) if config.chunked_loss else None,
        **dict(zip(("collator", "collate", "about_collator"), _collator(result), strict=True)),
        "shown": None,
        **_samples(result),
        "lost": lost,
    }
    # With autoescape what a macro has written counts as written, and everything else goes through `finalize`.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.exports", "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Code(literal(value)),
    )
    environment.filters |= {"name": _name, "text": _text, "comment": lambda value: Code(visible(value))}
    return Draft(name, environment.get_template(template).render(c={**known, **values}), (command,), tuple(lost))


def _model_arguments(result: ResultData) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`: the measured ones, and those that make it the same model."""
    spec = result.workload.model
    arguments: dict[str, Any] = dict(result.arguments.model)
    if spec.source != "directory" and spec.revision is not None:
        arguments["revision"] = spec.revision
    if spec.trust_remote_code:
        arguments["trust_remote_code"] = True
    return arguments


def _imported(is_quantized: bool, *names: str) -> Code:
    """Return the names to import from transformers, with bitsandbytes' config for quantized weights; '' is no name."""
    packed = {"BitsAndBytesConfig"} if is_quantized else set()
    wanted = sorted({name for name in names if name} | packed, key=lambda name: (name[0].islower(), name))
    line = ", ".join(wanted)
    return Code(line if len(line) <= 96 else "(\n" + "".join(f"    {n},\n" for n in wanted) + ")")


def _collator(result: ResultData) -> tuple[str, Code, str]:
    if result.workload.task is Task.IMAGE_TEXT_TO_TEXT:
        return "", Code("collate"), "for texts of one length; others need the model's own processor, which pads them"
    if result.best.config.packing:
        name = "DataCollatorWithFlattening"
        return name, Code(f"{name}()"), "puts the samples of a micro-batch into one row, as was measured"
    padding, name = _PADDING.get(result.workload.task), "default_data_collator"
    if padding and (multiple := result.best.config.pad_to_multiple_of):
        padding = f"{padding[:-1]}, pad_to_multiple_of={multiple})"
    about = f"for samples of one length; others need {padding}" if padding else "for samples of one size"
    return name, Code(name), about


def _samples(result: ResultData) -> dict[str, Any]:
    """Return the values of templates for the samples that stand in for the user's: input, labels and a remark."""
    workload, task, lengths = result.workload, result.workload.task, result.workload.lengths
    length, target = workload.sequence_length, workload.target_length or workload.sequence_length
    if lengths is not None and lengths.mean_target is not None:
        target = round(lengths.mean_target)
    vocabulary = VOCABULARIES.get(workload.model.model_type, Code("config.get_text_config().vocab_size"))
    ids = {"kind": "ids", "length": target, "vocabulary": vocabulary}
    mean = length if lengths is None else max(2, round(lengths.mean))
    texts = {"name": "input_ids", "size": (_TEXTS, mean), "vocabulary": vocabulary, "ends": True}
    if task.takes_text and task is not Task.IMAGE_TEXT_TO_TEXT:
        about = f"Yours are tokenized, with `labels`; the measured ones all had {length} tokens."
        if lengths is not None:
            about = (
                f"Yours are tokenized, with `labels`, and cut at {length} tokens. The throughput was measured with "
                f"{lengths.minimum} to {lengths.maximum} tokens, {lengths.mean:.0f} on average, of {workload.dataset}."
            )
        kinds = {Task.CAUSAL_LM: "inputs", Task.MASKED_LM: "masked", Task.SEQUENCE_CLASSIFICATION: "class"}
        labels = {**ids, "kind": kinds.get(task, "ids")}
        return {"input": texts, "labels": labels, "about_data": about}
    config = build_config(workload.model, task)
    about = "Yours are made by the model's own processor, with `labels`"
    if task is Task.IMAGE_TEXT_TO_TEXT:
        shown = image_text(config, workload.images, workload.image_size)
        about += f" that are -100 where an image stands. Measured were {length} tokens a sample, those of its images"
        return {
            "input": texts,
            "labels": {"kind": "text beside images"},
            "shown": shown,
            "pixels": (_DENSE, *shown.pixels),
            "about_data": f"{about} included.",
        }
    name, shape, colours = image_or_sound(config, length)
    inputs = {"name": name, "size": (_DENSE, *shape), "vocabulary": colours, "ends": False}
    labels = ids if task is Task.SPEECH_SEQ2SEQ else {"kind": "class"}
    if task is Task.SPEECH_CTC:
        labels = {**ids, "length": labels_of(length), "vocabulary": Code("config.vocab_size")}
    return {"input": inputs, "labels": labels, "about_data": f"{about}."}


@functools.cache
def _name(value: str) -> Code:
    assert re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", value, re.ASCII), f"{value!r} is no name"
    return Code(value)


def _text(value: str, indent: int = 0, *, wrap: bool = True) -> Code:
    """Return words within a docstring, in lines; they can neither end it nor be an escape in it."""
    lines = textwrap.wrap(visible(value), 112) if wrap else [visible(value)]
    return Code(("\n" + " " * indent).join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines))


def literal(value: Any, indent: int = 0) -> str:
    """Return a value of JSON, or a tuple of such, as Python writes it, long ones a line an item."""
    if isinstance(value, str):
        return '"' + "".join({"\\": "\\\\", '"': '\\"'}.get(c) or visible(c) for c in value) + '"'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, dict):
        opening, closing = "{}"
        items = [f"{literal(key)}: {literal(item, indent + 4)}" for key, item in value.items()]
    elif isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        items = [literal(item, indent + 4) for item in value]
    else:
        raise TypeError(f"a {type(value).__name__} has no literal")
    line = ", ".join(items) + "," * (isinstance(value, tuple) and len(items) == 1)
    if indent + len(line) <= 90 and "\n" not in line:
        return f"{opening}{line}{closing}"
    return f"{opening}\n" + "".join(f"{' ' * (indent + 4)}{item},\n" for item in items) + f"{' ' * indent}{closing}"
