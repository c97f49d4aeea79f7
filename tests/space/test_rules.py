"""Rules of legality: each refuses its own case with a reason, and no other."""

import pytest
from factories import make_config, make_facts, make_gpu, make_hardware, make_spec, make_workload

from autotune.space.rules import refusals
from autotune.values.config import Parallelism
from autotune.values.model import Task
from autotune.values.techniques import ADAPTERS
from autotune.values.workload import Barred, Held, LengthProfile, OwnCode, Recipe, Workload

CPU, GPU, OLD_GPU = make_hardware(), make_gpu(), make_gpu(capability=(7, 5))
TF32_GPU, NO_CC, NO_CXX = make_gpu(starts_with_tf32=True), make_gpu(has_cc=False), make_hardware(cxx=None)
AUTOTUNED = {"torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune", "micro_batch": 16}


def why(hardware=GPU, *, model_type: str = "llama", workload: Workload | None = None, facts=None, **knobs):
    workload = workload or make_workload(model=make_spec(model_type=model_type))
    return list(refusals(make_config(**knobs), workload, facts or make_facts(), hardware))


def with_package(hardware, package: str):
    return hardware.model_copy(update={"versions": {**hardware.versions, package: "1.0"}})


def without(hardware, package: str):
    return hardware.model_copy(update={"versions": {k: v for k, v in hardware.versions.items() if k != package}})


FLASH_3 = make_facts(attn_implementations=("sdpa", "flash_attention_3"))
MOE = make_facts(experts=8, experts_implementations=("grouped_mm", "eager"), experts_per_token=2)


LINEAR = ("q_proj", "v_proj", "down_proj")
ADAPTABLE = make_facts(linear_modules=LINEAR, biases=8, max_sequence_length=128, takes_prefix=True)
FUSED = ADAPTABLE.model_copy(update={"expert_parameters": ("experts.gate_up_proj", "experts.down_proj")})


def why_not(kind, *, facts=ADAPTABLE, hardware=GPU, model_type="llama", task=Task.CAUSAL_LM, knobs=(), **fields):
    """Return the reasons against an adapter of a kind with `fields`."""
    workload = make_workload(sequence_length=64, task=task, model=make_spec(model_type=model_type))
    adapter = kind and {"kind": kind, **fields}
    return why(hardware, workload=workload, facts=facts, precision="bf16", adapter=adapter, **dict(knobs))


LENGTHS = LengthProfile(samples=100, mean=40.0, minimum=8, median=32, p95=90, maximum=128)
TEXTS = make_workload(lengths=LENGTHS)
ALIKE = make_workload(lengths=LENGTHS.model_copy(update={"minimum": 128}))
FREE = make_workload(lengths=LENGTHS, global_batch_size=None)
MASKED = make_workload(lengths=LENGTHS, task=Task.MASKED_LM)
SMOOTHED = make_workload(fixed_arguments={"label_smoothing_factor": 0.1})
WITH_A_RECIPE = make_workload(lengths=LENGTHS, recipe=Recipe(name="sft", prompt_length=8, completion_length=8))
BALANCED = {"train_sampling_strategy": "batch_rebalance"}
SPEECH = make_workload(task=Task.SPEECH_CTC, model=make_spec(model_type="wav2vec2"))
IMAGES = make_workload(task=Task.IMAGE_CLASSIFICATION, model=make_spec(model_type="efficientnet"))
PACKS = make_facts(packs=True)

CHUNKED, UNNAMED = make_facts(chunks_loss=True, liger=True), make_facts(linear_modules=("in_x",))
INDUCTOR, FLASH = {"torch_compile_backend": "inductor"}, {"attn_implementation": "flash_attention_2"}
FP8, HOPPER = {**INDUCTOR, "precision": "fp8"}, GPU.model_copy(update={"capability": (9, 0)})
AO_GPU = with_package(HOPPER, "torchao")
FLEX = {"facts": make_facts(attn_implementations=("flex_attention",)), "attn_implementation": "flex_attention"}
IA3 = {"adapter": {"kind": "ia3"}, "quantization": "nf4"}
GROUPED = {"train_sampling_strategy": "group_by_length"}
LIGER_GPU, GALORE_GPU, LOMO_GPU = (with_package(GPU, name) for name in ("liger-kernel", "galore-torch", "lomo-optim"))
NO_BNB_GPU, NO_LINEAR, LIGER = without(GPU, "bitsandbytes"), make_facts(linear_modules=()), make_facts(liger=True)
TWO, PARTS = Parallelism(world_size=2), Parallelism(world_size=2, tensor_parallel=2)
HEADS = make_facts(tensor_parallel_heads=8)

CODE = OwnCode(
    kind="script", shown="python train.py", command=("train.py",), directory="/",
    held={"optim": Held(value="adamw_torch", reason="the script hands over an optimizer")},
    barred=(Barred(knob="precision", value="pure_bf16", reason="it casts nothing"),),
)  # fmt: skip
HELD = {"hardware": CPU, "workload": make_workload(own_code=CODE)}

PINNED = {"non_blocking": True, "dataloader_pin_memory": True}
EVEN, AHEAD, IN_A_FILE = (
    {"fixed_arguments": {"accelerator_config": settings}}
    for settings in ({"even_batches": False, "non_blocking": False}, {"non_blocking": True}, "accelerate.json")
)

ILLEGAL = [
    (why(non_blocking=True), "non_blocking needs dataloader_pin_memory, and a CPU has nothing to copy to"),
    (why(workload=make_workload(**AHEAD), **PINNED), "non_blocking is as your accelerator_config has it"),
    (why(workload=make_workload(**IN_A_FILE), **PINNED), "non_blocking is as your accelerator_config has it"),
    (why(workload=make_workload(own_code=CODE, **EVEN), optim="adamw_torch", **PINNED),
     "non_blocking is as your accelerator_config has it"),
    (why(**HELD, optim="adafactor"), "optim stays as it is: the script hands over an optimizer"),
    (why(**HELD, optim="adamw_torch", precision="pure_bf16"), "precision pure_bf16: it casts nothing"),
    (why(workload=make_workload(own_code=CODE), optim="adamw_torch", parallelism=PARTS, facts=HEADS),
     "tensor parallel: your code makes its model by itself"),
    (why(workload=SPEECH, precision="pure_bf16"), "wav2vec2 in transformers does not cast sound"),
    (why(**GROUPED), "grouping by length: the samples have one length"),
    (why(workload=ALIKE, **GROUPED), "grouping by length: the samples have one length"),
    (why(micro_batch=4, **BALANCED), "balancing by tokens: the samples have one length"),
    (why(workload=TEXTS, micro_batch=16, **BALANCED), "moves samples between the micro-batches of a step, which has"),
    (why(workload=FREE, micro_batch=4, **BALANCED), "moves samples between the micro-batches of a step, which has one"),
    (why(workload=TEXTS, micro_batch=4, packing=True, facts=PACKS, **BALANCED), "packed batches have no padding that"),
    (why(workload=TEXTS, micro_batch=4, parallelism=PARTS, facts=HEADS, **BALANCED), "deals samples out to all ranks"),
    (why(workload=WITH_A_RECIPE, micro_batch=4, **BALANCED), "without code of yours or a recipe"),
    (why(packing=True, facts=PACKS), "packing: the samples have one length"),
    (why(workload=TEXTS, packing=True), "packing: llama lets the samples of a row see each other"),
    (why(pad_to_multiple_of=64), "pad_to_multiple_of: the samples have one length"),
    (why(workload=TEXTS, packing=True, facts=PACKS, pad_to_multiple_of=64), "packed batches have no padding to a"),
    (why(workload=TEXTS, facts=make_facts(max_sequence_length=130), pad_to_multiple_of=48),
     "padded to 144 exceed the 130"),
    (why(workload=MASKED, packing=True, facts=PACKS), "packing joins the texts of causal models"),
    (why(workload=TEXTS, packing=True, facts=PACKS, attn_implementation="eager"), "packing with eager attention"),
    (why(workload=TEXTS, packing=True, facts=PACKS, **GROUPED), "packed batches have no padding"),
    (why(workload=TEXTS, packing=True, facts=PACKS, adapter={"kind": "prompt"}), "packing: prompt puts its virtual"),
    (why(micro_batch=3), "a micro-batch of 3 does not divide the global batch of 16"),
    (why(micro_batch=32), "a micro-batch of 32 does not divide the global batch of 16"),
    (why(CPU, precision="fp16"), "fp16 on a CPU silently stays fp32"),
    (why(model_type="t5", precision="fp16"), "t5 overflows in fp16"),
    (why(model_type="t5", **INDUCTOR, checkpointing="full"), "inductor with checkpointing on CUDA breaks the sdpa"),
    (why(OLD_GPU, precision="bf16"), "a GPU has no bf16"),
    (why(GPU, **FP8), "a GPU has no products in fp8 (compute capability 8.9 or newer)"),
    (why(HOPPER, **FP8), "fp8 needs the package torchao"),
    (why(AO_GPU, precision="fp8"), "fp8 pays only where inductor fuses its casts (--fix compile=inductor)"),
    (why(AO_GPU, **FP8, workload=WITH_A_RECIPE), "fp8 replaces linear layers of whole models"),
    (why(AO_GPU, **FP8, facts=NO_LINEAR), "llama has no linear layers that could multiply in fp8"),
    (why(AO_GPU, **FP8, model_type="gpt2"), "gpt2 has no linear layers that could multiply in fp8"),
    (why(workload=IMAGES, precision="pure_bf16"), "efficientnet in transformers does not cast images"),
    (why(model_type="deberta", precision="bf16"), "deberta in transformers fails in 16 bits; use fp32"),
    (why(model_type="fnet", precision="fp16"), "fnet in transformers fails in 16 bits; use fp32"),
    (why(OLD_GPU, tf32=True), "a GPU has no tf32"),
    (why(CPU, tf32=True), "a CPU has no tf32"),
    (why(TF32_GPU, tf32=False), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE has torch begin with TF32"),
    (why(tf32=True, precision="bf16", **AUTOTUNED), "max-autotune raises in mixed precision where tf32 is asked for"),
    (why(NO_CC, **INDUCTOR), "inductor needs a C compiler on CUDA"),
    (why(with_package(NO_CC, "liger-kernel"), facts=LIGER, use_liger_kernel=True), "use_liger_kernel needs a C comp"),
    (why(NO_CC, **FLEX), "flex attention needs a C compiler"),
    (why(with_package(NO_CC, "torchao"), optim="adamw_torch_8bit"), "compiles its step, which needs a C compiler"),
    (why(attn_implementation="flex_attention"), "llama offers no flex_attention attention"),
    (why(CPU, **FLASH, precision="bf16"), "flash attention needs a CUDA device"),
    (why(**FLASH, precision="fp32"), "flash attention computes in fp16 or bf16"),
    (why(without(GPU, "flash-attn"), **FLASH, precision="bf16"), "flash attention needs the package flash-attn"),
    (why(facts=FLASH_3, attn_implementation="flash_attention_3", precision="bf16"), "flash attention needs the"),
    (why(OLD_GPU, **FLASH, precision="fp16"), "needs compute capability 8.0 or newer"),
    (why(CPU, **FLEX), "flex attention has no backward on the CPU"),
    (why(CPU, optim="paged_adamw_8bit"), "paged_adamw_8bit needs CUDA; on the CPU bitsandbytes silently doesn't page"),
    (why(optim="adamw_torch_xla"), "adamw_torch_xla: it needs an XLA device"),
    (why(optim="rmsprop_bnb_8bit", precision="pure_bf16"), "bitsandbytes has no kernel of it for gradients in bf16"),
    (why(optim="galore_adamw"), "galore_adamw needs the package galore-torch"),
    (why(with_package(CPU, "lomo-optim"), optim="adalomo"), "adalomo needs CUDA"),
    (why(LOMO_GPU, optim="lomo", micro_batch=8), "gradient accumulation forbids"),
    (why(GALORE_GPU, optim="galore_adamw", adapter={}), "an adapter's are low-rank already"),
    (why(GALORE_GPU, optim="galore_adamw", facts=NO_LINEAR), "projects the gradients of linear"),
    (why(with_package(NO_CXX, "torchao"), optim="adamw_torch_4bit"), "compiles its step, which needs a C++ compiler"),
    (why(CPU, checkpointing="offload"), "pinned memory of the host, which needs a CUDA device"),
    (why(facts=make_facts(layers=2), checkpointing="every-4th"), "checkpointing every-4th: tiny has 2 layers"),
    (why(torch_compile_mode="max-autotune"), "a mode of torch.compile needs a backend"),
    (why(**AUTOTUNED | {"micro_batch": 8}), "CUDA graphs (max-autotune) overwrite gradients that accumulate"),
    (why(**INDUCTOR, torch_compile_mode="reduce-overhead"), "CUDA graphs (reduce-overhead) overwrite gradients that"),
    (why(torch_compile_backend="cudagraphs", micro_batch=8), "CUDA graphs (cudagraphs) overwrite gradients that"),
    (why(torch_compile_backend="aot_eager", torch_compile_mode="default"), "modes of torch.compile are inductor's"),
    (why(experts_implementation="grouped_mm"), "llama has no experts"),
    (why(facts=make_facts(experts=8), experts_implementation="eager"), "llama computes experts in its own way"),
    (why(facts=MOE, experts_per_token=9), "9 experts a token are more than the 8 of a layer"),
    (why(facts=MOE, expert_capacity=64), "llama has no expert_capacity to set"),
    (why(experts_per_token=1), "llama has no experts_per_token to set"),
    (why(CPU, use_liger_kernel=True), "written in Triton and need a CUDA device"),
    (why(CPU, torch_empty_cache_steps=1), "empties the cache of a GPU's allocator; a CPU has none"),
    (why(CPU, expandable_segments=True), "expandable_segments are of a GPU's allocator; a CPU has none"),
    (why(activation_memory_budget=0.5), "activation_memory_budget is of models that inductor compiles"),
    (why(**INDUCTOR, checkpointing="full", activation_memory_budget=0.5), "without checkpointing"),
    (why(chunked_loss=True), "the loss of llama isn't that of a linear head's logits alone"),
    (why(LIGER_GPU, facts=CHUNKED, chunked_loss=True, use_liger_kernel=True), "Liger's kernels have it already"),
    (why(workload=SMOOTHED, facts=CHUNKED, chunked_loss=True), "worked out from all logits"),
    (why(without(GPU, "liger-kernel"), use_liger_kernel=True), "needs the package liger-kernel"),
    (why(LIGER_GPU, use_liger_kernel=True), "liger-kernel has no kernels for llama"),
    (why(LIGER_GPU, facts=LIGER, use_liger_kernel=True, torch_compile_backend="inductor"), "or give a wrong loss"),
    (why(NO_BNB_GPU, optim="adamw_bnb_8bit"), "adamw_bnb_8bit needs the package bitsandbytes"),
    (why(facts=make_facts(supports_checkpointing=False), checkpointing="full"), "has no activation checkpointing"),
    (why(NO_CXX, **INDUCTOR), "inductor needs a C++ compiler"),
    (why(without(GPU, "triton"), **INDUCTOR), "inductor needs the package triton"),
    (why(make_gpu(capability=(6, 1)), **INDUCTOR), "inductor needs compute capability 7.0 or newer"),
    (why(CPU, torch_compile_backend="cudagraphs"), "cudagraphs does nothing on a CPU"),
    (why_not("dora", facts=NO_LINEAR), "has no linear layers for dora"),
    (why_not("ia3", facts=UNNAMED), "is known to ia3 as keys, values or feed-forward"),
    (why_not("lora", facts=UNNAMED, target_modules="attention"), "is known as a projection of attention; use all-lin"),
    (why_not("loha", model_type="gpt2"), "peft's loha doesn't know the layers of gpt2; its lora does"),
    (why_not("bitfit", facts=make_facts(biases=0)), "bitfit trains biases, and llama has none"),
    (why_not("lora", target_modules="all-linear+experts"), "has no experts whose weights are fused; use"),
    (why_not("dora", facts=FUSED), "peft's dora can't be put on the fused weights of experts (its lora can)"),
    (why_not("vera", facts=FUSED, target_modules="all-linear+experts"), "peft's vera can't be put on the fused"),
    (why_not("lora", facts=FUSED, dropout=0.1), "on the fused weights of experts has no dropout"),
    (why_not("prompt", task=Task.MASKED_LM), "peft has no prompt for masked-lm"),
    (why_not("p-tuning", virtual_tokens=65), "p-tuning: 64 tokens and 65 virtual ones are more than the 128"),
    (why_not("prefix", facts=ADAPTABLE.model_copy(update={"takes_prefix": False})), "takes no keys and values"),
    (why_not("prefix", knobs={"checkpointing": "full"}), "prefix needs the cache of keys and values"),
    (why_not("prompt", task=Task.SEQUENCE_CLASSIFICATION), "finds the end of a sample by its token"),
    (why_not(None, knobs={"quantization": "nf4"}), "can't be trained, only an adapter on them (--fix adapter=lora)"),
    (why_not("loha", knobs={"quantization": "int8"}), "loha can't be trained on int8 weights; lora can"),
    (why_not("bitfit", knobs={"quantization": "nf4"}), "bitfit can't be trained on nf4 weights; lora can"),
    (why_not("lora", hardware=NO_BNB_GPU, knobs={"quantization": "nf4"}), "nf4 weights need the package bitsandbytes"),
]  # fmt: skip

LEGAL = [
    why(CPU), why(workload=make_workload(**EVEN), **PINNED),
    why(**HELD, optim="adamw_torch", precision="bf16", checkpointing="full"), why(CPU, optim="adafactor"), why(),
    why(micro_batch=3, workload=make_workload(global_batch_size=None)), why(CPU, precision="bf16"),
    why(LOMO_GPU, optim="lomo", micro_batch=16), why(facts=MOE, experts_implementation="eager", experts_per_token=1),
    why(**INDUCTOR, torch_compile_mode="max-autotune-no-cudagraphs"), why(**AUTOTUNED),
    why(CPU, **AUTOTUNED | {"micro_batch": 8}),
    why(with_package(GPU, "flash-attn-3"), facts=FLASH_3, attn_implementation="flash_attention_3", precision="bf16"),
    why(checkpointing="offload"), why(LIGER_GPU, facts=LIGER, use_liger_kernel=True), why(OLD_GPU, precision="fp16"),
    why(model_type="t5", precision="bf16"), why(**FLASH, precision="fp16"), why(AO_GPU, **FP8),
    why(facts=make_facts(attn_implementations=()), attn_implementation=None), why(optim="paged_adamw_8bit"),
    *(why(**IA3, precision=precision) for precision in ("bf16", "pure_bf16")),
    why(optim="rmsprop_bnb", precision="bf16"), why(optim="rmsprop_bnb", precision="pure_bf16", adapter={}),
    why(optim="adamw_bnb_8bit", precision="pure_bf16"), why(checkpointing="full"), why(CPU, **INDUCTOR),
    why(NO_CC, torch_compile_backend="cudagraphs", micro_batch=16),
    why(TF32_GPU, tf32=True, precision="bf16", **AUTOTUNED), why(make_gpu(starts_with_tf32=True, capability=(7, 5))),
    why(precision="bf16", **AUTOTUNED), why(tf32=True, **AUTOTUNED), why(tf32=True, precision="bf16"), why(adapter={}),
    why(torch_empty_cache_steps=4), why(CPU, facts=CHUNKED, chunked_loss=True), why(expandable_segments=True),
    why_not("dora", facts=FUSED, target_modules="attention"), why_not("vera", facts=FUSED),
    why_not("lora", facts=FUSED, target_modules="all-linear+experts"),
    why_not("prefix", virtual_tokens=64),  # as many as there are positions left
]  # fmt: skip


@pytest.mark.parametrize(("reasons", "said"), ILLEGAL)
def test_an_illegal_configuration_is_refused_with_the_reason(reasons, said):
    assert len(reasons) == 1
    assert said in reasons[0]


@pytest.mark.parametrize("reasons", LEGAL)
def test_a_legal_configuration_is_not_refused(reasons):
    assert reasons == []


def test_every_reason_is_told():
    assert len(why(CPU, micro_batch=3, precision="fp16", tf32=True)) == 3


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_is_legal_somewhere_and_most_on_quantized_weights(kind):
    assert why_not(kind) == []
    for quantization in ("int8", "nf4", "nf4-double", "fp4", "fp4-double"):
        is_legal = not why_not(kind, knobs={"quantization": quantization})
        assert is_legal is (kind not in ("loha", "lokr", "bitfit"))
