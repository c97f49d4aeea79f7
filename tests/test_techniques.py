"""A row for each technique on one device: here, on a CPU, it works in a real trial, or is refused with its reason.

Numbers are those of the list that the product is held to. What needs a GPU is refused here; that it works there is for
`pytest -m "cuda or gpu"` and `benchmarks/gpu_pack.py`.
"""

import json
from typing import Any

import pytest
from conftest import TINY_LLAMA, write_model
from model_families import FAMILIES
from pydantic import ValidationError

from autotune.space.rules import refusals
from autotune.training.build import describe
from autotune.training.resolve import default_task, resolve
from autotune.values.config import TrainConfig
from autotune.values.hardware import detect
from autotune.values.techniques import ADAPTERS, OPTIMIZERS
from autotune.values.trial import TrialStatus
from autotune.values.workload import Workload

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**TINY_LLAMA, "num_hidden_layers": 4},
    "mixtral": {**TINY_LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **EXPERTS},
    "opt": {**FAMILIES["OPT"], "dropout": 0.0},
    "switch": {**FAMILIES["Switch"], "expert_capacity": 16},
}

# (row, configuration, model, an effect that was seen)
WORKS = [
    ("1 micro-batch", {"per_device_train_batch_size": 8}, "llama", ("precision", "float32")),
    ("2 accumulation", {"per_device_train_batch_size": 2}, "llama", ("precision", "float32")),
    ("3 full checkpointing", {"checkpointing": "full"}, "llama", ("checkpointing", "8 checkpointed calls")),
    ("3 every second layer", {"checkpointing": "every-2nd"}, "llama", ("checkpointing", "4 checkpointed calls")),
    ("3 every fourth layer", {"checkpointing": "every-4th"}, "llama", ("checkpointing", "2 checkpointed calls")),
    ("5 bf16", {"precision": "bf16"}, "llama", ("precision", "weights float32, layer outputs bfloat16")),
    ("7 pure half", {"precision": "pure_bf16"}, "llama", ("precision", "weights bfloat16, layer outputs bfloat16")),
    ("9 sdpa", {}, "llama", ("attn_implementation", "sdpa (flash)")),
    ("9 eager", {"attn_implementation": "eager"}, "llama", ("attn_implementation", "eager")),
    ("11 Adafactor", {"optim": "adafactor"}, "llama", ("optim", "transformers.optimization.Adafactor")),
    ("12 8-bit Adam", {"optim": "adamw_bnb_8bit"}, "llama", ("optim", "optim_bits=8, embeddings' states in float32")),
    ("13 workers", {"dataloader_num_workers": 1}, "llama", ("dataloader_num_workers", "1")),
    ("14 compile", {"torch_compile_backend": "aot_eager"}, "llama", ("torch_compile_backend", "aot_eager: 1 graphs")),
    ("22 activation budget", {"torch_compile_backend": "inductor", "activation_memory_budget": 0.5}, "llama",
     ("activation_memory_budget", "50% kept")),
    *(
        (f"{15 if kind == 'lora' else 16} {kind}", {"adapter": {"kind": kind}}, "opt", ("adapter", kind))
        for kind in sorted(ADAPTERS)
    ),
    *(
        (f"17 {kind}", {"adapter": {}, "quantization": kind}, "llama", ("quantization", kind.partition("-")[0]))
        for kind in ("int8", "nf4", "nf4-double", "fp4")
    ),
    *(
        (f"18 {way}", {"experts_implementation": way}, "mixtral", ("experts_implementation", way))
        for way in ("eager", "batched_mm", "grouped_mm")
    ),
    ("21 chunked loss", {"chunked_loss": True}, "llama", ("chunked_loss", "in chunks")),
    ("18 top-k", {"experts_per_token": 1}, "mixtral", ("experts_implementation", "none to choose")),
    ("18 capacity", {"expert_capacity": 8, "attn_implementation": "eager"}, "switch", ("precision", "float32")),
]  # fmt: skip

# The nearest kin of these run in every test run.
SLOW = {
    "3 every fourth layer", "13 workers", "16 rslora", "16 dora", "16 vera", "16 loha", "16 lokr",
    "14 compile", "16 prompt", "16 p-tuning", "17 nf4-double", "17 fp4", "18 batched_mm", "18 top-k",
    "22 activation budget",
}  # fmt: skip

# (row, configuration, model, the reason)
REFUSED = [
    ("3 offload", {"checkpointing": "offload"}, "llama", "needs a CUDA device"),
    ("4 fp16", {"precision": "fp16"}, "llama", "fp16 on a CPU silently stays fp32"),
    ("6 tf32", {"tf32": True}, "llama", "has no tf32"),
    ("8 flash attention", {"attn_implementation": "flash_attention_2"}, "llama", "needs a CUDA device"),
    ("8 flex attention", {"attn_implementation": "flex_attention"}, "llama", "no backward on the CPU"),
    ("11 layer-wise", {"optim": "galore_adamw_layerwise"}, "llama", "needs the package galore-torch"),
    ("14 CUDA graphs", {"torch_compile_backend": "cudagraphs"}, "llama", "does nothing on a CPU"),
    ("13 emptied cache", {"torch_empty_cache_steps": 1}, "llama", "empties the cache of a GPU's allocator"),
    ("13 expandable segments", {"expandable_segments": True}, "llama", "are of a GPU's allocator"),
    ("19 balanced by tokens", {"train_sampling_strategy": "batch_rebalance"}, "llama", "the samples have one length"),
    ("16 BitFit without biases", {"adapter": {"kind": "bitfit"}}, "llama", "bias"),
    ("17 quantized base alone", {"quantization": "nf4"}, "llama", "adapter"),
    ("18 experts of another kind", {"experts_implementation": "grouped_mm"}, "llama", "has no experts"),
    ("21 Liger", {"use_liger_kernel": True}, "llama", "need a CUDA device"),
    ("22 fp8", {"precision": "fp8"}, "llama", "has no products in fp8"),
]

# (row, a field, what nobody can give any more or yet, the reason)
NOT_OFFERED = [
    ("10 BetterTransformer", "attn_implementation", "bettertransformer", "sdpa replaced it"),
    ("11 removed", "optim", "adamw_hf", "use adamw_torch"),
    ("11 removed", "optim", "adamw_apex_fused", "use adamw_torch_fused"),
    ("17 QAT", "quantization", "int8-qat", "quantization-aware training is not offered"),
]


def config_of(**fields: Any) -> TrainConfig:
    usual = {"per_device_train_batch_size": 4, "attn_implementation": "sdpa", "dataloader_pin_memory": False}
    return TrainConfig(**{**usual, **fields})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    specs = {name: resolve(str(write_model(folder / name, config))) for name, config in MODELS.items()}
    return {name: (spec, describe(spec, default_task(spec))) for name, spec in specs.items()}


def workload_of(spec: Any) -> Workload:
    return Workload(model=spec, task=default_task(spec), sequence_length=16, target_length=8, global_batch_size=8)


@pytest.mark.parametrize(
    ("row", "knobs", "model", "effect"),
    [pytest.param(*row, id=row[0], marks=[pytest.mark.slow] if row[0] in SLOW else []) for row in WORKS],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_works_in_a_real_trial(models, bench, row, knobs, model, effect):
    spec, facts = models[model]
    config, workload = config_of(**knobs), workload_of(spec)
    assert list(refusals(config, workload, facts, detect("cpu"))) == []
    result = bench.run(config=dict(config), workload=dict(workload), limits={"memory_bytes": 2 << 30})
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.accumulation_steps * config.per_device_train_batch_size == 8
    knob, seen = effect
    assert seen in result.outcome.effects[knob], json.dumps(result.outcome.effects, indent=1)


@pytest.mark.parametrize(("row", "knobs", "model", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_it_is_refused_without_a_trial(models, row, knobs, model, reason):
    spec, facts = models[model]
    reasons = list(refusals(config_of(**knobs), workload_of(spec), facts, detect("cpu")))
    assert any(reason in given for given in reasons), reasons
    assert all("\n" not in given for given in reasons)


@pytest.mark.parametrize(("row", "field", "value", "reason"), NOT_OFFERED, ids=[row[2] for row in NOT_OFFERED])
def test_what_can_not_be_had_says_what_replaced_it(row, field, value, reason):
    with pytest.raises(ValidationError, match=reason):
        config_of(**{field: value})


def test_every_optimizer_is_legal_here_or_says_what_it_lacks(models):
    (spec, facts), here = models["llama"], detect("cpu")
    for name, row in OPTIMIZERS.items():
        reasons = list(refusals(config_of(optim=name), workload_of(spec), facts, here))
        lacks = row.unusable or row.device == "cuda" or (row.package or "torch") not in here.versions
        assert bool(reasons) == bool(lacks or row.updates_in_backward), name
