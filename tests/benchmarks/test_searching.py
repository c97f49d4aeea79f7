"""Searches of recorded tables: a table and its file, trials as if they ran, whole searches, and their figures."""

import math

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_config,
    make_limits,
    make_measurement,
    make_plan,
    make_request,
    make_result,
    make_space_file,
    product_rate,
)
from search import STRATEGIES, TABLES
from searching.replay import ReplayRunner
from searching.scores import first_hit, near_best, noise_of, rates_of
from searching.tables import Table, TableTrial, load_table, plan_of, table_of, write_table

from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.values.budget import Effort
from autotune.values.problem import Event, TrialEnded
from autotune.values.trial import Interval, Memory, TrialStatus

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
def runner(table) -> ReplayRunner:
    return ReplayRunner(table)


def test_the_trials_of_a_configuration_come_in_turn_and_then_again(runner):
    rates = [runner.run(make_request(FAST)).measurement.samples_per_second for _ in range(5)]
    assert rates == [10.0, 12.0, 10.0, 12.0, 10.0]


def test_a_trial_ends_at_its_time_limit_and_runs_out_of_memory_in_the_first_step(runner):
    late = runner.run(make_request(FAST, limits=make_limits(timeout_s=19.0)))
    assert (late.status, late.duration_s, runner.now_s) == (TrialStatus.TIMED_OUT, 19.0, 19.0)
    large = runner.run(make_request(FAST, limits=make_limits(memory_bytes=GIB - 1)))
    assert large.outcome.cause == "needed 1.00 GiB when it was recorded"
    assert runner.now_s == 19.0 + 2.0  # one second to start, one for the first step


PARAMETERS = {
    "precision": ["fp32", "bf16"], "per_device_train_batch_size": {"choices": "lattice"},
    "optim": ["adamw_torch_fused", "adafactor"], "checkpointing": ["none", "full"],
}  # fmt: skip
rate = product_rate(
    {
        "precision": {"fp32": 1.0, "bf16": 1.3},
        "optim": {"adamw_torch_fused": 1.0, "adafactor": 1.1},
        "checkpointing": {"none": 1.0, "full": 0.75},
        "per_device_train_batch_size": {1: 5.0, 2: 7.0, 4: 8.5, 8: 10.0, 16: 11.5},
    }
)


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
    runner, events = ReplayRunner(table), list[Event]()
    searched = plan_of(table, effort=Effort.QUICK).model_copy(update=plan)
    result = Tuner(searched, RunDirectory(directory), runner, events.append, clock=lambda: runner.now_s).run()
    return result, [e.result for e in events if isinstance(e, TrialEnded)], runner.now_s


def test_a_whole_search_is_replayed_to_the_best_of_the_table(space_table, tmp_path):
    result, trials, now_s = replayed(space_table, tmp_path)
    assert result.best.config == make_config(16, precision="bf16", optim="adafactor")
    assert result.verdict == "faster"
    assert now_s == result.search_time_s == 4.0 * len(trials)
    assert {t.status for t in trials} == {TrialStatus.COMPLETED}


def test_a_replay_within_less_memory_finds_the_best_that_fits(space_table, tmp_path):
    result, trials, _ = replayed(space_table, tmp_path, memory_bytes=8 * GIB)
    assert TrialStatus.OUT_OF_MEMORY in {t.status for t in trials}
    fitting = [p for p in space_table.points if p.trials[0].measurement.memory.peak_bytes <= 8 * GIB]
    assert result.best.config == max(fitting, key=lambda p: p.samples_per_second).config


@pytest.fixture
def rows() -> Table:
    """Three points: two of them measured twice, one of which ran out of memory."""
    unsure = make_measurement(12.0, samples_per_second_interval=Interval(low=0.0, high=math.inf))
    results = [
        make_result(FAST, unsure, number=0, duration_s=3.0),
        make_result(UNKNOWN, OUT_OF_MEMORY, number=1, duration_s=1.0),
        make_result(BROKEN, 5.0, number=2),
        make_result(UNKNOWN, OUT_OF_MEMORY, number=3, duration_s=2.0),
        make_result(FAST, 8.0, number=4, duration_s=4.0),
    ]
    return table_of(make_plan(), results)


@pytest.fixture
def path(rows, tmp_path):
    write_table(rows, tmp_path / "table.jsonl")
    return tmp_path / "table.jsonl"


def test_a_table_survives_its_file_without_logs(rows, path):
    assert load_table(path) == rows
    assert [p.samples_per_second for p in rows.points] == [10.0, None, 5.0]
    assert [[t.number for t in p.trials] for p in rows.points] == [[0, 4], [1, 3], [2]]
    assert TableTrial.of(make_result(FAST, CRASHED)).outcome == CRASHED
    measured = make_result(FAST, OUT_OF_MEMORY.model_copy(update={"memory": Memory(resident_bytes=5)}))
    assert TableTrial.of(measured).outcome == measured.outcome


KEPT = sorted(TABLES.glob("*.jsonl"))


# The last trials of a recording, during which a library was installed that each of them imported.
LEFT_OUT = {"mixtral-2m": 45}


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_kept_table_is_whole(path):
    table = load_table(path)
    plan = plan_of(table)
    assert {p.config for p in table.points} == set(plan.every_config())
    counts = [len(p.trials) for p in table.points]
    assert set(counts) <= {1, 2}
    assert table.header.repeats == 2
    assert counts.count(1) == LEFT_OUT.get(path.stem, 0)
    statuses = {t.status for p in table.points for t in p.trials}
    assert statuses <= {TrialStatus.COMPLETED, TrialStatus.OUT_OF_MEMORY}
    assert noise_of(table) < 0.2
    assert not any(map(math.isnan, rates_of(table).values()))


def test_a_search_by_a_sampler_starts_from_the_baseline_and_counts_a_configuration_once(space_table):
    plan = plan_of(space_table, max_trials=10)
    trials = STRATEGIES["unguided"].search(space_table, plan)
    assert trials[0].config == space_table.header.baseline
    assert len({trial.config for trial in trials}) == len(trials) <= 11
    assert first_hit(trials, near_best(space_table, 0.2)) is not None
    assert len(STRATEGIES["random"].search(space_table, plan)) == 11
