"""`autotune --version`: what is installed here, for a bug report. Reads metadata and imports none of it."""

from __future__ import annotations

import importlib.metadata
import platform
from contextlib import suppress

from autotune.value import Value
from autotune.values.hardware import PACKAGES, installed_versions
from autotune.version import __version__

# Of these nothing that is measured depends, but what can be asked for.
_ALSO = ("ray", "optuna-dashboard")


class Versions(Value):
    """Of autotune, of what it runs on, and of the libraries that decide what it measures."""

    autotune: str
    python: str
    platform: str
    packages: dict[str, str]
    missing: tuple[str, ...]

    @property
    def text(self) -> str:
        """A line each."""
        lines = [f"autotune {self.autotune}", f"Python {self.python}, {self.platform}"]
        lines += [f"{name} {version}" for name, version in self.packages.items()]
        if self.missing:
            lines.append(f"not installed: {', '.join(self.missing)}")
        return "\n".join(lines)


def versions() -> Versions:
    """Return what is installed."""
    found = {name: version for name, version in installed_versions().items() if name != "python"}
    for name in _ALSO:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return Versions(
        autotune=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=found,
        missing=tuple(name for name in (*PACKAGES, *_ALSO) if name not in found),
    )
