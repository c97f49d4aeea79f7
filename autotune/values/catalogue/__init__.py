"""The built-in catalogue: architecture figures of known models, a JSON file a family, with the source of each."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any, Literal

from pydantic import Field

from autotune.value import Value
from autotune.values.model import Kind, Task


class CatalogueEntry(Value):
    """A model of the built-in catalogue: its architecture's figures, and where they come from."""

    family: str
    id: str = Field(description="id on the hub")
    names: tuple[str, ...] = Field(description="short names, the first is the preferred one")
    model_type: str
    kind: Kind
    config: dict[str, Any] = Field(description="keyword arguments of the config class")
    parameters: int = Field(description="number of parameters, tied ones counted once, buffers not at all")
    parameters_from: Literal["published", "counted"] = Field(
        description="published: the count stands in public; counted: it is what the figures give"
    )
    parameters_task: Task | Literal["base"] = Field(description="head that the count includes; base: none")
    source: str = Field(description="address of the published config")


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return the built-in models, family by family."""
    entries: list[CatalogueEntry] = []
    folder = importlib.resources.files("autotune.values.catalogue") / "models"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            content = json.loads(file.read_text(encoding="utf-8"))
            entries += [CatalogueEntry(family=content["family"], **model) for model in content["models"]]
    return tuple(entries)


@functools.cache
def entries_by_name() -> dict[str, CatalogueEntry]:
    """Return the built-in models by every name they answer to, in lower case."""
    return {name.lower(): entry for entry in catalogue() for name in (entry.id, *entry.names)}
