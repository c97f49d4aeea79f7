"""The examples in docstrings hold: doctests give what they say, files are read, Python calls what exists."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import autotune
from autotune.space.file import read_space

PACKAGE = Path(autotune.__file__).parent
SOURCES = {
    ".".join(("autotune", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}
WITH_DOCTESTS = [name for name, source in SOURCES.items() if re.search(r"^ *>>> ", source, re.MULTILINE)]

# Files that docstrings show, and what reads them.
FILES = {"autotune.space.file": read_space}


def shown(module: str) -> list[str]:
    """Return the literal blocks of a module's docstring: what is indented after two colons."""
    text = ast.get_docstring(ast.parse(SOURCES[module])) or ""
    found = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", text + "\n")
    return [inspect.cleandoc(block) for block in found]


def test_there_are_examples():
    assert {"autotune.units", "autotune.values.config"} <= set(WITH_DOCTESTS)


@pytest.mark.parametrize("name", WITH_DOCTESTS)
def test_doctests_give_what_they_say(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_shown_can_be_read(name, tmp_path):
    (block,) = shown(name)
    path = tmp_path / "shown.yaml"
    path.write_text(block)
    assert FILES[name](path)


@pytest.mark.parametrize("name", [name for name in SOURCES if any("autotune.find(" in block for block in shown(name))])
def test_python_that_is_shown_calls_what_exists(name):
    for block in shown(name):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "autotune.find":
                keywords = {keyword.arg: None for keyword in node.keywords}
                inspect.signature(autotune.find).bind(*node.args, **keywords)
