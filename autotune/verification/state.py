"""The state of a search: its trials so far, and the configurations that were refused without one."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.planning.plan import SearchPlan
from autotune.space.history import History
from autotune.values.config import TrainConfig
from autotune.values.trial import Measurement, Purpose, TrialResult


class SearchState:
    """The state of one search; the tuner alone changes it.

    Attributes:
        results: All trials in the order they ended.
        refused: Configurations that were refused without a trial, with the reasons.
        history: The trials that explore the space: the baseline's and the search's, not finals and checks.
    """

    def __init__(
        self, plan: SearchPlan, results: Iterable[TrialResult] = (), refused: dict[TrainConfig, str] | None = None
    ) -> None:
        self.plan = plan
        self.history = History(plan.objective)
        self.results: list[TrialResult] = []
        self.refused: dict[TrainConfig, str] = {} if refused is None else refused
        for result in results:
            self.take_in(result)

    def trials(self, config: TrainConfig, purpose: Purpose) -> list[TrialResult]:
        """Return the trials of a configuration for a purpose."""
        return [r for r in self.results if r.request.purpose is purpose and r.request.config == config]

    def measured(self, config: TrainConfig) -> Measurement | None:
        """Return the measurement of a configuration by the search, not by finals or checks."""
        known = self.history.known(config)
        return known.measurement if known is not None else None

    def take_in(self, result: TrialResult, *, counts: bool = True) -> None:
        """Add a trial that has ended; `counts`: whether it enters the history, so that it isn't tried again."""
        self.results.append(result)
        if counts and result.request.purpose.explores:
            self.history.add(result)
