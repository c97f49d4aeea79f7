"""Where the trials of a search run, and how many at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from autotune.value import Value
from autotune.values.hardware import Hardware

Engine = Literal["local", "ray"]


class Fleet(Value):
    """What runs the trials: this machine, or the nodes of a Ray cluster."""

    engine: Engine = "local"
    workers: PositiveInt | None = Field(
        default=None, description="trials at once; None: one on this machine, one per device or node of a cluster"
    )
    devices: PositiveInt = Field(default=1, description="GPUs of each trial")
    address: str | None = Field(
        default=None, description="address of the cluster; None: RAY_ADDRESS, or a new local one"
    )
    kind: str | None = Field(
        default=None, description="part of the device's name; None: the device that most nodes have"
    )

    @property
    def is_single(self) -> bool:
        """Whether trials run on this machine, one at a time."""
        return self.engine == "local" and (self.workers or 1) == 1


class Allotment(Value):
    """The resources of each trial of a fleet."""

    hardware: Hardware
    is_shared: bool = Field(
        default=False, description="whether concurrent trials share one processor, and disturb each other"
    )
    notes: tuple[str, ...] = Field(default=(), description="what the user should know, a line each")
