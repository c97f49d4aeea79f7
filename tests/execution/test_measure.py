"""Step times from marks: which steps count, when it is enough, and how missing micro-steps are added."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from factories import StepClock, make_request, make_workload

from autotune.execution.measure import EXTRA_DISCARDED_STEPS, Compilations, StepTimer
from autotune.values.conditions import Conditions
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Limits, Memory
from autotune.values.workload import LengthProfile

# Micro-steps after the first read gradients, and add to them.
DATA_S, MICRO_S, ADDING_S, OPTIMIZER_S = 0.5, 2.0, 0.25, 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    made = StepClock()
    monkeypatch.setattr("autotune.execution.measure.time.perf_counter", lambda: made.now)
    return made


def timer_of(clock: StepClock, *, run: int = 1, full: int | None = None, more: dict[str, Any] | None = None, **limits):
    usual = {"memory_bytes": 1, "timeout_s": 1, "discarded_steps": 1, "measure_steps": 5, "measure_time_s": 1e9}
    bounds = Limits(**{**usual, "relative_interval": 1e-9, **limits})
    return StepTimer(bounds, run, full or run, clock=clock, **more or {})


def train(timer: StepTimer, clock: StepClock, *, run: int = 1, slowness: Iterable[float]) -> int:
    """Call the timer as a Trainer does, in steps stretched by `slowness`; return how many it takes."""
    control = SimpleNamespace(should_training_stop=False)
    for step, factor in enumerate(slowness, start=1):
        clock.now += factor * DATA_S * run
        timer.on_step_begin(None, SimpleNamespace(global_step=step - 1), control)
        for number in range(run):
            clock.now += factor * (MICRO_S + ADDING_S * (number > 0))
            timer.micro_step_ended()
        clock.now += factor * OPTIMIZER_S
        timer.on_step_end(None, SimpleNamespace(global_step=step), control)
        if control.should_training_stop:
            return step
    return step


def step_s(micro_steps: int) -> float:
    return micro_steps * (DATA_S + MICRO_S + ADDING_S) - ADDING_S + OPTIMIZER_S


@pytest.mark.parametrize(("run", "full"), [(1, 1), (8, 8), (2, 3), (2, 8), (3, 64)])
def test_times_are_those_of_the_full_step_from_the_end_of_the_last_one_data_included(clock, run, full):
    timer = timer_of(clock, run=run, full=full)
    train(timer, clock, run=run, slowness=[1] * 9)
    assert timer.step_times_s() == pytest.approx([step_s(full)] * 5)
    assert timer.data_wait_share() == pytest.approx(run * DATA_S / step_s(run))


@pytest.mark.parametrize(("run", "full", "ran"), [(8, 8, [0, 7]), (2, 8, [0, 1]), (1, 1, [0])])
def test_steps_before_the_measured_ones_leave_out_all_but_the_first_micro_step_and_the_last(clock, run, full, ran):
    more = {"warm_up_micro_steps": 2, "stopwatch": Stopwatch("trainer_s", since=clock.now, clock=lambda: clock.now)}
    timer = timer_of(clock, run=run, full=full, more=more, discarded_steps=2, measure_steps=2)
    control, computed = SimpleNamespace(should_training_stop=False), []
    for step in range(1, 5):
        clock.now += DATA_S * run
        timer.on_step_begin(None, SimpleNamespace(global_step=step - 1), control)
        computed.append([])
        for number in range(run):
            if not timer.leaves_out():
                computed[-1].append(number)
                clock.now += MICRO_S + ADDING_S * (number > 0)
            timer.micro_step_ended()
        clock.now += OPTIMIZER_S
        timer.on_step_end(None, SimpleNamespace(global_step=step), control)
    assert control.should_training_stop
    assert computed == [ran, ran, list(range(run)), list(range(run))]
    assert timer.step_times_s() == pytest.approx([step_s(full)] * 2)
    first_step_s = timer.measurement(make_request(), Memory(), None, {}, None).first_step_s
    assert first_step_s == pytest.approx(step_s(full) - DATA_S * len(ran))


def test_a_step_at_the_end_of_the_data_that_lacks_samples_is_not_measured(clock):
    timer = timer_of(clock, measure_steps=3)
    whole = iter([True, False, True, False, True])
    timer.is_whole = lambda: next(whole)
    assert train(timer, clock, slowness=[1] * 9) == 6
    assert timer.step_times_s() == pytest.approx([step_s(1)] * 3)


def test_of_several_ranks_micro_steps_are_inferred_from_those_that_exchange_nothing(clock):
    timer, exchanging_s = timer_of(clock, run=3, full=8, more={"ranks": True}), 4.0
    ended = timer.micro_step_ended

    def micro_step_ended():
        clock.now += exchanging_s if len(timer._marks) == 4 else 0.0
        ended()

    timer.micro_step_ended = micro_step_ended
    train(timer, clock, run=3, slowness=[1] * 9)
    assert timer.step_times_s() == pytest.approx([step_s(8) + exchanging_s] * 5)


def test_missing_micro_steps_cannot_be_inferred_from_a_single_one(clock):
    with pytest.raises(ValueError, match="two or more"):
        timer_of(clock, run=1, full=2)


@pytest.mark.parametrize(("discarded", "discarded_s", "left_out"), [(1, 0, 1), (3, 0, 3), (1, 10 * step_s(1), 1 + 10)])
def test_the_first_steps_do_not_count_until_the_seconds_to_discard_are_over(clock, discarded, discarded_s, left_out):
    timer = timer_of(clock, discarded_steps=discarded, discarded_s=discarded_s)
    steps = train(timer, clock, slowness=[50] * discarded + [1] * 29)
    assert timer.step_times_s() == pytest.approx([step_s(1)] * 5)
    assert steps - 5 == left_out + 1  # the first of the measured ones


def test_steps_are_discarded_up_to_a_limit_even_if_they_never_settle(clock):
    timer = timer_of(clock, discarded_s=1e9)
    assert train(timer, clock, slowness=[1] * 1100) == 1 + EXTRA_DISCARDED_STEPS + 6
    falling = timer_of(clock, discarded_s=10 * step_s(1), measure_steps=2)
    steps = train(falling, clock, slowness=(0.96**n for n in range(200)))
    assert sum(0.96**n for n in range(1, steps - 3)) == pytest.approx(4 * 10, rel=0.7), "steps that never settle"


def test_only_computing_warms_a_chip_and_compiling_does_not(clock):
    """The first steps compile for 80 s, in which the chip cools; then it is 10 % slow, and less from step to step."""
    ramp = [1 + 0.1 * 0.8**n for n in range(60)]
    timer = timer_of(clock, discarded_s=8 * step_s(1), relative_interval=0.02, measure_steps=5)
    timer.has_compiled = iter([True, True, *[False] * 90]).__next__
    train(timer, clock, slowness=[20, 20, *ramp])
    assert max(timer.step_times_s()) < 1.01 * step_s(1)
    noisy = timer_of(clock, discarded_s=8 * step_s(1), measure_steps=2)
    assert train(noisy, clock, slowness=[1, *[1.05, 0.95, 1.1, 0.9] * 9]) <= 1 + 9 + 3, "noise is no trend"
    long = timer_of(clock, discarded_s=step_s(1), measure_steps=2)
    assert train(long, clock, slowness=[1] * 9) == 1 + 1 + 2, "one step warms a chip as long as many"


def test_torch_tells_what_it_compiles_the_first_new_shape_too():
    has_compiled = Compilations()
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    seen = []
    for rows in (3, 3, 5, 5, 7):  # the second length makes one code for all
        doubled(torch.ones(rows))
        seen.append(has_compiled())
    torch.compiler.reset()
    assert seen == [True, False, True, False, False]


def test_a_step_that_compiles_or_records_a_graph_is_not_measured_and_its_time_is_none_of_measuring(clock):
    limits = {"measure_steps": 5, "measure_time_s": 30 * step_s(1)}
    timer = timer_of(clock, **limits)
    timer.has_compiled = iter([True, True, False, False, True, True, *[False] * 9]).__next__
    steps = train(timer, clock, slowness=[9, 9, 1, 1, 50, 20, *[1] * 9])
    assert timer.step_times_s() == pytest.approx([step_s(1)] * 5)
    assert steps == 3 + 2 + 6
    always = timer_of(clock, measure_steps=5)
    always.has_compiled = lambda: True
    train(always, clock, slowness=[1] * 60)
    assert len(always.step_times_s()) == 5, "who compiles at every step trains like that"
    assert told(always) == ["it was compiled in 16 steps"]
    assert told(timer) == ["it was compiled in 4 steps"]
    lengths = LengthProfile(samples=9, mean=4.0, minimum=1, median=4, p95=8, maximum=8)
    assert told(always, lengths=lengths)[0].startswith("it was compiled in 16 steps: samples differ in length")


def told(timer: StepTimer, **workload) -> list[str]:
    request = make_request(workload=make_workload(**workload))
    return list(timer.measurement(request, Memory(), None, {}, None).warnings)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_a_fused_optimizer_skips_by_itself_is_not_taken_for_a_real_one(clock, fused, device):
    """Under accelerate a fused optimizer is stepped in any case, and finds out on the device that it must not."""
    Accelerator(cpu=device == "cpu")  # makes the state that the optimizer asks
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    plain, scaler = torch.optim.AdamW([weight], fused=fused), torch.amp.GradScaler(device)
    optimizer = AcceleratedOptimizer(plain, scaler=scaler, device_placement=False)
    timer, control = timer_of(clock, measure_steps=2), SimpleNamespace(should_training_stop=False)
    gradients = [torch.inf] * 4 + [1.0] * 9
    for step, gradient in enumerate(gradients):
        timer.on_step_begin(None, SimpleNamespace(global_step=step), control, optimizer=optimizer)
        optimizer.scaler.scale(torch.zeros((), device=device))  # as a loss is, which makes the scale
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        clock.now += 1
        timer.on_step_end(None, SimpleNamespace(global_step=step + 1), control, optimizer=optimizer)
        if control.should_training_stop:
            break
    assert step + 1 == 4 + 1 + 2  # the first real one makes the states, and isn't measured


def test_it_ends_when_the_interval_is_narrow_but_not_for_a_few_steps_that_happen_to_agree(clock):
    timer = timer_of(clock, measure_steps=50, relative_interval=0.01)
    assert train(timer, clock, slowness=[1] * 60) == 1 + 6
    timer = timer_of(clock, measure_steps=50, relative_interval=0.01)
    assert train(timer, clock, slowness=[1, 1, 1, 1, *[2, 1] * 40]) == 52
    timer = timer_of(clock, measure_steps=50, relative_interval=1e-9, beaten_step_s=0.9 * step_s(1))
    assert train(timer, clock, slowness=[1, 1, 1, *[0.5] * 60]) == 52, "two slow steps lose no race"


@pytest.mark.parametrize("beaten_s", [None, 0.5 * step_s(1)])
def test_short_steps_are_measured_for_a_least_time_however_many_are_allowed_and_however_they_agree(clock, beaten_s):
    """A host that hesitates for half a second, in steps of 10 ms, is over before measuring is."""
    factor = 0.01 / step_s(1)
    limits = {"measure_steps": 20, "measure_time_s": 20.0, "relative_interval": 0.02}
    timer = timer_of(clock, least_time_s=2.0, **limits, beaten_step_s=beaten_s and beaten_s * factor)
    train(timer, clock, slowness=[factor] * 30 + [3 * factor] * 20 + [factor] * 2000)
    times = timer.step_times_s()
    least_s = 2.0 if beaten_s is None else 0.5
    assert least_s <= sum(times) < 2 * least_s
    assert len(times) > 30


@pytest.mark.parametrize(("beaten_s", "steps"), [(0.5, 4), (2.0, 52), (None, 52)])
def test_it_ends_as_soon_as_the_race_is_surely_lost(clock, beaten_s, steps):
    """Steps of 1 and 1.1 times the usual: after three it is sure that they take no half of that."""
    limit = None if beaten_s is None else beaten_s * step_s(1)
    timer = timer_of(clock, measure_steps=50, relative_interval=1e-9, beaten_step_s=limit)
    assert train(timer, clock, slowness=[1, 1, 1.1] * 20) == steps


def test_it_ends_with_the_step_in_which_its_time_is_up(clock):
    timer = timer_of(clock, measure_steps=50, measure_time_s=10 * step_s(1))
    steps = train(timer, clock, slowness=[1, 2] * 30)
    assert 5 <= len(timer.step_times_s()) < 15
    assert steps < 20
    slow = timer_of(clock, measure_steps=50, measure_time_s=0.001)
    train(slow, clock, slowness=[1, 2] * 30)
    assert len(slow.step_times_s()) == 1


def test_the_device_is_waited_for_seldom(clock):
    timer = timer_of(clock, measure_steps=50, discarded_steps=3)
    train(timer, clock, slowness=[1, 1, 2] * 20)
    assert clock.settled < 25


@pytest.mark.parametrize(("waits", "idle"), [(0.0, 0.02), (0.3, 0.3), (None, 0.02)])
def test_the_machine_is_watched_over_the_measured_steps_and_a_gpu_idle_while_it_waited_for_data(clock, waits, idle):
    watch = Mock(**{"conditions.return_value": Conditions(others_share=0.5, idle_share=0.02)})
    timer = timer_of(clock, more={"watch": watch}, discarded_steps=2, measure_steps=3)
    train(timer, clock, slowness=[1] * 9)
    first, *looks, last = (name for name, _, _ in watch.method_calls)
    assert (first, set(looks), last) == ("begin", {"look"}, "conditions")
    found = timer.measurement(make_request(), Memory(), None, {}, waits)
    assert (found.conditions.others_share, found.conditions.idle_share) == (0.5, idle)


def test_the_stopwatch_tells_first_step_discarded_and_measured_steps_apart(clock):
    stopwatch = Stopwatch("trainer_s", since=clock.now - 7, clock=lambda: clock.now)
    timer = timer_of(clock, more={"stopwatch": stopwatch}, discarded_steps=3, measure_steps=3)
    train(timer, clock, slowness=[5, 1, 1, 0.9, 1.1, 1, 1])
    laps = stopwatch.laps()
    assert timer.startup_s == pytest.approx(7 + 5 * DATA_S)
    assert laps["first_step_s"] == timer.first_step_s == pytest.approx(5 * (MICRO_S + OPTIMIZER_S))
    assert laps["discarded_s"] == pytest.approx(2 * step_s(1))
    assert laps["measured_s"] == pytest.approx(3 * step_s(1))


@pytest.mark.parametrize("left_steps", [3.0, 5.5, 20.5, 60.0])
def test_measuring_ends_before_the_time_is_up_and_leaves_the_steps_so_far(clock, left_steps):
    ends_at = clock.now + left_steps * step_s(1)
    timer = timer_of(clock, more={"ends_at": ends_at}, discarded_steps=1, measure_steps=50)
    train(timer, clock, slowness=[0.9, 1.1] * 50)
    assert 1 <= len(timer.step_times_s()) <= 50
    assert clock.now <= ends_at
    assert clock.now >= min(ends_at - 0.25 * left_steps * step_s(1) - step_s(1), 50 * step_s(1))


def test_memory_has_peaked_before_the_guard_is_relaxed_and_the_steps_count(clock):
    """The second step is the first that meets the optimizer's states."""
    relaxed, heard = [], []
    more = {"relax": lambda: relaxed.append(clock.now), "step_ended": lambda: heard.append(1)}
    timer = timer_of(clock, more=more, discarded_steps=1, measure_steps=3)
    began = clock.now
    train(timer, clock, slowness=[1] * 9)
    assert len(heard) == 2
    assert relaxed == [pytest.approx(began + 2 * step_s(1))]


@pytest.mark.parametrize(("measured", "counted"), [(3, 3), (4, 4), (9, 9)])
def test_the_step_that_fills_the_heap_does_not_count_where_others_are_left(clock, measured, counted):
    timer = timer_of(clock, more={"relax": lambda: None}, discarded_steps=2, measure_steps=measured)
    train(timer, clock, slowness=[1, 1, 4, *[1, 1.1] * 10])
    times = timer.step_times_s()
    assert len(times) == counted
    assert (max(times) > 2 * step_s(1)) is (measured == 3)


def test_the_first_rank_decides_for_all_when_to_begin_and_when_to_stop(clock, monkeypatch):
    """Here another rank's decisions: this one would have begun with the second step and gone on to the fifth record."""
    agree = Mock(side_effect=[False, False, False, True, False, True])
    monkeypatch.setattr("autotune.execution.environment.agree", agree)
    timer = timer_of(clock)
    taken = train(timer, clock, slowness=[1.0, 1.0, 1.0, 1.0, 1.1, 1.3, 1.0, 1.2])
    assert [call.args[0] for call in agree.call_args_list] == [True, True, True, True, False, False]
    assert (taken, len(timer.step_times_s())) == (6, 2)
    monkeypatch.setattr("autotune.execution.environment.agree", agree := Mock(side_effect=bool))
    assert train(timer_of(clock, measure_steps=3), clock, slowness=[1.0, 1.0, 1.1, 1.3, 1.0]) == 4
    # whether it is warm, and two looks; that the third record is the last, all ranks know by counting
    assert [call.args[0] for call in agree.call_args_list] == [True, False, False]


def test_the_allocators_retries_are_those_of_the_measured_steps_after_the_second(clock):
    """The second step is the first to meet the optimizer's states, and may have to make room for them."""
    counted = iter([7, 11, 20])  # when measuring begins, after the second step, at the end
    timer = timer_of(clock, more={"retries": lambda: next(counted)}, discarded_steps=1, measure_steps=3)
    train(timer, clock, slowness=[1] * 9)
    assert timer.alloc_retries == 9
    found = timer.measurement(make_request(), Memory(), None, {}, None)
    assert found.alloc_retries == 9
    said = "the allocator ran short 9 times while it was measured, and gave its cache back: it is too near the budget"
    assert found.warnings == (said,)
