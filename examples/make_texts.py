"""Makes a file of texts of varied length, to try `autotune find --data` on before your own data are ready.

    python examples/make_texts.py texts.jsonl [--count 1000]

The texts are docstrings of Python's standard library, which lies on every machine: from one line to several
pages of English and code, no two alike. One version of Python always gives the same file. Each line is
{"text": "..."}. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

SHORTEST = 20  # characters; below lie placeholders
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--count", type=int, default=1000, help="number of texts (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.count < 1:
        parser.error("--count must be at least 1")
    texts = list(islice(docstrings(Path(sysconfig.get_path("stdlib"))), arguments.count))
    if len(texts) < arguments.count:
        parser.error(f"this Python has {len(texts)} docstrings; ask for no more with --count")
    try:
        with arguments.path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    except OSError as error:
        parser.error(f"{arguments.path}: can't be written ({error.strerror})")
    print(f"{arguments.path}: {len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters")


def docstrings(library: Path) -> Iterator[str]:
    """Yield the docstrings of all modules, classes and functions below `library`, each text once."""
    seen = set()
    for path in sorted(library.rglob("*.py")):
        if NOT_THE_LIBRARY.intersection(path.relative_to(library).parts):
            continue
        for text in docstrings_of(path):
            if len(text) >= SHORTEST and text not in seen:
                seen.add(text)
                yield text


def docstrings_of(path: Path) -> Iterator[str]:
    """Yield the docstrings in one source file; none if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that newer versions frown upon
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


if __name__ == "__main__":
    main()
