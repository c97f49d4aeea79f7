"""Rules of legality for a training of the user's own: what its code decides can't be changed from outside.

Pure; of the form that `rules` asks for.
"""

from __future__ import annotations

from autotune.architecture import ModelFacts
from autotune.config import TrainConfig, Workload
from autotune.hardware import Hardware


def own_code(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return which knob stays as the user's code has it, and why."""
    code = workload.own_code
    if code is None:
        return None
    for knob, held in code.held.items():
        if getattr(config, knob) != held.value:
            return f"{knob} stays as it is: {held.reason}"
    if not config.parallelism.is_single:
        return "a training of your own is one process on one device"
    for barred in code.barred:
        if getattr(config, barred.knob) == barred.value:
            return f"{barred.knob} {barred.value}: {barred.reason}"
    return None
