"""What an adapter or quantized base weights can't be put on is refused before a trial, in one line that says why."""

import pytest
from factories import make_config, make_facts, make_gpu, make_workload

from autotune.space.rules import refusals
from autotune.values.adapters import ADAPTERS
from autotune.values.model import Task

GPU = make_gpu(versions={**make_gpu().versions, "bitsandbytes": "0.50.2"})
FACTS = make_facts(
    linear_modules=("q_proj", "v_proj", "down_proj"), biases=8, max_sequence_length=128, takes_prefix=True
)
MOE = FACTS.model_copy(update={"expert_parameters": ("experts.gate_up_proj", "experts.down_proj")})
NO_BNB = make_gpu(versions={k: v for k, v in GPU.versions.items() if k != "bitsandbytes"})


def why(kind=None, *, facts=FACTS, hardware=GPU, knobs=None, model=None, **fields):
    """Return the reasons against an adapter of a kind with `fields`."""
    workload = make_workload(**{"sequence_length": 64, **(fields.pop("workload", {}))})
    if model is not None:
        workload = workload.model_copy(update={"model": workload.model.model_copy(update=model)})
    adapter = None if kind is None else {"kind": kind, **fields}
    config = make_config(precision="bf16", adapter=adapter, **(knobs or {}))
    return refusals(config, workload, facts, hardware)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_is_legal_somewhere(kind):
    assert why(kind) == []


@pytest.mark.parametrize("quantization", ["int8", "nf4", "nf4-double", "fp4", "fp4-double"])
@pytest.mark.parametrize("kind", [kind for kind, adapter in ADAPTERS.items() if adapter.on_quantized])
def test_adapters_can_be_put_on_quantized_weights(kind, quantization):
    assert why(kind, knobs={"quantization": quantization}) == []


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (why("dora", facts=make_facts(linear_modules=())), "has no linear layers for dora"),
        (why("ia3", facts=make_facts(linear_modules=("in_x",))), "is known to ia3 as keys, values or feed-forward"),
        (
            why("lora", facts=make_facts(linear_modules=("in_x",)), target_modules="attention"),
            "no layer of llama is known as a projection of attention; use all-linear",
        ),
        (why("loha", model={"model_type": "gpt2"}), "peft's loha doesn't know the layers of gpt2; its lora does"),
        (why("bitfit", facts=make_facts(biases=0)), "bitfit trains biases, and llama has none"),
        (why("lora", target_modules="all-linear+experts"), "has no experts whose weights are fused; use all-linear"),
        (why("dora", facts=MOE), "peft's dora can't be put on the fused weights of experts (its lora can)"),
        (why("vera", facts=MOE, target_modules="all-linear+experts"), "peft's vera can't be put on the fused weights"),
        (why("lora", facts=MOE, dropout=0.1), "on the fused weights of experts has no dropout"),
        (why("prompt", workload={"task": Task.MASKED_LM}), "peft has no prompt for masked-lm"),
        (
            why("p-tuning", virtual_tokens=65),
            "p-tuning: 64 tokens and 65 virtual ones are more than the 128 positions of",
        ),
        (
            why("prefix", facts=FACTS.model_copy(update={"takes_prefix": False})),
            "takes no keys and values from outside",
        ),
        (why("prefix", knobs={"checkpointing": "full"}), "prefix needs the cache of keys and values"),
        (
            why("prompt", workload={"task": Task.SEQUENCE_CLASSIFICATION}),
            "finds the end of a sample by its token ids, which prompt takes away",
        ),
        (why(knobs={"quantization": "nf4"}), "can't be trained, only an adapter on them (--fix adapter=lora)"),
        (why("loha", knobs={"quantization": "int8"}), "loha can't be trained on int8 weights; lora can"),
        (why("bitfit", knobs={"quantization": "nf4"}), "bitfit can't be trained on nf4 weights; lora can"),
        (why("lora", hardware=NO_BNB, knobs={"quantization": "nf4"}), "nf4 weights need the package bitsandbytes"),
    ],
)
def test_what_can_not_be_put_on_is_refused_with_the_reason(reasons, said):
    assert len(reasons) == 1
    assert said in reasons[0]


def test_adapters_beside_the_experts_are_legal_where_peft_leaves_them_alone():
    assert why("dora", facts=MOE, target_modules="attention") == []
    assert why("vera", facts=MOE) == []
    assert why("lora", facts=MOE, target_modules="all-linear+experts") == []


def test_virtual_tokens_may_fill_all_positions():
    assert why("prefix", virtual_tokens=64) == []
