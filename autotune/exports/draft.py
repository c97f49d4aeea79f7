"""What a target's writer hands back: files, the commands that use them, and what of the answer they don't say."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath
from typing import NamedTuple


class Draft(NamedTuple):
    """Files of one target."""

    files: dict[str, str]  # by name
    launch: tuple[str, ...] = ()  # command lines, the one to prefer first
    lost: tuple[str, ...] = ()  # what the target can't express, a line each

    def placed(self, path: PurePath) -> Draft:
        """Return the draft of a single file with the place that it is written to.

        Command lines call it by its path, and what it says itself of how it is run by its name.
        """
        ((name, text),) = self.files.items()
        # A name that would have to be escaped within a script's docstring or a comment is left out of it.
        if path.name.isprintable() and not set(path.name) & set('\\"'):
            text = _renamed(text, name, shlex.quote(path.name))
        return self._replace(
            files={path.name: text}, launch=tuple(_renamed(line, name, shlex.quote(str(path))) for line in self.launch)
        )


def _renamed(text: str, name: str, other: str) -> str:
    """Return `text` with another word for the word `name`."""
    return re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", lambda _: other, text)
