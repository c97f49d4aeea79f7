"""Where the trials of a search run, and how many at once. Values only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.hardware import Hardware

Engine = Literal["local", "ray"]


class Fleet(Value):
    """What runs the trials: this machine, or the nodes of a cluster."""

    engine: Engine = "local"
    workers: PositiveInt | None = Field(
        default=None, description="trials at once; None: one here, on a cluster as many as it has devices or nodes"
    )
    devices: PositiveInt = Field(default=1, description="GPUs of each trial")
    address: str | None = Field(default=None, description="of the cluster; None: RAY_ADDRESS, or one started here")
    kind: str | None = Field(default=None, description="of device, part of its name; None: what most nodes have")

    @property
    def is_single(self) -> bool:
        """Whether one trial at a time runs on this machine."""
        return self.engine == "local" and (self.workers or 1) == 1


class Allotment(Value):
    """What each trial of a fleet has to itself."""

    hardware: Hardware
    is_shared: bool = Field(
        default=False, description="trials at the same time are on one processor, and disturb each other"
    )
    notes: tuple[str, ...] = Field(default=(), description="what the user should know, a line each")
