"""The replay benchmark: its figures on a table whose answers are known, and on the tables that are kept."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import OUT_OF_MEMORY, make_config, make_plan, make_request, make_result, make_space_file, product_rate

from autotune.errors import InputError
from autotune.exhaustive import plan_of, table_of
from autotune.recording import Table, load_table, write_table
from autotune.trial import TrialStatus

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from replay import STRATEGIES, TABLES, near_best, replay, spread  # noqa: E402

KEPT = sorted(TABLES.glob("*.jsonl"))
OPTIONS = argparse.Namespace(seeds=3, effort="quick", max_trials=8)

rate = product_rate(
    {"precision": {"fp32": 1.0, "bf16": 1.3}, "per_device_train_batch_size": {1: 5.0, 2: 7.0, 4: 8.5, 8: 10.0, 16: 1}}
)


@pytest.fixture
def table() -> Table:
    """10 points; a micro-batch of 16 doesn't fit, the best is bf16 and one step from the baseline."""
    plan = make_plan(space=make_space_file({"precision": ["fp32", "bf16"], "per_device_train_batch_size": "lattice"}))
    configs = plan.every_config()
    outcomes = [OUT_OF_MEMORY if c.per_device_train_batch_size == 16 else rate(make_request(c)) for c in configs]
    return table_of(plan, [make_result(c, o, number=n) for n, (c, o) in enumerate(zip(configs, outcomes, strict=True))])


def test_the_trials_until_the_best_are_counted(table):
    found = replay(table, STRATEGIES["unguided"], OPTIONS)
    assert found["trials"] == {"median": 2, "lowest": 2, "highest": 2}
    assert found["seconds"]["median"] == 20.0
    assert (found["never"], found["out_of_memory"]["highest"]) == (0, 0)
    assert found["trials_in_all"]["highest"] <= 9


def test_any_order_ends_with_every_point(table):
    trials = STRATEGIES["random"](table, plan_of(table, seed=1))
    assert {t.config for t in trials} == {p.config for p in table.points}
    assert sum(t.status is TrialStatus.OUT_OF_MEMORY for t in trials) == 2
    assert trials[-1].ended_at_s == 100.0


@pytest.mark.slow
def test_a_search_that_never_comes_near_says_so(table):
    found = replay(table, lambda table, plan: STRATEGIES["search"](table, plan)[:1], OPTIONS)
    assert found["never"] == 3
    assert found["trials"] == {"median": None, "lowest": None, "highest": None}


def test_what_is_near_the_best_is_within_5_percent_of_it(table):
    assert [p.config for p in near_best(table)] == [make_config(8, precision="bf16")]


def test_a_table_without_a_measurement_has_no_best():
    with pytest.raises(InputError, match="no point of the table has completed"):
        list(near_best(table_of(make_plan(), [make_result(make_config(), OUT_OF_MEMORY)])))


def test_never_is_later_than_any_number():
    assert spread([3, None, 5]) == {"median": 5, "lowest": 3, "highest": None}


@pytest.mark.slow
def test_the_command_prints_a_line_per_strategy_and_ends_with_the_figures(table, tmp_path):
    write_table(table, tmp_path / "table.jsonl")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "replay.py"), "table.jsonl", "--seeds", "2", "--max-trials", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert "tiny on a CPU, 10 points, 2 out of memory, 1 within 5% of the best" in done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert [(f["table"], f["strategy"]) for f in figures] == [("table.jsonl", name) for name in STRATEGIES]


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_kept_table_is_whole_and_memory_is_scarce_in_it(path):
    table = load_table(path)
    plan = plan_of(table)
    assert {p.config for p in table.points} == set(plan.every_config())
    assert all(len(p.trials) == table.header.repeats == 2 for p in table.points)
    statuses = [t.status for p in table.points for t in p.trials]
    assert set(statuses) == {TrialStatus.COMPLETED, TrialStatus.OUT_OF_MEMORY}
    assert 60 <= len(table.points) <= 200


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_search_of_a_kept_table_asks_for_nothing_that_was_not_recorded(path):
    table = load_table(path)
    trials = STRATEGIES["search"](table, plan_of(table, max_trials=6))
    assert 2 <= len(trials) <= 7
    assert TrialStatus.INVALID not in {t.status for t in trials}
