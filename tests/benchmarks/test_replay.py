"""Recorded trials as if they ran: what a request gives, what its limits do, and whole searches in no time."""

from __future__ import annotations

import pytest
from factories import (
    CRASHED,
    make_config,
    make_limits,
    make_measurement,
    make_plan,
    make_request,
    make_result,
    make_space_file,
    product_rate,
)
from runner_contract import RunnerContract
from searching.replay import ReplayClock, ReplayPool, ReplayRunner
from searching.tables import Table, plan_of, table_of

from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.values.budget import Effort
from autotune.values.problem import Event, TrialEnded
from autotune.values.trial import Memory, Purpose, TrialStatus

FAST, BROKEN, UNKNOWN = make_config(8), make_config(4), make_config(2)


@pytest.fixture
def table() -> Table:
    """FAST took 20 s at 10 samples/s, then 30 s at 12 samples/s, and 1 GiB; BROKEN crashed after 5 s."""
    results = [
        make_result(FAST, 10.0, number=0, duration_s=20.0),
        make_result(BROKEN, CRASHED, number=1, duration_s=5.0),
        make_result(FAST, 12.0, number=2, duration_s=30.0),
    ]
    return table_of(make_plan(), results)


@pytest.fixture
def clock() -> ReplayClock:
    return ReplayClock()


@pytest.fixture
def runner(table, clock) -> ReplayRunner:
    return ReplayRunner(table, clock)


class TestContract(RunnerContract):
    @pytest.fixture
    def completing(self):
        return make_request(FAST)

    @pytest.fixture
    def starved(self):
        return make_request(FAST, limits=make_limits(memory_bytes=GIB - 1))

    @pytest.fixture
    def hurried(self):
        return make_request(FAST, limits=make_limits(timeout_s=19.0))

    @pytest.fixture
    def impossible(self):
        return make_request(UNKNOWN)


def test_the_trials_of_a_configuration_come_in_turn_and_then_again(runner):
    rates = [runner.run(make_request(FAST)).measurement.samples_per_second for _ in range(5)]
    assert rates == [10.0, 12.0, 10.0, 12.0, 10.0]


def test_other_requests_do_not_move_the_turn(runner):
    runner.run(make_request(FAST))
    runner.run(make_request(BROKEN))
    runner.run(make_request(UNKNOWN))
    assert runner.run(make_request(FAST)).measurement.samples_per_second == 12.0


def test_time_passes_as_it_was_recorded(runner, clock):
    assert runner.run(make_request(FAST)).duration_s == 20.0
    assert runner.run(make_request(BROKEN)).duration_s == 5.0
    assert clock.now() == 25.0


def test_a_failure_is_the_recorded_one(runner):
    assert runner.run(make_request(BROKEN)).outcome == CRASHED


def test_a_configuration_that_was_not_recorded_is_named_and_takes_no_time(runner, clock):
    result = runner.run(make_request(UNKNOWN))
    assert result.status is TrialStatus.INVALID
    assert f"the table has no trial of {UNKNOWN.config_id}" in result.outcome.cause
    assert '"per_device_train_batch_size":2' in result.outcome.cause
    assert clock.now() == 0.0


def test_a_trial_ends_at_its_time_limit(runner, clock):
    result = runner.run(make_request(FAST, limits=make_limits(timeout_s=19.0)))
    assert (result.status, result.duration_s, clock.now()) == (TrialStatus.TIMED_OUT, 19.0, 19.0)


def test_memory_runs_out_in_the_first_step(runner, clock):
    result = runner.run(make_request(FAST, limits=make_limits(memory_bytes=GIB - 1)))
    assert result.outcome.cause == "needed 1.00 GiB when it was recorded"
    assert clock.now() == 2.0  # one second to start, one for the first step


def test_the_seed_of_a_workload_is_not_asked_for(runner):
    request = make_request(FAST)
    other = request.model_copy(update={"workload": request.workload.model_copy(update={"seed": 7})})
    assert runner.run(other).status is TrialStatus.COMPLETED


PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "per_device_train_batch_size": {"choices": "lattice"},
    "optim": ["adamw_torch_fused", "adafactor"],
    "checkpointing": ["none", "full"],
}
rate = product_rate(
    {
        "precision": {"fp32": 1.0, "bf16": 1.3},
        "optim": {"adamw_torch_fused": 1.0, "adafactor": 1.1},
        "checkpointing": {"none": 1.0, "full": 0.75},
        "per_device_train_batch_size": {1: 5.0, 2: 7.0, 4: 8.5, 8: 10.0, 16: 11.5},
    }
)


FASTEST = make_config(16, precision="bf16", optim="adafactor")  # of `space_table`


@pytest.fixture(scope="module")
def space_table() -> Table:
    """40 points, the fastest of which takes 16 GiB."""
    plan = make_plan(space=make_space_file(PARAMETERS), memory_bytes=16 * GIB)
    results = []
    for number, config in enumerate(plan.every_config()):
        gib = config.per_device_train_batch_size // (2 if config.checkpointing == "full" else 1)
        measured = make_measurement(rate(make_request(config)), memory=Memory(resident_bytes=max(1, gib) * GIB))
        results.append(make_result(config, measured, number=number, duration_s=4.0))
    return table_of(plan, results)


def replayed(table: Table, directory, **plan):
    clock, events = ReplayClock(), list[Event]()
    tuner = Tuner(
        plan_of(table, effort=Effort.QUICK, **plan),
        RunDirectory(directory),
        ReplayRunner(table, clock),
        events.append,
        clock=clock.now,
    )
    result = tuner.run()
    return result, [e.result for e in events if isinstance(e, TrialEnded)], clock


def test_a_whole_search_is_replayed_to_the_best_of_the_table(space_table, tmp_path):
    result, trials, clock = replayed(space_table, tmp_path)
    assert result.best.config == FASTEST
    assert result.verdict == "faster"
    assert clock.now() == result.search_time_s == 4.0 * len(trials)
    assert {t.status for t in trials} == {TrialStatus.COMPLETED}


def test_a_replay_within_less_memory_finds_the_best_that_fits(space_table, tmp_path):
    result, trials, _ = replayed(space_table, tmp_path, memory_bytes=8 * GIB)
    assert TrialStatus.OUT_OF_MEMORY in {t.status for t in trials}
    fitting = [p for p in space_table.points if p.trials[0].measurement.memory.peak_bytes <= 8 * GIB]
    assert result.best.config == max(fitting, key=lambda p: p.samples_per_second).config


@pytest.mark.slow
def test_finals_are_replayed_too(space_table, tmp_path):
    _, trials, _ = replayed(space_table, tmp_path)
    assert sum(t.request.purpose is Purpose.FINAL for t in trials) == 4


@pytest.mark.slow
def test_the_same_seed_gives_the_same_search(space_table, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    _, one, _ = replayed(space_table, first, seed=3, max_trials=15)
    _, other, _ = replayed(space_table, second, seed=3, max_trials=15)
    assert [t.request.config for t in one] == [t.request.config for t in other]


@pytest.fixture
def pool(runner, clock) -> ReplayPool:
    return ReplayPool(runner, clock, 2)


class TestPoolContract(TestContract):
    @pytest.fixture
    def runner(self, table, clock):
        return ReplayPool(ReplayRunner(table, clock), clock, 2)


def test_trials_at_once_end_in_the_order_of_their_time(pool, clock):
    slow, quick = make_request(FAST, number=0), make_request(BROKEN, number=1)
    pool.begin(slow)
    assert pool.free() == 1
    pool.begin(quick)
    assert pool.free() == 0
    assert (pool.wait().request, clock.now()) == (quick, 5.0)
    assert (pool.wait().request, clock.now()) == (slow, 20.0)


def test_a_trial_begins_when_it_is_begun(pool, clock):
    pool.begin(make_request(BROKEN, number=0))
    pool.wait()
    pool.begin(make_request(FAST, number=1))
    assert pool.wait().began == 5.0
    assert clock.now() == 25.0


def test_what_has_ended_while_the_driver_was_at_work_takes_no_more_time(pool, clock):
    pool.begin(make_request(BROKEN))
    clock.advance(7.0)
    pool.wait()
    assert clock.now() == 7.0


@pytest.mark.parametrize("places", [1, 3])
def test_a_search_at_several_places_finds_the_best_of_the_table_in_less_time(space_table, tmp_path, places):
    clock, events = ReplayClock(), list[Event]()
    pool = ReplayPool(ReplayRunner(space_table, clock), clock, places)
    plan = plan_of(space_table, effort=Effort.QUICK)
    result = Tuner(plan, RunDirectory(tmp_path), pool, events.append, clock=clock.now).run()
    trials = [e.result for e in events if isinstance(e, TrialEnded)]
    finals = sum(r.request.purpose is Purpose.FINAL for r in trials)
    assert result.best.config == FASTEST
    assert clock.now() == result.search_time_s
    assert clock.now() >= 4.0 * ((len(trials) - finals) / places + finals)
    assert clock.now() <= 4.0 * (1 + -(-(len(trials) - finals - 1) // places) + finals + 1)
