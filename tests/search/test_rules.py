"""Rules of legality: each refuses what it is about, with a reason, and nothing beside it."""

import pytest
from factories import make_config, make_facts, make_gpu, make_hardware, make_spec, make_workload

from autotune.config import Workload
from autotune.search.rules import refusals

CPU, GPU, OLD_GPU = make_hardware(), make_gpu(), make_gpu(capability=(7, 5))


def why(hardware=GPU, *, model_type: str = "llama", workload: Workload | None = None, facts=None, **knobs):
    workload = workload or make_workload(model=make_spec(model_type=model_type))
    return refusals(make_config(**knobs), workload, facts or make_facts(), hardware)


def without(hardware, *packages: str):
    versions = {k: v for k, v in hardware.versions.items() if k not in packages}
    return hardware.model_copy(update={"versions": versions})


ILLEGAL = [
    (why(micro_batch=3), "a micro-batch of 3 does not divide the global batch of 16"),
    (why(micro_batch=32), "a micro-batch of 32 does not divide the global batch of 16"),
    (why(CPU, precision="fp16"), "fp16 on a CPU silently stays fp32"),
    (why(model_type="t5", precision="fp16"), "t5 overflows in fp16"),
    (why(OLD_GPU, precision="bf16"), "a GPU has no bf16"),
    (why(OLD_GPU, precision="pure_bf16"), "a GPU has no bf16"),
    (why(model_type="resnet", precision="pure_bf16"), "resnet in transformers does not cast images"),
    (why(OLD_GPU, tf32=True), "a GPU has no tf32"),
    (why(CPU, tf32=True), "a CPU has no tf32"),
    (why(attn_implementation="flex_attention"), "llama offers no flex_attention attention"),
    (why(CPU, attn_implementation="flash_attention_2", precision="bf16"), "flash attention needs a CUDA device"),
    (why(attn_implementation="flash_attention_2", precision="fp32"), "flash attention computes in fp16 or bf16"),
    (
        why(without(GPU, "flash-attn"), attn_implementation="flash_attention_2", precision="bf16"),
        "flash attention needs the package flash-attn",
    ),
    (
        why(CPU, facts=make_facts(attn_implementations=("flex_attention",)), attn_implementation="flex_attention"),
        "flex attention has no backward on the CPU",
    ),
    (why(CPU, optim="paged_adamw_8bit"), "paged optimizer states need CUDA"),
    (why(without(GPU, "bitsandbytes"), optim="adamw_bnb_8bit"), "adamw_bnb_8bit needs the package bitsandbytes"),
    (why(without(GPU, "bitsandbytes"), optim="paged_adamw_32bit"), "needs the package bitsandbytes"),
    (why(facts=make_facts(supports_checkpointing=False), checkpointing="full"), "has no activation checkpointing"),
    (why(make_hardware(cxx=None), torch_compile_backend="inductor"), "inductor needs a C++ compiler"),
    (why(without(GPU, "triton"), torch_compile_backend="inductor"), "inductor needs the package triton"),
    (why(CPU, torch_compile_backend="cudagraphs"), "cudagraphs does nothing on a CPU"),
    (why(facts=make_facts(linear_modules=()), adapter={}), "has no linear layers for LoRA"),
]

LEGAL = {
    "the default on a CPU": why(CPU),
    "the default on a GPU": why(),
    "the whole global batch": why(micro_batch=16),
    "any micro-batch of a free global batch": why(micro_batch=3, workload=make_workload(global_batch_size=None)),
    "bf16 on a CPU": why(CPU, precision="bf16"),
    "fp16 on an old GPU": why(OLD_GPU, precision="fp16"),
    "bf16 where fp16 overflows": why(model_type="t5", precision="bf16"),
    "flash attention in 16 bits": why(attn_implementation="flash_attention_2", precision="fp16"),
    "no attention": why(facts=make_facts(attn_implementations=()), attn_implementation=None),
    "paged states on a GPU": why(optim="paged_adamw_8bit"),
    "checkpointing": why(checkpointing="full"),
    "compilation on a CPU": why(CPU, torch_compile_backend="inductor"),
    "compilation on a GPU": why(torch_compile_backend="inductor"),
    "tf32 beside 16 bits": why(tf32=True, precision="bf16"),
    "LoRA": why(adapter={}),
}


@pytest.mark.parametrize(("reasons", "said"), ILLEGAL)
def test_what_can_not_run_is_refused_with_the_reason(reasons, said):
    assert len(reasons) == 1
    assert said in reasons[0]


@pytest.mark.parametrize("what", LEGAL)
def test_what_can_run_is_not_refused(what):
    assert LEGAL[what] == []


def test_every_reason_is_told():
    assert len(why(CPU, micro_batch=3, precision="fp16", tf32=True)) == 3
