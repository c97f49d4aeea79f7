"""From what the user wrote to a :class:`ModelSpec`: a name of the catalogue, a local directory or a hub id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from autotune.errors import InputError, UnknownModelError, one_line, suggestion
from autotune.training.build import library_config
from autotune.training.heads import architecture_of, cannot_train, kind_of, remote_classes, shown, tasks_for
from autotune.values.catalogue import catalogue, entries_by_name
from autotune.values.model import ModelSpec


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
