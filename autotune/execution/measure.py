"""Times the optimizer steps of a real Trainer by callback, and stops it once their mean is known well enough.

::

    data | micro-step 1 | ... | micro-step k | clipping, optimizer | data | micro-step 1 | ...
         ^ step_begin   ^ each micro-step's end                    ^ step_end   (a mark at each)

The Trainer fetches the micro-batches of a step before `step_begin`, so the time from one `step_end` to the next holds
everything: data, forward, backward, optimizer. A trial may run fewer micro-steps than the workload's; since a step's
time is affine in them, the missing ones are added at the time of a micro-step after the first: the first writes
gradients, and those after it read, add and write. Steps before the measured ones may have the first and the last alone.

Steps count once they take as long as those before them, by the device's time: a chip that was idle while a model was
made or compiled is slow, or fast, for seconds. A step that compiles or records a CUDA graph is left out.

Marks are host clocks on the CPU and events in the stream on CUDA, which is synchronised only when the measurement
checks whether it is done. Of several ranks the first decides: a rank that stopped alone would leave the others waiting.
"""

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from autotune.execution import environment
from autotune.execution.noise import Clock, HostWatch
from autotune.execution.outcome import speed_of
from autotune.execution.token_ring import Turns
from autotune.training.dataset import STEPS_TO_PEAK
from autotune.values.conditions import Conditions
from autotune.values.statistics import half_width, relative_half_width
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Limits, Measurement, Memory, TrialRequest

# Steps that may be discarded beyond `discarded_steps`, while fewer than four times `discarded_s` have been trained.
EXTRA_DISCARDED_STEPS = 1000

_ENOUGH = 3  # measured steps from which on a race can be lost, and beyond which the first is left out


class Compilations:
    """Tells whether torch has compiled, or recorded a CUDA graph, since the last call, in any of the `ranks`."""

    def __init__(self, *, ranks: bool = False) -> None:
        self._ranks, self._is_listening, self._seen = ranks, False, 0

    def __call__(self) -> bool:
        seen, self._seen = self._seen, 0
        if not self._is_listening and (compiler := sys.modules.get("torch._dynamo.callback")) is not None:
            compiler.on_compile_start(self._note)
            self._is_listening, seen = True, 1  # torch has imported it since then, to compile
        if self._ranks:
            environment.wait_for_all(of_all := torch.tensor([seen]))
            seen = int(of_all)
        return seen > 0

    def _note(self, _: object) -> None:
        self._seen += 1


@dataclasses.dataclass(eq=False)
class StepTimer(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Collects marks while the Trainer runs and ends training when `limits` say so."""

    limits: Limits
    run_micro_steps: int  # of a step
    full_micro_steps: int  # those that the workload asks for
    clock: Clock
    warm_up_micro_steps: int | None = None  # of the steps before the measured ones; None: as many as of those
    is_timed: bool = True  # otherwise the measured steps run as few
    ends_at: float = math.inf  # `time.perf_counter()` before which measuring ends, once a step has been measured
    # Began with the trial; gets laps for the first step, the discarded and the measured ones, then `afterwards`.
    stopwatch: Stopwatch = dataclasses.field(default_factory=lambda: Stopwatch("trainer_s"))
    afterwards: str = "closing_s"
    watch: HostWatch = dataclasses.field(default_factory=HostWatch)  # looks at the machine during the measured steps
    relax: Callable[[], None] | None = None  # called before the measured steps, when memory has peaked
    step_ended: Callable[[], None] = lambda: None  # called after each step before the measured ones
    retries: Callable[[], int | None] = lambda: None  # how often so far the allocator has run short; None: uncounted
    turns: Turns | None = None  # the place among trials that compute in turn; None: the trial runs alone
    added_s: float = 0.0  # to the time of each step, for work on its samples before training
    is_whole: Callable[[], bool] = lambda: True  # whether the step that ends has all its samples, and counts
    has_compiled: Callable[[], bool] = lambda: False  # whether something was compiled in the step that ends
    ranks: bool = False  # there are several, which exchange their gradients in the last micro-step
    steps_per_turn: int | None = None  # measured steps of a turn; None: the trial doesn't measure in turn
    startup_s: float = 0.0
    first_step_s: float = 0.0
    conditions: Conditions | None = None
    alloc_retries: int | None = None  # in the measured steps but the second of all

    def __post_init__(self) -> None:
        if self.run_micro_steps < min(2, self.full_micro_steps):
            raise ValueError("missing micro-steps can only be inferred from two or more")
        self._warm_up_micro_steps = min(self.warm_up_micro_steps or self.run_micro_steps, self.run_micro_steps)
        self._least_discarded = max(self.limits.discarded_steps, STEPS_TO_PEAK if self.relax else 0)
        self._marks: list[Any] = []
        self._records: list[list[Any]] = []
        self._previous_end: Any = None
        self._measured_from = self._scale = 0.0
        self._next_look = 1
        self._compiling_steps = 0
        self._ended_at = 0.0  # the latest step
        self._warm_s: list[float] = []  # of each step after the first that wasn't measured and compiled nothing
        self._really_stepped = False
        self._retries_before: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not self._really_stepped:
            self._scale = _loss_scale(optimizer)
        if self._previous_end is None:
            self.startup_s = self.stopwatch.elapsed_s()
            self.stopwatch.enter("first_step_s")
            self._previous_end = self.clock.mark()
        self._marks = [self._previous_end, self.clock.mark()]

    def leaves_out(self) -> bool:
        """Whether the micro-step that is to begin may be left out, in which case it ends at once."""
        begun, runs_all = len(self._marks) - 2, self.is_timed and self._measured_from
        return not runs_all and self._warm_up_micro_steps - 1 <= begun < self.run_micro_steps - 1

    def micro_step_ended(self) -> None:
        self._marks.append(self.clock.mark())

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._previous_end = self.clock.mark()
        self._marks.append(self._previous_end)
        # Training ends when enough is known, and not before: other callbacks come first.
        if control.should_training_stop and state.global_step < state.max_steps:  # another callback of the user's code
            control.should_training_stop = False
        control.should_evaluate = control.should_save = False  # which would be timed with the next step
        if not self.first_step_s:
            self.clock.settle()
            self.first_step_s = self.stopwatch.elapsed_s() - self.startup_s
            self.stopwatch.enter("discarded_s")
        # An fp16 scaler skips the first steps: until one is real, the optimizer has no states, and memory no peak.
        # Fused optimizers skip by themselves, which only the scale tells. Looking waits for the device.
        if not self._really_stepped:
            was_skipped = getattr(optimizer, "step_was_skipped", False) or _loss_scale(optimizer) < self._scale
            self._really_stepped = not was_skipped
        # Torch compiles a function anew eight times (`recompile_limit`), and records a graph in the step after. A
        # training that compiles more often is measured with it.
        compiles = self.has_compiled() and self._compiling_steps < 16
        self._compiling_steps += compiles
        since, self._ended_at = self._ended_at, time.perf_counter()
        if not self._measured_from:
            self.step_ended()
            is_warm = self._is_warm(state.global_step, compiles=compiles)
            if not environment.agree(self._really_stepped and is_warm):  # all ranks go on, or begin to measure
                return
            if self.relax is not None:
                self.relax()
            if self.turns is not None:  # let the others warm up, and settle how many steps make a turn
                step_s = self.clock.seconds(self._marks[0], self._marks[-1])
                step_s *= self.run_micro_steps / self._warm_up_micro_steps
                steps = self.turns.steps(step_s, most=self.limits.measure_steps)
                self.stopwatch.enter("waited_s")
                self.steps_per_turn = steps if self.turns.warmed_up(self.ends_at) else None
            self.watch.begin()
            self._retries_before = self.retries()
            self.stopwatch.enter("measured_s")
            self._measured_from = self._ended_at = time.perf_counter()
            self._previous_end = self.clock.mark()
            return
        if compiles:
            self._measured_from += self._ended_at - since
        if compiles or not self.is_whole():
            return
        self._records.append(self._marks)
        if state.global_step <= STEPS_TO_PEAK:  # the first to meet the optimizer's states: the cache is made for them
            self._retries_before = self.retries()
        if self.turns is not None and self.steps_per_turn is not None:
            at_end = len(self._records) % self.steps_per_turn == 0
            is_over = at_end and not self._goes_on(self.turns, self.steps_per_turn)
        else:
            is_over = self._is_enough()
        if is_over:
            control.should_training_stop = True
            self._end()

    def _is_warm(self, steps: int, *, compiles: bool) -> bool:
        """Whether the steps after these may count: their time has settled, or enough of them were discarded."""
        self.clock.settle()
        if steps > 1 and not compiles:
            self._warm_s.append(self.clock.seconds(self._marks[0], self._marks[-1]))
        least_s, trained_s = self.limits.discarded_s, sum(self._warm_s)
        if steps < self._least_discarded or compiles or trained_s < least_s:
            return steps >= self.limits.discarded_steps + EXTRA_DISCARDED_STEPS
        if trained_s >= 4 * least_s:
            return True
        # The last two spans are compared, unless the steps are so long that too few are in one to tell a trend from
        # chance; each is of half a second at the least, since clocks rise as slowly.
        spans: list[list[float]] = []
        latest_first = reversed(self._warm_s)
        for _ in range(2):
            span, span_s = list[float](), 0.0
            while span_s < max(0.5, least_s / 2):
                if (step_s := next(latest_first, None)) is None:
                    return False
                span.append(step_s)
                span_s += step_s
            if len(span) < _ENOUGH:
                return True
            spans.append(span)
        late_s, early_s = map(statistics.fmean, spans)
        chance_s = math.sqrt(sum(statistics.variance(span) / len(span) for span in spans))
        return abs(late_s - early_s) <= max(self.limits.relative_interval / 4 * late_s, 2 * chance_s)

    def _goes_on(self, turns: Turns, steps: int) -> bool:
        """End a turn of `steps`; return whether to go on, in the next turn or, if the others have gone, alone."""
        self.clock.settle()
        turn_s = statistics.fmean(map(self._step_time_s, self._records[-steps:]))
        self.stopwatch.enter("waited_s")
        goes_on = turns.end_turn(turn_s, self.limits, self.ends_at)
        self.stopwatch.enter("measured_s")
        self._previous_end = self.clock.mark()
        if turns.broken:
            self.steps_per_turn = None
            return not self._is_enough()
        return goes_on

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._records:
            self._end()

    def _end(self) -> None:
        if self.conditions is None:
            self.watch.look()
            self.clock.settle()
            self.conditions = self.watch.conditions()
            counted = self.retries()
            if counted is not None and self._retries_before is not None:
                self.alloc_retries = counted - self._retries_before
            self.stopwatch.enter(self.afterwards)

    def _is_enough(self) -> bool:
        """Look, at growing distances, whether the interval is tight, the race is lost or a limit is reached."""
        # The next look follows from counts, the same for all ranks; on the result they have to agree.
        ran, count, most = len(self._records), len(self._counted()), self.limits.measure_steps
        if count >= most and not self.limits.least_time_s:
            return True
        if ran < self._next_look:
            return False
        further = max(1, ran // 4)
        self._next_look = ran + (min(further, most - count) if count < most else further)
        self.watch.look()  # while the device still computes
        times, now = self.step_times_s(), time.perf_counter()
        took_s = now - self._measured_from
        look_s = (self._next_look - ran) * took_s / ran  # until the next look
        # Some short steps may agree by chance, or be all of one moment. Hyperfine has ten runs and 3 s at the least,
        # NVBench ten samples and 0.5 s, of commands and kernels that are shorter than a step.
        counted_s = sum(self.clock.seconds(marks[0], marks[-1]) for marks in self._counted())
        has_least = count >= min(5, most) and counted_s >= self.limits.least_time_s
        is_known = count >= most or relative_half_width(times) <= self.limits.relative_interval
        is_late = took_s >= self.limits.measure_time_s or now + look_s > self.ends_at
        can_lose = count >= _ENOUGH and counted_s >= self.limits.least_time_s / 4
        beaten_s = self.limits.beaten_step_s if can_lose else None
        is_beaten = beaten_s is not None and statistics.fmean(times) - half_width(times) > beaten_s
        return environment.agree((has_least and is_known) or is_late or is_beaten)

    def step_times_s(self) -> list[float]:
        self.clock.settle()
        return [self._step_time_s(marks) for marks in self._counted()]

    def _counted(self) -> list[list[Any]]:
        """Return the records that count: without the first of several, which fills the heap or the launch queue."""
        if self.steps_per_turn is not None:  # without the first turn
            return self._records[self.steps_per_turn :]
        return self._records[1:] if len(self._records) > _ENOUGH else self._records

    def data_wait_share(self) -> float:
        """Return the share of the measured time that lies between a step's end and the next one's first forward."""
        waits, total = (sum(self.clock.seconds(marks[0], marks[i]) for marks in self._records) for i in (1, -1))
        return waits / total if total else 0.0

    def _step_time_s(self, marks: list[Any]) -> float:
        missing = self.full_micro_steps - self.run_micro_steps
        whole_s = self.added_s + self.clock.seconds(marks[0], marks[-1])
        return whole_s + missing * self._later_micro_step_s(marks) if missing else whole_s

    def _later_micro_step_s(self, marks: list[Any]) -> float:
        """Return the seconds of a micro-step after the first, with its share of the wait for data."""
        seconds = self.clock.seconds
        later_s = [seconds(a, b) for a, b in itertools.pairwise(marks[2:-1])]
        if self.ranks and len(later_s) > 1:
            del later_s[-1]
        return statistics.fmean(later_s) + seconds(marks[0], marks[1]) / self.run_micro_steps

    def measurement(
        self, request: TrialRequest, memory: Memory, loss: float | None, effects: dict[str, str], waits: float | None
    ) -> Measurement:
        """Return what was measured; `loss` is the mean over all steps, `waits` the share of waiting for data."""
        warnings: list[str] = []
        if retries := self.alloc_retries:
            often = f"the allocator ran short {'once' if retries == 1 else f'{retries} times'} while it was measured"
            warnings.append(f"{often}, and gave its cache back: it is too near the budget")
        # The second compiles what the first has settled, or for any length; then a CUDA graph is recorded.
        if self._compiling_steps > 3:
            varies = request.workload.lengths is not None and request.config.pad_to_multiple_of is None
            why = ": samples differ in length, and pad_to_multiple_of would leave fewer lengths" if varies else ""
            warnings.append(f"it was compiled in {self._compiling_steps} steps{why}")
        missing = self.full_micro_steps - self._warm_up_micro_steps
        missing_s = missing * statistics.fmean(map(self._later_micro_step_s, self._counted())) if missing else 0.0
        return Measurement(
            **speed_of(self.step_times_s(), request),
            accumulation_steps=request.accumulation_steps,
            steps_per_turn=self.steps_per_turn,
            memory=memory,
            startup_s=self.startup_s,
            first_step_s=self.first_step_s + missing_s,
            data_wait_share=waits,
            loss=loss,
            alloc_retries=self.alloc_retries,
            warnings=tuple(warnings),
            effects=effects,
            conditions=self.conditions and self.conditions.with_waits(waits),
        )


def _loss_scale(optimizer: Any) -> float:
    """Return the factor of an fp16 scaler, which halves it where it skips a step; 1: there is no scaler."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())
