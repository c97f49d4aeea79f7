"""The examples hold: doctests give what they say, and the search space of the documents can be read."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import autotune
from autotune.space.file import read_space

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
    (block,) = re.findall(r"```yaml.*\n((?:.*\n)+?)```", (PACKAGE.parent / "docs" / "search-spaces.md").read_text())
    (tmp_path / "shown.yaml").write_text(block)
    assert len(read_space(tmp_path / "shown.yaml").parameters) == 7
