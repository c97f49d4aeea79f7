"""The space of one workload on one device: which points exist, which are legal, which its trials rule out."""

import itertools
import random

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_budget,
    make_config,
    make_facts,
    make_gpu,
    make_hardware,
    make_measurement,
    make_result,
    make_space,
    make_workload,
)

from autotune.space.file import builtin_spaces, load_space, spaces_directory
from autotune.space.space import History, SearchSpace, is_no_harder, micro_batches
from autotune.values.budget import Effort
from autotune.values.config import LARGEST_BATCH, Allowance, Parallelism, TrainConfig
from autotune.values.trial import TrialResult

ADAPTERS = {"adapter": [None, "lora"], "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}}}


def names(space: SearchSpace) -> list[str]:
    return [d.name for d in space.dimensions]


def choices(space: SearchSpace, name: str) -> tuple:
    return next(d.choices for d in space.dimensions if d.name == name)


OF_SEVERAL = ("parallel", "fsdp", "deepspeed")


def of_several(name: str, effort: Effort, allowance: Allowance) -> SearchSpace:
    """A built-in space for several devices, on eight GPUs with DeepSpeed installed."""
    return make_space(
        space=load_space(name),
        facts=make_facts(tensor_parallel_heads=8, layers=16, parameters=1_000_000_000),
        hardware=make_gpu(count=8, versions={**make_gpu().versions, "deepspeed": "0.19.8"}),
        workload=make_workload(global_batch_size=64),
        baseline=make_config(dataloader_pin_memory=True, parallelism=Parallelism(world_size=8)),
        budget=make_budget(effort=effort),
        allowance=allowance,
    )


def builtin(name: str, effort: Effort = Effort.QUICK, allowance: Allowance = Allowance.METHOD) -> SearchSpace:
    """A built-in space on the device that it is for, at the global batch that is the default there."""
    if name in OF_SEVERAL:
        return of_several(name, effort, allowance)
    on_cpu = name == "cpu"
    experts = {"experts": 8, "experts_implementations": ("grouped_mm", "batched_mm", "eager"), "experts_per_token": 2}
    return make_space(
        space=load_space(name),
        facts=make_facts(**experts if name == "moe" else {}),
        hardware=make_hardware() if on_cpu else make_gpu(),
        workload=make_workload(global_batch_size=16 if on_cpu else 64),
        baseline=make_config(
            dataloader_pin_memory=not on_cpu, experts_implementation="grouped_mm" if name == "moe" else None
        ),
        budget=make_budget(effort=effort),
        allowance=allowance,
    )


def test_dimensions_have_the_order_of_the_file_and_the_baselines_value_even_if_it_is_illegal():
    assert names(make_space({"optim": ["adafactor"], "precision": ["bf16"]})) == ["optim", "precision"]
    space = make_space({"optim": ["adafactor"], "per_device_train_batch_size": [2]}, baseline=make_config(4))
    assert choices(space, "optim") == ("adamw_torch_fused", "adafactor")
    assert choices(space, "per_device_train_batch_size") == (4, 2)
    space = make_space({"precision": ["bf16"]}, baseline=make_config(precision="fp16"), hardware=make_hardware())
    assert choices(space, "precision") == ("fp16", "bf16")


def test_what_speaks_against_the_baseline_speaks_against_no_other_value():
    paged = make_config(optim="paged_adamw_8bit")  # not on a CPU
    space = make_space({"optim": ["adafactor"], "checkpointing": ["full"], "tf32": [True]}, baseline=paged)
    assert choices(space, "optim") == ("paged_adamw_8bit", "adafactor")
    assert choices(space, "checkpointing") == ("none", "full")
    assert choices(space, "tf32") == (False,)


def test_what_can_not_be_legal_here_is_left_out_with_the_reason():
    space = make_space({"precision": ["fp32", "fp16", "bf16"], "tf32": [True, False]}, hardware=make_hardware())
    assert choices(space, "precision") == ("fp32", "bf16")
    assert choices(space, "tf32") == (False,)
    assert space.left_out["precision", "fp16"] == "fp16 on a CPU silently stays fp32 in the Trainer"
    assert set(space.left_out) == {("precision", "fp16"), ("tf32", True)}


def test_what_the_allowance_does_not_admit_is_left_out():
    space = make_space({"precision": ["bf16", "pure_bf16"]}, allowance=Allowance.NUMERICS)
    assert choices(space, "precision") == ("fp32", "bf16")
    assert "--allow numerics does not admit" in space.left_out["precision", "pure_bf16"]


def test_a_kernel_that_needs_16_bits_is_kept_for_a_baseline_of_32():
    kernels = {"attn_implementation": ["sdpa", "flash_attention_2"]}
    here = {"hardware": make_gpu(), "baseline": make_config(precision="fp32")}
    assert "flash_attention_2" in choices(make_space({"precision": ["bf16"], **kernels}, **here), "attn_implementation")
    assert "flash_attention_2" not in choices(make_space(kernels, **here), "attn_implementation")


def test_a_parameter_that_costs_too_much_for_the_effort_does_not_exist():
    parameters = {"precision": ["bf16"], "torch_compile_backend": {"choices": ["inductor"], "from_effort": "standard"}}
    for effort, there in ((Effort.QUICK, False), (Effort.STANDARD, True), (Effort.THOROUGH, True)):
        budget = make_budget(effort=effort)
        assert ("torch_compile_backend" in names(make_space(parameters, budget=budget))) == there


def test_a_parameter_without_a_dimension_keeps_the_baselines_value():
    space = make_space({"precision": ["bf16"]}, baseline=make_config(4, checkpointing="full"))
    config = space.config({"precision": "bf16"})
    assert config == make_config(4, checkpointing="full", precision="bf16")


def test_a_combination_that_the_file_forbids_is_refused_with_its_reason():
    rule = {"forbid": {"optim": ["adafactor"], "precision": ["bf16"]}, "reason": "nobody wants it"}
    space = make_space({"optim": ["adafactor"], "precision": ["fp32", "bf16"]}, rules=[rule])
    assert space.refusal(make_config(optim="adafactor", precision="bf16")) == "nobody wants it"
    assert space.refusal(make_config(optim="adafactor", precision="fp32")) is None
    assert len(list(space.points())) == 3


def test_a_value_is_left_out_if_it_is_forbidden_alone_not_beside_the_baselines_others():
    rule = {"forbid": {"optim": ["adafactor"], "checkpointing": ["none"]}, "reason": "only with checkpointing"}
    space = make_space({"optim": ["adafactor"], "checkpointing": ["none", "full"]}, rules=[rule])
    assert space.left_out == {}
    assert {"optim": "adafactor", "checkpointing": "full"} in list(space.points())
    rule = {"forbid": {"optim": ["adafactor"]}, "reason": "never"}
    assert make_space({"optim": ["adafactor"]}, rules=[rule]).left_out == {("optim", "adafactor"): "never"}


def test_a_conditional_parameter_exists_only_where_its_condition_holds():
    points = [{"adapter": None}, {"adapter": "lora", "adapter.rank": 8}, {"adapter": "lora", "adapter.rank": 64}]
    assert list(make_space(ADAPTERS).points()) == points
    assert list(make_space({"adapter": [None, "lora"], "adapter.rank": [8, 64]}).points()) == points
    assert choices(make_space({**ADAPTERS, "adapter": ["lora"]}), "adapter") == (None, "lora")


@pytest.mark.parametrize(
    ("point", "whole"),
    [
        ({}, {"precision": "fp32", "adapter": None}),
        ({"adapter": "lora"}, {"precision": "fp32", "adapter": "lora", "adapter.rank": 8}),
        ({"adapter": "lora", "adapter.rank": 64}, {"precision": "fp32", "adapter": "lora", "adapter.rank": 64}),
        ({"adapter": None, "adapter.rank": 64}, {"precision": "fp32", "adapter": None}),
        ({"precision": "bf16", "seed": 1}, {"precision": "bf16", "adapter": None}),
    ],
)
def test_a_point_is_completed_with_what_exists_there_and_nothing_else(point, whole):
    assert make_space({"precision": ["bf16"], **ADAPTERS}).complete(point) == whole


_ENUMERATED = [("cpu", Effort.QUICK), ("cpu", Effort.STANDARD), ("default", Effort.QUICK), ("adapters", Effort.QUICK)]
BUILTIN = [
    pytest.param(name, effort, marks=[] if (name, effort) in _ENUMERATED else [pytest.mark.slow])
    for name, effort in itertools.product(builtin_spaces(), [Effort.QUICK, Effort.STANDARD])
]


@pytest.mark.parametrize(("name", "effort"), BUILTIN)
def test_every_legal_point_of_a_built_in_space_is_one_configuration_and_back(name, effort):
    space, seen = builtin(name, effort), set()
    for point in itertools.islice(space.points(), 0, 10_000, 7):
        config = space.config(point)
        assert space.refusal(config) is None
        assert space.complete(space.point(config)) == point
        assert config not in seen
        seen.add(config)
    assert seen


QUICK, STANDARD, THOROUGH = Effort
SIZES = [  # the smallest and the largest legal space
    ("cpu", (QUICK, Allowance.EXACT), (THOROUGH, Allowance.OPTIMIZER)),
    ("default", (QUICK, Allowance.EXACT), (STANDARD, Allowance.OPTIMIZER)),
    ("exact", (QUICK, Allowance.EXACT), (THOROUGH, Allowance.EXACT)),
    ("full", (QUICK, Allowance.OPTIMIZER), (THOROUGH, Allowance.METHOD)),
    ("adapters", (QUICK, Allowance.METHOD), (STANDARD, Allowance.METHOD)),
    ("lora", (QUICK, Allowance.METHOD), (STANDARD, Allowance.METHOD)),
    ("qlora", (QUICK, Allowance.METHOD), (STANDARD, Allowance.METHOD)),
    ("fsdp", (QUICK, Allowance.EXACT), (STANDARD, Allowance.NUMERICS)),
    ("deepspeed", (QUICK, Allowance.EXACT), (QUICK, Allowance.OPTIMIZER)),
    *(
        (name, (QUICK, Allowance.EXACT), (STANDARD, Allowance.OPTIMIZER))
        for name in ("moe", "vision", "speech", "parallel")
    ),
]
LARGE = ("full", "speech", "qlora", "parallel")


@pytest.mark.parametrize(
    ("name", "smallest", "largest"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in LARGE else []) for case in SIZES],
)
def test_a_built_in_space_is_as_big_as_its_first_line_says(name, smallest, largest):
    first = (spaces_directory() / f"{name}.yaml").read_text().splitlines()[0]
    low, high = (len(list(builtin(name, *ends).points())) for ends in (smallest, largest))
    assert f"{low:,} to {high:,} legal points" in first


def test_the_strictest_allowance_leaves_the_training_as_it_is():
    space = builtin("default", Effort.THOROUGH, Allowance.EXACT)
    configs = [space.config(point) for point in space.points()]
    assert {c.precision for c in configs} == {"fp32"}
    assert {c.optim for c in configs} == {"adamw_torch", "adamw_torch_fused"}
    assert {c.adapter for c in configs} == {None}
    assert len({c.per_device_train_batch_size for c in configs}) > 1
    coupled = make_space(allowance=Allowance.EXACT, facts=make_facts(batch_coupled="batch norm"))
    assert choices(coupled, "per_device_train_batch_size") == (8,)


@pytest.mark.parametrize(
    ("global_batch", "lattice"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (7, (1, 7)),
        (15, (1, 3, 5, 15)),
        (12, (1, 2, 4, 6, 12)),
        (16, (1, 2, 4, 8, 16)),
        (24, (1, 2, 4, 8, 24)),
        (96, (1, 2, 4, 8, 16, 24, 32, 48, 96)),
    ],
)
def test_the_lattice_of_micro_batches(global_batch, lattice):
    assert micro_batches(global_batch) == lattice


@pytest.mark.timeout(30)
def test_the_lattice_of_a_large_global_batch_is_whole_and_there_in_a_moment():
    assert micro_batches(LARGEST_BATCH) == tuple(1 << power for power in range(21))
    for prime in (1_048_573, 1_000_003, 10**13 + 37):
        assert micro_batches(prime) == (1, prime)


def test_a_free_global_batch_has_a_lattice_of_its_own():
    lattice = micro_batches(None)
    assert list(lattice) == sorted(set(lattice))
    assert 8 in lattice
    space = make_space(
        {"per_device_train_batch_size": {"choices": "lattice"}}, workload=make_workload(global_batch_size=None)
    )
    assert choices(space, "per_device_train_batch_size") == lattice


def test_compiling_is_exact_and_tried_where_tf32_is_on_already():
    def exact(**baseline):
        space = make_space(
            {"torch_compile_backend": ["inductor"]},
            hardware=make_gpu(),
            baseline=make_config(**baseline),
            allowance=Allowance.EXACT,
        )
        return len(list(space.points()))

    assert (exact(), exact(tf32=True), exact(precision="fp16")) == (1, 2, 2)


def history_of(*results: TrialResult) -> History:
    history = History()
    for result in results:
        history.add(result)
    return history


def sample(count: int) -> list[TrainConfig]:
    """Configurations of all kinds, the comparable ones often."""
    draw = random.Random(7)
    return [
        make_config(
            draw.choice([1, 2, 4]),
            checkpointing=draw.choice(["none", "full"]),
            optim=draw.choice(["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"]),
            precision=draw.choice(["fp32", "bf16"]),
            dataloader_num_workers=draw.choice([0, 2]),
        )
        for _ in range(count)
    ]


SAMPLE = sample(60)


def test_no_harder_is_reflexive_and_transitive():
    assert all(is_no_harder(config, config) for config in SAMPLE)
    chains = [(a, b, c) for a, b, c in itertools.product(SAMPLE, repeat=3) if is_no_harder(a, b) and is_no_harder(b, c)]
    assert len(chains) > 500
    assert all(is_no_harder(a, c) for a, b, c in chains)


def test_two_that_are_no_harder_than_each_other_differ_in_nothing_that_takes_memory():
    mutual = [(a, b) for a, b in itertools.product(SAMPLE, repeat=2) if is_no_harder(a, b) and is_no_harder(b, a)]
    assert any(a != b for a, b in mutual)
    for a, b in mutual:
        assert a == b.model_copy(update={"dataloader_num_workers": a.dataloader_num_workers})


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ({"micro_batch": 4}, {"micro_batch": 8}),
        ({"checkpointing": "full"}, {"checkpointing": "none"}),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_torch_fused"}),
        ({"optim": "adafactor"}, {"optim": "adamw_torch"}),
        ({"micro_batch": 4, "checkpointing": "full", "optim": "adafactor"}, {"micro_batch": 8}),
    ],
)
def test_an_easier_configuration_that_ran_out_of_memory_rules_out_the_harder(easy, hard):
    history = history_of(make_result(make_config(**easy), OUT_OF_MEMORY, number=3))
    assert history.refusal(make_config(**hard)) == "trial 3, no harder on memory, ran out of it"
    assert history_of(make_result(make_config(**hard), OUT_OF_MEMORY)).refusal(make_config(**easy)) is None


@pytest.mark.parametrize(
    "knobs",
    [
        {"precision": "bf16"},
        {"attn_implementation": "eager"},
        {"torch_compile_backend": "inductor"},
        {"adapter": {}},
        {"optim": "lion_32bit"},
    ],
)
def test_what_may_take_more_or_less_is_not_compared(knobs):
    tried, other = make_config(4), make_config(8, **knobs)
    assert history_of(make_result(tried, OUT_OF_MEMORY)).refusal(other) is None
    assert history_of(make_result(other, OUT_OF_MEMORY)).refusal(make_config(16)) is None


def test_neither_a_crash_nor_a_rate_rules_anything_out():
    """The noise of a trial is larger than what these rates differ by: the true ones may be 10 and 11."""
    results = [
        make_result(make_config(1), 10.0),
        make_result(make_config(2), 10.05),
        make_result(make_config(4), CRASHED),
    ]
    history = history_of(*results)
    assert [history.refusal(make_config(size)) for size in (4, 8, 16)] == [None, None, None]


def test_what_has_run_is_known_by_its_latest_trial_and_ranked_by_rate():
    config = make_config(1)
    first, slow, fast = make_result(config, 10.0), make_result(config, 5.0, number=1), make_result(make_config(2), 9.0)
    history = history_of(first, slow, make_result(make_config(4), CRASHED), fast)
    assert history.known(config) == slow
    assert history.known(make_config(16)) is None
    assert (history.ranking(), history.best(), len(history), history.memory_bound) == ([fast, slow], fast, 4, False)
    failed = history_of(make_result(make_config(), OUT_OF_MEMORY))
    assert (failed.best(), failed.memory_bound) == (None, True)


def waiting(share: float, config: TrainConfig | None = None) -> TrialResult:
    return make_result(config or make_config(), make_measurement(data_wait_share=share))


def test_workers_are_tried_with_the_leader_where_its_steps_wait_for_data():
    few, many = make_config(dataloader_num_workers=2), make_config(4, dataloader_num_workers=2)
    hardly = history_of(waiting(0.004))
    said = "a step of the leader waits for data 0.4% of its time: loading them otherwise can't pay"
    assert (hardly.refusal(few), hardly.refusal(make_config(16))) == (said, None)
    history = history_of(waiting(0.2))
    assert history.refusal(few) is None
    assert "with the leader alone" in history.refusal(many)
    history.add(make_result(few, 1e6))  # a leader with workers is varied with and without them
    assert (history.refusal(many), history.refusal(make_config(4))) == (None, None)
    assert "0.0%" in history.refusal(make_config(4, dataloader_num_workers=4))
    assert "nothing measured" in history_of(make_result(make_config(), OUT_OF_MEMORY)).refusal(many)
    assert History().refusal(few) is None


@pytest.mark.parametrize(
    ("light", "heavy"), list(itertools.pairwise(("offload", "full", "every-2nd", "every-4th", "none")))
)
def test_the_more_layers_are_checkpointed_the_easier_on_memory(light, heavy):
    easy, hard = (make_config(checkpointing=kind) for kind in (light, heavy))
    assert is_no_harder(easy, hard)
    assert not is_no_harder(hard, easy)


def test_balanced_micro_batches_are_compared_among_themselves():
    random, grouped, balanced = (
        make_config(4, train_sampling_strategy=name) for name in ("random", "group_by_length", "batch_rebalance")
    )
    assert is_no_harder(random, grouped)
    assert is_no_harder(balanced, balanced.model_copy(update={"per_device_train_batch_size": 8}))
    assert not is_no_harder(random, balanced)
    assert not is_no_harder(balanced, random)
