"""The examples in docstrings hold: doctests give what they say, and a file that is shown can be read."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import autotune
from autotune.space import file

PACKAGE = Path(autotune.__file__).parent
WITH_DOCTESTS = [
    ".".join(("autotune", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", WITH_DOCTESTS)
def test_doctests_give_what_they_say(name):
    assert {"autotune.units", "autotune.values.config"} <= set(WITH_DOCTESTS)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_a_search_space_that_is_shown_can_be_read(tmp_path):
    text = ast.get_docstring(ast.parse(inspect.getsource(file))) or ""
    (block,) = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", text + "\n")
    (tmp_path / "shown.yaml").write_text(inspect.cleandoc(block))
    file.read_space(tmp_path / "shown.yaml")
