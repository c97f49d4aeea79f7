"""The search benchmark: its figures on a table whose answers are known, its strategies, and the kept tables."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from factories import OUT_OF_MEMORY, make_config, make_plan, make_request, make_result, make_space_file, product_rate
from searching.tables import Table, load_table, plan_of, table_of, write_table

from autotune.errors import InputError
from autotune.values.trial import TrialStatus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from search import STRATEGIES, TABLES  # noqa: E402
from searching.oracle import Oracle, Replayed, tightened  # noqa: E402
from searching.scores import (  # noqa: E402
    figures,
    first_hit,
    near_best,
    noise_of,
    performance_score,
    rates_of,
    spread,
)

KEPT = sorted(TABLES.glob("*.jsonl"))

rate = product_rate(
    {"precision": {"fp32": 1.0, "bf16": 1.3}, "per_device_train_batch_size": {1: 5.0, 2: 7.0, 4: 8.5, 8: 10.0, 16: 1}}
)


def recorded(*factors: float) -> Table:
    """10 points with a trial for each factor on their rate; 16 doesn't fit, the best is a step from the baseline."""
    plan = make_plan(space=make_space_file({"precision": ["fp32", "bf16"], "per_device_train_batch_size": "lattice"}))
    configs = plan.every_config()
    results = []
    for factor in factors:
        for config in configs:
            fits = config.per_device_train_batch_size < 16
            outcome = rate(make_request(config)) * factor if fits else OUT_OF_MEMORY
            results.append(make_result(config, outcome, number=len(results)))
    return table_of(plan.model_copy(update={"repeats": len(factors)}), results)


@pytest.fixture
def table() -> Table:
    return recorded(1.0)


def run(name: str, table: Table, seed: int = 0, **limits) -> list[Replayed]:
    return STRATEGIES[name].search(table, plan_of(table, seed=seed, **limits))


def trial(config, at_s: float, status: TrialStatus = TrialStatus.COMPLETED) -> Replayed:
    return Replayed(config, status, at_s)


# Scores


def test_near_is_within_a_share_of_the_best(table):
    assert near_best(table, 0.05) == {make_config(8, precision="bf16")}
    assert near_best(table, 0.16) == {make_config(8, precision="bf16"), make_config(4, precision="bf16")}


def test_a_table_whose_trials_agree_but_for_a_drift_has_no_noise():
    assert noise_of(recorded(1.0, 0.9)) == pytest.approx(0.0, abs=1e-9)
    assert noise_of(recorded(1.0)) == 0.0


def test_differences_within_the_noise_do_not_count():
    points, quiet = [], recorded(1.0, 1.0)
    for number, point in enumerate(quiet.points):
        trials = list(point.trials)
        if trials[1].measurement is not None:
            factor = math.exp(0.2 if number % 2 else -0.2)
            rates = {"samples_per_second": trials[1].measurement.samples_per_second * factor}
            trials[1] = trials[1].model_copy(update={"measurement": trials[1].measurement.model_copy(update=rates)})
        points.append(point.model_copy(update={"trials": tuple(trials)}))
    noisy = Table(header=quiet.header, points=tuple(points))
    assert noise_of(noisy) == pytest.approx(0.15, abs=0.03)
    assert len(near_best(noisy, 0.05)) > len(near_best(quiet, 0.05))


def test_a_table_without_a_measurement_has_no_best():
    with pytest.raises(InputError, match="no point of the table has completed"):
        near_best(table_of(make_plan(), [make_result(make_config(), OUT_OF_MEMORY)]), 0.05)


def test_a_point_that_failed_once_is_not_among_the_best():
    best = make_config(8, precision="bf16")
    table = table_of(
        make_plan(),
        [
            make_result(make_config(), 5.0),
            make_result(best, 10.0, number=1),
            make_result(best, OUT_OF_MEMORY, number=2),
        ],
    )
    assert list(rates_of(table)) == [make_config()]


def test_the_first_trial_that_is_near_is_a_hit():
    good, bad = make_config(8), make_config(4)
    trials = [trial(bad, 1), trial(good, 2, TrialStatus.OUT_OF_MEMORY), trial(good, 3)]
    assert first_hit(trials, frozenset({good})) == 3
    assert first_hit(trials[:2], frozenset({good})) is None


def test_never_is_later_than_any_number():
    assert spread([3, None, 5]) == {"median": 5, "p90": None, "lowest": 3, "highest": None}
    assert spread(range(1, 11))["p90"] == 9


def test_the_score_is_one_for_the_optimum_from_the_start_and_nought_for_random_search(table):
    by_chance = [run("random", table, seed) for seed in range(5)]
    assert performance_score(by_chance, by_chance, table) == pytest.approx(0.0)
    best = [[trial(make_config(8, precision="bf16"), 0.0)]]
    assert performance_score(best, by_chance, table) > 0.9
    worst = [[trial(make_config(1), 0.0)]]
    assert performance_score(worst, by_chance, table) < 0


# Tables


def test_a_tightened_table_has_room_for_a_share_of_its_points(table):
    peaks = {p.config: 100 + p.config.per_device_train_batch_size for p in table.points}

    def with_peak(point):
        found = point.trials[0].measurement
        if found is None:
            return point
        memory = found.memory.model_copy(update={"resident_bytes": peaks[point.config]})
        measured = found.model_copy(update={"memory": memory})
        return point.model_copy(update={"trials": (point.trials[0].model_copy(update={"measurement": measured}),)})

    tight = tightened(Table(header=table.header, points=tuple(map(with_peak, table.points))), 0.4)
    assert tight.header.memory_bytes == 102
    assert {c.per_device_train_batch_size for c in rates_of(tight)} == {1, 2}


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
    assert not np.isnan(list(rates_of(table).values())).any()


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_search_of_a_kept_table_asks_for_nothing_that_was_not_recorded(path):
    trials = run("autotune", load_table(path), max_trials=6)
    assert 2 <= len(trials) <= 7
    assert TrialStatus.INVALID not in {t.status for t in trials}


# Strategies


def test_an_oracle_counts_a_configuration_once_and_ends_when_its_trials_are_spent(table):
    oracle = Oracle(table, plan_of(table, max_trials=1))
    assert oracle.run(make_config(8)) == oracle.run(make_config(8))
    assert oracle.run(make_config(8)).measurement.samples_per_second == 10.0
    assert not oracle.is_spent
    assert oracle.run(make_config(16)).measurement is None
    assert [t.status for t in oracle.trials] == [TrialStatus.COMPLETED, TrialStatus.OUT_OF_MEMORY]
    assert oracle.is_spent
    assert oracle.run(make_config(3)) is None  # not of the table


def test_any_order_ends_with_every_point(table):
    trials = run("random", table, seed=1, max_trials=10)
    assert {t.config for t in trials} == {p.config for p in table.points}
    assert sum(t.status is TrialStatus.OUT_OF_MEMORY for t in trials) == 2
    assert trials[-1].ended_at_s == 100.0


def test_our_search_without_a_model_starts_from_the_baseline_and_finds_the_best(table):
    trials = run("unguided", table)
    assert first_hit(trials, near_best(table, 0.01)) == 2
    found = figures([trials], table)
    assert found["trials_to_5%"]["median"] == 2
    assert found["seconds_to_5%"]["median"] == 20.0
    assert found["never_5%"] == 0
    assert found["out_of_memory_share"] <= 0.2


def test_optuna_s_sampler_starts_from_the_baseline_and_finds_the_best_of_ten(table):
    trials = run("tpe", table, max_trials=10)
    assert trials[0].config == table.header.baseline
    assert first_hit(trials, near_best(table, 0.01)) is not None


@pytest.mark.slow
def test_the_command_prints_a_line_per_strategy_and_ends_with_the_figures(table, tmp_path):
    write_table(table, tmp_path / "table.jsonl")
    chosen = ["--strategy", "autotune", "--strategy", "random"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "search.py"), "table.jsonl", "--seeds", "2", "--max-trials", "4", *chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert "table: 10 points, 2 out of memory, 1 within 5% and 1 within 1% of the best" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])["figures"]
    names = [(table, name) for table in ("table", "table-tight") for name in ("autotune", "random")]
    assert [(f["table"], f["strategy"]) for f in found] == names
