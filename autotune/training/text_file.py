"""Reads the user's file of texts: its kind, the columns that are used, and what is wrong with it."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import InputError, one_line, suggestion
from autotune.values.model import Task
from autotune.values.workload import Recipe, Workload

# Suffix -> builder of the datasets library and its options. "utf-8-sig" drops the byte-order mark of Windows editors.
_READERS: dict[str, tuple[str, dict[str, str]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"encoding": "utf-8-sig"}),
    ".text": ("text", {"encoding": "utf-8-sig"}),
}

NOT_UTF_8 = "is not UTF-8 text; save it in that encoding"


def checked_path(dataset: str) -> Path:
    """Return the path of a readable file of a known kind.

    Raises:
        InputError: It is missing, empty, a directory, or of another kind.
    """
    kinds = ", ".join(_READERS)
    try:
        path = Path(dataset).expanduser().absolute()  # a link's own name says the kind, not that of its target
        if path.is_dir():
            raise InputError(f"{dataset}: is a directory; give one file in it, ending in {kinds}")
        if path.suffix.lower() not in _READERS:
            raise InputError(f"{dataset}: unknown kind of file; give one that ends in {kinds}")
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise InputError(f"{dataset}: no such file{suggestion(path.name, siblings)}")
        if not path.is_file():
            raise InputError(f"{dataset}: is not a regular file; copy the data into one")
        with path.open("rb") as file:
            if not file.read(1):
                raise InputError(f"{dataset}: is empty; give a file with at least one text")
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{dataset}: can't be read ({one_line(error)})") from error
    return path


def read_rows(path: Path, dataset: str, scratch: Path) -> Any:
    """Return the rows of the file `path` as a `datasets.Dataset`; `dataset` is what the user called it.

    Raises:
        InputError: The file is malformed or holds no rows.
    """
    import datasets

    kind, options = _READERS[path.suffix.lower()]
    # The library takes file names for patterns and URLs, so it gets one that is neither.
    link = scratch / f"source{path.suffix.lower()}"
    link.symlink_to(path)
    try:
        reader = datasets.load_dataset_builder(
            kind, data_files=glob.escape(str(link)), cache_dir=str(scratch), **options
        )
        reader.download_and_prepare()
        if reader.info.splits["train"].num_examples:
            return reader.as_dataset(split="train")
    except Exception as error:  # whatever the library's parsers raise
        raise InputError(f"{dataset}: {_reason(error, path)}") from error
    raise InputError(f"{dataset}: holds no rows; give a file with at least one text")


def _reason(error: Exception, path: Path) -> str:
    """Return what is wrong with a file that the library has refused."""
    cause = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return NOT_UTF_8
    found = _malformed_json(path) if path.suffix.lower() in (".json", ".jsonl") else None
    return found or f"can't be read as {path.suffix[1:].upper()} ({one_line(cause)}); mend or convert it"


def _malformed_json(path: Path) -> str | None:
    """Return the first line that is no JSON object, and why; the library counts rows by block or not at all."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        if path.suffix.lower() == ".json" and file.read(1) == "[":
            return 'is not a list of objects such as [{"text": "..."}]'
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except RecursionError:
                return f"line {number}: nested too deeply; mend or delete the line"
            except json.JSONDecodeError as error:
                what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                return f"line {number}: not valid JSON ({what}); mend or delete the line"
            if not isinstance(value, dict):
                return f'line {number}: not an object such as {{"text": "..."}}; mend or delete the line'
    return None


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep the library's progress bars and logged errors off the terminal; our errors say the same in one line."""
    import datasets

    verbosity, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are used."""

    text: str
    target: str | None = None
    label: str | None = None


def choose_columns(rows: Any, workload: Workload) -> tuple[Columns, list[str]]:
    """Return the columns to use and what the user should know of the choice.

    Raises:
        InputError: It isn't clear which column of strings is the text.
    """
    texts = [name for name, kind in rows.features.items() if _kind(kind) in ("string", "large_string")]
    notes = []
    target = label = None
    if workload.task is Task.SEQ2SEQ_LM:
        target = "target" if "target" in texts and workload.text_field != "target" else None
        if target is None:
            notes.append("no column 'target': the target is the text itself")
    if workload.task is Task.SEQUENCE_CLASSIFICATION and workload.text_field != "label":
        label = "label" if "label" in rows.column_names else None
    candidates = [name for name in texts if name not in (target, label)]
    return Columns(_text_column(rows, candidates, texts, workload), target, label), notes


def _text_column(rows: Any, candidates: list[str], texts: list[str], workload: Workload) -> str:
    field = workload.text_field
    wanted = field if field is not None else "text"
    if wanted in texts:
        return wanted
    if wanted in rows.column_names:
        kind = _kind(rows.features[wanted])
        raise InputError(f"{workload.dataset}: column '{wanted}' holds {kind}, not strings; name one that does")
    columns = ", ".join(rows.column_names)
    if field is not None:
        hint = suggestion(field, rows.column_names)
        raise InputError(f"{workload.dataset}: no column '{field}'{hint}; the columns are {columns}")
    if len(candidates) == 1:
        return candidates[0]
    problem = "several columns of strings; name the one of the text" if candidates else "no column of strings"
    raise InputError(f"{workload.dataset}: {problem}; the columns are {columns}")


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", type(feature).__name__.lower()))


def row_classes(
    rows: Any, columns: Columns, workload: Workload, num_labels: int, notes: list[str]
) -> Sequence[int | None] | None:
    """Return the class of every row (None: the row has none), or None if the task needs no classes."""
    if workload.task is not Task.SEQUENCE_CLASSIFICATION:
        return None
    values: list[Any] = list(rows[columns.label]) if columns.label else []
    # Integers with gaps come out of a CSV file as floats.
    known = {v for v in values if isinstance(v, str | int) or (isinstance(v, float) and v.is_integer())}
    if len({type(v) for v in known}) != 1 or not all(v is None or v in known for v in values):
        notes.append("no column 'label' of classes: labels are random")
        return [int(n) for n in np.random.default_rng(workload.seed).integers(num_labels, size=len(rows))]
    if len(known) > num_labels:
        notes.append(f"{len(known)} classes are folded into the {num_labels} of the model's head")
    classes = {value: index % num_labels for index, value in enumerate(sorted(known))}
    return [classes.get(value) for value in values]


def check_columns(features: Mapping[str, Any], recipe: Recipe, dataset: str) -> None:
    """Refuse rows that TRL has no use for in a recipe; conversations (`messages`) and whole texts do for SFT.

    Raises:
        InputError: A column is missing, or holds neither text nor conversations; labels: neither truths nor numbers.
    """
    columns = list(features)
    whole = [column for column in ("messages", "text") if recipe.name == "sft" and column in columns]
    for column in whole or recipe.kind.columns:
        if column in columns and not _is_usable(column, features[column]):
            wanted = "true or false" if column == "label" else "text, or messages with role and content"
            raise InputError(f"{dataset}: {column}: expected {wanted}")
    if whole:
        return
    needed = [column for column in recipe.kind.columns if column not in columns]
    if recipe.name == "dpo" and needed == ["prompt"]:  # TRL takes what both begin with
        return
    if needed:
        raise InputError(
            f"{dataset}: {recipe.name} needs the columns {', '.join(recipe.kind.columns)}; there is no "
            f"{needed[0]}{suggestion(needed[0], columns)} among {', '.join(columns)}"
        )


def _is_usable(column: str, feature: Any) -> bool:
    kind, message = getattr(feature, "dtype", None), getattr(feature, "feature", None)
    if column == "label":
        return kind in ("bool", "int64")
    if isinstance(message, Mapping):  # of a conversation
        return {"role", "content"} <= message.keys() and getattr(message["role"], "dtype", None) == "string"
    return kind in ("string", "large_string")
