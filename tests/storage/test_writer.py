"""Trials go to the lasting record as they end; what is wrong with it costs a search a line and nothing else."""

from __future__ import annotations

from unittest.mock import Mock

import optuna
import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    ScriptedRunner,
    make_budget,
    make_config,
    make_measurement,
    make_plan,
    make_result,
    make_space_file,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from search_events import Heard

from autotune.errors import RecordError
from autotune.search.tuner import Tuner
from autotune.storage.record import VARIABLE, Record
from autotune.storage.run_directory import RunDirectory
from autotune.storage.writer import MEMORY, RecordWriter, TrialConverter, record_writer
from autotune.units import GIB
from autotune.values.budget import SoakTask
from autotune.values.problem import TrialEnded
from autotune.values.trial import Memory, Purpose, TrialResult, TrialStatus

PLAN = make_plan(record=True)


@pytest.fixture
def database(tmp_path) -> Record:
    return Record(tmp_path / "record.journal")


@pytest.fixture
def heard() -> Heard:
    return Heard()


def ended(number: int = 0, **fields) -> TrialEnded:
    return TrialEnded(result=make_result(number=number, **fields), changes=())


def numbers(database: Record) -> list[int]:
    return [trial.request.number for search in database.searches() for trial in search.trials]


def load(directory: RunDirectory) -> optuna.Study:
    """The study of a run directory, as any program reads it."""
    storage = JournalStorage(JournalFileBackend(str(directory.path / "study.journal")))
    return optuna.load_study(study_name=None, storage=storage)


def numbers_in(directory: RunDirectory) -> list[int]:
    return [trial.user_attrs["trial"] for trial in load(directory).trials]


def test_a_trial_that_is_no_check_is_kept_when_it_ends_and_passed_on_with_what_a_user_knows_the_search_by(
    database, directory, heard
):
    recording = RecordWriter(database, PLAN, directory, heard)
    for number, purpose in enumerate((Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)):
        recording(ended(number, purpose=purpose))
        assert numbers(database) == numbers_in(directory) == [*range(number + 1)]
    recording(ended(3, purpose=Purpose.SOAK, task=SoakTask(eval_batch_sizes=(8,))))
    assert numbers(database) == numbers_in(directory) == [0, 1, 2]
    assert [event.result.request.number for event in heard] == [0, 1, 2, 3]
    (search,) = database.searches()
    assert (search.model, search.shape, search.device) == ("tiny", "causal-lm, sequence 128, batch 16", "a CPU")
    assert (search.run_directory, search.verdict) == (str(directory.path), None)


def test_all_that_was_measured_is_there_before_the_next_trial_begins_and_the_answer_in_the_end(
    database, directory, heard
):
    space = make_space_file({"precision": ["fp32", "bf16"]})
    plan = make_plan(record=True, space=space, budget=make_budget(finalists=1, max_trials=1))
    seen = []

    def answer(request):
        assert numbers(database) == (numbers_in(directory) if seen else []) == seen[: request.number]
        seen.append(request.number)
        return 20.0 if request.config.precision == "bf16" else 10.0

    recording = RecordWriter(database, plan, directory, heard)
    recording.end(Tuner(plan, directory, ScriptedRunner(directory.path, answer), recording).run())
    (search,) = database.searches()
    assert (search.verdict, search.best_config_id) == ("faster", make_config(precision="bf16").config_id)
    assert [t.request.purpose for t in search.trials] == ["baseline", "search", "final", "final", "final", "final"]
    study = load(directory)
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.user_attrs["search"]["verdict"] == "faster"
    assert (study.trials[1].value, study.trials[1].params) == (20.0, {"precision": "bf16"})
    assert [TrialResult.model_validate_json(t.user_attrs["result"]) for t in study.trials] == [
        r for r in directory.results() if r.request.task is None
    ]


def test_a_search_that_is_gone_on_with_is_the_same_one_and_keeps_what_was_missed(database, directory, heard):
    RecordWriter(database, PLAN, directory, heard)(ended(0))
    for number in (0, 1):  # it was killed before the second was kept
        directory.write_result(make_result(number=number))
    RecordWriter(database, PLAN, directory, heard)(ended(2))
    assert numbers(database) == numbers_in(directory) == [0, 1, 2]
    assert len(database.searches()) == 1


def test_earlier_searches_are_those_with_the_same_key_but_itself(database, tmp_path, heard):
    def search(name: str, plan) -> RecordWriter:
        (tmp_path / name).mkdir()
        plan = plan.model_copy(update={"search_id": name})
        recording = RecordWriter(database, plan, RunDirectory(tmp_path / name), heard)
        recording(ended())
        return recording

    first = search("first", PLAN)
    other = search("other", PLAN.model_copy(update={"facts": PLAN.facts.model_copy(update={"parameters": 7})}))
    second = search("second", PLAN.model_copy(update={"memory_bytes": 1 << 30}))
    assert [s.run_directory for s in second.earlier()] == [str(tmp_path / "first")]
    assert [s.run_directory for s in first.earlier()] == [str(tmp_path / "second")]
    assert other.earlier() == []


def test_a_record_that_can_not_be_reached_is_told_once_and_has_all_when_the_search_goes_on(
    database, directory, heard, monkeypatch
):
    away = Mock(side_effect=RecordError("db: can't be used: connection refused"))
    with monkeypatch.context() as fault:
        fault.setattr(database, "write", away)
        recording = RecordWriter(database, PLAN, directory, heard)
        for number in range(3):
            directory.write_result(make_result(number=number))
            recording(ended(number))
    assert away.call_count == 1
    (note,) = heard.notes
    assert note.startswith("the lasting record: db: can't be used: connection refused; the search goes on without it")
    assert note.endswith(f"once that is mended, `autotune resume '{directory.path}'` writes what is missing")
    assert numbers_in(directory) == [0, 1, 2]
    RecordWriter(database, PLAN, directory, heard)
    assert numbers(database) == [0, 1, 2]


def test_a_damaged_record_and_a_study_that_can_not_be_written_cost_a_line_each(tmp_path, directory, heard):
    (tmp_path / "record.journal").write_bytes(b"no journal\n" * 200)
    (directory.path / "study.journal").mkdir()
    recording = RecordWriter(Record(tmp_path / "record.journal"), PLAN, directory, heard)
    assert recording.earlier() == []
    for number in range(2):
        recording(ended(number))
    of_record, of_study = heard.notes
    assert "damaged" in of_record
    assert of_study.startswith("the study: ")


def test_a_mistake_of_ours_is_not_passed_over(database, directory, heard, monkeypatch):
    monkeypatch.setattr(database, "write", lambda *of: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        RecordWriter(database, PLAN, directory, heard)(ended())


@pytest.mark.parametrize(
    ("url", "record", "said", "is_made"),
    [
        ("sqlite:///{}/record.db", False, "", False),
        ("off", True, "", False),
        ("nosuch://host/db", True, f"the lasting record: {VARIABLE}: no URL", False),
        ("sqlite:///{}/record.db", True, "", True),
    ],
    ids=["by the user", "by the environment", "by a setting that can't be used", "on"],
)
def test_the_record_is_switched_off(directory, heard, monkeypatch, tmp_path, url, record, said, is_made):
    monkeypatch.setenv(VARIABLE, url.format(tmp_path))
    recording = record_writer(PLAN.model_copy(update={"record": record}), directory, heard)
    recording(ended())
    assert recording.earlier() == []
    assert any(isinstance(event, TrialEnded) for event in heard)
    assert len(heard.notes) == bool(said)
    assert "".join(heard.notes).startswith(said)
    assert (tmp_path / "record.db").exists() == is_made


# Trials of a study as results, and results as trials of a study.

PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "per_device_train_batch_size": {"choices": "lattice"},
    "adapter": [None, "lora"],
    "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
}
CONFIG = make_config(2, precision="bf16", adapter={"rank": 64})


SPACE_PLAN = make_plan(space=make_space_file(PARAMETERS), memory_bytes=2 * GIB)
PARAMS = SPACE_PLAN.search_space.choices_of


@pytest.fixture
def trials() -> TrialConverter:
    return TrialConverter(SPACE_PLAN)


def test_every_legal_configuration_is_that_of_its_parameters(trials):
    every = SPACE_PLAN.every_config()
    assert [trials.config(PARAMS(config)) for config in every] == every


@pytest.mark.parametrize(
    ("outcome", "state", "value", "constraints"),
    [
        (make_measurement(12.0, memory=Memory(resident_bytes=GIB)), TrialState.COMPLETE, 12.0, {"memory": -0.5}),
        (OUT_OF_MEMORY, TrialState.PRUNED, None, {"memory": 0.01}),
        (CRASHED, TrialState.FAIL, None, {}),
    ],
    ids=["completed", "out of memory", "crashed"],
)
def test_a_trial_is_told_with_its_throughput_and_its_headroom(trials, outcome, state, value, constraints):
    frozen = trials.frozen(make_result(CONFIG, outcome))
    assert (frozen.state, frozen.value, frozen.constraints) == (state, value, constraints)
    assert frozen.params == PARAMS(CONFIG)


def told(trials: TrialConverter, state: TrialState, value: float | None = None, config=CONFIG, **constraints: float):
    """A finished trial of a study that knows nothing of autotune."""
    params = PARAMS(config)
    distributions = {name: trials.distributions[name] for name in params}
    known = {"state": state, "value": value, "constraints": constraints}
    trial = optuna.create_trial(params=params, distributions=distributions, **known)
    trial.number = 0
    return trial


def test_value_and_constraint_are_samples_per_second_and_peak_memory(trials):
    result = trials.result(told(trials, TrialState.COMPLETE, 8.0, **{MEMORY: -0.25}))
    assert (result.request.config, result.request.purpose) == (CONFIG, Purpose.SEARCH)
    assert result.measurement.samples_per_second == 8.0
    assert result.measurement.step_times_s == (2.0,)  # 16 samples
    assert result.measurement.memory.peak_bytes == 1.5 * GIB
    of_baseline = trials.result(told(trials, TrialState.COMPLETE, 8.0, make_config()))
    assert of_baseline.request.purpose is Purpose.BASELINE


@pytest.mark.parametrize(
    ("state", "value", "constraints", "status"),
    [
        (TrialState.PRUNED, None, {"memory": 0.1}, TrialStatus.OUT_OF_MEMORY),
        (TrialState.PRUNED, None, {}, TrialStatus.TIMED_OUT),
        (TrialState.COMPLETE, 8.0, {"memory": 0.1}, TrialStatus.OUT_OF_MEMORY),
        (TrialState.FAIL, None, {}, TrialStatus.CRASHED),
        (TrialState.COMPLETE, 0.0, {}, TrialStatus.CRASHED),
    ],
)
def test_what_did_not_run_or_broke_a_constraint_has_failed(trials, state, value, constraints, status):
    assert trials.result(told(trials, state, value, **constraints)).status is status


def test_a_trial_without_a_parameter_of_the_space_is_not_ours(trials):
    assert not trials.is_ours(optuna.create_trial(state=TrialState.FAIL))
    assert trials.is_ours(told(trials, TrialState.FAIL))
