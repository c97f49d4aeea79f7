"""Makes a :class:`ModelSpec` of the user's reference: a name of the catalogue, a local directory or a hub id.

Tells a model's heads as well: those of its type that can be trained here, the one in config.json, and the usual one.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from autotune.errors import InputError, UnknownModelError, one_line, suggestion
from autotune.training.inputs import IMAGES, SOUND
from autotune.units import visible
from autotune.values.catalogue import catalogue
from autotune.values.model import UNTRAINED, Kind, ModelSpec, Task

# The class that chooses the head by model type, and the table of transformers that names those types.
HEADS = {
    task: (f"AutoModelFor{head}", f"MODEL_FOR_{table}_MAPPING_NAMES")
    for task, head, table in (
        (Task.CAUSAL_LM, "CausalLM", "CAUSAL_LM"),
        (Task.SEQ2SEQ_LM, "Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
        (Task.MASKED_LM, "MaskedLM", "MASKED_LM"),
        (Task.SEQUENCE_CLASSIFICATION, "SequenceClassification", "SEQUENCE_CLASSIFICATION"),
        (Task.IMAGE_CLASSIFICATION, "ImageClassification", "IMAGE_CLASSIFICATION"),
        (Task.SPEECH_CTC, "CTC", "CTC"),
        (Task.SPEECH_SEQ2SEQ, "SpeechSeq2Seq", "SPEECH_SEQ_2_SEQ"),
        (Task.AUDIO_CLASSIFICATION, "AudioClassification", "AUDIO_CLASSIFICATION"),
        (Task.IMAGE_TEXT_TO_TEXT, "ImageTextToText", "IMAGE_TEXT_TO_TEXT"),
    )
}
# Fields of config.json, and files beside it, that say that weights are packed, and by whom where they don't name it.
_PACKED = {"quantization_config": "unknown", "quantization": "MLX"}
_PACKED_FILES = {"quantize_config.json": "AutoGPTQ", "hf_quant_config.json": "ModelOpt"}
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

    A name of the catalogue, in any case, needs no network, and wins over a directory of the same name (`./name`).
    `revision` is of the hub. Without `trust_remote_code` the library's own class is used in place of the model's code.
    """
    name = reference.strip()
    if not name:
        raise InputError("the model's name is empty; `autotune models` lists the catalogue")
    asked = {"reference": reference, "revision": revision, "trust_remote_code": trust_remote_code}
    known = {one.lower(): entry for entry in catalogue() for one in (entry.id, *entry.names)}
    if entry := known.get(name.lower()):
        figures = entry.model_dump(include={"model_type", "kind", "config"})
        return ModelSpec(**asked, **figures, name=entry.id, source="catalogue")
    try:
        path = Path(name).expanduser().resolve()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError):  # a name too long, or with a null byte; a home that isn't there
        is_directory = is_file = False
    if is_file:
        raise InputError(f"{visible(name)} is a file; give the directory that holds config.json")
    if is_directory:
        return _described_by(path / "config.json", asked, name=path.name, source="directory")
    return _described_by(_hub_config_file(name, revision), asked, name=name, source="hub")


def _hub_config_file(name: str, revision: str | None) -> Path:
    """Return the path of a hub model's config.json in the local cache, fetching it if the hub answers."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        # The download would repeat its attempts for minutes if nobody answers.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json", revision=revision), timeout=5.0)
        return Path(hub.hf_hub_download(name, "config.json", revision=revision))
    except errors.OfflineModeIsEnabled:
        raise _unknown(name, "not cached, and HF_HUB_OFFLINE is set") from None
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
    sought = f"not in the catalogue{near}, not a directory, {reason}"
    return UnknownModelError(f"model {shown!r} is unknown: {sought}; `autotune models` lists the catalogue")


def _described_by(file: Path, asked: dict[str, Any], *, name: str, source: Literal["directory", "hub"]) -> ModelSpec:
    from transformers import __version__ as installed
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, where = _read_json(file), visible(str(file))
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]  # as the library looks
    told = ((part.get(field), by) for part in parts for field, by in _PACKED.items())
    methods = [found.get("quant_method", by) if isinstance(found, dict) else by for found, by in told if found]
    methods += [by for beside, by in _PACKED_FILES.items() if file.with_name(beside).is_file()]
    if methods:
        raise InputError(f"{where}: the weights are quantized already ({methods[0]}); name the model they come from")
    code, model_type = config.get("auto_map") or {}, config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not is_known and not (asked["trust_remote_code"] and "AutoConfig" in code):
        if code:
            own = f"is not part of transformers {installed} but of code that comes with the model"
            raise InputError(f"{where}: model type {model_type!r} {own}; it runs only with --trust-remote-code")
        if not isinstance(model_type, str) or not model_type:
            raise InputError(f"{where}: lacks model_type, which says what architecture it is (as 'llama')")
        near = suggestion(model_type, CONFIG_MAPPING.keys())
        raise InputError(f"{where}: model type {model_type!r} is unknown to transformers {installed}{near}")
    if model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as the library has it when it reads such a file
    figures: dict[str, Any] = {"model_type": str(model_type), "config": config, "path": str(file.parent)}
    spec = ModelSpec(**asked, **figures, name=name, source=source, kind="encoder")  # until the library's config tells
    if spec.hub_kernels and not spec.trust_remote_code:
        kernels = f"names kernels of a repository on the hub ({', '.join(spec.hub_kernels)}), whose code would be run"
        raise InputError(f"{where}: {kernels}; it runs only with --trust-remote-code")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for field, value in part.items():  # more would take forever to build; the most published are 1000
            if field.endswith(("layer", "layers")) and isinstance(value, int) and value > 4096:
                raise InputError(f"{where}: {field}: expected at most 4096, not {value}")
    built = library_config(spec)
    tasks = tasks_for(built.model_type, remote_classes(spec))
    if not tasks or built.model_type in UNTRAINED:
        raise _untrainable(where, architecture_of(config) or f"model type {built.model_type!r}", built.model_type)
    return spec.model_copy(update={"model_type": built.model_type, "kind": kind_of(built, tasks)})


def _read_json(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        # Infinity as transformers 4 wrote it becomes what transformers 5 writes, which is JSON.
        content = json.loads(text, parse_constant=lambda name: {"__float__": name})
    except FileNotFoundError:
        folder, adapter = visible(str(file.parent)), file.with_name("adapter_config.json")
        if adapter != file and adapter.is_file():
            base = visible(str(_read_json(adapter).get("base_model_name_or_path")))
            raise InputError(f"{folder}: holds an adapter of the model {base}; name that model") from None
        raise InputError(f"{folder}: not the directory of a model, it has no config.json") from None
    except OSError as error:
        raise InputError(f"{visible(str(file))}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{visible(str(file))}: not valid JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise InputError(f"{visible(str(file))}: must hold a JSON object, not a {type(content).__name__}")
    return content


def library_config(spec: ModelSpec) -> Any:
    """Make the library config from the spec's figures, or with the model's own code if that is trusted."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    location = spec.path if spec.source == "directory" else spec.name
    try:
        if "AutoConfig" in remote_classes(spec):
            return AutoConfig.from_pretrained(location, revision=spec.revision, trust_remote_code=True)
        text = json.dumps(spec.config)
        for kernel in spec.missing_kernels:  # the library chooses another one
            text = text.replace(f'"{kernel}"', "null")
        # Infinity and its kin are {"__float__": "Infinity"} since transformers 5.
        figures = json.loads(text, object_hook=lambda d: float(d["__float__"]) if d.keys() == {"__float__"} else d)
        figures.pop("model_type", None)  # the class has its own, which may be a narrower one
        if remote_classes(spec):
            figures["name_or_path"] = location  # where the library looks for the head's code
        return CONFIG_MAPPING[spec.model_type].from_dict(figures)
    except Exception as error:  # a config class may raise anything at figures that it doesn't expect
        raise InputError(f"{visible(spec.name)}: transformers refuses its config: {one_line(error)}") from error


def tasks_for(model_type: str, remote: Collection[str] = ()) -> tuple[Task, ...]:
    """Return the tasks with a head, in the library or the model's own code, whose inputs can be made here."""
    from transformers.models.auto import modeling_auto

    found = tuple(
        task
        for task, (head, table) in HEADS.items()
        if (head in remote or model_type in getattr(modeling_auto, table))
        and (task is not Task.IMAGE_TEXT_TO_TEXT or model_type in IMAGES)
    )
    if not any(task.takes_audio for task in found):
        return found
    return tuple(task for task in found if task.takes_audio) if model_type in SOUND else ()


def kind_of(config: Any, tasks: tuple[Task, ...]) -> Kind:
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


def default_task(spec: ModelSpec) -> Task:
    """Return the task of the head that config.json names, or the usual one of a model of this kind."""
    usual, remote = USUAL_TASK[spec.kind], remote_classes(spec)
    if spec.source == "catalogue":
        return usual
    import transformers

    possible, named = tasks_for(spec.model_type, remote), architecture_of(spec.config)
    usual = usual if usual in possible else possible[0]
    if own := [task for task in possible if named in _heads(spec, task)]:
        return usual if usual in own else own[0]
    if not remote and named in dir(transformers):
        # A class with a head or a loss of its own. A model without a head, as BertModel, is meant to be given one;
        # CLIP's kin learn as they are.
        contrastive = class_names(spec.model_type, "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES")
        bare = class_names(spec.model_type, "MODEL_MAPPING_NAMES")
        if named in contrastive or named not in bare or re.search("For[A-Z]", str(named)):
            raise _untrainable(spec.name, str(named), spec.model_type, possible)
    return usual


def check_task(spec: ModelSpec, task: Task) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    possible = tasks_for(spec.model_type, remote_classes(spec))
    if not possible and spec.model_type not in CONFIG_MAPPING:
        none = f"transformers {transformers.__version__} has no models of type {spec.model_type!r}"
        raise InputError(f"{visible(spec.name)}: {none}; a newer version may")
    if task not in possible:
        others = f"(possible: {', '.join(t.value for t in possible)})"
        raise InputError(f"{visible(spec.name)}: model type {spec.model_type!r} has no head for {task.value} {others}")


def head_notes(spec: ModelSpec, task: Task, recipe: str | None = None) -> list[str]:
    """Return notes on the head, where it isn't the one in config.json or the usual one, and on parts left out."""
    option, value = ("--task", task) if recipe is None else ("--recipe", recipe)
    named, heads, notes = architecture_of(spec.config), _heads(spec, task), []
    if spec.source != "catalogue" and named is not None and heads and named not in heads:
        place = f"in place of the {named} that config.json names: the answer holds for that head"
        notes.append(f"trained is {heads[0]} ({option} {value}) {place}")
    elif spec.source != "catalogue" and named is not None and named not in _heads(spec, USUAL_TASK[spec.kind]):
        notes.append(f"the head is that of {named} in config.json: {task} ({option})")
    is_text_alone = task.takes_text and task is not Task.IMAGE_TEXT_TO_TEXT
    others = {"vision_config": "images", "audio_config": "recordings"}
    if senses := [word for part, word in others.items() if part in spec.config and is_text_alone]:
        text_alone = "the trials train on text alone, which takes less time and memory"
        notes.append(f"{' and '.join(senses)} are left out: {text_alone}")
    for kernel, package in spec.missing_kernels.items():
        notes.append(f"config.json's {kernel} needs the package {package}: another attention takes its place")
    return notes


def architecture_of(config: dict[str, Any]) -> str | None:
    """Return the class that a config.json names as that of the weights."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _untrainable(name: str, architecture: str, model_type: str, possible: tuple[Task, ...] = ()) -> InputError:
    said = UNTRAINED.get(model_type, f"has no head that can be trained here ({', '.join(Task.heads())})")
    others = f", or take another head of this model: --task {' or '.join(possible)}" if possible else ""
    way = f"tune a script that trains it (autotune script -- python train.py){others}"
    return InputError(f"{visible(name)}: {architecture} {said}; {way}")


def _heads(spec: ModelSpec, task: Task) -> tuple[str, ...]:
    """Return the classes with the head of a task, the library's choice first."""
    own = remote_classes(spec).get(HEADS[task][0])
    return class_names(spec.model_type, HEADS[task][1]) if own is None else (own.rpartition(".")[2],)


def class_names(model_type: str, table: str) -> tuple[str, ...]:
    """Return the classes of a type of model in a table of transformers (`HEADS`), the library's own choice first."""
    from transformers.models.auto import modeling_auto

    entry = getattr(modeling_auto, table).get(model_type)
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def remote_classes(spec: ModelSpec) -> dict[str, str]:
    """Return the classes that come with the model, by the name of their auto class, if they may run."""
    return (spec.config.get("auto_map") or {}) if spec.trust_remote_code else {}
