"""The study: persistent, told everything once, proposing points of the space."""

import pytest
from factories import CRASHED, OUT_OF_MEMORY, make_config, make_measurement, make_result, make_space, read_study
from optuna.trial import FrozenTrial, TrialState

from autotune.search.study import STUDY_FILE, Study
from autotune.space.space import SearchSpace
from autotune.units import GIB
from autotune.values.trial import Memory

CAPACITY = 2 * GIB

PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "per_device_train_batch_size": {"choices": "lattice"},
    "adapter": [None, "lora"],
    "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
}


@pytest.fixture
def space() -> SearchSpace:
    return make_space(PARAMETERS)


@pytest.fixture
def open_study(tmp_path, space):
    """Return a function that opens the one study of the test, again and again."""
    return lambda: Study(tmp_path, space, capacity_bytes=CAPACITY, seed=1)


@pytest.fixture
def trials(tmp_path):
    """Return a function that reads the study's trials off the disk."""

    def read() -> list[FrozenTrial]:
        return read_study(tmp_path).trials

    return read


def test_a_proposal_is_what_is_asked(open_study, space):
    point = space.complete(space.point(make_config(2, precision="bf16")))
    assert open_study().ask(point).point == point


def test_a_proposal_with_an_adapter_is_what_is_asked(open_study, space):
    point = space.complete({"adapter": "lora", "adapter.rank": 64})
    assert open_study().ask(point).point == point


def test_every_legal_point_can_be_proposed(open_study, space):
    study = open_study()
    for point in space.points():
        assert study.ask(point).point == point


def test_the_samplers_points_lie_in_the_space(open_study, space):
    study, points = open_study(), []
    for number in range(25):
        asked = study.ask()
        points.append(asked.point)
        assert space.complete(asked.point) == asked.point
        for dimension in space.dimensions:
            assert asked.point.get(dimension.name) in (*dimension.choices, None)
        study.tell(asked, make_result(space.config(asked.point), 10.0 + number, number=number))
    assert len({space.config(point) for point in points}) > 3


def test_the_best_of_the_study_is_the_fastest(open_study, tmp_path):
    study = open_study()
    for number, rate in enumerate((10.0, 30.0, 20.0)):
        study.tell(study.ask(), make_result(outcome=rate, number=number))
    read = read_study(tmp_path)
    assert read.best_trial.user_attrs["trial"] == 1


def test_a_completed_trial_is_told_with_its_throughput_and_its_headroom(open_study, trials):
    study = open_study()
    measured = make_measurement(12.0, memory=Memory(resident_bytes=GIB))
    study.tell(study.ask(), make_result(outcome=measured, number=5))
    (trial,) = trials()
    assert (trial.state, trial.value) == (TrialState.COMPLETE, 12.0)
    assert trial.constraints == {"memory": -0.5}
    assert trial.user_attrs == {"trial": 5, "status": "completed"}


def test_running_out_of_memory_is_told_as_pruned_beyond_the_capacity(open_study, trials):
    study = open_study()
    study.tell(study.ask(), make_result(outcome=OUT_OF_MEMORY))
    (trial,) = trials()
    assert (trial.state, trial.value) == (TrialState.PRUNED, None)
    assert trial.constraints["memory"] > 0


def test_a_crash_is_told_as_failed_without_a_constraint(open_study, trials):
    study = open_study()
    study.tell(study.ask(), make_result(outcome=CRASHED))
    (trial,) = trials()
    assert (trial.state, trial.constraints) == (TrialState.FAIL, {})


def test_what_is_refused_is_not_told_as_if_measured(open_study, trials):
    study = open_study()
    study.refuse(study.ask(), "illegal")
    (trial,) = trials()
    assert (trial.state, trial.constraints) == (TrialState.FAIL, {})
    assert trial.user_attrs == {"status": "refused: illegal"}


def test_a_study_goes_on_where_it_was(open_study, trials):
    study = open_study()
    study.tell(study.ask(), make_result())
    again = open_study()
    again.tell(again.ask(), make_result(number=1))
    assert [t.user_attrs["trial"] for t in trials()] == [0, 1]


def test_results_are_told_once_however_often_a_search_is_recovered(open_study, trials):
    results = [
        make_result(make_config(1), 10.0),
        make_result(make_config(2), OUT_OF_MEMORY, number=1),
        make_result(make_config(4, adapter={"rank": 64}), CRASHED, number=2),
    ]
    study = open_study()
    study.tell(study.ask(), results[0])
    for _ in range(2):
        open_study().recover(results)
    assert [t.user_attrs["trial"] for t in trials()] == [0, 1, 2]


def test_a_recovered_result_is_what_would_have_been_told(open_study, trials, space):
    config = make_config(2, precision="bf16", adapter={"rank": 64})
    study = open_study()
    for number, outcome in enumerate((10.0, OUT_OF_MEMORY, CRASHED)):
        study.tell(study.ask(space.complete(space.point(config))), make_result(config, outcome, number=number))
        study.recover([make_result(config, outcome, number=number + 10)])
        told, recovered = trials()[-2:]
        assert (told.state, told.value, told.params) == (recovered.state, recovered.value, recovered.params)
        assert told.constraints == recovered.constraints
        assert told.distributions == recovered.distributions


def test_what_a_killed_search_left_running_is_closed(open_study, trials):
    open_study().ask()
    open_study().recover([])
    assert [t.state for t in trials()] == [TrialState.FAIL]


def test_a_result_whose_trial_was_left_running_is_told(open_study, trials):
    """The search was killed between the number and the value."""
    asked = open_study().ask()
    asked.trial.set_user_attr("trial", 0)
    open_study().recover([make_result()])
    assert [t.state for t in trials()] == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_proposal_that_a_killed_search_left_waiting_is_not_taken_for_the_next(open_study, trials, space, tmp_path):
    open_study()
    left = read_study(tmp_path)
    left.enqueue_trial({"precision": "bf16", "per_device_train_batch_size": 1, "adapter": None})
    study = open_study()
    study.recover([])
    assert [t.state for t in trials()] == [TrialState.FAIL]
    point = space.complete(space.point(make_config(16)))
    assert study.ask(point).point == point


@pytest.mark.parametrize("left", [b"what a power cut left\n" * 100, b'{"op_code": 99}\n', b"\x00" * 4096 + b"\n"])
def test_a_file_that_is_no_journal_is_put_aside_and_the_results_told_again(open_study, trials, tmp_path, left):
    (tmp_path / STUDY_FILE).write_bytes(left)
    open_study().recover([make_result()])
    assert [t.state for t in trials()] == [TrialState.COMPLETE]
    assert (tmp_path / STUDY_FILE).with_suffix(".broken").read_bytes() == left


def test_half_a_line_and_the_lock_of_a_killed_search_are_taken_away(open_study, trials, tmp_path):
    open_study().recover([make_result()])
    with (tmp_path / STUDY_FILE).open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    (tmp_path / f"{STUDY_FILE}.lock").symlink_to(tmp_path / STUDY_FILE)
    study = open_study()
    study.tell(study.ask(), make_result(number=1))
    assert [t.state for t in trials()] == [TrialState.COMPLETE, TrialState.COMPLETE]
