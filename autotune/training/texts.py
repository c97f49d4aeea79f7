"""The user's file of texts: its kind, the columns that are used, what is wrong with it, and its lengths in tokens.

Texts are tokenized once per search for their lengths alone; trials train on random ids of these lengths. Nothing is
downloaded, nothing is written outside the given directory, and no tensor operation is run.
"""

import glob
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InputError, RunDirectoryError, one_line, suggestion
from autotune.training.build import build_config
from autotune.value import write_bytes
from autotune.values.model import ModelSpec, Task
from autotune.values.workload import LengthProfile, Recipe, Workload

TEXT_LENGTHS = "lengths.npy"  # in the directory that `prepare` is given
MAX_SAMPLES = 10_000  # more than any trial trains on, and tokenized in seconds
BYTE_LEVEL = "byte-level ByT5"

# Suffix -> builder of the datasets library and its options. "utf-8-sig" drops the byte-order mark of Windows editors.
READERS: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys((".jsonl", ".json"), ("json", {})),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    **dict.fromkeys((".txt", ".text"), ("text", {"encoding": "utf-8-sig"})),
}

_STRINGS = ("string", "large_string")

# Files of vocabularies. Without one of them AutoTokenizer may build an empty tokenizer instead of failing.
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip


def prepare(workload: Workload, directory: Path) -> tuple[LengthProfile | None, tuple[str, ...]]:
    """Write the lengths of the workload's texts into `directory`; return their spread, None if synthetic, and notes."""
    if workload.dataset is None:
        return None, ()
    if not workload.task.takes_text or workload.task is Task.IMAGE_TEXT_TO_TEXT:
        what = "recordings" if workload.task.takes_audio else "images"
        raise InputError(f"{workload.dataset}: {what} are not read from files yet; leave the data out")
    notes: list[str] = []
    config = build_config(workload.model, workload.task)
    with rows_of_file(workload.dataset, directory) as whole:
        rows, columns = whole, _text_columns(whole, workload, notes)
        if len(whole) > MAX_SAMPLES:
            notes.append(f"{MAX_SAMPLES:,} of {len(whole):,} rows are used, drawn at random")
            drawn = np.random.default_rng(workload.seed).choice(len(whole), MAX_SAMPLES, replace=False)
            rows = whole.select(np.sort(drawn))
        tokenizer, name = load_tokenizer(workload.model, notes)
        lengths, largest = _tokenized(rows, columns, workload, tokenizer, is_bytes=name == BYTE_LEVEL)
        if len(lengths) < len(rows):
            notes.append(f"{len(rows) - len(lengths):,} of {len(rows):,} rows are left out: no text or too short")
        if not len(lengths):
            raise InputError(f"{workload.dataset}: no row holds enough text in column '{columns[0]}'")
        if largest >= (vocabulary := config.get_text_config().vocab_size):
            why = f"makes token id {largest}, but the model's vocabulary ends at {vocabulary - 1}"
            raise InputError(f"{name}: {why}; put the model's own tokenizer beside its config.json")
        write_lengths(lengths, directory / TEXT_LENGTHS)
    profile = profile_of(lengths[:, 0], float(lengths[:, 1].mean()) if len(columns) > 1 else None)
    limit, used = workload.sequence_length, " and ".join(dict.fromkeys(columns))
    if cut := float((lengths[:, 0] == limit).mean()):
        notes.append(f"{'under 1%' if cut < 0.01 else f'{cut:.0%}'} of the samples reach {limit} tokens: they are cut")
    return profile, (f"{profile.shown}, of column {used} (tokenizer: {name})", *notes)


def write_lengths(lengths: NDArray[np.int64], path: Path) -> None:
    """Write the lengths for trials, which needn't read all samples again."""
    path.parent.mkdir(exist_ok=True)
    file = io.BytesIO()
    np.save(file, lengths, allow_pickle=False)
    write_bytes(file.getvalue(), path)


def text_lengths(directory: Path) -> NDArray[np.int64]:
    """Return the tokens of each sample that `prepare` found, (samples, 1), or (samples, 2) with those of its target."""
    try:
        lengths: NDArray[np.int64] = np.load(directory / TEXT_LENGTHS, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{directory / TEXT_LENGTHS}: no tokenized data; start the search anew") from error
    return lengths


def _tokenized(
    rows: Any, columns: list[str], workload: Workload, tokenizer: Any, *, is_bytes: bool
) -> tuple[NDArray[np.int64], int]:
    """Return the tokens of each row that has text and is long enough, by column, and the largest id of all."""
    limits = (workload.sequence_length, workload.target_length or workload.sequence_length)
    # A causal model predicts each token from those before it, so that a single one has no loss.
    shortest = 2 if workload.task is Task.CAUSAL_LM else 1
    largest, lengths = 0, []
    for batch in rows.select_columns(list(dict.fromkeys(columns))).iter(batch_size=256):
        texts = [row for row in zip(*(batch[c] for c in columns), strict=True) if all(t and t.strip() for t in row)]
        sizes = []
        for argument, limit, column in zip(("text", "text_target"), limits, zip(*texts, strict=True), strict=False):
            characters = limit * (1 if is_bytes else 64)  # so that a book takes no longer than a page
            cut = {argument: [text[:characters] for text in column]}
            ids = tokenizer(**cut, truncation=True, max_length=limit)["input_ids"]
            largest = max(largest, *(max(row, default=0) for row in ids))
            sizes.append([min(len(row), limit) for row in ids])  # what a tokenizer adds may be more than the limit
        lengths += [each for each in zip(*sizes, strict=True) if each[0] >= shortest]
    return np.array(lengths, dtype=np.int64).reshape(-1, len(columns)), largest


def profile_of(lengths: NDArray[np.int64], mean_target: float | None = None) -> LengthProfile:
    places = {"minimum": 0, "median": 50, "p95": 95, "maximum": 100}
    found: dict[str, Any] = {n: int(np.percentile(lengths, at, method="nearest")) for n, at in places.items()}
    return LengthProfile(samples=len(lengths), mean=float(lengths.mean()), mean_target=mean_target, **found)


def load_tokenizer(spec: ModelSpec, notes: list[str]) -> tuple[Any, str]:
    """Return the model's own tokenizer if this machine holds it, otherwise one that needs no vocabulary."""
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = None  # for `from_pretrained`, if the tokenizer's files are on this machine
    if spec.path is not None and any((Path(spec.path) / file).is_file() for file in _VOCABULARIES):
        name = spec.path
    elif spec.source != "directory":
        found = (try_to_load_from_cache(spec.name, file, revision=spec.revision) for file in _VOCABULARIES)
        name = spec.name if any(isinstance(path, str) for path in found) else None
    if name is None:
        longer = "every byte counts as a token, so the samples are several times longer than with its own"
        notes.append(f"no tokenizer of {spec.name} on this machine: {longer}")

        class ByteTokenizer(ByT5Tokenizer):  # type: ignore[misc]  # transformers is untyped
            # A model with a larger vocabulary generates other ids as well.
            def convert_tokens_to_string(self, tokens: list[str]) -> str:
                text: str = super().convert_tokens_to_string([t for t in tokens if len(t) > 1 or ord(t) < 256])
                return text

        return ByteTokenizer(split_special_tokens=True), BYTE_LEVEL
    revision, options = spec.revision, {"local_files_only": True, "trust_remote_code": spec.trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(name, revision=None if spec.path else revision, **options), name
    except Exception as error:  # whatever the tokenizer's library or its remote code raises
        raise InputError(f"{name}: the tokenizer can't be loaded ({one_line(error)})") from error


@contextmanager
def rows_of_file(dataset: str, directory: Path) -> Iterator[Any]:
    """Give the rows of the user's file `dataset`; the library is quiet, and its scratch files are in `directory`."""
    import datasets

    path = checked_path(dataset)
    kind, options = READERS[path.suffix.lower()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch, quiet_datasets():
            # The library takes file names for patterns and URLs, so it gets one that is neither.
            link = Path(scratch) / f"source{path.suffix.lower()}"
            link.symlink_to(path)
            rows = None
            try:
                files = glob.escape(str(link))
                reader = datasets.load_dataset_builder(kind, data_files=files, cache_dir=scratch, **options)
                reader.download_and_prepare()
                if reader.info.splits["train"].num_examples:
                    rows = reader.as_dataset(split="train")
            except Exception as error:  # whatever the library's parsers raise
                cause = error.__cause__ or error
                if isinstance(cause, UnicodeDecodeError):
                    raise cause from error
                bad = _bad_record(path) if kind == "json" else None
                reason = bad or f"can't be read as {path.suffix[1:].upper()} ({one_line(cause)})"
                raise InputError(f"{dataset}: {reason}; mend or convert it") from error
            if rows is None:
                raise InputError(f"{dataset}: holds no rows; give a file with at least one text")
            yield rows
    except UnicodeDecodeError as error:  # the library's JSON reader raises it only when a text is used
        raise InputError(f"{dataset}: is not UTF-8 text; save it in that encoding") from error
    except OSError as error:
        raise RunDirectoryError(f"{directory}: can't be written ({error.strerror or error})") from error


def checked_path(dataset: str) -> Path:
    try:
        path = Path(dataset).expanduser().absolute()  # a link's own name says the kind, not that of its target
        if path.suffix.lower() not in READERS:
            raise InputError(f"{dataset}: unknown kind of file; give one that ends in {', '.join(READERS)}")
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir() if p.exists()] if path.parent.is_dir() else []
            raise InputError(f"{dataset}: no such file{suggestion(path.name, siblings)}")
        if not path.is_file():
            raise InputError(f"{dataset}: is not a regular file; copy the data into one")
        if path.stat().st_size == 0:
            raise InputError(f"{dataset}: is empty; give a file with at least one text")
        path.open("rb").close()
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{dataset}: can't be read ({one_line(error)})") from error
    return path


def _bad_record(path: Path) -> str | None:
    """Return the first line that is no JSON object; the library counts rows by block or not at all."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            with suppress(ValueError, RecursionError):
                if not line.strip() or isinstance(json.loads(line), dict):
                    continue
            return f'line {number}: not a JSON object such as {{"text": "..."}}'
    return None


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep the library's progress bars and logged errors off the terminal; our errors say the same in one line."""
    import datasets

    verbosity, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _text_columns(rows: Any, workload: Workload, notes: list[str]) -> list[str]:
    """Return the column of the text, with a decoder that of the target too; InputError: it can't be told."""
    texts = [name for name, kind in rows.features.items() if _kind(kind) in _STRINGS]
    field, columns, is_seq2seq = workload.text_field, ", ".join(rows.column_names), workload.task is Task.SEQ2SEQ_LM
    has_target = is_seq2seq and field != "target" and "target" in texts
    if is_seq2seq and not has_target:
        notes.append("no column 'target': the target is the text itself")
    # The classes of a classifier may be words.
    others = {"target"} if has_target else {"label"} if workload.task is Task.SEQUENCE_CLASSIFICATION else set()
    wanted, candidates = field or "text", [name for name in texts if name not in others]
    if wanted in rows.column_names and wanted not in texts:
        kind = _kind(rows.features[wanted])
        raise InputError(f"{workload.dataset}: column '{wanted}' holds {kind}, not strings; name one that does")
    if field is not None and field not in texts:
        hint = suggestion(field, rows.column_names)
        raise InputError(f"{workload.dataset}: no column '{field}'{hint}; the columns are {columns}")
    if wanted not in texts and len(candidates) != 1:
        problem = "several columns of strings; say --text-field" if candidates else "no column of strings (--recipe?)"
        raise InputError(f"{workload.dataset}: {problem}; the columns are {columns}")
    text = wanted if wanted in texts else candidates[0]
    return [text, *["target" if has_target else text] * is_seq2seq]


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", type(feature).__name__.lower()))


def check_columns(features: Mapping[str, Any], recipe: Recipe, dataset: str, *, text: str) -> None:
    """Refuse rows that TRL can't use in a recipe; SFT takes conversations (`messages`) and a whole `text` as well."""
    columns = list(features)
    whole = [column for column in ("messages", text) if recipe.name == "sft" and column in columns]
    for column in (column for column in whole or recipe.kind.columns if column in columns):
        message = getattr(features[column], "feature", None)  # of a conversation
        wanted, is_usable = "text, or messages with role and content", _kind(features[column]) in _STRINGS
        if column == "label":
            wanted, is_usable = "true or false", _kind(features[column]) in ("bool", "int64")
        elif isinstance(message, Mapping):
            is_usable = {"role", "content"} <= message.keys() and _kind(message["role"]) == "string"
        if not is_usable:
            raise InputError(f"{dataset}: {column}: expected {wanted}")
    needed = [column for column in recipe.kind.columns if column not in columns and not whole]
    if needed and not (recipe.name == "dpo" and needed == ["prompt"]):  # TRL takes what both begin with
        missing = f"there is no {needed[0]}{suggestion(needed[0], columns)} among {', '.join(columns)}"
        raise InputError(f"{dataset}: {recipe.name} needs {', '.join(recipe.kind.columns)}; {missing}")
