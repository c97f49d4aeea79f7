"""From the user's words to a plan: every default is said, and what can't be is refused before the first trial."""

import json

import pytest
from factories import make_facts, make_hardware
from pydantic import ValidationError

from autotune.errors import InputError
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import complete, machine_notes, outline
from autotune.planning.workload import Outline
from autotune.units import GIB
from autotune.value import read_value, write_value
from autotune.values.budget import Budget, Effort
from autotune.values.config import Allowance, Parallelism
from autotune.values.model import Task


def outlined(**options) -> Outline:
    return outline(SearchOptions(**{"model": "gpt2", "device": "cpu", **options}))


def planned(facts=None, **options) -> SearchPlan:
    found = outlined(**options)
    return complete(found, facts or make_facts(task=found.workload.task))


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
        ("train_steps", 0),
        ("train_steps", 10**400),
        ("train_tokens", 0.0),
        ("max_time_s", 0.0),
        ("max_time_s", float("inf")),
        ("max_time_s", float("nan")),
        ("allow", "everything"),
        ("effort", "enormous"),
    ],
)
def test_options_out_of_range_are_refused_when_made(field, value):
    with pytest.raises(ValidationError, match=field):
        SearchOptions(model="gpt2", **{field: value})


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
        ({"train_steps": 10, "train_tokens": 1e6}, "both say how long the run is"),
        ({"train_steps": 10, "global_batch": "any"}, "steps differ in size; use --train-tokens"),
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


def test_samples_of_speech_are_counted_in_frames():
    found = outlined(model="wav2vec2-base")
    assert (found.workload.task, found.workload.sequence_length) == (Task.SPEECH_CTC, 128)
    assert "samples of 128 frames of sound (--seq-len)" in found.notes
    assert found.workload.tokens_per_sample is None


def test_whisper_takes_half_a_minute_and_transcripts_of_its_own_length():
    workload = outlined(model="whisper-tiny").workload
    assert (workload.sequence_length, workload.target_length) == (1500, 128)
    assert outlined(model="whisper-tiny", target_len=60).workload.target_length == 60
    with pytest.raises(InputError, match="--seq-len 128: openai/whisper-tiny takes 1500 frames of sound and no other"):
        outlined(model="whisper-tiny", seq_len=128)


def test_a_transcript_longer_than_the_decoder_is_refused():
    facts = make_facts(task=Task.SPEECH_SEQ2SEQ, max_target_length=448)
    with pytest.raises(InputError, match="--target-len 500: openai/whisper-tiny has 448 positions"):
        planned(facts, model="whisper-tiny", target_len=500)


def test_a_recording_too_short_to_be_trained_on_is_refused():
    with pytest.raises(InputError, match="--seq-len 5: facebook/wav2vec2-base hides spans of 10 frames"):
        outlined(model="wav2vec2-base", seq_len=5)


def test_the_length_of_a_run_is_one_of_samples_whatever_it_was_given_in():
    assert planned().objective.run_samples is None
    assert planned(train_steps=100, global_batch=16).objective.run_samples == 1600
    assert planned(train_tokens=1e6, seq_len=100).objective.run_samples == 10_000


def test_images_have_no_tokens_to_say_the_length_of_a_run_in():
    with pytest.raises(InputError, match="--train-tokens: image-classification has no tokens; use --train-steps"):
        planned(model="vit-base", train_tokens=1e6)


@pytest.mark.parametrize(
    ("options", "soak", "steps", "insisted"),
    [
        ({}, True, 20, False),
        ({"effort": Effort.QUICK}, True, 0, False),
        ({"effort": Effort.QUICK, "check_loss": 30}, True, 30, True),
        ({"check_loss": 0}, True, 0, False),
        ({"global_batch": "any"}, True, 0, False),
        ({"exhaustive": True}, False, 0, False),
    ],
)
def test_what_a_winner_has_to_pass_is_planned(options, soak, steps, insisted):
    plan = planned(**options)
    assert (plan.soak, plan.loss_steps, plan.loss_insisted) == (soak, steps, insisted)


def test_losses_that_can_not_be_compared_are_refused_before_the_first_trial():
    with pytest.raises(InputError, match="--check-loss 20: with --global-batch any"):
        outlined(check_loss=20, global_batch="any")


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr("autotune.values.hardware.detect", lambda device: make_hardware(cores=8, count=1))


def test_over_several_devices_the_baseline_is_what_torchrun_makes_of_the_trainer(eight_cores):
    plan = planned(devices=4)
    assert plan.baseline.parallelism == Parallelism(world_size=4)
    assert plan.workload.global_batch_size == 16  # of all together, as with one
    assert plan.baseline.per_device_train_batch_size == 4
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


def test_a_global_batch_that_the_devices_cannot_share_is_refused_with_the_nearest(eight_cores):
    with pytest.raises(InputError, match="--global-batch 10: 4 devices can't share it evenly; 8 and 12 do"):
        outlined(devices=4, global_batch=10)


def test_the_memory_budget_is_each_processs_own(eight_cores):
    found = outlined(devices=4)
    assert found.memory_bytes == pytest.approx(12 * GIB / 4 * 0.92, rel=1e-6)
    assert outlined(devices=4, memory_bytes=3 * GIB).memory_bytes == 3 * GIB
    with pytest.raises(InputError, match=r"--memory 5\.00 GiB: a CPU has 16\.00 GiB for 4 processes"):
        outlined(devices=4, memory_bytes=5 * GIB)


def test_a_world_larger_than_the_search_has_devices_is_refused(eight_cores):
    plan = planned(devices=2)
    larger = plan.baseline.model_copy(
        update={"parallelism": Parallelism(world_size=4), "per_device_train_batch_size": 4}
    )
    assert "4 devices are more than the 2" in plan.search_space().refusal(larger)


HUGE = 9999999999999999999999999


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"global_batch": HUGE}, r"--global-batch 9{25}: use at most 1048576 samples a step"),
        ({"global_batch": 1048577}, "--global-batch 1048577: use at most 1048576"),
        ({"seq_len": HUGE}, r"--seq-len 9{25}: use at most 10000000"),
        ({"model": "t5-small", "target_len": HUGE}, r"--target-len 9{25}: use at most 10000000"),
    ],
)
def test_what_nobody_trains_with_is_refused_in_a_moment(options, said):
    with pytest.raises(InputError, match=said):
        outlined(**options)


@pytest.mark.parametrize(
    "document",
    [
        {"per_device_train_batch_size": HUGE},
        {"gradient_accumulation_steps": HUGE},
        {"per_device_train_batch_size": 2048, "gradient_accumulation_steps": 2048},
    ],
)
def test_a_baseline_that_nobody_trains_with_is_refused_in_a_moment(arguments, document):
    with pytest.raises(InputError, match=r"--baseline: the global batch \d+: use at most 1048576"):
        outlined(baseline=arguments(**document))


def test_a_baseline_is_refused_beside_a_free_global_batch_as_well(arguments):
    found = outlined(baseline=arguments(per_device_train_batch_size=HUGE), global_batch="any")
    with pytest.raises(InputError, match="--baseline: per_device_train_batch_size: expected 1048576 or less"):
        complete(found, make_facts())


def test_the_largest_global_batch_is_planned():
    assert planned(global_batch=1048576).workload.global_batch_size == 1048576
