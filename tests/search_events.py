"""Events as a search tells them, of which a test names only what it is about."""

from __future__ import annotations

from typing import Any

from factories import make_config, make_result

from autotune.units import GIB
from autotune.values.config import Allowance
from autotune.values.problem import Change, Event, Leader, Note, Standing, TrialEnded, TrialStarted
from autotune.values.trial import Prediction, Purpose

BF16 = Change(knob="precision", before="fp32", after="bf16", allowance=Allowance.NUMERICS)
MICRO_BATCH = Change(knob="per_device_train_batch_size", before="8", after="16", allowance=Allowance.EXACT)


def make_leader(**fields: Any) -> Leader:
    defaults = {"changes": (BF16,), "samples_per_second": 34.2, "peak_bytes": 3 * GIB, "speedup": 1.62}
    return Leader(**{**defaults, **fields})


def make_standing(**fields: Any) -> Standing:
    counts = {"completed": 5, "out_of_memory": 2, "failed": 0, "refused": 132}
    return Standing(**{"memory_bytes": 8 * GIB, "leader": make_leader(), **counts, **fields})


def make_started(number: int = 7, **fields: Any) -> TrialStarted:
    defaults = {
        "purpose": Purpose.SEARCH,
        "config": make_config(16, precision="bf16"),
        "changes": (BF16, MICRO_BATCH),
        "time_left_s": 720.0,
        "trials_left": 17,
        "prediction": Prediction(samples_per_second=40.0, peak_bytes=5 * GIB),
        "standing": make_standing(),
    }
    return TrialStarted(number=number, **{**defaults, **fields})


def make_ended(number: int = 7, *, standing: Standing | None = None, **fields: Any) -> TrialEnded:
    """Other fields are those of `make_result`."""
    result = make_result(number=number, **fields)
    return TrialEnded(result=result, changes=(BF16, MICRO_BATCH), standing=standing or make_standing())


class Heard(list[Event]):
    """An observer that remembers."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self if isinstance(event, Note)]
