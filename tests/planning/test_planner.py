"""From the user's words to a plan: every default is said, and what can't be is refused before the first trial."""

import os

import pytest
from factories import make_facts
from plans import outlined, planned

from autotune.errors import InputError, MachineError
from autotune.planning.options import SearchOptions
from autotune.planning.planner import disk_notes, loss_steps_of, outline
from autotune.units import GIB
from autotune.values.budget import Budget, Effort
from autotune.values.config import Allowance, Parallelism


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "gpt-two"}, "gpt"),
        ({"task": "chess"}, "--task chess: expected one of causal-lm"),
        ({"data": "nothing.jsonl"}, "nothing.jsonl: no such file"),
        ({"text_field": "text"}, "--text-field: needs --data"),
        ({"target_len": 5}, "--target-len: the task causal-lm has no decoder targets"),
        ({"memory_bytes": 1 << 60}, "--memory"),
        ({"baseline": "nothing.json"}, "--baseline nothing.json: No such file"),
        ({"space": "defualt"}, "did you mean 'default'?"),
        ({"device": "tpu"}, "--device tpu"),
        ({"train_steps": 10, "train_tokens": 1e6}, "both say how long the run is"),
        ({"train_steps": 10, "global_batch": "any"}, "steps differ in size; use --train-tokens"),
    ],
)
def test_what_can_not_be_used_is_refused_in_one_line(options, said):
    with pytest.raises(InputError) as error:
        outlined(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_data_are_refused_for_what_they_are_before_a_trial(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=r"/pipe.jsonl: is not a regular file"):
        outlined(data=str(tmp_path / "pipe.jsonl"))


def test_a_links_own_name_says_the_kind_of_data(tmp_path):
    (tmp_path / "blob").write_text('{"text": "one"}\n')
    (tmp_path / "texts.jsonl").symlink_to("blob")
    assert planned(data=str(tmp_path / "texts.jsonl")).workload.dataset == str(tmp_path / "texts.jsonl")


def test_every_default_that_decides_the_figures_is_said():
    notes = "\n".join(outlined().notes)
    for word in ("tuning for the CPU", "sequence length 64", "global batch 8 samples", "memory budget"):
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


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(InputError, match=r"--seq-len 64: .*gpt2 has 50 positions; use at most that"):
        planned(facts=make_facts(max_sequence_length=50), model="gpt2")


def test_a_target_longer_than_the_model_is_refused():
    with pytest.raises(InputError, match=r"--target-len 300: .* has 256 positions"):
        planned(facts=make_facts(max_sequence_length=256), model="t5-small", target_len=300)


def test_limits_of_the_user_replace_those_of_the_effort():
    budget = outlined(effort=Effort.QUICK, max_trials=3, max_time_s=20).budget
    assert (budget.max_trials, budget.max_time_s, budget.trial_timeout_s) == (3, 20, 20)
    assert budget.measure_steps == Budget.of(Effort.QUICK).measure_steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "at most 40 min and 40 trials (--effort)"),
        ({"max_time_s": 80}, "at most 80 s (--max-time) and 40 trials (--effort)"),
        ({"max_trials": 3}, "at most 40 min (--effort) and 3 trials (--max-trials)"),
        ({"max_time_s": 80, "max_trials": 3}, "at most 80 s (--max-time) and 3 trials (--max-trials)"),
    ],
)
def test_each_limit_names_the_option_it_comes_from(given, said):
    assert said in planned(**given).notes


def test_what_the_baseline_needs_at_least_is_said_and_held_against_the_budget():
    notes = planned(facts=make_facts(parameters=GIB // 8), memory_bytes=GIB).notes
    assert any("2.00 GiB for weights, gradients and optimizer states alone" in note for note in notes)
    assert any("more than the budget of 1.00 GiB" in note for note in notes)


def test_what_is_not_trained_has_no_states():
    trained, frozen = (
        planned(facts=make_facts(parameters=GIB // 8, frozen_parameters=count)).notes for count in (0, GIB // 16)
    )
    assert any("2.00 GiB for weights, gradients and optimizer states alone" in note for note in trained)
    assert any("1.25 GiB for weights, gradients and optimizer states alone" in note for note in frozen)


def test_states_of_another_optimizer_are_not_counted_as_adamws(arguments):
    path = arguments(optim="adafactor")
    notes = planned(facts=make_facts(parameters=GIB // 8), baseline=path).notes
    assert any("1.00 GiB for weights, gradients and optimizer states alone" in note for note in notes)


def test_a_full_disk_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5 << 20})())
    notes = disk_notes(tmp_path)
    assert any("only 5 MiB of disk are free" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "soak", "steps", "insisted"),
    [
        ({}, True, 20, False),
        ({"effort": Effort.QUICK}, True, 0, False),
        ({"effort": Effort.QUICK, "check_loss": 30}, True, 30, True),
        ({"check_loss": 0}, True, 0, False),
        ({"global_batch": "any"}, True, 0, False),
    ],
)
def test_what_a_winner_has_to_pass_is_planned(options, soak, steps, insisted):
    plan = planned(**options)
    assert (plan.soak, plan.loss_steps, plan.loss_insisted) == (soak, steps, insisted)


def test_losses_that_can_not_be_compared_are_refused_before_the_first_trial():
    with pytest.raises(InputError, match="--check-loss 20: with --global-batch any"):
        outlined(check_loss=20, global_batch="any")


def test_over_several_devices_the_baseline_is_what_torchrun_makes_of_the_trainer(eight_cores):
    plan = planned(devices=4)
    assert plan.baseline.parallelism == Parallelism(world_size=4)
    assert plan.workload.global_batch_size == 8  # of all together, as with one
    assert plan.baseline.per_device_train_batch_size == 2
    assert plan.workload.accumulation_steps(plan.baseline) == 1
    assert plan.hardware.count == 4
    space = plan.search_space()
    assert {space.config(point).parallelism.world_size for point in space.points()} == {4}


def test_a_baseline_of_ones_own_trains_on_each_device_what_it_says(eight_cores, arguments):
    written = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    plan = planned(devices=4, baseline=written)
    assert plan.workload.global_batch_size == 24
    assert plan.baseline.per_device_train_batch_size == 2
    with pytest.raises(InputError, match=r"--global-batch 6: the baseline's is 24 .* x 4 devices"):
        outlined(devices=4, baseline=written, global_batch=6)


def test_the_memory_budget_is_each_processs_own(eight_cores):
    found = outlined(devices=4)
    assert found.memory_bytes == pytest.approx(12 * GIB / 4 * 0.92, rel=1e-6)
    assert outlined(devices=4, memory_bytes=3 * GIB).memory_bytes == 3 * GIB
    with pytest.raises(InputError, match=r"--memory 5\.00 GiB: a CPU has 16\.00 GiB for 4 processes"):
        outlined(devices=4, memory_bytes=5 * GIB)


def test_a_world_larger_than_the_search_has_devices_is_refused(eight_cores):
    plan = planned(devices=2, global_batch=16)
    larger = plan.baseline.model_copy(
        update={"parallelism": Parallelism(world_size=4), "per_device_train_batch_size": 4}
    )
    assert "4 devices are more than the 2" in plan.search_space().refusal(larger)


def planned_losses(asked=None, effort=Effort.STANDARD, **options):
    return loss_steps_of(SearchOptions(model="tiny", check_loss=asked, effort=effort, **options))


@pytest.mark.parametrize(("effort", "steps"), [(Effort.QUICK, 0), (Effort.STANDARD, 20), (Effort.THOROUGH, 20)])
def test_the_effort_decides_unless_the_user_does(effort, steps):
    assert planned_losses(effort=effort) == steps
    assert planned_losses(50, effort) == 50
    assert planned_losses(0, effort) == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"asked": 20, "global_batch": "any"}, "--check-loss 20: with --global-batch any"),
        ({"asked": 9}, "--check-loss 9: fewer than 10 steps"),
    ],
)
def test_what_can_not_be_compared_is_refused_if_asked_for_and_left_out_otherwise(how, why):
    with pytest.raises(InputError, match=why):
        planned_losses(**how)
    if how["asked"] == 20:
        assert planned_losses(**{**how, "asked": None}) == 0


def test_gpus_of_amd_are_refused_in_one_line_instead_of_tuning_the_processor(monkeypatch):
    from autotune.values import hardware

    monkeypatch.setattr(hardware, "cuda_count", lambda: 0)
    monkeypatch.setattr(hardware, "installed_versions", lambda: {"torch": "2.13.0+rocm7.0"})
    with pytest.raises(MachineError, match=r"built for AMD GPUs \(ROCm\), which autotune doesn't tune"):
        outline(SearchOptions(model="t5-small"))
    assert outline(SearchOptions(model="t5-small", device="cpu")).hardware.is_cpu
