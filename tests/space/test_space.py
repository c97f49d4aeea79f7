"""The space of one workload on one device: which points exist, which are legal, which its trials rule out."""

import functools
import itertools
import random

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    legal_points,
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
from autotune.space.knobs import make_point
from autotune.space.space import History, SearchSpace, is_no_harder, micro_batches
from autotune.values.budget import Effort
from autotune.values.config import LARGEST_BATCH, Allowance, Parallelism, TrainConfig
from autotune.values.trial import TrialResult

ADAPTERS = {"adapter": [None, "lora"], "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}}}


def choices(space: SearchSpace, name: str) -> tuple:
    return next(d.choices for d in space.dimensions if d.name == name)


def builtin(name: str, effort: Effort = Effort.QUICK, allowance: Allowance = Allowance.METHOD) -> SearchSpace:
    """A built-in space on the device that it is for, at the global batch that is the default there."""
    facts, hardware, own, global_batch = {}, make_gpu(), {"dataloader_pin_memory": True}, 64
    if name == "cpu":
        hardware, own, global_batch = make_hardware(), {}, 16
    elif name == "moe":
        kinds = ("grouped_mm", "batched_mm", "eager")
        facts = {"experts": 8, "experts_implementations": kinds, "experts_per_token": 2}
        own["experts_implementation"] = "grouped_mm"
    elif name in ("parallel", "fsdp", "deepspeed"):
        facts = {"tensor_parallel_heads": 8, "layers": 16, "parameters": 1_000_000_000}
        hardware = make_gpu(count=8, versions={**hardware.versions, "deepspeed": "0.19.8"})
        own["parallelism"] = Parallelism(world_size=8)
    return make_space(
        space=load_space(name), facts=make_facts(**facts), hardware=hardware,
        workload=make_workload(global_batch_size=global_batch), baseline=make_config(**own),
        budget=make_budget(effort=effort), allowance=allowance,
    )  # fmt: skip


def test_dimensions_have_the_order_of_the_file_and_the_baselines_value_even_if_it_is_illegal():
    space = make_space({"optim": ["adafactor"], "precision": ["bf16"]})
    assert [dimension.name for dimension in space.dimensions] == ["optim", "precision"]
    space = make_space({"optim": ["adafactor"], "per_device_train_batch_size": [2]}, baseline=make_config(4))
    assert choices(space, "optim") == ("adamw_torch_fused", "adafactor")
    assert choices(space, "per_device_train_batch_size") == (4, 2)
    space = make_space({"precision": ["bf16"]}, baseline=make_config(precision="fp16"), hardware=make_hardware())
    assert choices(space, "precision") == ("fp16", "bf16")


def test_a_reason_against_the_baseline_counts_against_no_other_value():
    paged = make_config(optim="paged_adamw_8bit")  # not on a CPU
    space = make_space({"optim": ["adafactor"], "checkpointing": ["full"], "tf32": [True]}, baseline=paged)
    assert choices(space, "optim") == ("paged_adamw_8bit", "adafactor")
    assert choices(space, "checkpointing") == ("none", "full")
    assert choices(space, "tf32") == (False,)


@pytest.mark.parametrize(
    ("fields", "own", "values"),
    [
        ({"parallelism": {"world_size": 2, "ddp_find_unused_parameters": False}}, "parallelism.world_size", (2, 1)),
        ({"parallelism": {"world_size": 2, "sharding": "fsdp_full", "wrapping": "size", "offload": "parameters"}},
         "parallelism.sharding", ("fsdp_full", "none")),
        ({"torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune-no-cudagraphs"},
         "torch_compile_backend", ("inductor", None)),
    ],
)  # fmt: skip
def test_knobs_of_the_baseline_that_mean_nothing_at_a_value_do_not_bar_it(fields, own, values):
    facts = make_facts(layers=2, parameters=200_000_000)
    here = {"hardware": make_gpu(count=2), "facts": facts, "workload": make_workload(global_batch_size=8)}
    space = make_space({own: list(values)}, baseline=make_config(4, **fields), **here)
    assert choices(space, own) == values
    assert [make_point(config)[own] for config in space.legal] == list(values)


def test_no_workers_are_tried_beside_a_baseline_whose_workers_fetch_ahead():
    own = make_config(dataloader_num_workers=2, dataloader_prefetch_factor=4)
    space = make_space({"dataloader_num_workers": [0, 2]}, baseline=own)
    ways = [(way["dataloader_num_workers"], way["dataloader_prefetch_factor"]) for way in space.loadings]
    assert ways == [(0, None), (2, 4)]


def test_the_users_own_sampling_bars_nothing_where_lengths_are_not_known():
    grouped = make_config(4, train_sampling_strategy="group_by_length")
    space = make_space({"checkpointing": ["none", "full"], "packing": [False, True]}, baseline=grouped)
    assert [config.checkpointing for config in space.legal] == ["none", "full"]


def test_values_that_are_never_legal_or_not_allowed_are_left_out_with_the_reason():
    space = make_space({"precision": ["fp32", "fp16", "bf16"], "tf32": [True, False]}, hardware=make_hardware())
    assert (choices(space, "precision"), choices(space, "tf32")) == (("fp32", "bf16"), (False,))
    assert space.left_out["precision", "fp16"] == "fp16 on a CPU silently stays fp32 in the Trainer"
    assert set(space.left_out) == {("precision", "fp16"), ("tf32", True)}
    space = make_space({"precision": ["bf16", "pure_bf16"]}, allowance=Allowance.NUMERICS)
    assert choices(space, "precision") == ("fp32", "bf16")
    assert "--allow numerics does not admit" in space.left_out["precision", "pure_bf16"]


def test_a_kernel_that_needs_16_bits_is_kept_for_a_baseline_of_32_as_fp8_is_for_one_that_is_not_compiled():
    kernels = {"attn_implementation": ["sdpa", "flash_attention_2"]}
    here = {"hardware": make_gpu(), "baseline": make_config(precision="fp32")}
    assert "flash_attention_2" in choices(make_space({"precision": ["bf16"], **kernels}, **here), "attn_implementation")
    assert "flash_attention_2" not in choices(make_space(kernels, **here), "attn_implementation")
    here = {"hardware": make_gpu(capability=(9, 0), versions={**make_gpu().versions, "torchao": "0.18.0"})}
    compiled = {"precision": ["fp8"], "torch_compile_backend": ["inductor"]}
    assert choices(make_space(compiled, **here), "precision") == ("fp32", "fp8")


def test_a_parameter_that_costs_too_much_for_the_effort_does_not_exist():
    parameters = {"precision": ["bf16"], "torch_compile_backend": {"choices": ["inductor"], "from_effort": "standard"}}
    dimensions = [len(make_space(parameters, budget=make_budget(effort=effort)).dimensions) for effort in Effort]
    assert dimensions == [1, 2, 2]


def test_a_parameter_without_a_dimension_keeps_the_baselines_value():
    space = make_space({"precision": ["bf16"]}, baseline=make_config(4, checkpointing="full"))
    assert space.config({"precision": "bf16"}) == make_config(4, checkpointing="full", precision="bf16")


def test_a_combination_that_the_file_forbids_is_refused_with_its_reason():
    rule = {"forbid": {"optim": ["adafactor"], "precision": ["bf16"]}, "reason": "nobody wants it"}
    space = make_space({"optim": ["adafactor"], "precision": ["fp32", "bf16"]}, rules=[rule])
    assert space.refusal(make_config(optim="adafactor", precision="bf16")) == "nobody wants it"
    assert len(list(legal_points(space))) == 3


def test_a_value_is_left_out_if_it_is_forbidden_alone_not_beside_the_baselines_others():
    rule = {"forbid": {"optim": ["adafactor"], "checkpointing": ["none"]}, "reason": "only with checkpointing"}
    space = make_space({"optim": ["adafactor"], "checkpointing": ["none", "full"]}, rules=[rule])
    assert space.left_out == {}
    assert {"optim": "adafactor", "checkpointing": "full"} in list(legal_points(space))
    rule = {"forbid": {"optim": ["adafactor"]}, "reason": "never"}
    assert make_space({"optim": ["adafactor"]}, rules=[rule]).left_out == {("optim", "adafactor"): "never"}


def test_a_conditional_parameter_exists_only_where_its_condition_holds():
    points = [{"adapter": None}, {"adapter": "lora", "adapter.rank": 8}, {"adapter": "lora", "adapter.rank": 64}]
    assert list(legal_points(make_space(ADAPTERS))) == points
    assert list(legal_points(make_space({"adapter": [None, "lora"], "adapter.rank": [8, 64]}))) == points
    assert choices(make_space({**ADAPTERS, "adapter": ["lora"]}), "adapter") == (None, "lora")


def test_a_point_is_completed_with_the_parameters_that_exist_there_and_no_others():
    complete = make_space({"precision": ["bf16"], **ADAPTERS}).complete
    assert complete({"adapter": None, "adapter.rank": 64}) == {"precision": "fp32", "adapter": None}
    assert complete({"precision": "bf16", "seed": 1}) == {"precision": "bf16", "adapter": None}
    assert complete({"adapter": "lora"}) == {"precision": "fp32", "adapter": "lora", "adapter.rank": 8}
    assert complete({"adapter": "lora", "adapter.rank": 64})["adapter.rank"] == 64


_ENUMERATED = [("cpu", Effort.QUICK), ("cpu", Effort.STANDARD), ("default", Effort.QUICK), ("adapters", Effort.QUICK)]
BUILTIN = [
    pytest.param(name, effort, marks=[] if (name, effort) in _ENUMERATED else [pytest.mark.slow])
    for name, effort in itertools.product(builtin_spaces(), [Effort.QUICK, Effort.STANDARD])
]


@pytest.mark.parametrize(("name", "effort"), BUILTIN)
def test_every_legal_point_of_a_built_in_space_is_one_configuration_and_back(name, effort):
    space, seen = builtin(name, effort), set()
    for point in itertools.islice(legal_points(space), 0, 10_000, 7):
        config = space.config(point)
        assert space.refusal(config) is None
        assert space.complete(make_point(config)) == point
        assert config not in seen
        seen.add(config)
    assert seen


SIZES = {  # effort and allowance of the smallest and the largest legal space; others: the first
    "default moe vision speech parallel": ("quick exact", "standard optimizer"),
    "cpu": ("quick exact", "thorough optimizer"), "exact": ("quick exact", "thorough exact"),
    "full": ("quick optimizer", "thorough method"), "adapters lora qlora": ("quick method", "standard method"),
    "fsdp": ("quick exact", "standard numerics"), "deepspeed": ("quick exact", "quick optimizer"),
}  # fmt: skip
LARGE = ("full", "speech", "qlora", "parallel")


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        pytest.param(name, ends, marks=[pytest.mark.slow] if name in LARGE else [], id=name)
        for names, ends in SIZES.items()
        for name in names.split()
    ],
)
def test_a_built_in_space_is_as_big_as_its_first_line_says(name, ends):
    first = (spaces_directory() / f"{name}.yaml").read_text().splitlines()[0]
    of = [builtin(name, Effort(effort), Allowance(allowance)) for effort, allowance in map(str.split, ends)]
    low, high = (len(list(legal_points(space))) for space in of)
    assert [len(space.legal) * len(space.loadings) for space in of] == [low, high]  # micro-batches together
    assert f"{low:,} to {high:,} legal points" in first


def test_a_rule_against_the_baseline_leaves_every_way_of_loading():
    choices = {"precision": ["fp32", "bf16"], "dataloader_num_workers": [0, 2], "optim": ["adamw_torch", "adafactor"]}
    space = make_space(choices, rules=[{"forbid": {"precision": ["fp32"]}, "reason": "too slow"}])
    assert [loading["dataloader_num_workers"] for loading in space.loadings] == [0, 2]


def test_the_strictest_allowance_leaves_the_training_as_it_is():
    space = builtin("default", Effort.THOROUGH, Allowance.EXACT)
    configs = [space.config(point) for point in legal_points(space)]
    assert {c.precision for c in configs} == {"fp32"}
    assert {c.optim for c in configs} == {"adamw_torch", "adamw_torch_fused"}
    assert {c.adapter for c in configs} == {None}
    assert len({c.per_device_train_batch_size for c in configs}) > 1
    coupled = make_space(allowance=Allowance.EXACT, facts=make_facts(batch_coupled="batch norm"))
    assert choices(coupled, "per_device_train_batch_size") == (8,)


def test_the_lattice_of_micro_batches_has_multiples_of_8_and_other_divisors_beyond_them():
    lattices = {1: (1,), 7: (1, 7), 15: (1, 3, 5, 15), 12: (1, 2, 4, 6, 12), 16: (1, 2, 4, 8, 16), 24: (1, 2, 4, 8, 24)}
    assert {size: micro_batches(size) for size in lattices} == lattices
    assert micro_batches(96) == (1, 2, 4, 8, 16, 24, 32, 48, 96)


@pytest.mark.timeout(30)
def test_the_lattice_of_a_large_global_batch_is_whole_and_there_in_a_moment():
    assert micro_batches(LARGEST_BATCH) == tuple(1 << power for power in range(21))
    for prime in (1_048_573, 1_000_003, 10**13 + 37):
        assert micro_batches(prime) == (1, prime)


def test_a_free_global_batch_has_a_lattice_of_its_own():
    lattice = micro_batches(None)
    assert list(lattice) == sorted(set(lattice))
    space = make_space({"per_device_train_batch_size": "lattice"}, workload=make_workload(global_batch_size=None))
    assert choices(space, "per_device_train_batch_size") == lattice


def test_compiling_is_exact_and_tried_where_tf32_is_on_already():
    def exact(**baseline):
        here = {"hardware": make_gpu(), "baseline": make_config(**baseline), "allowance": Allowance.EXACT}
        return len(list(legal_points(make_space({"torch_compile_backend": ["inductor"]}, **here))))

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
no_harder = functools.partial(is_no_harder, workload=make_workload(global_batch_size=16))


def test_no_harder_is_reflexive_and_transitive():
    assert all(no_harder(config, config) for config in SAMPLE)
    chains = [(a, b, c) for a, b, c in itertools.product(SAMPLE, repeat=3) if no_harder(a, b) and no_harder(b, c)]
    assert len(chains) > 500
    assert all(no_harder(a, c) for a, b, c in chains)


def test_two_that_are_no_harder_than_each_other_differ_in_nothing_that_takes_memory():
    mutual = [(a, b) for a, b in itertools.product(SAMPLE, repeat=2) if no_harder(a, b) and no_harder(b, a)]
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


def test_a_micro_batch_without_accumulation_may_need_less_than_a_smaller_one_whose_gradients_stay():
    failed = make_result(make_config(4), OUT_OF_MEMORY)
    assert [history_of(failed).refusal(make_config(size)) is None for size in (8, 16)] == [False, True]


def test_knobs_that_may_take_more_or_less_are_not_compared():
    others = {"precision": "bf16", "attn_implementation": "eager", "torch_compile_backend": "inductor", "adapter": {}}
    for knob, value in {**others, "optim": "lion_32bit"}.items():
        other = make_config(8, **{knob: value})
        assert history_of(make_result(make_config(4), OUT_OF_MEMORY)).refusal(other) is None
        assert history_of(make_result(other, OUT_OF_MEMORY)).refusal(make_config(16)) is None
    # A driver's margin is counted for paged states.
    assert not no_harder(make_config(optim="paged_adamw_8bit"), make_config(optim="adamw_bnb_8bit"))


def test_neither_a_crash_nor_a_rate_rules_anything_out():
    """The noise of a trial is larger than what these rates differ by: the true ones may be 10 and 11."""
    history = history_of(*(make_result(make_config(n), found) for n, found in ((1, 10.0), (2, 10.05), (4, CRASHED))))
    assert [history.refusal(make_config(size)) for size in (4, 8, 16)] == [None, None, None]


def test_a_configuration_is_known_by_its_latest_trial_and_ranked_by_its_rate():
    config = make_config(1)
    first, slow, fast = make_result(config, 10.0), make_result(config, 5.0, number=1), make_result(make_config(2), 9.0)
    history = history_of(first, slow, make_result(make_config(4), CRASHED), fast)
    assert history.known(config) == slow
    assert history.known(make_config(16)) is None
    assert (history.ranking(), history.best(), len(history.results), history.shortages) == ([fast, slow], fast, 4, [])
    failed = history_of(make_result(make_config(), OUT_OF_MEMORY))
    assert (failed.best(), failed.shortages) == (None, failed.results)


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


def test_what_the_host_waits_for_is_tried_with_the_leader_whether_or_not_its_steps_wait_for_data():
    ahead = make_config(logging_nan_inf_filter=False)
    history = history_of(waiting(0.004))
    assert history.refusal(ahead) is None
    assert "with the leader alone" in history.refusal(make_config(4, logging_nan_inf_filter=False))
    assert "0.4%" in history.refusal(make_config(logging_nan_inf_filter=False, dataloader_num_workers=2))
    history.add(make_result(ahead, 1e6))
    assert history.refusal(make_config(4)) is None


def test_the_more_layers_are_checkpointed_the_easier_on_memory():
    configs = [make_config(checkpointing=kind) for kind in ("offload", "full", "every-2nd", "every-4th", "none")]
    for easy, hard in itertools.pairwise(configs):
        assert (no_harder(easy, hard), no_harder(hard, easy)) == (True, False)


def test_balanced_micro_batches_are_compared_among_themselves():
    random, grouped, balanced = (
        make_config(4, train_sampling_strategy=name) for name in ("random", "group_by_length", "batch_rebalance")
    )
    assert no_harder(random, grouped)
    assert no_harder(balanced, balanced.model_copy(update={"per_device_train_batch_size": 8}))
    assert not no_harder(random, balanced)
    assert not no_harder(balanced, random)
