"""A plan that is resumed: other limits, other files, what runs again."""

import os

import pytest
from exporting import answer_of
from factories import VERSIONS, make_budget, make_config, make_gpu, make_hardware, make_plan, make_result, make_workload

from autotune.errors import InputError, MachineError
from autotune.planning import plan as plans
from autotune.planning.options import SearchOptions
from autotune.space.file import load_space
from autotune.values.budget import Budget, Effort
from autotune.values.config import Allowance
from autotune.values.problem import Fleet
from autotune.values.techniques import LoraAdapter
from autotune.values.trial import Purpose

RESULTS = [
    make_result(make_config(), 10.0, number=0, purpose=Purpose.BASELINE),
    make_result(make_config(16), 20.0, number=1),
    make_result(make_config(16), 20.0, number=2, purpose=Purpose.FINAL),
]


def make(**fields):
    defaults = {"budget": Budget.of(Effort.QUICK), "options": SearchOptions(model="gpt2", effort=Effort.QUICK)}
    return make_plan(**{**defaults, **fields})


def test_a_limit_that_is_given_takes_the_place_of_the_old_one_and_no_other_does():
    plan = make()
    later = plan.reopened(RESULTS, max_time_s=1200.0)
    assert later.budget == plan.budget.model_copy(update={"max_time_s": 1200.0})
    assert later.options == plan.options.model_copy(update={"max_time_s": 1200.0})
    again = later.reopened(RESULTS, max_trials=50)
    assert (again.budget.max_time_s, again.loss_steps) == (1200.0, 0)


def test_effort_stands_for_all_limits_but_those_given_with_it_and_decides_whether_losses_are_compared():
    plan = make().reopened(RESULTS, max_time_s=1200.0)
    later = plan.reopened(RESULTS, effort=Effort.STANDARD)
    assert (later.budget, later.loss_steps) == (Budget.of(Effort.STANDARD), 20)
    later = plan.reopened(RESULTS, effort=Effort.STANDARD, max_trials=7)
    assert later.budget == Budget.of(Effort.STANDARD).limited(max_trials=7)
    assert (later.options.effort, later.options.max_trials, later.options.max_time_s) == ("standard", 7, None)


def test_with_more_time_a_trial_may_take_as_long_as_its_effort_lets_it():
    plan = make(budget=Budget.of(Effort.QUICK).limited(max_time_s=30.0))
    assert plan.budget.trial_timeout_s == 30.0
    assert plan.reopened(RESULTS, max_time_s=600.0).budget.trial_timeout_s == Budget.of(Effort.QUICK).trial_timeout_s


def test_a_plan_is_changed_by_what_is_given_alone():
    plan = make()
    assert plan.reopened(RESULTS) is plan
    assert plan.reopened(RESULTS, effort=Effort.QUICK, max_time_s=plan.budget.max_time_s) is plan
    there = plan.reopened(RESULTS, output="/here.json")
    assert there.reopened(RESULTS, max_trials=50).output == "/here.json"
    assert there.reopened(RESULTS, output="/there.json").output == "/there.json"
    assert make(options=None, budget=make_budget(max_trials=5)).reopened(RESULTS, max_trials=9).budget.max_trials == 9


def test_a_search_is_over_once_its_finals_have_begun_and_until_it_is_given_more():
    later = make().reopened(RESULTS, max_time_s=1200.0)
    assert [make().is_over(RESULTS), make().is_over(RESULTS[:2]), later.is_over(RESULTS)] == [True, False, False]
    assert (later.reopened_at, make().reopened([], max_time_s=1200.0).reopened_at) == (3, 0)


def test_an_earlier_winner_is_tried_if_it_trains_the_same_and_may_be_tried():
    wins = make_config(4)
    assert make_plan().with_earlier(answer_of(wins)).against == wins
    longer = answer_of(wins, workload=make_workload(sequence_length=8192))
    with pytest.raises(InputError, match=r"can't be tried: it trained something else: sequence length 8192 and \d+$"):
        make_plan().with_earlier(longer)
    with pytest.raises(InputError, match="--against: its winner can't be tried: changes the method"):
        make_plan(allowance=Allowance.OPTIMIZER).with_earlier(answer_of(make_config(4, adapter=LoraAdapter())))
    quick = make_plan(budget=make_budget(effort=Effort.QUICK), space=load_space("cpu"))
    with pytest.raises(InputError, match="its winner can't be tried: compile=inductor: no choice of this search"):
        quick.with_earlier(answer_of(make_config(4, torch_compile_backend="inductor")))


def test_another_machine_is_refused_and_other_versions_are_told(monkeypatch):
    monkeypatch.setattr("autotune.values.hardware.detect", lambda device: make_hardware(versions=versions))
    versions = {"torch": "2.12.0", "transformers": "5.23.0"}
    assert make_plan().changed_packages() == [
        "since the search: bitsandbytes 0.49.0 is now gone, torch 2.13.0 is now 2.12.0"
    ]
    assert make_plan(fleet=Fleet(workers=2)).changed_packages() == []
    versions = VERSIONS
    assert make_plan(hardware=make_hardware(free_bytes=1)).changed_packages() == []
    with pytest.raises(MachineError, match="go on where it ran"):
        make_plan(hardware=make_gpu()).changed_packages()


@pytest.mark.parametrize("most", [64 << 20, 0], ids=["by a digest", "by size and time"])
def test_files_that_are_others_since_the_search_began_are_told(tmp_path, monkeypatch, most):
    monkeypatch.setattr(plans, "_MOST_HASHED_BYTES", most)
    data = tmp_path / "texts.jsonl"
    data.write_text("one")
    os.utime(data, (1000, 1000))
    plan = make_plan(workload=make_workload(dataset=str(data))).with_files()
    assert plan.changed_files() == []
    if most:  # a small file that was only touched is the same
        os.utime(data, (0, 0))
        assert plan.changed_files() == []
    data.write_text("two" if most else "three")
    os.utime(data, (1000, 1000))  # as a restored copy has it
    (line,) = plan.changed_files()
    assert line.startswith(f"since the search: {data} has changed; ")
    data.unlink()
    assert plan.changed_files() == []
