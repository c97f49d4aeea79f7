"""Times the optimizer steps of a real Trainer by callback, and stops it when their mean is known well enough.

::

    data | micro-step 1 | ... | micro-step k + optimizer | data | micro-step 1 | ...
         ^ step_begin   ^ substep_end                    ^ step_end   (a mark at each)

The Trainer fetches the micro-batches of a step before `step_begin`, so the time from one `step_end` to the next holds
everything: data, forward, backward, optimizer. A trial may run fewer micro-steps than the workload's; since a step's
time is affine in them, the missing ones are added at the measured time of a micro-step that isn't the last.

Marks are host clocks on the CPU and events in the stream on CUDA, which is synchronised only when the measurement
checks whether it is done. Of several ranks the first decides: a rank that stopped alone would leave the others waiting.
Trials in turn measure a few steps each time the others wait for them (see `turns`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from autotune.execution.failures import ran_short
from autotune.execution.noise import Clock, HostWatch, Watch
from autotune.execution.outcome import speed_of
from autotune.execution.turns import Turns
from autotune.training.batches import STEPS_TO_PEAK
from autotune.values.conditions import Conditions
from autotune.values.statistics import half_width, relative_half_width
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Limits, Measurement, Memory, TrialRequest

# Steps that may be discarded, beyond those that must be, until the trial has trained for `discarded_s`.
EXTRA_DISCARDED_STEPS = 100

# Measured steps from which on the first can be left out and a race be lost; and from which on an interval is believed.
_ENOUGH = 3
_LEAST_STEPS = 5


class StepTimer(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Collects marks while the Trainer runs and ends training when `limits` say so.

    Args:
        limits: Steps to discard, steps and seconds to measure, and the interval that is tight enough.
        accumulation_steps: Micro-steps of a step that are run.
        full_accumulation_steps: Micro-steps of a step that the workload asks for.
        clock: Where moments come from.
        started_at: `time.perf_counter()` when the trial began, for the start-up time.
        ends_at: `time.perf_counter()` before which measuring ends, if one step or more has been measured.
        stopwatch: Has laps for the first step, the discarded and the measured ones, and `afterwards` for what follows.
        watch: Looks at the machine during the measured steps.
        relax: Called before the measured steps, when memory has peaked; None: nothing is to be done.
        step_ended: Called after each step before the measured ones.
        retries: Returns how often so far the allocator has run short; None: it doesn't count.
        agree: Turns this rank's decision into that of all ranks, which have to stop after the same step.
        turns: The place among trials that compute in turn; None: the trial runs alone.

    Attributes:
        added_s: Added to the time of each step, for what was worked out of its samples before training.
        is_whole: Whether the step that ends has all its samples; one that has not isn't measured.
        stopped_at: The step after which another callback would have ended training first; None: none would have.
        steps_per_turn: Measured steps between those of the other trials; None: it runs alone.
    """

    def __init__(
        self,
        limits: Limits,
        accumulation_steps: int,
        full_accumulation_steps: int,
        *,
        clock: Clock,
        started_at: float,
        ends_at: float = float("inf"),
        stopwatch: Stopwatch | None = None,
        watch: Watch | None = None,
        afterwards: str = "closing_s",
        relax: Callable[[], None] | None = None,
        step_ended: Callable[[], None] = lambda: None,
        retries: Callable[[], int | None] = lambda: None,
        agree: Callable[[bool], bool] = bool,
        turns: Turns | None = None,
    ) -> None:
        if accumulation_steps < min(2, full_accumulation_steps):
            raise ValueError("missing micro-steps can only be inferred from two or more")
        self._limits, self._run = limits, accumulation_steps
        self._missing = full_accumulation_steps - accumulation_steps
        self._clock = clock
        self._started_at, self._ends_at = started_at, ends_at
        self._stopwatch = stopwatch or Stopwatch("trainer_s")
        self._watch = watch or HostWatch()
        self._afterwards = afterwards
        self._relax = relax
        self._step_ended, self._retries, self._agree = step_ended, retries, agree
        self._turns = turns
        self.steps_per_turn: int | None = None
        self.added_s = 0.0
        self.is_whole: Callable[[], bool] = lambda: True
        self.stopped_at: int | None = None
        self._least_discarded = max(limits.discarded_steps, STEPS_TO_PEAK if relax else 0)
        self._marks: list[Any] = []
        self._previous_end: Any = None
        self._measured_from = self._scale = 0.0
        self._next_look = 1
        self._really_stepped = False
        self._records: list[list[Any]] = []
        self.startup_s = self.first_step_s = 0.0
        self.conditions: Conditions | None = None
        self._retries_before: int | None = None
        self.alloc_retries: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Mark the end of data loading."""
        if not self._really_stepped:
            self._scale = _loss_scale(optimizer)
        if self._previous_end is None:
            self.startup_s = time.perf_counter() - self._started_at
            self._stopwatch.enter("first_step_s")
            self._previous_end = self._clock.mark()
        self._marks = [self._previous_end, self._clock.mark()]

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of a micro-step that isn't the last of its step."""
        self._marks.append(self._clock.mark())

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Mark the end of a step; end training when enough is known, and not before: other callbacks come first."""
        self._previous_end = self._clock.mark()
        self._marks.append(self._previous_end)
        if control.should_training_stop and state.global_step < state.max_steps:
            self.stopped_at = self.stopped_at or state.global_step
            control.should_training_stop = False
        if not self.first_step_s:
            self._clock.settle()
            self.first_step_s = time.perf_counter() - self._started_at - self.startup_s
            self._stopwatch.enter("discarded_s")
        # An fp16 scaler skips the first steps: until one is real, optimizer states and their peak would be missing.
        # Fused optimizers skip by themselves, which nothing but the scale tells. Looking waits for the device.
        if not self._really_stepped:
            was_skipped = getattr(optimizer, "step_was_skipped", False) or _loss_scale(optimizer) < self._scale
            self._really_stepped = not was_skipped
        if not self._measured_from:
            self._step_ended()
            if not self._agree(self._is_warm(state.global_step)):
                return
            self._clock.settle()
            if self._relax is not None:
                self._relax()
            if self._turns is not None:
                self._begin_turns(self._turns)
            self._watch.begin()
            self._retries_before = self._retries()
            self._stopwatch.enter("measured_s")
            self._measured_from = time.perf_counter()
            self._previous_end = self._clock.mark()
            return
        if not self.is_whole():
            return
        self._records.append(self._marks)
        if state.global_step <= STEPS_TO_PEAK:  # the first to meet the optimizer's states: the cache is made for them
            self._retries_before = self._retries()
        if self._turns is not None and self.steps_per_turn is not None:
            is_over = not len(self._records) % self.steps_per_turn and not self._goes_on(self._turns)
        else:
            is_over = self._is_enough()
        if is_over:
            control.should_training_stop = True
            self._end()

    def _begin_turns(self, turns: Turns) -> None:
        """Let the others warm up, and settle how many steps make a turn."""
        step_s = self._clock.seconds(self._marks[0], self._marks[-1])
        self.steps_per_turn = turns.steps(step_s, most=self._limits.measure_steps)
        self._stopwatch.enter("waited_s")
        if not turns.warmed_up(self._ends_at):
            self.steps_per_turn = None

    def _goes_on(self, turns: Turns) -> bool:
        """End a turn; return whether more is to be measured, in the next turn or, if the others have gone, alone."""
        assert self.steps_per_turn is not None
        self._clock.settle()
        turn_s = statistics.fmean(map(self._step_time_s, self._records[-self.steps_per_turn :]))
        self._stopwatch.enter("waited_s")
        goes_on = turns.end_turn(turn_s, self._limits, self._ends_at)
        self._stopwatch.enter("measured_s")
        self._previous_end = self._clock.mark()
        if turns.broken:
            self.steps_per_turn = None
            return not self._is_enough()
        return goes_on

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End measuring where training ended by itself."""
        if self._records:
            self._end()

    def _end(self) -> None:
        if self.conditions is None:
            self._watch.look()
            self._clock.settle()
            self.conditions = self._watch.conditions()
            counted = self._retries()
            if counted is not None and self._retries_before is not None:
                self.alloc_retries = counted - self._retries_before
            self._stopwatch.enter(self._afterwards)

    def _is_warm(self, steps: int) -> bool:
        """Return whether enough is discarded: the first steps are slow, and of short steps many."""
        trained_s = time.perf_counter() - self._started_at - self.startup_s
        enough = trained_s >= self._limits.discarded_s or steps >= self._limits.discarded_steps + EXTRA_DISCARDED_STEPS
        return self._really_stepped and steps >= self._least_discarded and enough

    def _is_enough(self) -> bool:
        """Look, at growing distances, whether the interval is tight, the race is lost or a limit is reached.

        When to look follows from counts, the same for all ranks; on what is then seen they have to agree.
        """
        count = len(self._counted())
        if count >= self._limits.measure_steps:
            return True
        if count < self._next_look:
            return False
        self._next_look = count + max(1, count // 4)
        self._watch.look()  # while the device still computes
        return self._agree(self._is_decided())

    def _is_decided(self) -> bool:
        times, now = self.step_times_s(), time.perf_counter()
        took_s = now - self._measured_from
        look_s = (self._next_look - len(times)) * took_s / len(self._records)  # until the next look
        if took_s >= self._limits.measure_time_s or now + look_s > self._ends_at:
            return True
        if len(times) >= _LEAST_STEPS and relative_half_width(times) <= self._limits.relative_interval:
            return True
        beaten_s = self._limits.beaten_step_s if len(times) >= _ENOUGH else None
        return beaten_s is not None and statistics.fmean(times) - half_width(times) > beaten_s

    def step_times_s(self) -> list[float]:
        """Return the time of each measured step, missing micro-steps added."""
        self._clock.settle()
        return [self._step_time_s(marks) for marks in self._counted()]

    def _counted(self) -> list[list[Any]]:
        """Return the records that count: the first after `relax` fills the heap, and is left out if others are left.

        Of trials in turn it is the first turn.
        """
        if self.steps_per_turn is not None:
            return self._records[self.steps_per_turn :]
        return self._records[1:] if self._relax is not None and len(self._records) > _ENOUGH else self._records

    def data_wait_share(self) -> float:
        """Return the share of the measured time spent between the end of a step and its successor's first forward."""
        waits = sum(self._clock.seconds(m[0], m[1]) for m in self._records)
        total = sum(self._clock.seconds(m[0], m[-1]) for m in self._records)
        return waits / total if total else 0.0

    def _step_time_s(self, marks: list[Any]) -> float:
        whole = self.added_s + self._clock.seconds(marks[0], marks[-1])
        if not self._missing:
            return whole
        micro_steps = [self._clock.seconds(a, b) for a, b in itertools.pairwise(marks[1:-1])]
        data = self._clock.seconds(marks[0], marks[1]) / self._run
        return whole + self._missing * (statistics.fmean(micro_steps) + data)


def _loss_scale(optimizer: Any) -> float:
    """Return what an fp16 scaler multiplies the loss by, halved where it skips a step; 1 where there is none."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def measurement_of(
    request: TrialRequest,
    timer: StepTimer,
    memory: Memory,
    *,
    loss: float | None,
    effects: dict[str, str],
    data_wait_share: float | None,
) -> Measurement:
    """Return the measurement of a trial that has trained.

    Args:
        request: The trial.
        timer: Has timed at least one of its steps.
        memory: Its peak.
        loss: The mean over all steps; None: unknown.
        effects: What was seen to be in effect, by knob.
        data_wait_share: Of a step's time, spent waiting for data; None: unknown.
    """
    return Measurement(
        **speed_of(timer.step_times_s(), request),
        accumulation_steps=request.accumulation_steps,
        steps_per_turn=timer.steps_per_turn,
        memory=memory,
        startup_s=timer.startup_s,
        first_step_s=timer.first_step_s,
        data_wait_share=data_wait_share,
        loss=loss,
        alloc_retries=timer.alloc_retries,
        warnings=ran_short(timer.alloc_retries),
        effects=effects,
        conditions=timer.conditions and timer.conditions.with_waits(data_wait_share),
    )
