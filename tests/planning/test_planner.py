"""From the user's words to a plan: every default is said, and what can't be is refused before the first trial."""

import pytest
from factories import legal_points, make_config, make_facts, make_gpu, make_plan
from plans import begun, planned, started

from autotune.errors import InputError, MachineError
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import start_of
from autotune.space.knobs import make_point
from autotune.units import GIB
from autotune.value import read_value, write_value
from autotune.values.budget import Budget, Effort
from autotune.values.config import Allowance, Parallelism
from autotune.values.problem import Allotment


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
        ({"check_loss": 20, "global_batch": "any"}, "--check-loss 20: with --global-batch any"),
        ({"check_loss": 9}, "--check-loss 9: fewer than 10 steps"),
        ({"fix": "optim=sgd", "only": ["optim"]}, "--only optim: --fix optim=sgd leaves nothing to search of it; drop"),
        ({"fix": "micro-batch=3"}, "--fix micro-batch=3: a micro-batch of 3 does not divide the global batch of 8"),
        ({"fix": "precision=fp16"}, "--fix precision=fp16: fp16 on a CPU silently stays fp32 in the Trainer"),
        ({"only": "liger"}, "--only liger: nothing to search: Liger's kernels"),
        ({"only": "adapter"}, "--only adapter: nothing to search: changes the method"),
        ({"only": "adapter-rank"}, "--only adapter-rank: nothing to search: it exists only with adapter; name that as"),
        ({"only": "adapter-rank", "fix": "adapter=none"}, "it exists only with adapter; --fix holds that"),
        ({"only": "prefetch", "space": "moe"}, "--only prefetch: nothing to search: it exists only with workers; name"),
        ({"only": "quantization"}, "--only quantization: the search space has no values of it: --fix one, or"),
    ],
)
def test_what_can_not_be_used_is_refused_in_one_line(options, said):
    with pytest.raises(InputError) as error:
        planned(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_every_default_that_decides_the_figures_is_said_and_nothing_that_the_user_says():
    words = ("sequence length 64", "global batch 8 samples", "memory budget")
    notes = "\n".join(planned().notes)
    assert all(word in notes for word in (*words, "tuning for the CPU", "at most 40 min and 40 trials (--effort)"))
    notes = "\n".join(planned(seq_len=64, global_batch=8, memory_bytes=GIB).notes)
    assert not any(word in notes for word in words)


def test_what_the_user_asks_for_is_planned(tmp_path):
    plan = planned(seq_len=64, global_batch=8, memory_bytes=GIB, allow=Allowance.EXACT, seed=7)
    assert (plan.workload.sequence_length, plan.workload.global_batch_size, plan.workload.seed) == (64, 8, 7)
    assert (plan.memory_bytes, plan.allowance, plan.baseline.per_device_train_batch_size) == (GIB, Allowance.EXACT, 8)
    assert {config.precision for config in plan.search_space.legal} == {"fp32"}
    write_value(plan, tmp_path / "search.json")
    assert read_value(SearchPlan, tmp_path / "search.json") == plan


def test_the_default_budget_leaves_a_margin_of_the_free_memory():
    found = started()
    assert 0.8 * found.hardware.free_bytes < found.memory_bytes < found.hardware.free_bytes


def test_limits_of_the_user_replace_those_of_the_effort():
    budget = started(effort=Effort.QUICK, max_trials=3, max_time_s=20).budget
    assert (budget.max_trials, budget.max_time_s, budget.trial_timeout_s) == (3, 20, 20)
    assert budget.measure_steps == Budget.of(Effort.QUICK).measure_steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_time_s": 80}, "at most 80 s (--max-time) and 40 trials (--effort)"),
        ({"max_trials": 3}, "at most 40 min (--effort) and 3 trials (--max-trials)"),
        ({"max_time_s": 80, "max_trials": 3}, "at most 80 s (--max-time) and 3 trials (--max-trials)"),
    ],
)
def test_each_limit_names_the_option_it_comes_from(given, said):
    assert said in planned(**given).notes


@pytest.mark.parametrize(
    ("document", "frozen", "size"), [({}, 0, "2.00"), ({}, GIB // 16, "1.25"), ({"optim": "adafactor"}, 0, "1.00")]
)
def test_the_least_memory_of_the_baseline_is_said_and_held_against_the_budget(arguments, document, frozen, size):
    facts = make_facts(parameters=GIB // 8, frozen_parameters=frozen)
    notes = "\n".join(planned(facts, memory_bytes=GIB, baseline=arguments(**document)).notes)
    assert f"{size} GiB for weights, gradients and optimizer states alone" in notes
    assert ("more than the budget of 1.00 GiB" in notes) == (size != "1.00")


@pytest.mark.parametrize(
    ("options", "steps", "insisted"),
    [
        ({}, 20, False), ({"effort": Effort.QUICK}, 0, False), ({"effort": Effort.THOROUGH}, 20, False),
        ({"effort": Effort.QUICK, "check_loss": 30}, 30, True), ({"check_loss": 0}, 0, False),
        ({"global_batch": "any"}, 0, False),
    ],
)  # fmt: skip
def test_what_a_winner_has_to_pass_is_planned(options, steps, insisted):
    plan = planned(**options)
    assert (plan.soak, plan.loss_steps, plan.loss_insisted) == (True, steps, insisted)


def test_numbers_of_devices_are_searched_and_the_first_is_the_baselines(eight_cores):
    plan = planned(devices="2,1,4", global_batch=8, effort="standard")
    assert plan.baseline.parallelism == Parallelism(world_size=2)
    assert plan.world_sizes == {1, 2, 4}
    legal = plan.search_space.legal
    assert {config.parallelism.world_size for config in legal} == {1, 2, 4}
    most = {n: max(c.per_device_train_batch_size for c in legal if c.parallelism.world_size == n) for n in (1, 2, 4)}
    assert most == {1: 8, 2: 4, 4: 2}
    start = started(devices=[1, 2])
    gpu, base = make_gpu(count=2), make_config(8)  # which on one device has nothing to split
    there = {choices.sharding for c in make_plan(hardware=gpu, baseline=base, space=start.space()).search_space.legal
             if (choices := c.parallelism).world_size == 2}  # fmt: skip
    assert {"none", "fsdp_full", "fsdp_grad_op"} <= there
    assert plan.hardware.count == 4
    assert "each training is spread over 2 or 1 or 4 processes" in " ".join(plan.notes)
    with pytest.raises(InputError, match="--devices 3: they can't share the global batch of 8 evenly"):
        planned(devices=[2, 3], global_batch=8)


def test_over_several_machines_fsdp_may_keep_a_replica_on_each_whatever_the_effort():
    machines = make_gpu(count=8, nodes=2)
    options = SearchOptions(model="gpt2", devices=8, nodes=2, effort="quick", global_batch=64)
    space = start_of(options, Allotment(hardware=machines)).space()
    plan = make_plan(hardware=machines, baseline=make_config(1, parallelism={"world_size": 8}), space=space)
    ways = {(config.parallelism.sharding, config.parallelism.replicas) for config in plan.search_space.legal}
    assert {("fsdp_full", 1), ("fsdp_full", 2), ("none", 1)} <= ways
    assert ("none", 2) not in ways


def test_over_several_devices_the_baseline_is_what_torchrun_makes_of_the_trainer(eight_cores):
    plan = planned(devices=4)
    assert plan.baseline.parallelism == Parallelism(world_size=4)
    assert (plan.hardware.count, plan.workload.global_batch_size) == (4, 8)  # of all together, as with one
    assert plan.baseline.per_device_train_batch_size == 2
    assert plan.workload.accumulation_steps(plan.baseline) == 1
    space = plan.search_space
    assert {config.parallelism.world_size for config in space.legal} == {4}
    larger = {"parallelism": Parallelism(world_size=8), "per_device_train_batch_size": 1}
    assert "8 devices are more than the 4" in space.refusal(plan.baseline.model_copy(update=larger))


def test_a_baseline_of_ones_own_trains_on_each_device_what_it_says(eight_cores, arguments):
    written = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    plan = planned(devices=4, baseline=written)
    assert (plan.workload.global_batch_size, plan.baseline.per_device_train_batch_size) == (24, 2)
    with pytest.raises(InputError, match=r"--global-batch 6: the baseline's is 24 .* x 4 devices"):
        planned(devices=4, baseline=written, global_batch=6)


def test_the_memory_budget_is_each_processs_own(eight_cores):
    assert started(devices=4).memory_bytes == pytest.approx(12 * GIB / 4 * 0.92, rel=1e-6)
    assert started(devices=4, memory_bytes=3 * GIB).memory_bytes == 3 * GIB
    with pytest.raises(InputError, match=r"--memory 5\.00 GiB: a CPU has 16\.00 GiB for 4 processes"):
        started(devices=4, memory_bytes=5 * GIB)


def test_gpus_of_amd_are_refused_in_one_line_instead_of_tuning_the_processor(monkeypatch):
    from autotune.values import hardware

    monkeypatch.setattr(hardware, "cuda_count", lambda: 0)
    monkeypatch.setattr(hardware, "installed_versions", lambda: {"torch": "2.13.0+rocm7.0"})
    with pytest.raises(MachineError, match=r"built for AMD GPUs \(ROCm\), which autotune doesn't tune"):
        begun(SearchOptions(model="t5-small"))
    assert begun(SearchOptions(model="t5-small", device="cpu")).hardware.is_cpu


def searched(plan: SearchPlan) -> set[str]:
    """Return the parameters that differ between configurations of a plan."""
    points = [make_point(config) for config in plan.every_config()]
    return {d.name for d in plan.search_space.dimensions if len({point.get(d.name) for point in points}) > 1}


def test_every_configuration_of_a_plan_is_legal_and_there_once_the_baseline_first():
    plan = planned(effort=Effort.QUICK)
    configs = plan.every_config()
    assert configs[0] == plan.baseline
    assert len(configs) == len(set(configs)) == len(list(legal_points(plan.search_space)))


def test_a_copy_of_a_plan_has_a_space_of_its_own():
    plan = planned(allow=Allowance.EXACT)
    assert plan.search_space is plan.search_space
    more = plan.model_copy(update={"allowance": Allowance.METHOD})
    assert len(more.every_config()) > len(plan.every_config())


def test_every_configuration_has_the_fixed_values_and_the_baseline_too():
    plan = planned(fix="bf16=true,micro-batch=4", global_batch=16, allow=Allowance.EXACT)
    assert {(c.precision, c.per_device_train_batch_size) for c in plan.every_config()} == {("bf16", 4)}
    assert searched(plan) >= {"attn_implementation", "checkpointing"}
    assert "in every configuration, the baseline too: precision=bf16, micro-batch=4 (--fix)" in plan.notes


def test_a_fixed_adapter_needs_no_allowance_and_takes_no_choice_from_its_other_fields():
    plan = planned(fix={"adapter-rank": 8}, only="adapter-target-modules", allow=Allowance.METHOD)
    assert {(c.adapter.kind, c.adapter.rank) for c in plan.every_config()} == {("lora", 8)}
    assert searched(plan) == {"adapter.target_modules"}
    assert planned(fix="adapter=lora", allow=Allowance.EXACT).baseline.adapter.kind == "lora"


def test_fixed_values_replace_those_of_the_users_arguments(arguments):
    plan = planned(baseline=arguments(bf16=True, optim="adafactor"), fix="optim=adamw_torch")
    assert (plan.baseline.optim, plan.baseline.precision) == ("adamw_torch", "bf16")


@pytest.mark.parametrize(
    ("only", "options", "varied"),
    [
        ("optim,micro-batch", {}, {"optim", "per_device_train_batch_size"}),
        ("gradient_checkpointing", {}, {"checkpointing"}),
        ("compile", {"effort": Effort.QUICK}, {"torch_compile_backend"}),  # which quick searches leave alone
        ("compile-mode", {"fix": "compile=inductor"}, {"torch_compile_mode"}),  # which the usual space lacks
        ("adapter-rank", {"fix": "adapter=lora", "space": "exact", "allow": Allowance.METHOD}, {"adapter.rank"}),
        ("adapter", {"allow": Allowance.METHOD}, {"adapter", "adapter.rank", "adapter.target_modules"}),
    ],
)
def test_only_the_named_knobs_are_searched(only, options, varied):
    plan = planned(only=only, **options)
    assert searched(plan) == varied
    assert plan.every_config()[0] == plan.baseline
