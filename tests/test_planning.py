"""From the user's words to a plan: every default is said, and what can't be is refused before the first trial."""

import json

import pytest
from factories import make_facts
from pydantic import ValidationError

from autotune.architecture import Task
from autotune.config import Allowance, Budget, Effort
from autotune.errors import InputError
from autotune.files import read_value, write_value
from autotune.planning import Options, Outline, SearchPlan, complete, machine_notes, outline
from autotune.units import GIB


def outlined(**options) -> Outline:
    return outline(Options(**{"model": "gpt2", "device": "cpu", **options}))


def planned(facts=None, **options) -> SearchPlan:
    found = outlined(**options)
    return complete(found, facts or make_facts(task=found.workload.task), found.workload, ())


@pytest.fixture
def arguments(tmp_path):
    """Return a function that writes TrainingArguments to a file and gives its name."""

    def write(**document) -> str:
        (tmp_path / "args.json").write_text(json.dumps(document))
        return str(tmp_path / "args.json")

    return write


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 0),
        ("target_len", -1),
        ("global_batch", 0),
        ("global_batch", "many"),
        ("memory_bytes", 0),
        ("max_trials", 0),
        ("repeat", 0),
        ("max_time_s", 0.0),
        ("max_time_s", float("inf")),
        ("max_time_s", float("nan")),
        ("allow", "everything"),
        ("effort", "enormous"),
    ],
)
def test_options_out_of_range_are_refused_when_made(field, value):
    with pytest.raises(ValidationError, match=field):
        Options(model="gpt2", **{field: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "gpt-two"}, "gpt"),
        ({"task": "chess"}, "--task chess: expected one of causal-lm"),
        ({"data": "nothing.jsonl"}, "--data nothing.jsonl: no such file"),
        ({"text_field": "text"}, "--text-field: needs --data"),
        ({"target_len": 5}, "--target-len: the task causal-lm has no decoder targets"),
        ({"memory_bytes": 1 << 60}, "--memory"),
        ({"baseline": "nothing.json"}, "--baseline nothing.json: No such file"),
        ({"space": "defualt"}, "did you mean 'default'?"),
        ({"device": "tpu"}, "--device tpu"),
        ({"repeat": 2}, "--repeat 2: needs --exhaustive"),
    ],
)
def test_what_can_not_be_used_is_refused_in_one_line(options, said):
    with pytest.raises(InputError) as error:
        outlined(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_every_default_that_decides_the_figures_is_said():
    notes = "\n".join(outlined().notes)
    for word in ("tuning for the CPU", "sequence length 128", "global batch 16 samples", "memory budget"):
        assert word in notes


def test_what_the_user_says_is_not_said_again():
    notes = "\n".join(outlined(seq_len=64, global_batch=8, memory_bytes=GIB).notes)
    for word in ("sequence length", "global batch", "memory budget"):
        assert word not in notes


def test_what_the_user_asks_for_is_planned():
    plan = planned(seq_len=64, global_batch=8, memory_bytes=GIB, allow=Allowance.EXACT, seed=7)
    assert (plan.workload.sequence_length, plan.workload.global_batch_size, plan.workload.seed) == (64, 8, 7)
    assert (plan.memory_bytes, plan.allowance) == (GIB, Allowance.EXACT)
    assert plan.baseline.per_device_train_batch_size == 8


def test_the_default_budget_leaves_a_margin_of_the_free_memory():
    found = outlined()
    assert 0.8 * found.hardware.free_bytes < found.memory_bytes < found.hardware.free_bytes


def test_a_free_global_batch_is_said_to_compare_what_learns_differently():
    found = outlined(global_batch="any")
    assert found.workload.global_batch_size is None
    assert any("the global batch is free" in note for note in found.notes)


def test_the_global_batch_of_given_arguments_is_theirs(arguments):
    plan = planned(baseline=arguments(per_device_train_batch_size=4, gradient_accumulation_steps=6))
    assert plan.workload.global_batch_size == 24
    assert plan.baseline.per_device_train_batch_size == 4


def test_a_global_batch_beside_other_arguments_must_agree_with_them(arguments):
    path = arguments(per_device_train_batch_size=4)
    assert outlined(baseline=path, global_batch=4).workload.global_batch_size == 4
    with pytest.raises(InputError, match="--global-batch 64: the baseline's is 4"):
        outlined(baseline=path, global_batch=64)


def test_fixed_arguments_of_the_user_are_part_of_the_workload(arguments):
    found = outlined(baseline=arguments(learning_rate=1e-3, bf16=True))
    assert found.workload.fixed_arguments == {"learning_rate": 1e-3}


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(InputError, match=r"--seq-len 128: .*gpt2 has 100 positions; use at most that"):
        planned(facts=make_facts(max_sequence_length=100), model="gpt2")


def test_a_target_longer_than_the_model_is_refused():
    with pytest.raises(InputError, match=r"--target-len 300: .* has 256 positions"):
        planned(facts=make_facts(max_sequence_length=256), model="t5-small", target_len=300)


def test_the_target_is_as_long_as_the_source_by_default():
    assert outlined(model="t5-small", seq_len=40).workload.target_length == 40
    assert outlined(model="gpt2", seq_len=40).workload.target_length is None


def test_limits_of_the_user_replace_those_of_the_effort():
    budget = outlined(effort=Effort.QUICK, max_trials=3, max_time_s=20).budget
    assert (budget.max_trials, budget.max_time_s, budget.trial_timeout_s) == (3, 20, 20)
    assert budget.measure_steps == Budget.of(Effort.QUICK).measure_steps


def test_a_recording_has_no_limits_but_those_that_are_given():
    plan = planned(exhaustive=True, repeat=2, effort=Effort.QUICK)
    trials = 2 * len(plan.every_config())
    assert (plan.exhaustive, plan.repeats, plan.budget.max_trials) == (True, 2, trials)
    assert plan.budget.max_time_s > trials * plan.budget.trial_timeout_s
    limited = planned(exhaustive=True, max_trials=3, max_time_s=20).budget
    assert (limited.max_trials, limited.max_time_s, limited.trial_timeout_s) == (3, 20, 20)


def test_how_much_there_is_to_record_is_said_first():
    plan = planned(exhaustive=True, repeat=2, effort=Effort.QUICK)
    expected = f"{len(plan.every_config())} points to measure, each 2 times: roughly "
    assert any(note.startswith(expected) for note in plan.notes)
    assert not any("(--effort)" in note for note in plan.notes)


def test_every_configuration_of_a_plan_is_legal_and_there_once_the_baseline_first():
    plan = planned(effort=Effort.QUICK)
    configs = plan.every_config()
    assert configs[0] == plan.baseline
    assert len(configs) == len(set(configs)) == plan.search_space().size()


def test_what_the_baseline_needs_at_least_is_said_and_held_against_the_budget():
    notes = planned(facts=make_facts(parameters=GIB // 8), memory_bytes=GIB).notes
    assert any("2.00 GiB for weights, gradients and AdamW states alone" in note for note in notes)
    assert any("more than the budget of 1.00 GiB" in note for note in notes)


def test_states_of_another_optimizer_are_not_counted_as_adamws(arguments):
    path = arguments(optim="adafactor")
    notes = planned(facts=make_facts(parameters=GIB // 8), baseline=path).notes
    assert any("1.00 GiB for weights and gradients alone" in note for note in notes)


def test_a_plan_survives_its_file(tmp_path):
    plan = planned(model="t5-small")
    write_value(plan, tmp_path / "search.json")
    assert read_value(SearchPlan, tmp_path / "search.json") == plan


def test_the_space_of_a_plan_is_bound_to_it():
    space = planned(allow=Allowance.EXACT).search_space()
    assert {space.config(point).precision for point in space.points()} == {"fp32"}


def test_a_full_disk_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5 << 20})())
    notes = machine_notes(outlined().hardware, tmp_path)
    assert any("only 5 MiB of disk are free" in note for note in notes)


def test_the_task_is_the_usual_one_of_the_model_unless_another_is_asked_for():
    assert outlined(model="t5-small").workload.task is Task.SEQ2SEQ_LM
    task = Task.SEQUENCE_CLASSIFICATION
    assert outlined(model="gpt2", task=task.value).workload.task is task
