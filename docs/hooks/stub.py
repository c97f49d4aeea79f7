"""Writes `autotune/__init__.pyi`, the public names for editors and the reference: `python docs/hooks/stub.py`.

The functions whose options are fields (`autotune.planning.options.takes_options`) are written out with all of them; a
test compares the file with what this makes.
"""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path

import autotune

PATH = Path(autotune.__file__).with_suffix(".pyi")

_HEAD = """# Made by docs/hooks/stub.py.
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

"""


def stub() -> str:
    """Return the content of the file."""
    homes = {name: f"autotune.{home}" for name, home in autotune._HOMES.items()}
    homes |= {"Knobs": "autotune.planning.user_code", "Observer": "autotune.values.problem"}
    written = ["find", "estimate"]
    names = sorted(homes.items(), key=lambda found: found[::-1])
    imports = [f"from {home} import {name} as {name}" for name, home in names if name not in written]
    imports.append("from autotune.version import __version__ as __version__")
    return _HEAD + "\n".join(imports) + "\n" + "".join(map(_function, written))


def _function(name: str) -> str:
    function = getattr(autotune, name)
    signature = inspect.signature(function)
    lines = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
        usual = "" if default is parameter.empty else f" = {default!r}".replace("'", '"')
        lines.append(f"{parameter.name}: {parameter.annotation}{usual}")
    listed = "".join(f"    {line},\n" for line in lines)
    return f'\n\ndef {name}(\n{listed}) -> {signature.return_annotation}:\n    """{function.__doc__}"""\n'


if __name__ == "__main__":
    PATH.write_text(stub())
