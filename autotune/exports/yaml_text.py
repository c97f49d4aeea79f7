"""YAML of a target: a heading that says what it is of and what it can't say, then the settings."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from autotune.exports.winner import Winner
from autotune.units import visible

_WIDTH = 100


def yaml_text(winner: Winner, tool: str, document: dict[str, Any], lost: list[str], *, about: str = "") -> str:
    """Return the text of a file.

    Args:
        winner: What it is of.
        tool: Who reads it, and by which command.
        document: The settings, in their order.
        lost: What the tool can't express, a line each.
        about: What else the user has to know.
    """
    lines = [f"{winner.workload.model.name} as autotune measured it: {winner.promise}.", f"For {tool}."]
    lines += [about] if about else []
    lines += [f"not expressed: {line}" for line in lost]
    heading = "".join(f"# {part}\n" for line in lines for part in textwrap.wrap(visible(line), _WIDTH))
    return heading + _settings(document)


def _settings(document: dict[str, Any]) -> str:
    """Return the settings as YAML: in their own letters, or all in ASCII where one of them can't be printed."""
    for in_own_letters in (True, False):
        found = str(yaml.safe_dump(document, sort_keys=False, width=_WIDTH, allow_unicode=in_own_letters))
        if found.replace("\n", "").isprintable():
            break
    return found
