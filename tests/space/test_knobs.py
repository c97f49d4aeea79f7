"""The changes of a configuration and their classes; its knobs as options, one for every field; points, plain values."""

import pytest
from factories import make_config, make_facts, make_gpu, make_hardware, make_problem
from pydantic import ValidationError

from autotune.errors import InputError
from autotune.space.knobs import (
    PARAMETERS,
    allowance_of,
    changes,
    differing,
    fitting,
    fixed_values,
    fixed_words,
    has_field,
    in_words,
    knobs,
    make_point,
    shown_changes,
)
from autotune.space.knobs import make_config as config_at
from autotune.values.config import Allowance, Parallelism, TrainConfig
from autotune.values.techniques import ADAPTERS

OPTIONS = {knob.parameter: knob.option for knob in knobs()}


def test_every_field_of_a_configuration_and_of_its_adapter_is_a_knob():
    adapter = {f"adapter.{f}" for kind in ADAPTERS.values() for f in kind.model_fields if f != "kind"}
    devices = {f"parallelism.{f}" for f in Parallelism.model_fields}
    assert OPTIONS.keys() == set(TrainConfig.model_fields) - {"parallelism", "own"} | adapter | devices


def test_options_are_the_fields_or_shorter():
    assert OPTIONS["per_device_train_batch_size"] == "micro-batch"
    assert OPTIONS["adapter.target_modules"] == "adapter-target-modules"
    assert len(set(OPTIONS.values())) == len(OPTIONS)


def test_values_are_shown_as_they_are_written_and_changes_by_the_short_names_of_the_knobs():
    assert (in_words("precision", "bf16"), in_words("tf32", True)) == ("precision=bf16", "tf32=true")
    assert in_words("torch_compile_backend", None) == "compile=none"
    assert in_words("adapter.dropout", 0.0) == "adapter-dropout=0.0"
    changed = changes(make_config(16, precision="bf16", parallelism=Parallelism(world_size=2)), make_problem())
    assert shown_changes(changed) == "micro-batch 16, precision bf16, devices 2"
    assert shown_changes(()) == "the baseline"


BASE = make_config()
GPU, OLD_GPU, CPU = make_gpu(), make_gpu(capability=(7, 5)), make_hardware()
PLAIN, COUPLED, RANDOM = make_facts(), make_facts(batch_coupled="batch norm"), make_facts(has_dropout=True)
COMPILED, TWO = {"torch_compile_backend": "inductor"}, {"parallelism": Parallelism(world_size=2)}


def compared(baseline=BASE, facts=PLAIN, hardware=GPU):
    return make_problem(baseline=baseline, facts=facts, hardware=hardware)


CLASSES = [  # of a change, for a model with these facts
    ("exact", PLAIN, [
        {"micro_batch": 16}, {"attn_implementation": "eager"}, {"experts_implementation": "eager"}, {"packing": True},
        {"dataloader_num_workers": 2}, {"dataloader_prefetch_factor": 4}, {"dataloader_pin_memory": True},
        {"non_blocking": True}, {"logging_nan_inf_filter": False},
        {"torch_compile_mode": "max-autotune"}, {"optim": "adamw_torch"}, TWO,
        *({"parallelism": Parallelism(**{degree: 2})} for degree in ("tensor_parallel", "sequence_parallel")),
        {"parallelism": Parallelism(sharding="zero_3", offload="parameters")},
        {"parallelism": Parallelism(sharding="fsdp_full", replicas=2)},
        {"parallelism": Parallelism(model_parallel=2)},
        {"parallelism": Parallelism(wrapping="size", ddp_bucket_cap_mb=100, ddp_find_unused_parameters=False)},
        {"parallelism": Parallelism(ddp_broadcast_buffers=False)},
    ]),
    ("exact", RANDOM, [
        {"checkpointing": "full"}, {"torch_empty_cache_steps": 1}, {"expandable_segments": True},
        {"generation_batch_size": 8}, {"precompute_ref_log_probs": True},
    ]),
    ("exact", PLAIN, [{"pad_to_multiple_of": 64}]),
    ("numerics", PLAIN, [
        {"train_sampling_strategy": "group_by_length"}, {"train_sampling_strategy": "batch_rebalance"}, {"tf32": True},
        {"precision": "bf16"}, {"precision": "fp16"}, {"use_liger_kernel": True}, {"chunked_loss": True},
        {"activation_memory_budget": 0.5}, COMPILED,  # with TF32
    ]),
    ("numerics", RANDOM, [{"packing": True}, COMPILED, {"torch_compile_mode": "max-autotune"}, TWO]),
    ("numerics", RANDOM, [{"pad_to_multiple_of": 64}]),
    ("numerics", COUPLED, [
        {"micro_batch": 16}, {"packing": True}, TWO, {"parallelism": Parallelism(ddp_broadcast_buffers=False)},
    ]),
    ("optimizer", PLAIN, [{"optim": "adamw_bnb_8bit"}, {"optim": "adafactor"}]),
    ("method", PLAIN, [
        {"precision": "pure_bf16"}, {"adapter": {}}, {"quantization": "nf4"}, {"experts_per_token": 1},
        {"expert_capacity": 32},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("allowance", "facts", "cases"), CLASSES)
def test_a_single_change_has_its_class_and_so_has_undoing_it(allowance, facts, cases):
    for case in cases:
        changed = make_config(**case)
        assert allowance_of(changed, compared(BASE, facts)) == allowance, case
        assert allowance_of(BASE, compared(changed, facts)) == allowance, case


@pytest.mark.parametrize(("kind", "allowance"), [("lora", "numerics"), ("prefix", "numerics"), ("bitfit", "method")])
def test_frozen_weights_in_bf16_round_otherwise_and_trained_ones_learn_otherwise(kind, allowance):
    mixed, pure = (make_config(adapter={"kind": kind}, precision=precision) for precision in ("bf16", "pure_bf16"))
    assert allowance_of(pure, compared(mixed)) == allowance_of(mixed, compared(pure)) == allowance
    assert allowance_of(pure, compared(BASE)) == allowance_of(mixed, compared(make_config(precision="pure_bf16")))


def test_every_knob_has_a_case():
    changed = {c.knob for *_, cases in CLASSES for one in cases for c in changes(make_config(**one), compared())}
    of_devices = {f"parallelism.{field}" for field in Parallelism.model_fields}
    assert changed == set(TrainConfig.model_fields) - {"parallelism", "own"} | of_devices


@pytest.mark.parametrize(
    ("hardware", "before", "after", "allowance"),
    [
        (GPU, {}, COMPILED, "numerics"),
        (OLD_GPU, {}, COMPILED, "exact"),
        (CPU, {}, COMPILED, "exact"),
        (make_gpu(starts_with_tf32=True), {}, COMPILED, "exact"),
        (GPU, {"tf32": True}, {"tf32": True, **COMPILED}, "exact"),
        (GPU, {"precision": "fp16"}, {"precision": "fp16", **COMPILED}, "exact"),
        (GPU, {"precision": "bf16"}, {"precision": "bf16", **COMPILED}, "numerics"),
        (GPU, COMPILED, {"tf32": True, **COMPILED}, "exact"),
    ],
)
def test_compiling_changes_the_numerics_where_it_switches_tf32_on(hardware, before, after, allowance):
    assert allowance_of(make_config(**after), compared(make_config(**before), hardware=hardware)) == allowance


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_library_of_sharding_rounds_16_bits_its_own_way_and_so_do_replicas(precision):
    def spread(sharding, **fields):
        return make_config(precision=precision, parallelism=Parallelism(world_size=4, sharding=sharding, **fields))

    in_16_bits = "exact" if precision == "fp32" else "numerics"
    for before, after in (("none", "fsdp_full"), ("none", "zero_1"), ("fsdp_full", "zero_3")):
        assert allowance_of(spread(after), compared(spread(before), RANDOM)) == in_16_bits
    for before, after in (("fsdp_full", "fsdp_grad_op"), ("zero_1", "zero_3")):
        assert allowance_of(spread(after), compared(spread(before), RANDOM)) == "exact"
    replicas = spread("fsdp_full", replicas=2)
    assert allowance_of(replicas, compared(spread("fsdp_full"), RANDOM)) == in_16_bits


def test_changes_are_told_in_the_order_of_the_fields_and_the_deepest_decides():
    assert (changes(BASE, compared()), allowance_of(BASE, compared())) == ((), Allowance.EXACT)
    config = make_config(16, optim="adafactor", torch_compile_backend="inductor", adapter={"rank": 4})
    assert [(c.knob, c.before, c.after) for c in changes(config, compared())] == [
        ("per_device_train_batch_size", "8", "16"), ("optim", "adamw_torch_fused", "adafactor"),
        ("torch_compile_backend", "none", "inductor"), ("adapter", "none", "lora rank 4 on all-linear"),
    ]  # fmt: skip
    assert allowance_of(make_config(16, precision="bf16", optim="adafactor"), compared()) is Allowance.OPTIMIZER


@pytest.mark.parametrize(
    ("written", "options", "values"),
    [
        (["micro-batch=8"], ("micro-batch=8",), {"per_device_train_batch_size": 8}),
        (["per_device_train_batch_size = 8"], ("micro-batch=8",), {"per_device_train_batch_size": 8}),
        (["parallelism.sharding=zero_2"], ("sharding=zero_2",), {"parallelism.sharding": "zero_2"}),
        (["tf32=on", "compile=none"], ("tf32=true", "compile=none"), {"tf32": True, "torch_compile_backend": None}),
        (["bf16=true"], ("precision=bf16",), {"precision": "bf16"}),
        (["gradient_checkpointing=false"], ("checkpointing=none",), {"checkpointing": "none"}),
        (["adapter_rank=8"], ("adapter-rank=8",), {"adapter": "lora", "adapter.rank": 8}),
        (["adapter=vera", "adapter-rank=8"], None, {"adapter": "vera", "adapter.rank": 8}),
        (["adapter=none"], ("adapter=none",), {"adapter": None}),
    ],
)
def test_fixed_values_are_read_by_any_name_of_a_knob(written, options, values):
    options = options or tuple(written)
    assert fixed_words(written) == options
    assert fixed_values(written) == fixed_values(options) == values


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (["precison=bf16"], "--fix precison: no such knob (did you mean 'precision'?)"),
        (["learning_rate=1e-4"], "--fix learning_rate: no such knob; there are micro-batch, precision, tf32, optim,"),
        (["gradient_accumulation_steps=4"], "--fix gradient_accumulation_steps: follows from micro-batch and"),
        (["batch-size=4"], "--fix batch-size: name micro-batch, the samples of a device at once, or give"),
        (["lora_r=4"], "--fix lora_r: name adapter-rank"),
        (["optim=adamw"], "--fix optim=adamw: there are several: adamw_torch_fused (the Trainer's default),"),
        (["precision"], "--fix precision: expected a knob and its value, such as precision=bf16"),
        (["precision=b16"], "--fix precision=b16: expected fp32, fp16, bf16, fp8 or pure_bf16 (did you mean 'bf16'?)"),
        (["attention=spda"], "--fix attention: 'spda' is unknown (did you mean 'sdpa'?)"),
        (["attention=flash"], "--fix attention: 'flash' is unknown; there are sdpa, eager, flash_attention_2,"),
        (["optim=adamw_bnb_4bit"], "--fix optim=adamw_bnb_4bit: transformers has no optimizer"),
        (["micro-batch=0"], "--fix micro-batch=0: expected a number above 0"),
        (["adapter-rank=0"], "--fix adapter-rank=0: "),
        (["devices=2"], "--fix devices=2: say --devices 2"),
        (["tf32=maybe"], "--fix tf32=maybe: expected true or false"),
        (["bf16=true", "precision=fp32"], "--fix precision=fp32: precision is fixed at bf16 too; drop one"),
        (["adapter=none", "adapter-rank=8"], "--fix adapter-rank=8: there is no adapter (--fix adapter=none)"),
        (["adapter=dorra"], "--fix adapter=dorra: expected lora, rslora, dora,"),
        (["adapter=prefix", "adapter-rank=8"], "--fix adapter-rank=8: prefix has none (--fix adapter=lora, rslora"),
        (["adapter-virtual-tokens=8"], "--fix adapter-virtual-tokens=8: lora has none (--fix adapter=prefix, prompt"),
        (["quantization=int8-qat"], "--fix quantization=int8-qat: quantization-aware training is not offered"),
        (["quantization=nf5"], "--fix quantization=nf5: expected int8, nf4, nf4-double, fp4 or fp4-double"),
    ],
)
def test_a_value_that_can_not_be_fixed_is_refused_in_one_line(written, said):
    with pytest.raises(InputError) as caught:
        fixed_values(written)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_an_unknown_knob_is_refused_with_the_names_of_all_that_there_are():
    with pytest.raises(InputError) as caught:
        fixed_values(["x=1"])
    assert str(caught.value).partition("there are ")[2].split(", ") == list(OPTIONS.values())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_survives_the_way_to_a_point_and_back(kind):
    config = make_config(adapter={"kind": kind}, quantization="nf4")
    assert config_at(make_point(config)) == config


def test_the_fields_of_every_kind_are_parameters_where_the_kind_has_them():
    assert {"adapter.rank", "adapter.virtual_tokens", "adapter.encoder_hidden_size", "quantization"} <= PARAMETERS
    assert "adapter.kind" not in PARAMETERS
    assert has_field("prefix", "adapter.virtual_tokens")
    assert not has_field("prefix", "adapter.rank")
    assert (has_field(None, "adapter.rank"), has_field(None, "precision")) == (False, True)
    with pytest.raises(ValidationError, match="rank"):
        config_at({"per_device_train_batch_size": 1, "adapter": "ia3", "adapter.rank": 8})


def test_another_kind_has_no_fields_of_the_one_before_and_starts_from_its_own_defaults():
    leader = {"adapter": "ia3", "adapter.rank": 8, "adapter.target_modules": "attention"}
    assert config_at(fitting(leader, make_point(make_config()))).adapter == ADAPTERS["ia3"]()
    origin = make_point(make_config(adapter={"kind": "lora", "rank": 4}))
    assert config_at(fitting({"adapter": "vera"}, origin)).adapter.rank == ADAPTERS["vera"]().rank
    assert config_at(fitting({}, origin)).adapter.rank == 4
    assert config_at(fitting({"adapter": None}, origin)).adapter is None


def test_the_values_that_differ_from_the_baseline_make_the_configuration_again():
    baseline = make_config(8)
    for config in (baseline, make_config(1, optim="adafactor"), make_config(8, adapter={"kind": "lora", "rank": 4})):
        assert config_at(fitting(differing(config, baseline), make_point(baseline))) == config
    lora = make_config(4, adapter={"kind": "lora"}, parallelism={"world_size": 2})
    assert differing(lora, baseline) == {"per_device_train_batch_size": 4, "adapter": "lora"}
