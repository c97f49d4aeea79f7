"""Tokenizes the user's file of texts once per search, into rows that trials memory-map.

Nothing is downloaded, nothing is written outside the given directory, and no tensor operation is run.

::

    file --datasets--> rows --text, target and label column--> tokenizer --> directory/tokens (Arrow) + Corpus
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.errors import InputError, RunDirectoryError, one_line
from autotune.training.batches import profile_of
from autotune.training.inputs import special_ids
from autotune.training.text_file import (
    NOT_UTF_8,
    Columns,
    checked_path,
    choose_columns,
    quiet_datasets,
    read_rows,
    row_classes,
)
from autotune.value import Value
from autotune.values.model import ModelSpec, Task
from autotune.values.workload import LengthProfile, Workload

TOKENS = "tokens"  # the directory of tokenized rows, in the one that `prepare` is given
MAX_SAMPLES = 10_000  # more than any trial trains on, and tokenized in seconds
BYTE_LEVEL = "byte-level ByT5"

# Files of vocabularies. Without one of them AutoTokenizer may build an empty tokenizer instead of failing.
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip

# Before tokenizing, a text is cut to this many characters per token, so that a book takes no longer than a page.
_CHARACTERS_PER_TOKEN = 64


class Corpus(Value):
    """What is known of the prepared texts."""

    lengths: LengthProfile = Field(description="of the inputs, and the mean of the targets")
    tokenizer: str = Field(description="'byte-level ByT5', a directory or a hub id")
    notes: tuple[str, ...] = Field(default=(), description="for the user, a line each")


def prepare(workload: Workload, directory: Path) -> Corpus | None:
    """Tokenize the workload's file into `directory`; return None for synthetic data.

    Raises:
        InputError: The file can't be used as it is.
        RunDirectoryError: `directory` can't be written.
    """
    if workload.dataset is None:
        return None
    refuse_files(workload)
    path = checked_path(workload.dataset)
    scratch = directory / "reading"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        with quiet_datasets():
            return _prepare(workload, path, directory, scratch)
    except UnicodeDecodeError as error:  # the library's JSON reader raises it only when a text is used
        raise InputError(f"{workload.dataset}: {NOT_UTF_8}") from error
    except OSError as error:
        raise RunDirectoryError(f"{directory}: can't be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_files(workload: Workload) -> None:
    """Refuse a data file for a task on images, also beside texts, or sound.

    Raises:
        InputError: The workload has one.
    """
    is_text = workload.task.takes_text and workload.task is not Task.IMAGE_TEXT_TO_TEXT
    if workload.dataset is not None and not is_text:
        what = "recordings" if workload.task.takes_audio else "images"
        raise InputError(f"{workload.dataset}: {what} are not read from files yet; leave the data out")


def load_rows(directory: Path) -> Any:
    """Return the rows that `prepare` left in `directory`, memory-mapped, as a `datasets.Dataset`.

    Columns: `input_ids`, and `labels` (token ids or a class) where the task needs them.

    Raises:
        RunDirectoryError: There are none.
    """
    from datasets import load_from_disk

    try:
        return load_from_disk(str(directory / TOKENS))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{directory / TOKENS}: no tokenized data; start the search anew") from error


def row_lengths(rows: Any, column: str = "input_ids") -> NDArray[np.int64]:
    """Return the number of tokens of each row of `load_rows` in a column."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(rows.data.column(column)), dtype=np.int64)


def _prepare(workload: Workload, path: Path, directory: Path, scratch: Path) -> Corpus:
    from autotune.training.build import build_config

    config = build_config(workload.model, workload.task)
    rows = read_rows(path, workload.dataset or str(path), scratch)
    columns, notes = choose_columns(rows, workload)
    if len(rows) > MAX_SAMPLES:
        notes.append(f"{MAX_SAMPLES:,} of {len(rows):,} rows are used, drawn at random")
        drawn = np.random.default_rng(workload.seed).choice(len(rows), MAX_SAMPLES, replace=False)
        rows = rows.select(np.sort(drawn))
    labels = row_classes(rows, columns, workload, config.num_labels, notes)
    tokenizer, name = load_tokenizer(workload.model, notes)
    encoder = _Encoder(
        tokenizer=tokenizer,
        columns=columns,
        workload=workload,
        labels=labels,
        eos=next(iter(special_ids(config, "eos_token_id")), None) if name == BYTE_LEVEL else None,
        characters_per_token=1 if name == BYTE_LEVEL else _CHARACTERS_PER_TOKEN,
    )
    tokens = rows.map(
        encoder,
        batched=True,
        batch_size=256,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_features(workload.task),
        load_from_cache_file=False,
        new_fingerprint=TOKENS,
    )
    if len(tokens) < len(rows):
        notes.append(f"{len(rows) - len(tokens):,} of {len(rows):,} rows are left out: no text, no class or too short")
    if not len(tokens):
        raise InputError(f"{workload.dataset}: no row holds any text in column '{columns.text}'")
    lengths = _checked_lengths(tokens, name, config)
    _save(tokens, directory / TOKENS)
    return Corpus(lengths=lengths, tokenizer=name, notes=tuple(notes))


def load_tokenizer(spec: ModelSpec, notes: list[str]) -> tuple[Any, str]:
    """Return the model's own tokenizer if this machine holds it, otherwise one that needs no vocabulary."""
    from transformers import AutoTokenizer

    name = _tokenizer_name(spec)
    if name is None:
        notes.append(
            f"no tokenizer of {spec.name} on this machine: every byte counts as a token, "
            "so the samples are several times longer than with its own"
        )
        return _byte_tokenizer(), BYTE_LEVEL
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=None if spec.path else spec.revision,
            local_files_only=True,
            trust_remote_code=spec.trust_remote_code,
        )
    except Exception as error:  # whatever the tokenizer's library or its remote code raises
        raise InputError(f"{name}: the tokenizer can't be loaded ({one_line(error)})") from error
    return tokenizer, name


def _byte_tokenizer() -> Any:
    """Return a tokenizer of bytes; other ids, which a model with a larger vocabulary generates, are no text to it."""
    from transformers import ByT5Tokenizer

    class ByteTokenizer(ByT5Tokenizer):  # type: ignore[misc]  # transformers is untyped
        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            text: str = super().convert_tokens_to_string([t for t in tokens if len(t) > 1 or ord(t) < 256])
            return text

    return ByteTokenizer(split_special_tokens=True)


def _tokenizer_name(spec: ModelSpec) -> str | None:
    """Return the path or id of the tokenizer for `from_pretrained`; None if its files aren't on this machine."""
    from huggingface_hub import try_to_load_from_cache

    if spec.path is not None and any((Path(spec.path) / name).is_file() for name in _VOCABULARIES):
        return spec.path
    if spec.source == "directory":
        return None
    found = (try_to_load_from_cache(spec.name, name, revision=spec.revision) for name in _VOCABULARIES)
    return spec.name if any(isinstance(path, str) for path in found) else None


@dataclass(frozen=True)
class _Encoder:
    """Turns a batch of rows into token ids; rows without text, without a class or too short are left out."""

    tokenizer: Any
    columns: Columns
    workload: Workload
    labels: Sequence[int | None] | None
    eos: int | None
    characters_per_token: int

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        workload, columns = self.workload, self.columns
        sources = batch[columns.text]
        targets = batch[columns.target] if columns.target else sources
        used = [
            position
            for position, (source, target) in enumerate(zip(sources, targets, strict=True))
            if _has_text(source)
            and _has_text(target)
            and (self.labels is None or self.labels[indices[position]] is not None)
        ]
        encoded = {"input_ids": self._encode([sources[p] for p in used], workload.sequence_length)}
        if workload.task is Task.SEQ2SEQ_LM:
            length = workload.target_length or workload.sequence_length
            encoded["labels"] = self._encode([targets[p] for p in used], length, targets=True)
        elif self.labels is not None:
            encoded["labels"] = [self.labels[indices[p]] for p in used]
        # A causal model predicts each token from those before it, so that a single one has no loss.
        shortest = 2 if workload.task is Task.CAUSAL_LM else 1
        used_rows = [k for k, ids in enumerate(encoded["input_ids"]) if len(ids) >= shortest]
        return {name: [values[k] for k in used_rows] for name, values in encoded.items()}

    def _encode(self, texts: list[str], length: int, *, targets: bool = False) -> list[Any]:
        if not texts:
            return []
        texts = [text[: length * self.characters_per_token] for text in texts]
        given = {"text_target": texts} if targets else {"text": texts}
        rows = self.tokenizer(**given, truncation=True, max_length=length)["input_ids"]
        if self.eos is not None:  # the model's own end, which heads such as BART's look for
            rows = [[*ids[:-1], self.eos] for ids in rows]
        return [ids[:length] for ids in rows]


def _has_text(value: str | None) -> bool:
    return value is not None and bool(value.strip())


def _features(task: Task) -> Any:
    from datasets import Features, List
    from datasets import Value as Column

    features = {"input_ids": List(Column("int32"))}
    if task is Task.SEQ2SEQ_LM:
        features["labels"] = List(Column("int32"))
    elif task is Task.SEQUENCE_CLASSIFICATION:
        features["labels"] = Column("int64")
    return Features(features)


def _checked_lengths(tokens: Any, tokenizer: str, config: Any) -> LengthProfile:
    """Return the profile of `input_ids`.

    Raises:
        InputError: The model doesn't know one of the ids.
    """
    import pyarrow.compute as pc

    listed = [name for name in ("input_ids", "labels") if hasattr(tokens.features.get(name), "feature")]
    largest = max(pc.max(pc.list_flatten(tokens.data.column(name))).as_py() or 0 for name in listed)
    vocabulary = config.get_text_config().vocab_size
    if largest >= vocabulary:
        raise InputError(
            f"{tokenizer}: makes token id {largest}, but the model's vocabulary ends at {vocabulary - 1}; "
            "put the model's own tokenizer beside its config.json"
        )
    lengths = row_lengths(tokens)
    return profile_of(lengths, float(row_lengths(tokens, "labels").mean()) if "labels" in listed else None)


def _save(tokens: Any, path: Path) -> None:
    """Write the rows under another name and rename them, so that an interrupted write is never taken for the data."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokens.save_to_disk(str(partial))
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
