"""The request of an estimate: its defaults are said, and an impossible one is refused in a line."""

import pytest
from factories import make_facts

from autotune.errors import InputError, MachineError
from autotune.estimates.request import plan_of
from autotune.units import GIB
from autotune.values.config import Allowance
from autotune.values.hardware import detect

REFUSED = {
    "an unknown model": ({"model": "gpt-two"}, "unknown"),
    "an unknown GPU": ({"gpu": "a100"}, "did you mean 'a100-80gb'"),
    "more memory than the GPU has": ({"memory_bytes": 80 * GIB}, "--memory 80.00 GiB: rtx-3070 has"),
    "memory of all GPUs": ({"gpu": "all", "memory_bytes": GIB}, "--memory: with --gpu all"),
    "a GPU and a device": ({"device": "cpu"}, "--device cpu: is of this machine"),
    "an allowance beside a configuration": ({"allow": "exact", "fix": {"tf32": True}}, "--allow exact: is for a"),
    "an unknown allowance": ({"allow": "all"}, "--allow all"),
    "no samples": ({"global_batch": 0}, "--global-batch 0"),
    "a sequence beyond the positions": ({"seq_len": 257}, "--seq-len 257: tiny-llama has 256 positions"),
    "a target without a decoder": ({"target_len": 8}, "--target-len: the task causal-lm has no decoder targets"),
    "a task without a head": ({"task": "image-classification"}, "has no head for image-classification"),
    "a micro-batch of nothing": ({"fix": {"micro-batch": "0"}}, "--fix micro-batch=0: expected a number above 0"),
    "a micro-batch that doesn't divide": ({"fix": {"micro-batch": "5"}}, "does not divide the global batch of 64"),
    "an adapter by its other name": ({"fix": {"adapter": "qlora"}}, "--fix adapter=lora,quantization=nf4"),
    "an optimizer that doesn't exist": ({"fix": {"optim": "adamw_trch"}}, "did you mean 'adamw_torch'"),
    "an optimizer that is gone": ({"fix": {"optim": "adamw_hf"}}, "--fix optim=adamw_hf: adamw_hf is gone"),
    "a knob the GPU lacks": ({"gpu": "t4", "fix": {"precision": "bf16"}}, "not possible on t4: Tesla T4 has no bf16"),
    "a kernel the model lacks": ({"fix": {"attention": "paged"}}, "'paged' is unknown"),
    "a compiler that doesn't train": ({"fix": {"compile": "onnxrt"}}, "expected inductor, cudagraphs, aot_eager"),
    "tokens of images": ({"model": "vit-base", "tokens": 1e9, "seq_len": None}, "--tokens: google/vit-base"),
    "lengths of images": ({"model": "vit-base"}, "--seq-len 128: the task image-classification has images alone"),
    "an evaluation of a recipe": ({"recipe": "dpo", "eval_batch": 8, "seq_len": None}, "dpo isn't predicted"),
    "what is alive of many": ({"explain": True, "devices": 2, "fix": {"optim": "sgd"}}, "--explain: is of one"),
    "nodes that don't divide": ({"devices": 4, "nodes": 3}, "--nodes 3: does not divide the 4 devices"),
    "nodes of one device": ({"nodes": 2}, "--nodes 2: is of several devices"),
    "several devices of all": ({"gpu": "all", "devices": 4}, "--devices 4: they are of one kind"),
    "an endless network": ({"network_gb_s": float("inf")}, "--network-gb-s inf: expected a finite number"),
    "a network of one node": ({"devices": 8, "network_gb_s": 1.0}, "--network-gb-s 1.0: is of several nodes"),
    "a host that nothing uses": ({"host_memory_bytes": GIB}, "--host-memory: is of several devices, or of a"),
    "a CPU's memory twice": (
        {"gpu": None, "device": "cpu", "devices": 2, "memory_bytes": 16 * GIB, "fix": {"sharding": "none"}},
        "--memory 16.00 GiB: ",
    ),
    "a knob that no GPU can": ({"gpu": "all", "fix": {"micro-batch": "5"}}, "not possible on any device"),
}  # fmt: skip


def test_every_default_is_said(estimated):
    said = " ".join(estimated(seq_len=None, model="t5-small", fix={"precision": "bf16"}).notes)
    defaults = ("sequence length 512", "target length 512", "global batch 64", "micro-batch=8", "attention=sdpa")
    for default in (*defaults, "optim=adamw_torch_fused", "rtx-3070 as its data sheet has it", "meta device"):
        assert default in said
    assert "precision=" not in said
    note = "sequence length 256, the longest that the model has (--seq-len)"
    assert note in estimated(seq_len=None, fix={"tf32": False}).notes


def test_the_default_batch_is_shared_evenly_and_experts_are_computed_as_the_library_does(estimated):
    found = estimated(devices=3)
    assert found.workload.global_batch_size == 72
    experts = make_facts(experts=8, experts_implementations=("grouped_mm", "eager"))
    plan = plan_of(found.workload, found.device, experts, Allowance.OPTIMIZER)
    assert {config.experts_implementation for config in plan.every_config()} == {"grouped_mm"}


def test_notes_tell_that_no_speed_is_known_and_which_knobs_change_nothing(estimated):
    fix = {"micro-batch": "4", "workers": "4", "pin-memory": False}
    found = estimated(gpu=None, memory_bytes=8 * GIB, fix=fix)
    assert (found.device.rates, found.predicted.speed) == (None, None)
    assert "only the memory of the device is known, so no speed (--gpu NAME)" in found.notes
    assert any("workers=4, pin-memory=false changes nothing" in note for note in found.notes)


def test_flash_attention_is_taken_as_installed_on_a_device_of_the_table(estimated):
    found = estimated(fix={"attention": "flash_attention_2", "precision": "bf16"})
    assert found.predicted.config.attn_implementation == "flash_attention_2"
    assert "flash-attn taken as installed" in found.notes


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_an_impossible_request_is_refused_in_one_line(estimated, options, said):
    with pytest.raises(InputError) as error:
        estimated(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_device_that_is_not_there_is_refused(estimated):
    with pytest.raises(MachineError, match="cuda:99"):
        estimated(gpu=None, device="cuda:99")


def test_the_local_device_has_the_defaults_and_the_budget_of_a_search(estimated):
    here = {"gpu": None, "device": "cpu", "seq_len": None, "fix": {"precision": "bf16"}}
    found = estimated(**here)
    assert found.workload.sequence_length == 64
    assert found.workload.global_batch_size == 8
    assert found.device.hardware.is_cpu
    assert found.device.memory_bytes == pytest.approx(detect("cpu").default_budget_bytes, rel=0.3)
    assert found.device.rates == "the processor's cores, frequency and vector extensions"
    assert any(found.device.rates in note for note in found.notes)
    assert estimated(memory_bytes=GIB, **here).device.memory_bytes == GIB
    shared = {**here, "fix": {"precision": "bf16", "sharding": "none"}, "devices": 8}
    assert estimated(**shared).device.memory_bytes == pytest.approx(found.device.memory_bytes / 8, rel=0.3)
