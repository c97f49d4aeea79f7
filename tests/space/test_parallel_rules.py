"""Rules for several devices: the combinations that the libraries have, and the reasons against others."""

import pytest
from factories import make_config, make_facts, make_gpu, make_hardware, make_spec, make_workload

from autotune.space.rules import refusals
from autotune.values.config import Parallelism

VERSIONS = {**make_gpu().versions, "deepspeed": "0.19.8", "galore-torch": "1.0", "lomo-optim": "0.1"}
GPUS, OLD = (make_gpu(versions={**VERSIONS, "transformers": v}, count=8) for v in ("5.23.0", "5.17.2"))
CPU = make_hardware(versions={**make_hardware().versions, "deepspeed": "0.19.8"}, count=8)
TURING = GPUS.model_copy(update={"capability": (7, 5)})
MACHINES = GPUS.model_copy(update={"nodes": 2})  # of four devices each
SEQUENCE = {"sequence_parallel": 2, "sharding": "zero_3"}
SEQUENCE_AND_TENSOR = {"world_size": 4, "sequence_parallel": 2, "tensor_parallel": 2, "sharding": "zero_2"}
RING = {"sequence_parallel": 2, "sharding": "fsdp_full", "knobs": {"precision": "bf16"}}
FACTS = make_facts(tensor_parallel_heads=8, has_self_attn=True, layers=4, parameters=1_000_000_000)
SMALL, NINE_HEADS = make_facts(parameters=40_000_000, layers=2), make_facts(tensor_parallel_heads=9)


def why(
    world_size=2, *, hardware=GPUS, facts=FACTS, model_config=(), knobs=(), dataset=None, length=32, **spread
) -> list[str]:
    """Return the reasons against a training that is spread like this."""
    config = make_config(2, parallelism=Parallelism(world_size=world_size, **spread), **dict(knobs))
    workload = make_workload(model=make_spec(config=dict(model_config)), dataset=dataset, sequence_length=length)
    return list(refusals(config, workload, facts, hardware))


@pytest.mark.parametrize("sharding", ["none", "fsdp_full", "fsdp_grad_op", "zero_1", "zero_2", "zero_3"])
def test_every_sharding_is_legal_on_gpus_and_those_of_deepspeed_on_a_cpu(sharding):
    for precision in ("fp32", "bf16", "fp16"):
        assert why(sharding=sharding, knobs={"precision": precision}) == []
    assert bool(why(sharding=sharding, hardware=CPU)) is sharding.startswith("fsdp")


@pytest.mark.parametrize(
    "spread",
    [
        {"world_size": 8, "ddp_bucket_cap_mb": 50, "ddp_broadcast_buffers": False},
        {"sharding": "fsdp_full", "offload": "parameters", "wrapping": "size"},
        {"sharding": "fsdp_full", "knobs": {"checkpointing": "every-2nd", "torch_compile_backend": "inductor"}},
        {"sharding": "zero_1", "offload": "optimizer"}, {"sharding": "zero_3", "offload": "parameters"},
        {"world_size": 1, "sharding": "zero_2", "offload": "optimizer"},
        {"world_size": 8, "replicas": 4, "sharding": "fsdp_grad_op"},
        {"world_size": 8, "tensor_parallel": 4, "sharding": "fsdp_full", "hardware": MACHINES}, {"tensor_parallel": 2},
        {"world_size": 8, "tensor_parallel": 4, "sharding": "fsdp_full"}, SEQUENCE, {**SEQUENCE, "world_size": 8},
        {**SEQUENCE, "hardware": CPU},
        {"sharding": "fsdp_full", "facts": make_facts(chunks_loss=True), "knobs": {"chunked_loss": True}}, RING,
        {**RING, "world_size": 8, "offload": "parameters"},
        {**RING, "knobs": {"precision": "pure_bf16", "adapter": {}, "checkpointing": "full"}},
        {**RING, "facts": make_facts(has_self_attn=True)},  # keys and values are handed on for all heads
        # models whose windows are not used
        {**SEQUENCE, "model_config": {"layer_types": ["full_attention"] * 2, "sliding_window": 64}},
        {**SEQUENCE, "model_config": {"sliding_window": 64, "use_sliding_window": False}},
    ],
)  # fmt: skip
def test_combinations_that_the_libraries_have_are_legal(spread):
    assert why(**spread) == []


CHUNKS, CHUNKED = {"chunked_loss": True}, FACTS.model_copy(update={"chunks_loss": True})
REFUSED = [
    ({"sharding": "zero_3", "facts": CHUNKED, "knobs": CHUNKS}, "which are gathered for the head alone"),
    ({"tensor_parallel": 2, "facts": CHUNKED, "knobs": CHUNKS}, "which are gathered for the head alone"),
    ({"sharding": "fsdp_full", "wrapping": "size", "facts": CHUNKED, "knobs": CHUNKS}, "gathered for the head alone"),
    ({"world_size": 4, "tensor_parallel": 3}, "does not divide the 4 devices"),
    ({"world_size": 3}, "does not divide the global batch of 16"),
    ({"knobs": {"optim": "lomo"}}, "before ranks have added up their gradients"),
    ({"sharding": "fsdp_full", "ddp_bucket_cap_mb": 25}, "are DDP's"),
    ({"world_size": 1, "ddp_find_unused_parameters": False}, "are DDP's"),
    ({"sharding": "zero_3", "ddp_broadcast_buffers": False}, "are DDP's"),
    ({"wrapping": "size"}, "wrapping is FSDP's"),
    ({"replicas": 2}, "replicas are FSDP's"),
    ({"world_size": 8, "replicas": 2, "sharding": "zero_3"}, "replicas are FSDP's"),
    ({"world_size": 4, "replicas": 4, "sharding": "fsdp_full"}, "4 replicas don't share 4 devices equally"),
    ({"world_size": 8, "replicas": 3, "sharding": "fsdp_full"}, "3 replicas don't share 8 devices equally"),
    ({"world_size": 8, "tensor_parallel": 8, "hardware": MACHINES}, "and does not divide its 4 devices"),
    ({"offload": "optimizer"}, "offload of optimizer is FSDP's and DeepSpeed's"),
    ({"world_size": 1, "sharding": "fsdp_full"}, "fsdp_full has nothing to split"),
    ({"sharding": "fsdp_full", "hardware": CPU}, "the Trainer would silently run DDP"),
    ({"sharding": "fsdp_full", "offload": "optimizer"}, "(--fix offload=parameters)"),
    ({"sharding": "fsdp_full", "facts": make_facts(not_fsdp="two units own it")}, "FSDP: llama: two units own it"),
    ({"sharding": "fsdp_full", "knobs": {"adapter": {}, "quantization": "nf4"}}, "accelerate leaves packed weights"),
    ({"sharding": "fsdp_full", "knobs": {"optim": "adamw_bnb_8bit"}}, "bitsandbytes' kernels take plain tensors"),
    ({"sharding": "fsdp_grad_op", "knobs": {"optim": "adafactor"}}, "adafactor works on whole matrices"),
    ({"sharding": "fsdp_full", "wrapping": "size", "knobs": {"checkpointing": "full"}}, "those by size lie within"),
    ({"sharding": "fsdp_full", "wrapping": "size", "facts": SMALL}, "no layer of tiny has the 20 million parameters"),
    ({"sharding": "zero_2", "hardware": make_gpu(count=8)}, "needs the package deepspeed"),
    ({"sharding": "zero_1", "hardware": CPU.model_copy(update={"cxx": None})}, "takes a C++ compiler"),
    ({"sharding": "zero_2", "knobs": {"precision": "pure_bf16"}}, "fp32 masters"),
    ({"sharding": "zero_3", "knobs": {"adapter": {}, "quantization": "nf4"}}, "zero_2 leaves them whole"),
    ({"sharding": "zero_2", "knobs": {"torch_compile_backend": "inductor"}}, "torch.compile under DeepSpeed"),
    ({"sharding": "zero_2", "offload": "parameters"}, "zero_3 can offload them"),
    ({"sharding": "zero_1", "knobs": {"optim": "adafactor"}}, "DeepSpeed: adafactor works on whole matrices"),
    ({"sharding": "zero_2", "offload": "optimizer", "knobs": {"optim": "sgd"}}, "stands in for torch's AdamW, not"),
    ({"sequence_parallel": 2}, "goes with FSDP (--fix sharding=fsdp_full) or DeepSpeed's ZeRO (--fix sharding=zero_3)"),
    ({**RING, "hardware": CPU}, "around its attention for CUDA alone"),
    ({**RING, "knobs": {"precision": "bf16", "attn_implementation": "eager"}},
     "the Trainer takes sdpa alone, not eager"),
    ({**RING, "knobs": {"precision": "fp32"}}, "goes around flash attention: 16 bits"),
    ({**RING, "hardware": TURING, "knobs": {"precision": "fp16"}}, "compute capability 8.0 or higher"),
    ({**RING, "facts": make_facts(tensor_parallel_heads=8)}, "by the name self_attn"),
    ({**RING, "model_config": {"sliding_window": 64}}, "accelerate refuses layers that attend to a window"),
    ({**RING, "dataset": "texts.jsonl"}, "samples must have one length"),
    ({**RING, "length": 34}, "does not divide the 34 tokens of a sample into 4 parts"),
    ({**RING, "knobs": {"precision": "bf16", "torch_compile_backend": "inductor"}},
     "torch.compile has not been run so"),
    ({**RING, "world_size": 8, "replicas": 2}, "replicas has not been run so"),
    (SEQUENCE_AND_TENSOR, "tensor parallel by transformers' plan goes with FSDP"),
    ({**SEQUENCE, "knobs": {"attn_implementation": "eager"}}, "has been run around sdpa, not around eager"),
    ({**SEQUENCE, "facts": NINE_HEADS}, "does not divide the heads of a layer (9)"),
    ({**SEQUENCE, "facts": make_facts(counts_keys=False, tensor_parallel_heads=8)}, "DeepSpeed reads num_key_value_h"),
    ({**SEQUENCE, "sharding": "zero_2"}, "makes gradients 2 times as large"),
    ({**SEQUENCE, "world_size": 4, "hardware": CPU}, "over gloo torch can't gather losses"),
    ({**SEQUENCE, "dataset": "texts.jsonl"}, "samples must have one length"),
    ({**SEQUENCE, "model_config": {"sliding_window": 64}}, "DeepSpeed drops the mask of sdpa"),
    ({**SEQUENCE, "model_config": {"layer_types": ["sliding_attention"]}}, "DeepSpeed drops the mask of sdpa"),
    ({**SEQUENCE, "knobs": {"adapter": {}}}, "an adapter has not been run so"),
    ({"tensor_parallel": 2, "hardware": CPU}, "accelerate refuses it through the Trainer"),
    ({"tensor_parallel": 2, "hardware": OLD}, "needs transformers 5.23"),
    ({"tensor_parallel": 2, "facts": make_facts()}, "no tensor-parallel plan for llama"),
    ({"tensor_parallel": 2, "facts": NINE_HEADS}, "does not divide the 9 heads"),
    ({"world_size": 4, "tensor_parallel": 2}, "goes with fsdp_full"),
    ({"world_size": 4, "tensor_parallel": 2, "sharding": "zero_2"}, "goes with FSDP, not with DeepSpeed"),
    ({"tensor_parallel": 2, "knobs": {"adapter": {}}}, "with an adapter"),
    ({"world_size": 1, "model_parallel": 2}, "model parallel is for a loop of your own"),
    ({"world_size": 2, "hardware": make_gpu(count=1)}, "2 devices are more than the 1 that a trial may use"),
]  # fmt: skip


@pytest.mark.parametrize(("spread", "said"), REFUSED)
def test_an_impossible_combination_is_refused_with_the_reason(spread, said):
    assert any(said in reason for reason in why(**spread)), why(**spread)
