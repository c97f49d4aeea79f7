"""From what the user wrote to a :class:`ModelSpec`: a name of the catalogue, a local directory or a hub id.

Its heads are those of its type that can be trained here, the one that config.json names, and the usual one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import InputError, UnknownModelError, one_line, suggestion
from autotune.training.inputs import takes_images, takes_sound
from autotune.values.catalogue import catalogue, entries_by_name
from autotune.values.model import Kind, ModelSpec, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# The class that chooses the head by model type, and the table of transformers that names those types.
HEADS = {
    Task.CAUSAL_LM: ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Task.SEQ2SEQ_LM: ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    Task.MASKED_LM: ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    Task.SEQUENCE_CLASSIFICATION: (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task.IMAGE_CLASSIFICATION: ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    Task.SPEECH_CTC: ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    Task.SPEECH_SEQ2SEQ: ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    Task.AUDIO_CLASSIFICATION: ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    Task.IMAGE_TEXT_TO_TEXT: ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
}
USUAL_TASK: dict[Kind, Task] = {
    "decoder": Task.CAUSAL_LM,
    "encoder": Task.SEQUENCE_CLASSIFICATION,
    "encoder-decoder": Task.SEQ2SEQ_LM,
    "vision": Task.IMAGE_CLASSIFICATION,
    "vision-language": Task.IMAGE_TEXT_TO_TEXT,
    "speech": Task.SPEECH_CTC,
    "speech-to-text": Task.SPEECH_SEQ2SEQ,
}


def resolve(reference: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelSpec:
    """Find the model that the user means: in the catalogue, in a directory, or on the hub, in this order.

    A name of the catalogue needs no network, and wins over a directory of the same name, which `./name` stands for.

    Args:
        reference: Catalogue name or full id (in any case), directory, or hub id.
        revision: Branch, tag or commit on the hub; the catalogue's figures are those of the main branch.
        trust_remote_code: Whether code that comes with the model may run; otherwise the library's own class is used.

    Raises:
        UnknownModelError: The reference leads nowhere.
        InputError: It leads to something that is not a model that can be trained.
    """
    name = reference.strip()
    if not name:
        raise InputError("the model's name is empty; `autotune models` lists the catalogue")
    asked = {"reference": reference, "revision": revision, "trust_remote_code": trust_remote_code}
    if entry := entries_by_name().get(name.lower()):
        figures = entry.model_dump(include={"model_type", "kind", "config"})
        return ModelSpec(**asked, **figures, name=entry.id, source="catalogue")
    if directory := _directory(name):
        return _described_by(directory / "config.json", asked, name=directory.name, source="directory")
    return _described_by(_hub_config_file(name, revision), asked, name=name, source="hub")


def _directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path.resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError):  # a name too long, a home that isn't there
        return None
    if is_file:
        raise InputError(f"{shown(name)} is a file; give the directory that holds config.json")
    return None


def _hub_config_file(name: str, revision: str | None) -> Path:
    """Return the path of a hub model's config.json in the local cache, fetching it if the hub answers."""
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise _unknown(name, "not cached, and HF_HUB_OFFLINE is set")
        # The download would repeat its attempts for minutes if nobody answers.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json", revision=revision), timeout=5.0)
        return Path(hub.hf_hub_download(name, "config.json", revision=revision))
    except UnknownModelError:
        raise
    except errors.HFValidationError:
        raise _unknown(name, "and no hub id") from None
    except errors.GatedRepoError as error:
        raise InputError(f"{name}: access is gated on the hub; ask for it and run `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{name}: the hub has no revision {revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise _unknown(name, "not cached, and the hub has no such model (or it is private)") from error
    except Exception as error:  # the network's errors are those of whatever client the hub library uses
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise InputError(f"{name}: the hub's repository has no config.json") from error
        raise _unknown(name, f"not cached, and the hub does not answer ({one_line(error)})") from error


def _unknown(name: str, reason: str) -> UnknownModelError:
    shown = name if len(name) <= 100 else name[:100] + "..."
    near = suggestion(shown, [n for entry in catalogue() for n in (*entry.names, entry.id)])
    return UnknownModelError(
        f"model {shown!r} is unknown: not in the catalogue{near}, not a directory, {reason}; "
        "`autotune models` lists the catalogue"
    )


def _described_by(file: Path, asked: dict[str, Any], *, name: str, source: Literal["directory", "hub"]) -> ModelSpec:
    config = _read_json(file)
    where = shown(str(file))
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise InputError(f"{where}: the weights are quantized already ({method}); name the model they were made from")
    code = config.get("auto_map") or {}
    model_type = config.get("model_type")
    if not (asked["trust_remote_code"] and "AutoConfig" in code):
        _check_model_type(model_type, where, has_code=bool(code))
    if model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as the library has it when it reads such a file
    spec = ModelSpec(
        **asked,
        name=name,
        source=source,
        model_type=str(model_type),
        kind="encoder",  # until the library's config tells
        config=config,
        path=str(file.parent),
    )
    if spec.hub_kernels and not spec.trust_remote_code:
        raise InputError(
            f"{where}: names kernels of a repository on the hub ({', '.join(spec.hub_kernels)}), whose code would be "
            "run; it runs only with --trust-remote-code"
        )
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for field, value in part.items():  # more would take forever to build; the most published are 1000
            if field.endswith(("layer", "layers")) and isinstance(value, int) and value > 4096:
                raise InputError(f"{where}: {field}: expected at most 4096, not {value}")
    built = library_config(spec)
    tasks = tasks_for(built.model_type, remote_classes(spec))
    if not tasks:
        raise InputError(cannot_train(where, architecture_of(config) or f"model type {built.model_type!r}"))
    return spec.model_copy(update={"model_type": built.model_type, "kind": kind_of(built, tasks)})


def _check_model_type(model_type: object, where: str, *, has_code: bool) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    if has_code:
        raise InputError(
            f"{where}: model type {model_type!r} is not part of transformers {transformers.__version__} "
            "but of code that comes with the model; it runs only with --trust-remote-code"
        )
    if not isinstance(model_type, str) or not model_type:
        raise InputError(f"{where}: lacks model_type, which says what architecture it is (as 'llama')")
    raise InputError(
        f"{where}: model type {model_type!r} is unknown to transformers {transformers.__version__}"
        f"{suggestion(model_type, CONFIG_MAPPING.keys())}"
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        # Infinity as transformers 4 wrote it becomes what transformers 5 writes, which is JSON.
        content = json.loads(text, parse_constant=lambda name: {"__float__": name})
    except FileNotFoundError:
        raise InputError(f"{shown(str(file.parent))}: not the directory of a model, it has no config.json") from None
    except OSError as error:
        raise InputError(f"{shown(str(file))}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shown(str(file))}: not valid JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise InputError(f"{shown(str(file))}: must hold a JSON object, not a {type(content).__name__}")
    return content


def library_config(spec: ModelSpec) -> PreTrainedConfig:
    """Make the library config from the spec's figures, or with the model's own code if that is trusted."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    location = spec.path if spec.source == "directory" else spec.name
    try:
        if "AutoConfig" in remote_classes(spec):
            return AutoConfig.from_pretrained(location, revision=spec.revision, trust_remote_code=True)
        # Infinity and its kin are {"__float__": "Infinity"} since transformers 5.
        figures = json.loads(
            json.dumps(spec.config),
            object_hook=lambda found: float(found["__float__"]) if found.keys() == {"__float__"} else found,
        )
        figures.pop("model_type", None)  # the class has its own, which may be a narrower one
        if remote_classes(spec):
            figures["name_or_path"] = location  # where the library looks for the head's code
        return CONFIG_MAPPING[spec.model_type].from_dict(figures)
    except Exception as error:  # a config class may raise anything at figures that it doesn't expect
        raise InputError(f"{shown(spec.name)}: transformers refuses its config: {one_line(error)}") from error


# Heads


def tasks_for(model_type: str, remote: Collection[str]) -> tuple[Task, ...]:
    """Return the tasks for which the library, or the model's own code, has a head for this type.

    Of a speech model these are heads for sound alone. A head whose inputs autotune can't make is none.
    """
    from transformers.models.auto import modeling_auto

    found = tuple(
        task
        for task, (head, table) in HEADS.items()
        if (head in remote or model_type in getattr(modeling_auto, table))
        and (task is not Task.IMAGE_TEXT_TO_TEXT or takes_images(model_type))
    )
    if not any(task.takes_audio for task in found):
        return found
    return tuple(task for task in found if task.takes_audio) if takes_sound(model_type) else ()


def kind_of(config: PreTrainedConfig, tasks: tuple[Task, ...]) -> Kind:
    """Return the kind by the heads: BERT and its kin have both language heads, decoders only one."""
    if tasks and all(task.takes_audio for task in tasks):
        return "speech-to-text" if Task.SPEECH_SEQ2SEQ in tasks else "speech"
    if Task.IMAGE_TEXT_TO_TEXT in tasks:
        return "vision-language"
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if Task.CAUSAL_LM in tasks and (Task.MASKED_LM not in tasks or getattr(config, "is_decoder", False)):
        return "decoder"
    if Task.MASKED_LM in tasks or Task.SEQUENCE_CLASSIFICATION in tasks:
        return "encoder"
    return "vision"


def tasks_of(spec: ModelSpec) -> tuple[Task, ...]:
    """Return the tasks for which this type of model has a head."""
    return tasks_for(spec.model_type, remote_classes(spec))


def default_task(spec: ModelSpec) -> Task:
    """Return the task of the head that config.json names, or the usual one of a model of this kind.

    Raises:
        InputError: config.json names a head that can't be trained here.
    """
    usual = USUAL_TASK[spec.kind]
    if spec.source == "catalogue":
        return usual
    possible = tasks_of(spec)
    usual = usual if usual in possible else possible[0]
    named = architecture_of(spec.config)
    own = tuple(task for task in possible if named in _heads(spec, task))
    if not own and _names_a_head(spec, named):
        raise InputError(cannot_train(spec.name, str(named), possible))
    return usual if usual in own or not own else own[0]


def check_task(spec: ModelSpec, task: Task) -> None:
    """Refuse a task for which the model has no head.

    Raises:
        InputError: There is no such head; the message lists those there are.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    possible = tasks_of(spec)
    if not possible and spec.model_type not in CONFIG_MAPPING:
        raise InputError(
            f"{shown(spec.name)}: transformers {transformers.__version__} has no models of type {spec.model_type!r}; "
            "a newer version may"
        )
    if task not in possible:
        raise InputError(
            f"{shown(spec.name)}: model type {spec.model_type!r} has no head for {task.value} "
            f"(possible: {', '.join(t.value for t in possible)})"
        )


def head_notes(spec: ModelSpec, task: Task, recipe: str | None = None) -> list[str]:
    """Return what the user has to know of the head that is trained, by a recipe, in place of the one in config.json."""
    option, value = ("--task", task) if recipe is None else ("--recipe", recipe)
    named, heads, notes = architecture_of(spec.config), _heads(spec, task), []
    if spec.source != "catalogue" and named is not None and heads and named not in heads:
        notes.append(
            f"trained is {heads[0]} ({option} {value}) in place of the {named} that config.json names: the answer "
            "holds for that head"
        )
    elif spec.source != "catalogue" and named is not None and named not in _heads(spec, USUAL_TASK[spec.kind]):
        notes.append(f"the head is that of {named} in config.json: {task} ({option})")
    is_text_alone = task.takes_text and task is not Task.IMAGE_TEXT_TO_TEXT
    others = {"vision_config": "images", "audio_config": "recordings"}
    if senses := [word for part, word in others.items() if part in spec.config and is_text_alone]:
        notes.append(
            f"{' and '.join(senses)} are left out: the trials train on text alone, which takes less time and memory"
        )
    return notes


def architecture_of(config: dict[str, Any]) -> str | None:
    """Return the class that a config.json names as that of the weights."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def cannot_train(name: str, architecture: str, possible: tuple[Task, ...] = ()) -> str:
    """Return the message of a refusal of a class that has none of the heads, with the ways out."""
    heads = ", ".join(task.value for task in Task.heads())
    others = f", or take another head of this model: --task {' or '.join(possible)}" if possible else ""
    return (
        f"{shown(name)}: {architecture} has no head that can be trained here ({heads}); "
        f"tune a script that trains it (autotune script -- python train.py){others}"
    )


def _names_a_head(spec: ModelSpec, named: str | None) -> bool:
    """Return whether transformers has a class of this name with a head or a loss of its own.

    A model without a head, as BertModel, is meant to be given one; CLIP's kin learn as they are.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    if remote_classes(spec) or named not in dir(transformers):
        return False
    contrastive = modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(spec.model_type)
    bare = _names(modeling_auto.MODEL_MAPPING_NAMES.get(spec.model_type))
    return named == contrastive or named not in bare or re.search("For[A-Z]", str(named)) is not None


def _heads(spec: ModelSpec, task: Task) -> tuple[str, ...]:
    """Return the classes with the head of a task, the library's choice first."""
    auto_class = HEADS[task][0]
    if auto_class in (remote := remote_classes(spec)):
        return (remote[auto_class].rpartition(".")[2],)
    return class_names(spec.model_type, task)


def class_names(model_type: str, task: Task) -> tuple[str, ...]:
    """Return the library's classes with the head of a task for a type of model, its own choice first."""
    from transformers.models.auto import modeling_auto

    return _names(getattr(modeling_auto, HEADS[task][1]).get(model_type))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return an entry of transformers' tables, which may be several classes, as a tuple."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def remote_classes(spec: ModelSpec) -> dict[str, str]:
    """Return the classes that come with the model, by the name of their auto class, if they may run."""
    return (spec.config.get("auto_map") or {}) if spec.trust_remote_code else {}


def shown(name: str) -> str:
    """Return a name that fits into a message of one line."""
    return name if name.isprintable() else repr(name)
