"""A whole space recorded, with trials that take no time; and the plan that replays it."""

import itertools
from pathlib import Path

import pytest
from factories import (
    OUT_OF_MEMORY,
    Clock,
    ScriptedRunner,
    make_budget,
    make_config,
    make_plan,
    make_result,
    make_space_file,
    make_spec,
    make_workload,
    product_rate,
)

from autotune.errors import InputError, NothingFitsError
from autotune.planning.plan import SearchPlan
from autotune.search.exhaustive import plan_of, table_of
from autotune.search.tuner import SearchInterrupted, Tuner
from autotune.space.file import load_space
from autotune.storage.run_directory import TABLE_FILE, RunDirectory
from autotune.tuning_result import TuningResult
from autotune.units import GIB
from autotune.values.budget import Effort
from autotune.values.events import Event, Note
from autotune.values.knob import Allowance
from autotune.values.recorded_table import Table, load_table
from autotune.values.trial import Outcome, Purpose, TrialRequest, TrialStatus

BASE = make_config()
PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "per_device_train_batch_size": {"choices": "lattice"},
    "optim": ["adamw_torch_fused", "adafactor"],
}
POINTS = 20

rate = product_rate(
    {
        "precision": {"fp32": 1.0, "bf16": 1.3},
        "optim": {"adamw_torch_fused": 1.0, "adafactor": 0.9},
        "per_device_train_batch_size": {1: 5.0, 2: 7.0, 4: 8.5, 8: 10.0, 16: 0.1},
    }
)


def memory_bound(request: TrialRequest) -> Outcome | float:
    """Only a micro-batch of 4 fits, so that many easier points rule out harder ones."""
    return OUT_OF_MEMORY if request.config.per_device_train_batch_size > 4 else rate(request)


class Recording:
    """One recording in one run directory, which can be stopped and gone on with."""

    def __init__(self, directory: Path, outcome=rate, *, duration_s: float = 10.0, **plan) -> None:
        defaults = {"space": make_space_file(PARAMETERS), "baseline": BASE, "exhaustive": True}
        self.plan: SearchPlan = make_plan(**{**defaults, **plan})
        self.directory = directory
        self.events: list[Event] = []
        self.clock = Clock()
        self._outcome = outcome
        self._duration_s = duration_s

    def run(self, *, stop_after: int | None = None) -> TuningResult:
        runs = itertools.count()

        def outcome(request: TrialRequest) -> Outcome | float:
            if next(runs) == stop_after:
                raise KeyboardInterrupt
            return self._outcome(request)

        self.runner = ScriptedRunner(
            self.directory, outcome, duration_s=lambda request: self._duration_s, clock=self.clock
        )
        run_directory = RunDirectory(self.directory)
        return Tuner(self.plan, run_directory, self.runner, self.events.append, clock=self.clock).run()

    @property
    def table(self) -> Table:
        return load_table(self.directory / TABLE_FILE)

    @property
    def finished(self) -> list[TrialRequest]:
        return [r.request for r in RunDirectory(self.directory).results()]

    @property
    def said(self) -> str:
        return "\n".join(e.text for e in self.events if isinstance(e, Note))


@pytest.fixture
def recording(tmp_path):
    """Return a function that makes the recording of the test."""
    return lambda *args, **fields: Recording(tmp_path, *args, **fields)


@pytest.mark.parametrize("outcome", [rate, memory_bound])
def test_every_legal_point_runs_once_whatever_the_others_gave(recording, outcome):
    run = recording(outcome)
    run.run()
    space = run.plan.search_space()
    configs = [r.config for r in run.finished]
    assert len(configs) == len(set(configs)) == POINTS
    assert set(configs) == {space.config(point) for point in space.points()}
    assert {p.config for p in run.table.points} == set(configs)


def test_there_are_no_finals(recording):
    run = recording()
    assert run.run().verdict == "unconfirmed"
    purposes = [r.purpose for r in run.finished]
    assert purposes == [Purpose.BASELINE] + [Purpose.SEARCH] * (POINTS - 1)


def test_the_answer_is_the_best_of_all(recording):
    assert recording().run().best.config == make_config(8, precision="bf16")


def test_a_baseline_that_the_space_forbids_is_measured_too(recording):
    rule = {"forbid": {"precision": ["fp32"], "per_device_train_batch_size": [8, 16]}, "reason": "too slow"}
    run = recording(space=make_space_file(PARAMETERS, [rule]))
    run.run()
    assert run.table.points[0].config == BASE
    assert len(run.table.points) == POINTS - 4 + 1


def test_only_what_the_allowance_admits_is_measured(recording):
    run = recording(allowance=Allowance.EXACT)
    run.run()
    assert {p.config.per_device_train_batch_size for p in run.table.points} == {1, 2, 4, 8, 16}
    assert {(p.config.precision, p.config.optim) for p in run.table.points} == {("fp32", "adamw_torch_fused")}


def test_repeats_come_in_rounds_each_in_an_order_of_its_own(recording):
    run = recording(repeats=3)
    run.run()
    configs = [r.config for r in run.finished]
    rounds = [configs[at : at + POINTS] for at in range(0, 3 * POINTS, POINTS)]
    assert all(len(set(one)) == POINTS and one[0] == BASE for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert all(len(p.trials) == 3 for p in run.table.points)


def test_no_trial_has_a_time_limit_but_its_own(recording):
    run = recording(budget=make_budget(trial_timeout_s=300.0))
    run.run()
    assert {r.limits.timeout_s for r in run.finished} == {300.0}


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 7, 25])
def test_a_stopped_recording_leaves_its_table_and_goes_on_without_running_anything_again(recording, stop_after):
    whole = [r.config for r in _whole(recording(repeats=2).plan)]
    run = recording(repeats=2)
    with pytest.raises(SearchInterrupted):
        run.run(stop_after=stop_after)
    assert sum(len(p.trials) for p in run.table.points) == stop_after
    run.run()
    assert len(run.runner.requests) == 2 * POINTS - stop_after
    assert [r.config for r in run.finished] == whole


def _whole(plan: SearchPlan) -> list[TrialRequest]:
    """The trials of a recording that nobody stops."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        run = Recording(Path(scratch), repeats=plan.repeats)
        run.run()
        return run.finished


def test_what_was_stopped_before_its_first_trial_has_no_table(recording):
    run = recording()
    with pytest.raises(SearchInterrupted):
        run.run(stop_after=0)
    assert not (run.directory / TABLE_FILE).exists()


def test_the_table_can_always_be_made_again_from_the_results(recording):
    run = recording()
    run.run()
    before = run.table
    (run.directory / TABLE_FILE).unlink()
    run.run()
    assert run.runner.requests == []
    assert run.table.points == before.points


def test_a_table_in_which_nothing_fits_is_written_all_the_same(recording):
    run = recording(lambda request: OUT_OF_MEMORY)
    with pytest.raises(NothingFitsError):
        run.run()
    assert {t.status for p in run.table.points for t in p.trials} == {TrialStatus.OUT_OF_MEMORY}
    assert len(run.table.points) == POINTS


@pytest.mark.parametrize("limits", [{"max_trials": 5}, {"max_time_s": 65.0, "trial_timeout_s": 60.0}])
def test_limits_that_were_given_hold(recording, limits):
    run = recording(budget=make_budget(**limits))
    run.run()
    assert len(run.finished) == 6
    assert "14 trials were not run" in run.said


def test_how_long_it_will_take_is_said_once_a_few_trials_are_known(recording):
    run = recording()
    run.run()
    assert "15 trials to go: some 2 min 30 s at the 10.0 s of those so far" in run.said
    assert run.said.count("to go") == 1
    assert str(run.directory / TABLE_FILE) in run.said


def test_a_table_holds_no_path_of_this_machine(tmp_path):
    spec = make_spec(reference="/home/me/tiny", source="directory", path="/home/me/tiny")
    plan = make_plan(workload=make_workload(model=spec, dataset="/home/me/texts.jsonl"))
    table = table_of(plan, [make_result(BASE)])
    assert "/home" not in table.model_dump_json()
    assert (table.header.workload.model.name, table.header.workload.dataset) == ("tiny", "texts.jsonl")


def test_finals_are_no_part_of_a_table():
    results = [make_result(BASE), make_result(BASE, 20.0, number=1, purpose=Purpose.FINAL)]
    (point,) = table_of(make_plan(), results).points
    assert [t.number for t in point.trials] == [0]


def recorded(**plan) -> Table:
    return table_of(make_plan(**plan), [make_result(BASE)])


def test_a_replay_is_planned_as_it_was_recorded():
    plan = make_plan(memory_bytes=5 * GIB, allowance=Allowance.NUMERICS, exhaustive=True, repeats=2)
    found = plan_of(table_of(plan, [make_result(BASE)]))
    for name in ("workload", "facts", "hardware", "memory_bytes", "allowance", "baseline"):
        assert getattr(found, name) == getattr(plan, name)
    assert not found.exhaustive
    assert found.budget.effort is Effort.STANDARD


@pytest.mark.parametrize("effort", list(Effort))
def test_the_space_of_a_replay_is_the_recorded_one_whatever_the_effort(effort):
    table = recorded(space=load_space("cpu"), budget=make_budget(effort=Effort.QUICK))
    names = [d.name for d in plan_of(table, effort=effort).search_space().dimensions]
    assert "precision" in names
    assert "torch_compile_backend" not in names
    wider = recorded(space=load_space("cpu"), budget=make_budget(effort=Effort.STANDARD))
    assert "torch_compile_backend" in [d.name for d in plan_of(wider, effort=effort).search_space().dimensions]


def test_a_replay_has_limits_and_a_seed_of_its_own():
    plan = plan_of(recorded(), effort=Effort.QUICK, seed=7, memory_bytes=GIB, max_trials=3, max_time_s=30.0)
    assert (plan.workload.seed, plan.memory_bytes) == (7, GIB)
    assert (plan.budget.max_trials, plan.budget.max_time_s, plan.budget.trial_timeout_s) == (3, 30.0, 30.0)


def test_what_needs_more_than_was_recorded_with_can_not_be_replayed():
    with pytest.raises(InputError, match=r"--memory 9\.00 GiB: the table was recorded within 8\.00 GiB"):
        plan_of(recorded(), memory_bytes=9 * GIB)


def test_a_space_that_can_not_be_read_is_refused_in_one_line():
    table = recorded()
    header = table.header.model_copy(update={"space": {"name": "mine"}})
    with pytest.raises(InputError, match="the table's space can't be read: description: is missing"):
        plan_of(table.model_copy(update={"header": header}))
