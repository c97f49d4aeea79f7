"""Doctests give what they say."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import autotune

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
