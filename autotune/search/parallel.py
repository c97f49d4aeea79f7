"""The conductor of a search whose trials run at several places at once.

It differs from the sequential one in the search alone: as long as a place is free the next proposal is begun there, and
results are taken in as they come. What is proposed together differs: a configuration that runs is not open, the cost
model takes what runs for what it predicts of it, and so does the sampler in its way. The baseline is among the first,
measured beside others as they are; where nothing can be predicted or the record has something to say, the others wait
for it. Finals and checks are compared closely, so they run one at a time, at one place.
"""

from __future__ import annotations

import time
from typing import Any

from autotune.errors import AutotuneError
from autotune.execution.pool import Pool
from autotune.planning.plan import SearchPlan
from autotune.planning.reopen import is_over
from autotune.search.guide import Guide
from autotune.search.study import Asked
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.values.config import TrainConfig
from autotune.values.events import Observer
from autotune.values.trial import Interval, Measurement, Memory, Prediction, Purpose, TrialRequest, TrialResult

# What a running trial is taken to give until it has ended: what is predicted of it. Pure. So the next proposal looks
# elsewhere: where a trial runs already nothing more is to be learned, and what it is expected to reach is no
# improvement any more ("kriging believer": Ginsbourger, Le Riche and Carraro, "Kriging is well-suited to parallelize
# optimization", 2010).


def believed(request: TrialRequest, prediction: Prediction | None) -> TrialResult | None:
    """Return a trial's result as predicted, None where nothing is; of memory it says nothing."""
    if prediction is None:
        return None
    rate = prediction.samples_per_second
    step_s = request.workload.samples_per_step(request.config) / rate
    measurement = Measurement(
        step_times_s=(step_s,),
        accumulation_steps=request.accumulation_steps,
        samples_per_second=rate,
        samples_per_second_interval=Interval(low=rate, high=rate),
        memory=Memory(),
        startup_s=0.0,
        first_step_s=step_s,
        data_wait_share=0.0,
        loss=0.0,
        effects={},
    )
    return TrialResult(request=request, outcome=measurement, duration_s=0.0)


# Of its time, the conductor may spend this much on writing the answer as it stands.
WRITING_SHARE = 0.1


class FanOut(Tuner):
    """One search in one run directory, at many places.

    Args:
        plan: What is searched.
        directory: Where everything is kept, locked by the caller.
        pool: What runs the trials.
        observer: Who listens.
        options: Of the sequential conductor.
    """

    def __init__(
        self, plan: SearchPlan, directory: RunDirectory, pool: Pool, observer: Observer, **options: Any
    ) -> None:
        super().__init__(plan, directory, pool, observer, **options)
        self._pool = pool
        self._running: dict[int, tuple[TrialRequest, Asked]] = {}
        self._occupied: set[TrainConfig] = set()
        self._write_after = float("-inf")

    def _baseline(self) -> None:
        baseline = self._plan.baseline
        if self._history.known(baseline) is not None:
            self._consult()
            return
        self._begin(self._study.ask(self._space.point(baseline)), baseline, Purpose.BASELINE)
        if self._guide is None or not self._recall.is_empty:
            self._take_next()

    def _search(self) -> None:
        """Keep every place busy until the budget ends, or nothing is left that could be worth a trial."""
        if is_over(self._plan, self._results):
            return
        self._fill()
        while self._running:
            self._take_next()
            self._fill()

    def _fill(self) -> None:
        """Begin a trial at each free place, as far as there is something worth one.

        What is worth one is asked anew each time, since what was learned meanwhile may have changed it.
        """
        while self._pool.free() and self._pace.may_go_on():
            found = next(self._open_points(), None)
            if found is None:
                return
            self._begin(*found, Purpose.SEARCH)

    def _begin(self, asked: Asked, config: TrainConfig, purpose: Purpose) -> None:
        request = self._begun(config, purpose)
        self._running[request.number] = request, asked
        self._occupied.add(config)
        self._pace.running = self._searching()
        self._pool.begin(request)

    def _take_next(self) -> None:
        """Take in the trial that ends next."""
        try:
            result = self._pool.wait()
        except AutotuneError:
            self._write()
            raise
        request, asked = self._running.pop(result.request.number)
        self._occupied.discard(request.config)
        self._pace.running = self._searching()
        self._study.tell(asked, self._ended(result))
        self._consult()

    def _keep_answer(self) -> None:
        """Write the answer, but not so often that places wait for it: that of many trials takes its time.

        The trials themselves are on disk, and the answer is written again at the end, whatever that is.
        """
        began = time.perf_counter()
        if began >= self._write_after:
            super()._keep_answer()
            self._write_after = began + (time.perf_counter() - began) / WRITING_SHARE

    def _searching(self) -> int:
        return sum(request.purpose is Purpose.SEARCH for request, _ in self._running.values())

    def _is_open(self, config: TrainConfig) -> bool:
        """Whether `config` is neither known, nor refused, nor running."""
        return config not in self._occupied and super()._is_open(config)

    def _next_guided(self, guide: Guide) -> TrainConfig | None:
        """Return what the cost model would try next if all that runs gave what is predicted of it."""
        running = [request for request, _ in self._running.values()]
        expected = [r for request in running if (r := believed(request, guide.prediction(request.config))) is not None]
        if not expected:
            return super()._next_guided(guide)
        history = self._history.with_results(expected)
        return guide.believing(expected).next(history, self._is_open, recalled=self._recall.counted)

    def _has_leader(self) -> bool:
        """Whether there is one, or may be when what runs has ended."""
        return bool(self._running) or super()._has_leader()

    def _say_that_nothing_is_left(self) -> None:
        """Say it once, at the end: what still runs may change it."""
        if not self._running:
            super()._say_that_nothing_is_left()
