"""The templates of scripts.

A value is data unless the template says otherwise: between braces it is written as a literal of Python, so that nothing
in a result becomes code. :class:`Code` alone is written as it stands, and is made here and in `scripts` of names and
literals; `text` and `comment` are for people.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from typing import Any

import jinja2
from markupsafe import Markup

from autotune.units import escaped, visible

# A literal that is no longer than this is left on one line.
_WIDTH = 90
_PROSE_WIDTH = 112

# Names of classes and modules.
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


class Code(Markup):
    """Text of our own that a template writes as it stands."""


def rendered(template: str, context: dict[str, Any]) -> str:
    """Return the text that a template makes of `context`, which it calls `c`."""
    return _environment().get_template(template).render(c=context)


@functools.cache
def _environment() -> jinja2.Environment:
    # With autoescape what a macro has written counts as written, and everything else goes through `finalize`.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.exports", "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Code(literal(value)),
    )
    environment.filters |= {"name": name, "text": text, "comment": comment}
    return environment


def name(value: str) -> Code:
    """Return a name of Python's, dotted or not, as it stands."""
    assert _NAME.fullmatch(value), f"{value!r} is no name"
    return Code(value)


def text(value: str, indent: int = 0, *, wrap: bool = True) -> Code:
    """Return words for people within a docstring, in lines: nothing in them ends it or is an escape of it."""
    lines = textwrap.wrap(visible(value), _PROSE_WIDTH) if wrap else [visible(value)]
    return Code(("\n" + " " * indent).join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines))


def comment(value: str) -> Code:
    """Return words for people within a comment, which ends with the line."""
    return Code(visible(value))


def literal(value: Any, indent: int = 0) -> str:
    """Return a value of JSON, or a tuple of such, as Python writes it, long ones a line an item."""
    if isinstance(value, str):
        return '"' + "".join({"\\": "\\\\", '"': '\\"'}.get(c) or escaped(c) for c in value) + '"'
    if isinstance(value, dict):
        items = [f"{literal(key)}: {literal(item, indent + 4)}" for key, item in value.items()]
        return _bracketed("{}", items, indent)
    if isinstance(value, list):
        return _bracketed("[]", [literal(item, indent + 4) for item in value], indent)
    if isinstance(value, tuple):
        items = [literal(item, indent + 4) for item in value]
        return f"({items[0]},)" if len(items) == 1 else _bracketed("()", items, indent)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is not None and not isinstance(value, bool | int | float):
        raise TypeError(f"a {type(value).__name__} has no literal")
    return repr(value)


def _bracketed(brackets: str, items: list[str], indent: int) -> str:
    line = ", ".join(items)
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return f"{brackets[0]}{line}{brackets[1]}"
    inner = "".join(f"{' ' * (indent + 4)}{item},\n" for item in items)
    return f"{brackets[0]}\n{inner}{' ' * indent}{brackets[1]}"
