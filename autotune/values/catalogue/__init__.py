"""The built-in catalogue: configurations of known models and their sources, one JSON file per family."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any, Literal

from pydantic import Field

from autotune.value import Value
from autotune.values.model import Kind, Task


class CatalogueEntry(Value):
    """A model of the built-in catalogue."""

    family: str
    id: str = Field(description="id on the hub")
    names: tuple[str, ...] = Field(description="short names, the first is the preferred one")
    model_type: str
    kind: Kind
    config: dict[str, Any] = Field(description="keyword arguments of the config class")
    parameters: int = Field(description="number of parameters, tied ones counted once, buffers not at all")
    parameters_from: Literal["published", "counted"] = Field(
        description="published: the count is published; counted: computed from the config"
    )
    parameters_task: Task | Literal["base"] = Field(description="task whose head the count includes; base: none")
    source: str = Field(description="address of the published config")
    quoted_in: str | None = Field(
        default=None,
        description="public file that quotes the figures, as owner/repository@commit:path; None: read at `source`",
    )


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return the built-in models, ordered by family."""
    entries: list[CatalogueEntry] = []
    folder = importlib.resources.files("autotune.values.catalogue") / "models"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            content = json.loads(file.read_text(encoding="utf-8"))
            for model in content["models"]:
                same = model.pop("checkpoints", [])  # ids of other checkpoints that have the same figures
                entry = CatalogueEntry(family=content["family"], **model)
                entries += [entry, *(_checkpoint(entry, id_) for id_ in same)]
    return tuple(entries)


def _checkpoint(entry: CatalogueEntry, id_: str) -> CatalogueEntry:
    """Return the entry of another checkpoint that has the figures of `entry`."""
    names = (id_.rpartition("/")[2],)
    return entry.model_copy(update={"id": id_, "names": names, "source": entry.source.replace(entry.id, id_)})


@functools.cache
def entries_by_name() -> dict[str, CatalogueEntry]:
    """Return the built-in models by each of their names, in lower case."""
    return {name.lower(): entry for entry in catalogue() for name in (entry.id, *entry.names)}
