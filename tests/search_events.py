"""Events as a search tells them, of which a test names only what it is about."""

from typing import Any

from factories import make_config, make_request, make_result

from autotune.units import GIB
from autotune.values.config import Allowance
from autotune.values.problem import Change, Event, Leader, Note, TrialEnded, TrialStarted
from autotune.values.trial import Prediction, Purpose

BF16 = Change(knob="precision", before="fp32", after="bf16", allowance=Allowance.NUMERICS)
MICRO_BATCH = Change(knob="per_device_train_batch_size", before="8", after="16", allowance=Allowance.EXACT)


LEADER = Leader(changes=(BF16,), samples_per_second=34.2, speedup=1.62)


PREDICTED = Prediction(samples_per_second=40.0, peak_bytes=5 * GIB)


def make_started(
    number: int = 7, prediction: Prediction | None = PREDICTED, purpose: Purpose = Purpose.SEARCH, **fields: Any
) -> TrialStarted:
    request = make_request(make_config(16, precision="bf16"), number=number, purpose=purpose, prediction=prediction)
    defaults = {"changes": (BF16, MICRO_BATCH), "time_left_s": 720.0, "trials_left": 17, "leader": LEADER}
    return TrialStarted(request=request, **{**defaults, **fields})


def make_ended(number: int = 7, **fields: Any) -> TrialEnded:
    """Other fields are those of `make_result`."""
    result = make_result(number=number, **fields)
    return TrialEnded(result=result, changes=(BF16, MICRO_BATCH), leader=LEADER)


class Heard(list[Event]):
    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self if isinstance(event, Note)]
