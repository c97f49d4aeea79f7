"""Models by name, built with random weights: the built-in catalogue, local directories, hub ids.

``resolve`` turns what the user wrote into a :class:`ModelSpec`, a value that any process can build
from; ``build_model`` does so on the device itself. A name of the catalogue never touches the network.
Weights are never read. Data, adapters and training arguments are somebody else's; called by the
tuner, the worker, the tracer and the command line.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.architecture import ModelFacts, ModelSpec, Task
from autotune.catalogue import catalogue, entries_by_name
from autotune.errors import InputError, UnknownModelError, one_line, suggestion
from autotune.model_facts import HEADS, USUAL_TASK, facts_of, kind_of, tasks_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HUB_TIMEOUT_S = 5.0
# What the library and torch raise at a request they can't fulfil. Out of memory is a RuntimeError; a
# build of torch without CUDA says so by an AssertionError.
_REFUSALS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    NotImplementedError,
    ImportError,
    AssertionError,
)


def resolve(reference: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelSpec:
    """Find the model the user means: in the catalogue, in a directory, or on the hub, in this order.

    A catalogue name wins over a directory of the same name; write ``./name`` for the directory.

    Args:
        reference: Catalogue name or full id (in any case), directory, or hub id.
        revision: Branch, tag or commit on the hub; the catalogue's figures are those of the main branch.
        trust_remote_code: Whether code that comes with the model may run. Without it, the library's own
            class is used where it has one.

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


def tasks_of(spec: ModelSpec) -> tuple[Task, ...]:
    """Return the tasks for which there is a head for this type of model."""
    return tasks_for(spec.model_type, _own_code(spec))


def default_task(spec: ModelSpec) -> Task:
    """Return the task a model of this kind is usually trained for."""
    usual = USUAL_TASK[spec.kind]
    if spec.source == "catalogue":
        return usual
    possible = tasks_of(spec)
    return usual if usual in possible else possible[0]


def check_task(spec: ModelSpec, task: Task) -> None:
    """Refuse a task for which the model has no head.

    Raises:
        InputError: There is no such head; the message lists those there are.
    """
    possible = tasks_of(spec)
    if task not in possible:
        raise InputError(
            f"{_shown(spec.name)}: model type {spec.model_type!r} has no head for {task.value} "
            f"(possible: {', '.join(t.value for t in possible)})"
        )


def build_config(spec: ModelSpec, task: Task) -> PreTrainedConfig:
    """Make the library's config for a model and a head.

    Raises:
        InputError: The model has no such head, or the library refuses the figures.
    """
    check_task(spec, task)
    config = _library_config(spec)
    if config.architectures is None:
        config.architectures = []  # the library iterates over it where a type has several heads, as DeiT
    if task is Task.SEQUENCE_CLASSIFICATION:
        if not spec.config.keys() & {"num_labels", "id2label"}:
            config.num_labels = 2
        text = config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:  # decoders look for the last token before padding
            end = getattr(text, "eos_token_id", None)
            text.pad_token_id = config.pad_token_id = (end[0] if isinstance(end, list) else end) or 0
    if task is Task.CAUSAL_LM and spec.kind == "encoder":
        config.is_decoder = True
    return config


def build_model(
    spec: ModelSpec,
    task: Task,
    *,
    dtype: str,
    attn_implementation: str | None = None,
    device: str,
    experts_implementation: str | None = None,
    config: PreTrainedConfig | None = None,
    quantization: dict[str, Any] | None = None,
    **figures: int,
) -> PreTrainedModel:
    """Build the model with random weights on the device, ready to train.

    Equal torch seeds give equal weights. Running out of memory is not caught here.

    Args:
        spec: The model.
        task: The head.
        dtype: Name of a torch dtype, as "float32" or "bfloat16".
        attn_implementation: Attention kernel; None leaves the choice to the library.
        device: Torch device; "meta" allocates nothing.
        experts_implementation: Way of running experts; None leaves the choice to the library.
        config: In place of the spec's own, as a shallower one.
        quantization: Keyword arguments of `transformers.BitsAndBytesConfig` for the weights of linear layers.
        figures: Fields of the config to set, such as `num_experts_per_tok`.

    Raises:
        InputError: The library refuses.
    """
    import torch
    import transformers

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise InputError(f"{dtype!r} is not a torch dtype (as 'float32' or 'bfloat16')")
    options: dict[str, Any] = {"dtype": torch_dtype, "trust_remote_code": spec.trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    config = copy.deepcopy(config or build_config(spec, task)) if figures else config or build_config(spec, task)
    for name, value in figures.items():
        setattr(config.get_text_config(), name, value)
    head = getattr(transformers, HEADS[task][0])
    try:
        first = device if quantization is None else "meta"
        with torch.device(first):
            model = head.from_config(config, **options)
        # Wav2Vec2 makes one parameter by torch's legacy constructor, which knows nothing of the device around it.
        if any(parameter.device.type != torch.device(first).type for parameter in model.parameters()):
            model.to(first)
    except _REFUSALS as error:
        raise InputError(f"{_shown(spec.name)}: can't be built: {one_line(error)}") from error
    if spec.config.get("tie_word_embeddings") is False:
        _untie(model)
    if quantization is not None:
        from autotune.quantized import quantize

        quantize(model, quantization, device)
    return model.train()


def describe(spec: ModelSpec, task: Task) -> ModelFacts:
    """Read off what the model's classes offer, without allocating its weights.

    Raises:
        InputError: The model has no such head, or the library refuses.
    """
    model = build_model(spec, task, dtype="float32", attn_implementation=None, device="meta")
    return facts_of(model, task)


def _directory(name: str) -> Path | None:
    """Return the directory of this name, or None; a file is refused with the remedy."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path.resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError):  # a name too long, a home that isn't there
        return None
    if is_file:
        raise InputError(f"{_shown(name)} is a file; give the directory that holds config.json")
    return None


def _hub_config_file(name: str, revision: str | None) -> Path:
    """Return the path of a hub model's config.json in the local cache, fetching it if the hub answers."""
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise _unknown(name, "not cached, and HF_HUB_OFFLINE is set")
        # The download repeats its attempts for minutes if nobody answers; this one doesn't.
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_HUB_TIMEOUT_S)
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except UnknownModelError:
        raise
    except HFValidationError:
        raise _unknown(name, "and no hub id") from None
    except GatedRepoError as error:
        raise InputError(f"{name}: access is gated on the hub; ask for it and run `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise InputError(f"{name}: the hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise _unknown(name, "not cached, and the hub has no such model (or it is private)") from error
    except Exception as error:  # the network's errors are those of whatever client the hub library uses
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
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
    """Make the spec of a model from its config.json."""
    config = _read_json(file)
    where = _shown(str(file))
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise InputError(f"{where}: the weights are quantized already ({method}); name the model they were made from")
    code = config.get("auto_map") or {}
    model_type = config.get("model_type")
    if not (asked["trust_remote_code"] and "AutoConfig" in code):
        _check_model_type(model_type, where, has_code=bool(code))
    if model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as the library itself does when it reads such a file
    spec = ModelSpec(
        **asked,
        name=name,
        source=source,
        model_type=str(model_type),
        kind="encoder",  # until the library's config tells
        config=config,
        path=str(file.parent),
    )
    built = _library_config(spec)
    tasks = tasks_for(built.model_type, _own_code(spec))
    if not tasks:
        raise InputError(
            f"{where}: model type {built.model_type!r} has no head that can be trained here "
            f"({', '.join(task.value for task in Task)})"
        )
    return spec.model_copy(update={"model_type": built.model_type, "kind": kind_of(built, tasks)})


def _own_code(spec: ModelSpec) -> dict[str, str]:
    """Return the classes that come with the model, by the auto class they stand for, if they may run."""
    return (spec.config.get("auto_map") or {}) if spec.trust_remote_code else {}


def _check_model_type(model_type: object, where: str, *, has_code: bool) -> None:
    """Refuse a config whose class the library doesn't have."""
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
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{_shown(str(file.parent))}: not the directory of a model, it has no config.json") from None
    except OSError as error:
        raise InputError(f"{_shown(str(file))}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{_shown(str(file))}: not valid JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise InputError(f"{_shown(str(file))}: must hold a JSON object, not a {type(content).__name__}")
    return content


def _library_config(spec: ModelSpec) -> PreTrainedConfig:
    """Make the config class from the spec's figures, or with the model's own code if that is trusted."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    location = spec.path if spec.source == "directory" else spec.name
    try:
        if "AutoConfig" in _own_code(spec):
            return AutoConfig.from_pretrained(location, revision=spec.revision, trust_remote_code=True)
        figures = copy.deepcopy(spec.config)
        figures.pop("model_type", None)  # the class has its own, which may be a narrower one
        if _own_code(spec):
            figures["name_or_path"] = location  # where the library looks for the head's code
        return CONFIG_MAPPING[spec.model_type].from_dict(figures)
    except Exception as error:  # a config class may raise anything at all at figures it didn't expect
        raise InputError(f"{_shown(spec.name)}: transformers refuses its config: {one_line(error)}") from error


def _untie(model: PreTrainedModel) -> None:
    """Give the output layer its own weights where the config says so and the library ties all the same.

    T5's config class forces the tie. Loading a checkpoint that has both (T5 v1.1, FLAN, mT5, ByT5) leaves
    them apart, so a model made from figures must be given what a loaded one has.
    """
    import torch

    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is None or inputs is None or outputs.weight is not inputs.weight:
        return
    outputs.weight = torch.nn.Parameter(outputs.weight.detach().clone())
    name = next(n for n, module in model.named_modules() if module is outputs)
    model.all_tied_weights_keys.pop(f"{name}.weight", None)


def _shown(name: str) -> str:
    """Return a name as it can stand in a message of one line."""
    return name if name.isprintable() else repr(name)
