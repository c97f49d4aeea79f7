"""Effort and budget: the limits of a search and of each of its trials."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, PositiveInt, model_validator

from autotune.units import show_time
from autotune.value import Value


class Effort(StrEnum):
    """How long a search may take, and how precisely it measures."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"

    @property
    def longer(self) -> Effort | None:
        """The next longer effort, or None."""
        return next(iter(list(Effort)[list(Effort).index(self) + 1 :]), None)


class Budget(Value):
    """Limits of a search and of each of its trials."""

    effort: Effort
    max_trials: PositiveInt = Field(description="trials of the search, finalists not counted")
    max_time_s: float = Field(gt=0, description="whole search, finalists included")
    trial_timeout_s: float = Field(gt=0, description="one trial from launch to exit")
    discarded_steps: PositiveInt = Field(description="optimizer steps before the clock starts, at the least")
    discarded_s: float = Field(ge=0, description="seconds of training before the clock starts, at the least")
    measure_steps: int = Field(ge=2, description="measured optimizer steps at the most")
    measure_time_s: float = Field(gt=0, description="measuring ends after the step that reaches this")
    relative_interval: float = Field(gt=0, description="measuring ends when the 95 % half-width is below this")
    finalists: PositiveInt = Field(description="configurations measured again beside the baseline")
    final_rounds: PositiveInt = Field(description="times each finalist and the baseline are measured, in turn")

    @model_validator(mode="after")
    def _check(self) -> Budget:
        if self.trial_timeout_s > self.max_time_s:
            raise ValueError(f"a trial of {self.trial_timeout_s} s is longer than the search of {self.max_time_s} s")
        return self

    @property
    def when_measured_again(self) -> dict[str, float]:
        """Limits for measuring a configuration again: four times the steps, half the interval.

        `measure_time_s` stays, so only configurations with short steps, which noise disturbs most, are measured longer.
        """
        return {"measure_steps": 4 * self.measure_steps, "relative_interval": self.relative_interval / 2}

    @property
    def when_in_turn(self) -> dict[str, float]:
        """Limits for measuring a configuration in turn with others: four times as long, in as many steps as that takes.

        A turn has several short steps, which is why there are many.
        """
        return {"measure_steps": 4000, "measure_time_s": 4 * self.measure_time_s}

    @property
    def against_timeouts(self) -> str:
        """Advice for trials that exceed their time limit."""
        remedies = ["an idle machine", "a shorter --seq-len", "a smaller --global-batch"]
        if self.trial_timeout_s < Budget.of(self.effort).trial_timeout_s:
            remedies.insert(0, "a longer --max-time")
        elif (longer := self.effort.longer) is not None:
            remedies.insert(0, f"--effort {longer} (trials of up to {show_time(Budget.of(longer).trial_timeout_s)})")
        return f"{', '.join(remedies[:-1])} or {remedies[-1]} may help"

    def limited(self, *, max_trials: int | None = None, max_time_s: float | None = None) -> Budget:
        """Return the budget with these limits of the search; a trial may take no longer than the search."""
        given: dict[str, float] = {} if max_trials is None else {"max_trials": max_trials}
        if max_time_s is not None:
            usual_s = Budget.of(self.effort).trial_timeout_s
            given |= {"max_time_s": max_time_s, "trial_timeout_s": min(usual_s, max_time_s)}
        return Budget.model_validate({**self.model_dump(), **given})

    @classmethod
    def of(cls, effort: Effort) -> Budget:
        """Return the limits that `effort` stands for."""
        return _BUDGETS[effort]


_BUDGETS = {
    budget.effort: budget
    for budget in (
        # an answer within five minutes on two CPU cores
        Budget(
            effort=Effort.QUICK, max_trials=12, max_time_s=285, trial_timeout_s=120, discarded_steps=1, discarded_s=0.5,
            measure_steps=12, measure_time_s=8, relative_interval=0.04, finalists=3, final_rounds=2,
        ),
        Budget(
            effort=Effort.STANDARD, max_trials=40, max_time_s=2400, trial_timeout_s=300, discarded_steps=2,
            discarded_s=2, measure_steps=40, measure_time_s=20, relative_interval=0.02, finalists=3, final_rounds=2,
        ),
        Budget(
            effort=Effort.THOROUGH, max_trials=150, max_time_s=10800, trial_timeout_s=900, discarded_steps=3,
            discarded_s=3, measure_steps=100, measure_time_s=45, relative_interval=0.01, finalists=3, final_rounds=3,
        ),
    )
}  # fmt: skip
