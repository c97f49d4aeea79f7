"""Uneven routing: in models of several families of experts, and in a real trial."""

from __future__ import annotations

import pytest
import torch
from conftest import write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from autotune.errors import NoEffectError
from autotune.execution.routing import busiest_share, routers_of, skewed_routing
from autotune.training.resolve import resolve
from autotune.values.checks import RoutingTask
from autotune.values.trial import Purpose, TrialStatus

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MIXTRAL = {**SMALL, "num_local_experts": 8}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "mixtral": MIXTRAL,
    "qwen2_moe": {**SMALL, "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
    "olmoe": {**SMALL, "num_experts": 8},
    "gpt_oss": {**MIXTRAL, "head_dim": 16},
    "deepseek_v3": {
        **SMALL,
        **LATENT,
        "n_routed_experts": 8,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "switch_transformers": {
        "vocab_size": 256,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "num_experts": 8,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "decoder_start_token_id": 0,
    },
}


def built(model_type: str, fields: dict):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config).eval()  # without dropout
    ids = torch.randint(3, 256, (4, 32))
    return model, lambda: model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_busiest_expert_gets_more_while_routing_is_skewed_and_gradients_still_flow(model_type):
    model, forward = built(model_type, FAMILIES[model_type])
    before = forward().loss.item()
    with skewed_routing(model, forward) as routed:
        found = routed()
        forward().loss.backward()
    assert found.busiest_share > 1.2 * found.even_busiest_share
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert forward().loss.item() == pytest.approx(before)


def test_shares_are_those_of_the_tokens_that_experts_are_given():
    model, forward = built("mixtral", MIXTRAL)
    with torch.no_grad():
        for layer in model.model.layers:  # with all logits alike, every token goes to the same two experts
            layer.mlp.gate.weight.zero_()
    assert busiest_share(model, forward) == 0.5


def test_a_model_whose_router_is_not_recognised_is_refused_by_name():
    model, forward = built("llama", {**SMALL, "num_local_experts": 8})
    with pytest.raises(NoEffectError, match="LlamaForCausalLM: no layer was recognised as the router of its 8 experts"):
        skewed_routing(model, forward).__enter__()


def test_weights_that_are_packed_are_not_taken_for_a_routers():
    model, _ = built("mixtral", MIXTRAL)
    assert len(routers_of(model)) == 2
    for layer in model.model.layers:
        layer.mlp.gate.weight = torch.nn.Parameter(layer.mlp.gate.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(NoEffectError, match="no layer was recognised"):
        routers_of(model)


def test_a_routing_run_trains_and_measures_with_uneven_routing(bench, tmp_path):
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **MIXTRAL}
    model = resolve(str(write_model(tmp_path / "experts", config)))
    request = bench.request(workload={"model": model, "sequence_length": 32})
    result = bench.runner.run(request.model_copy(update={"purpose": Purpose.ROUTING, "task": RoutingTask()}))
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.routed.busiest_share > result.outcome.routed.even_busiest_share
    assert result.outcome.samples_per_second > 0
