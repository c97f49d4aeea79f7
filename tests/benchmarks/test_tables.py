"""The table of a recorded space: what it keeps of a trial, and what a broken file is told."""

import math

import pytest
from factories import CRASHED, OUT_OF_MEMORY, make_config, make_measurement, make_plan, make_result
from pydantic import ValidationError
from searching.tables import RecordedPoint, Table, TableTrial, load_table, table_of, write_table

from autotune.errors import InputError
from autotune.values.trial import Interval, Memory, TrialStatus

FAST, SLOW, LARGE = make_config(8), make_config(4), make_config(16)


@pytest.fixture
def table() -> Table:
    """Three points: two of them measured twice, one of which ran out of memory."""
    unsure = make_measurement(12.0, samples_per_second_interval=Interval(low=0.0, high=math.inf))
    results = [
        make_result(FAST, unsure, number=0, duration_s=3.0),
        make_result(LARGE, OUT_OF_MEMORY, number=1, duration_s=1.0),
        make_result(SLOW, 5.0, number=2),
        make_result(LARGE, OUT_OF_MEMORY, number=3, duration_s=2.0),
        make_result(FAST, 8.0, number=4, duration_s=4.0),
    ]
    return table_of(make_plan(), results)


@pytest.fixture
def path(table, tmp_path):
    write_table(table, tmp_path / "table.jsonl")
    return tmp_path / "table.jsonl"


def test_a_table_survives_its_file(table, path):
    assert load_table(path) == table


def test_a_file_has_a_line_for_the_header_and_one_per_point(path):
    assert len(path.read_text().splitlines()) == 1 + 3


def test_points_stand_in_the_order_in_which_they_first_ran(table):
    assert [p.config for p in table.points] == [FAST, LARGE, SLOW]
    assert [[t.number for t in p.trials] for p in table.points] == [[0, 4], [1, 3], [2]]


def test_a_trial_gives_back_the_outcome_it_was_recorded_with():
    measured = make_result(FAST, 12.0)
    assert TableTrial.of(measured).outcome == measured.outcome
    failed = make_result(FAST, OUT_OF_MEMORY.model_copy(update={"memory": Memory(resident_bytes=5)}))
    assert TableTrial.of(failed).outcome == failed.outcome


def test_the_log_of_a_failure_is_not_kept():
    failed = make_result(FAST, CRASHED.model_copy(update={"log_tail": "File /home/somebody/secret.py"}))
    assert TableTrial.of(failed).outcome == CRASHED


def test_the_throughput_of_a_point_is_the_mean_of_its_completed_trials(table):
    assert [p.samples_per_second for p in table.points] == [10.0, None, 5.0]


def test_a_point_needs_a_trial():
    with pytest.raises(ValidationError):
        RecordedPoint(config=FAST, trials=())


@pytest.mark.parametrize(
    "fields",
    [
        {"status": TrialStatus.COMPLETED},
        {"status": TrialStatus.CRASHED},
        {"status": TrialStatus.COMPLETED, "measurement": make_measurement(), "cause": "none"},
        {"status": TrialStatus.CRASHED, "measurement": make_measurement(), "cause": "it broke"},
    ],
)
def test_a_trial_has_either_a_measurement_or_a_cause(fields):
    with pytest.raises(ValidationError, match="a completed trial has a measurement, any other a cause"):
        TableTrial(number=0, duration_s=1.0, **fields)


BROKEN = {
    "empty": (lambda lines: [], "empty"),
    "header alone": (lambda lines: lines[:1], "without any point"),
    "header missing": (lambda lines: lines[1:], "line 1: no header of a table"),
    "newer schema": (
        lambda lines: [lines[0].replace('"schema_version":1', '"schema_version":2'), *lines[1:]],
        "schema",
    ),
    "cut off": (lambda lines: [*lines[:3], lines[3][:100]], "line 4: no point of a table"),
    "not JSON": (lambda lines: [lines[0], "words", *lines[1:]], "line 2"),
    "unknown field": (lambda lines: [lines[0], lines[1].replace('"config"', '"knobs"')], "line 2"),
    "without measurement": (lambda lines: [lines[0], lines[2].replace("out of memory", "completed")], "a measurement"),
    "same point twice": (lambda lines: [*lines, lines[2]], "line 5: the configuration of line 3 again"),
}


@pytest.mark.parametrize(("change", "said"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_table_is_refused_in_one_line_that_says_where(path, change, said):
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(InputError) as error:
        load_table(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.jsonl: No such file"):
        load_table(tmp_path / "nothing.jsonl")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "table.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="line 1: no header"):
        load_table(tmp_path / "table.jsonl")
