"""A plan: its file, its space and its configurations."""

import pytest
from factories import make_facts
from plans import outlined, planned

from autotune.errors import InputError
from autotune.planning.plan import SearchPlan
from autotune.value import read_value, write_value
from autotune.values.budget import Effort
from autotune.values.config import Allowance


def test_every_configuration_of_a_plan_is_legal_and_there_once_the_baseline_first():
    plan = planned(effort=Effort.QUICK)
    configs = plan.every_config()
    assert configs[0] == plan.baseline
    assert len(configs) == len(set(configs)) == len(list(plan.search_space().points()))


def test_a_plan_survives_its_file(tmp_path):
    plan = planned(model="t5-small")
    write_value(plan, tmp_path / "search.json")
    assert read_value(SearchPlan, tmp_path / "search.json") == plan


def test_the_space_of_a_plan_is_bound_to_it():
    space = planned(allow=Allowance.EXACT).search_space()
    assert {space.config(point).precision for point in space.points()} == {"fp32"}


def searched(plan: SearchPlan) -> set[str]:
    """The parameters of which configurations of a plan have several values."""
    space = plan.search_space()
    points = [space.point(config) for config in plan.every_config()]
    return {name for name in points[0] if len({point.get(name) for point in points}) > 1}


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
    ],
)
def test_only_the_named_knobs_are_searched(only, options, varied):
    plan = planned(only=only, **options)
    assert searched(plan) == varied
    assert plan.every_config()[0] == plan.baseline


def test_an_adapter_is_searched_with_its_fields():
    plan = planned(only="adapter", allow=Allowance.METHOD)
    assert {c.adapter and c.adapter.rank for c in plan.every_config()} == {None, 8, 16, 64}
    assert {c.precision for c in plan.every_config()} == {"fp32"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fix": "micro-batch=3"}, "--fix micro-batch=3: a micro-batch of 3 does not divide the global batch of 8"),
        ({"fix": "precision=fp16"}, "--fix precision=fp16: fp16 on a CPU silently stays fp32 in the Trainer"),
        ({"only": "liger"}, "--only liger: nothing to search: Liger's kernels"),
        ({"only": "adapter"}, "--only adapter: nothing to search: changes the method"),
        ({"only": "adapter-rank"}, "--only adapter-rank: nothing to search: it exists only with adapter; name that as"),
        ({"only": "offload"}, "--only offload: no search space has values to try; --fix sets one"),
    ],
)
def test_what_can_not_be_fixed_or_searched_is_refused_with_the_reason(options, said):
    with pytest.raises(InputError) as caught:
        planned(facts=make_facts(), **options)
    assert str(caught.value).startswith(said)


def test_a_knob_is_fixed_or_searched():
    with pytest.raises(InputError, match="--only optim: --fix optim=sgd leaves nothing to search of it; drop one"):
        outlined(fix="optim=sgd", only=["optim"])
