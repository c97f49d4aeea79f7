"""What a user asked of a search, before anything of it is looked at. Values only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.value import Value
from autotune.values.budget import Effort
from autotune.values.config import Allowance
from autotune.values.placement import Engine, Fleet


class Options(Value):
    """What the user asked for; None means the default, which depends on the device."""

    model: str
    task: str | None = None
    data: str | None = None
    text_field: str | None = None
    seq_len: PositiveInt | None = None
    target_len: PositiveInt | None = None
    global_batch: PositiveInt | Literal["any"] | None = None
    baseline: str | None = None
    allow: Allowance = Allowance.OPTIMIZER
    effort: Effort = Effort.STANDARD
    space: str | None = None
    device: str = "auto"
    devices: PositiveInt | Literal["all"] | None = None
    memory_bytes: PositiveInt | None = None
    max_trials: PositiveInt | None = None
    max_time_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    exhaustive: bool = False
    repeat: PositiveInt = 1
    check_loss: NonNegativeInt | None = None
    train_steps: PositiveInt | None = Field(default=None, le=10**12, description="at a microsecond each, eleven days")
    train_tokens: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    seed: int = 42
    revision: str | None = None
    trust_remote_code: bool = False
    record: bool = True
    report_to: tuple[str, ...] = ()
    workers: PositiveInt | None = None
    engine: Engine = "local"
    address: str | None = None
    kind: str | None = None
    output: str | None = Field(default=None, description="file that the answer is written to as well")

    @property
    def fleet(self) -> Fleet:
        """Where trials run."""
        devices = self.devices if isinstance(self.devices, int) else 1
        return Fleet(engine=self.engine, workers=self.workers, devices=devices, address=self.address, kind=self.kind)
