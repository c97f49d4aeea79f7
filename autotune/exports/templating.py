"""The templates of files that are more text than data: scripts and a Dockerfile."""

from __future__ import annotations

import functools
import json
from typing import Any

import jinja2

# A literal that is no longer than this is left on one line.
_WIDTH = 90


def rendered(template: str, context: dict[str, Any]) -> str:
    """Return the text that a template makes of `context`, which it calls `c`."""
    return _environment().get_template(template).render(c=context)


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("autotune.exports", "templates")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["python"] = literal
    return environment


def literal(value: Any, indent: int = 0) -> str:
    """Return a value as Python writes it, long ones a line an item."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        items = [f"{literal(key)}: {literal(item, indent + 4)}" for key, item in value.items()]
        return _bracketed("{}", items, indent)
    if isinstance(value, list):
        return _bracketed("[]", [literal(item, indent + 4) for item in value], indent)
    if isinstance(value, tuple):
        items = [literal(item, indent + 4) for item in value]
        return f"({items[0]},)" if len(items) == 1 else _bracketed("()", items, indent)
    return repr(value)


def _bracketed(brackets: str, items: list[str], indent: int) -> str:
    line = ", ".join(items)
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return f"{brackets[0]}{line}{brackets[1]}"
    inner = "".join(f"{' ' * (indent + 4)}{item},\n" for item in items)
    return f"{brackets[0]}\n{inner}{' ' * indent}{brackets[1]}"
