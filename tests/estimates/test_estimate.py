"""An estimate is the cost model's prediction, by options or from Python; its notes say what was assumed."""

import pytest
from factories import make_config

import autotune
from autotune.cost.family import family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.errors import InputError
from autotune.estimates.estimate import estimate
from autotune.estimates.request import check
from autotune.planning.options import EstimateOptions, options_of
from autotune.storage.home import rates_of
from autotune.training.resolve import default_task, resolve
from autotune.units import show_memory
from autotune.values.catalogue import gpu_named
from autotune.values.config import TrainConfig
from autotune.values.estimate import CostEstimate
from autotune.values.techniques import LoraAdapter
from autotune.values.workload import RECIPES, Workload

GPU = "rtx-3070"  # 7.8 GiB
LORA = {"adapter": "lora", "adapter-rank": "8"}


def test_a_configuration_is_estimated_by_the_cost_model(estimated):
    found = estimated(fix={"micro-batch": "4", "precision": "bf16", "checkpointing": "full", **LORA}, explain=True)
    knobs = {"precision": "bf16", "checkpointing": "full", "attn_implementation": "sdpa"}
    config = TrainConfig(per_device_train_batch_size=4, adapter=LoraAdapter(rank=8), **knobs)
    assert found.predicted.config == config
    hardware = gpu_named(GPU).hardware()
    traced = profile(found.workload.model, family_of(config, hardware), shape_of(found.workload))
    expected = CostModel.of(found.workload, hardware, rates_of(hardware), [traced]).estimate(config)
    assert found.predicted.memory == expected.memory
    for name in ("step_time_s", "samples_per_second_interval", "tokens_per_second", "mfu"):
        assert getattr(found.predicted.speed, name) == getattr(expected, name), name
    assert found.predicted.accumulation_steps == 16
    alive_bytes = sum(row.allocated_bytes for row in found.alive)
    assert alive_bytes == pytest.approx(expected.memory.allocated_peak_bytes, abs=len(found.alive))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_not_refused_for_a_number_of_devices_that_nobody_gave(recipe):
    pytest.importorskip("trl")
    check(options_of(EstimateOptions, {"model": "gpt2", "gpu": GPU, "recipe": recipe}))


def test_the_devices_of_a_configuration_need_not_be_told_again(tiny_llama):
    config = make_config(1, parallelism={"world_size": 16})
    alone = estimate(str(tiny_llama), config=config, gpu="a100-80gb", seq_len=128)
    slow = estimate(str(tiny_llama), config=config, gpu="a100-80gb", seq_len=128, nodes=16)
    assert slow.step_time_s > alone.step_time_s


def test_zero_with_an_optimizer_without_states_is_explained(estimated):
    fix = {"sharding": "zero_2", "optim": "sgd"}
    found = estimated(devices=2, fix=fix, explain=True)
    states = [row for row in found.alive if row.kind == "optimizer states"]
    assert [(row.operator, row.tensors) for row in states] == [("others", 0)]  # DeepSpeed's weights in fp32


def test_a_recipe_is_estimated_by_its_own_step(estimated):
    pytest.importorskip("trl")
    fix = {"micro-batch": "4", **LORA}
    lengths = {"seq_len": None, "prompt_len": 64, "completion_len": 64}
    dpo, sft = (estimated(recipe=name, **lengths, fix=fix) for name in ("dpo", "sft"))
    assert dpo.predicted.config.checkpointing == "full"  # TRL's default
    assert dpo.predicted.memory.activations_bytes > 1.5 * sft.predicted.memory.activations_bytes
    assert dpo.predicted.speed.step_time_s > sft.predicted.speed.step_time_s
    assert dpo.predicted.flops_per_step > 2.5 * sft.predicted.flops_per_step
    assert any(note.startswith("TRL's DPOTrainer: prompts of 64 tokens") for note in dpo.notes)
    grpo = estimated(recipe="grpo", **lengths, fix=fix)
    assert "generation" in {phase.name for phase in grpo.predicted.memory.phases}
    assert grpo.predicted.speed.step_time_s > sft.predicted.speed.step_time_s


def test_adapters_are_said_to_keep_the_frozen_weights_in_fp32_under_autocast(estimated):
    halve = "the frozen weights stay in fp32; precision=pure_bf16 halves them"

    def is_said(precision, **options):
        found = estimated(**options, fix={"adapter": "lora", "precision": precision, **options.pop("more", {})})
        return f"with {precision} {halve}" in found.notes

    assert [is_said(precision) for precision in ("bf16", "pure_bf16")] == [True, False]
    assert not is_said("fp16", gpu="t4")  # which has no bf16


def test_from_python_it_is_the_same(estimated, tiny_llama):
    found = estimated(fix={"micro-batch": "8", "precision": "bf16"})
    asked = {"config": found.predicted.config, "gpu": GPU}
    by_name = autotune.estimate(str(tiny_llama), seq_len=128, **asked)
    assert isinstance(by_name, CostEstimate)
    assert by_name.memory == found.predicted.memory
    assert by_name.step_time_s == found.predicted.speed.step_time_s
    assert any("global batch 64" in note for note in by_name.notes)
    by_workload = autotune.estimate(workload=found.workload, **asked)
    assert by_workload.memory == by_name.memory
    assert not any("global batch" in note for note in by_workload.notes)


def test_from_python_contradictions_are_refused(tiny_llama):
    spec = resolve("gpt2")
    workload = Workload(model=spec, task=default_task(spec), sequence_length=64, global_batch_size=8)
    config = TrainConfig(per_device_train_batch_size=8, attn_implementation="sdpa")
    for arguments, said in (
        ({}, "needs a model or a workload"),
        ({"workload": workload, "seq_len": 8}, "seq_len is part of the workload"),
        ({"workload": workload, "model": str(tiny_llama)}, "is not that of the workload"),
        ({"workload": workload, "config": {"precision": "bf16"}}, "expected a TrainConfig, not dict"),
        ({"workload": workload, "config": config.model_copy(update={"per_device_train_batch_size": 3})}, "not divide"),
    ):
        with pytest.raises(InputError, match=said):
            autotune.estimate(**{"config": config, **arguments})


def test_logits_that_metrics_keep_can_be_the_peak_and_decide_whether_it_fits(estimated):
    knobs = {"micro-batch": "1", "precision": "bf16"}
    plain, kept = estimated(fix=knobs), estimated(fix=knobs, eval_samples=100_000)
    assert (plain.predicted.memory.phase, plain.predicted.fits) == ("forward and backward", "yes")
    assert (kept.predicted.memory.phase, kept.predicted.fits) == ("evaluation", "no")
    training = show_memory(plain.predicted.memory.allocated_peak_bytes)
    assert f"that of the evaluation, and training has {training} allocated at most" in kept.would_fit
    assert kept.would_fit in kept.notes
    assert not any("evaluation" in note for note in plain.notes)


def test_what_joined_logits_leave_unused_is_given_back_before_memory_runs_out(estimated):
    few, more, most = (estimated(fix={"micro-batch": "1"}, eval_samples=n).predicted for n in (2000, 8000, 20_000))
    assert [found.fits for found in (few, more, most)] == ["probably", "probably", "no"]
    # On the stand-in GPT-2 with 256 samples reserves all of an A100: 50.5 GiB of logits, 413 if none were given back.
    assert more.memory.device_peak_bytes == pytest.approx(gpu_named(GPU).hardware().memory_bytes)
    assert most.memory.reserved_peak_bytes == most.memory.allocated_peak_bytes
