"""Where what outlasts a search is kept: `$AUTOTUNE_HOME`, by default `~/.local/share/autotune`.

The default follows the XDG base directory specification (https://specifications.freedesktop.org/basedir/latest):
`$XDG_DATA_HOME` moves it, if that is an absolute path. Nothing is made before something is written; whoever reads
takes a missing folder for an empty one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autotune.errors import InputError


def home() -> Path:
    """Return the folder of all lasting things; it need not exist.

    Raises:
        InputError: Neither `$AUTOTUNE_HOME` nor a home directory is known, or the former is a URL.
    """
    named = os.environ.get("AUTOTUNE_HOME")
    if named and "://" in named:  # not shown: it may hold a password
        raise InputError("AUTOTUNE_HOME names a folder, and is a URL; a database is named by AUTOTUNE_RECORD")
    try:
        if named:
            return Path(named).expanduser().absolute()
        data = os.environ.get("XDG_DATA_HOME", "")
        base = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        raise InputError("this user has no home directory: set AUTOTUNE_HOME to a folder that can be written") from None
    return base / "autotune"


def writable(*parts: str) -> Path:
    """Return the folder `parts` of the home, made if need be.

    Raises:
        InputError: It can't be written.
    """
    folder = home().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{folder}: can't be written: {error.strerror} (AUTOTUNE_HOME names another)") from None
    return folder
