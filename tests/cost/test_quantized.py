"""Adapters and packed weights as traced: the sizes and the work of the real ones."""

import pytest
import torch
from profiles import make_family, parts_of

from autotune.cost.family import Shape
from autotune.cost.profile import ACTIVATION, CONTRACTION, ELEMENTWISE, Profile
from autotune.cost.profiler import profile
from autotune.cost.semantics import Semantics
from autotune.cost.tape import Recorder
from autotune.cost.trace import library_autocast
from autotune.training.adapters import quantization_arguments
from autotune.training.build import build_model
from autotune.training.random_weights import quantized_layers
from autotune.values.config import Precision
from autotune.values.model import Task
from autotune.values.techniques import ADAPTERS

LORA = ADAPTERS["lora"]()
LENGTH = 64  # as `profile_of` traces
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def moved(profile: Profile, kind: int) -> float:
    return sum(w.count * w.moved_bytes.at(8) for w in profile.work if w.kind == kind)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in ("lora", "prefix") else pytest.mark.slow) for k in ADAPTERS if k != "bitfit"],
)
def test_every_kind_of_adapter_is_traced_and_trains_little(kind, profile_of, facts_of):
    traced = profile_of("llama", adapter=ADAPTERS[kind]())
    frozen = sum(g.count * g.elements for g in traced.parameters if not g.adapter)
    assert frozen == facts_of("llama").parameters
    assert 0 < traced.gradients_bytes < traced.weights_bytes
    assert not [g for g in traced.parameters if g.trained and not g.adapter]


def test_bitfit_adds_no_weights(profile_of):
    plain, traced = profile_of("bert"), profile_of("bert", adapter=ADAPTERS["bitfit"]())
    assert traced.weights_bytes == plain.weights_bytes
    assert 0 < traced.gradients_bytes < plain.gradients_bytes / 20


def test_virtual_tokens_take_activations_as_real_ones_do(profile_of):
    few, many = (profile_of("llama", adapter=ADAPTERS["prompt"](virtual_tokens=n)) for n in (8, 64))
    per_sample = [profile.storages.alive[:, ACTIVATION, 1].max() for profile in (few, many)]
    assert per_sample[1] > 1.5 * per_sample[0]  # 64 tokens and 64 or 8 virtual ones


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantization"), [*(("llama", kind) for kind in ("int8", "nf4", "nf4-double")), ("t5", "nf4-double")]
)
def test_packed_weights_have_the_size_of_real_ones(name, quantization, profile_of, spec_of, facts_of):
    task = Task.SEQ2SEQ_LM if name == "t5" else Task.CAUSAL_LM
    traced = profile_of(name, adapter=LORA, quantization=quantization)
    arguments = quantization_arguments(quantization, Precision.FP32, task)
    real = build_model(
        spec_of(name), task, dtype="float32", attn_implementation=None, device="cpu", quantization=arguments
    )
    adapters = sum(g.count * g.elements * g.element_bytes for g in traced.parameters if g.adapter)
    kept = [*real.parameters(), *real.buffers()]
    for _, layer in quantized_layers(real):  # what bitsandbytes keeps beside its weights
        state = getattr(layer.weight, "quant_state", None)
        kept += [layer.weight.SCB] if state is None else [state.absmax, state.code]
        if state is not None and state.nested:
            kept += [state.state2.absmax, state.state2.code, state.offset]
    assert traced.weights_bytes - adapters == sum(tensor.nbytes for tensor in kept)
    frozen = sum(g.count * g.elements for g in traced.parameters if not g.adapter)
    assert frozen == facts_of(name).parameters


def test_unpacking_is_work_beside_the_same_products(profile_of):
    plain, packed = profile_of("llama", adapter=LORA), profile_of("llama", adapter=LORA, quantization="nf4")
    assert packed.needed_flops == plain.needed_flops
    assert moved(packed, ELEMENTWISE) > moved(plain, ELEMENTWISE)
    assert moved(packed, CONTRACTION) == pytest.approx(moved(plain, CONTRACTION))


def test_lora_on_experts_is_traced(profile_of):
    lora = ADAPTERS["lora"](target_modules="all-linear+experts")
    on_experts, beside = (profile_of("mixtral", adapter=a, autocast="bfloat16") for a in (lora, ADAPTERS["ia3"]()))
    assert on_experts.gradients_bytes > 10 * beside.gradients_bytes


PACKED = {"autocast": "bfloat16", "quantization": "nf4-double"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        *(("t5", kind, {}) for kind in ("ia3", "prefix", "prompt")),
        ("llama", "lora", PACKED),
        *(("llama", kind, {**PACKED, "device": "cuda"}) for kind in ("lora", "dora", "prefix")),
    ],
    ids=str,
)
def test_adapters_of_encoder_decoders_and_on_packed_weights_are_traced(name, kind, fields, profile_of):
    assert profile_of(name, adapter=ADAPTERS[kind](), **fields).gradients_bytes


def test_autocast_is_seen_while_tracing_and_not_after():
    family = make_family(device="cuda", autocast="bfloat16", adapter=LORA, quantization="nf4")
    semantics = Semantics("cuda", Recorder([]), autocast=torch.bfloat16)
    with library_autocast(family, semantics):
        assert torch.is_autocast_enabled("cuda")
        assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).dtype is torch.float32
    assert not torch.is_autocast_enabled("cuda")
    with library_autocast(family.model_copy(update={"device": "cpu"}), semantics):
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_packed_layers_take_the_memory_of_those_of_published_runs(checkpointing, profile_of, spec_of):
    """Layers that reproduce published QLoRA peaks to 1 %: `benchmarks/published/quantized.py`."""
    from published.quantized import Quantization
    from published.software import Software, as_of

    lora = {"r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": list(LINEAR)}
    software = Software(
        quantization=Quantization("4bit"), lora=lora, autocast=True, checkpointing=checkpointing == "full"
    )
    mixed = {"device": "cuda", "autocast": "bfloat16", "checkpointing": checkpointing}
    ours = profile_of("llama", adapter=LORA, quantization="nf4", **mixed)
    family = ours.family.model_copy(update={"adapter": None, "quantization": None})
    theirs = profile(spec_of("llama"), family, Shape(task=Task.CAUSAL_LM, length=LENGTH), change=as_of(software))
    peaks = [parts_of(p, "adamw_torch_fused", 8, 1).allocated for p in (ours, theirs)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.005)
