"""One device's part of a model; what has no trace is refused in one line."""

import json

import pytest
import torch
from profiles import make_family

from autotune.cost import profiler
from autotune.cost.family import Shape
from autotune.cost.profile import ACTIVATION, CONTRACTION, total_bytes
from autotune.cost.traced_model import keep_part
from autotune.errors import InputError
from autotune.training.build import build_config, build_model, shallower, stacks
from autotune.training.random_weights import untie_weights
from autotune.training.resolve import default_task, resolve
from autotune.values.catalogue import catalogue
from autotune.values.model import Task


def test_a_device_has_its_part_of_a_samples_tokens_and_attends_to_all(profile_of):
    whole, half = (
        profile_of("llama", attn_implementation="sdpa", sequence_parallel=n, device="cuda", dtype="bfloat16")
        for n in (1, 2)
    )
    assert half.parameters == whole.parameters
    assert half.hidden_bytes == whole.hidden_bytes / 2
    assert half.needed_flops.per_sample == pytest.approx(whole.needed_flops.per_sample / 2)
    activations = [one.storages.alive[:, ACTIVATION, 1].max() for one in (whole, half)]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.01)
    shared = {"attn_implementation": "sdpa", "sequence_parallel": 2, "device": "cuda", "dtype": "bfloat16"}
    ring = profile_of("llama", **shared, context_parallel=2)  # two groups of 64 keys and values in 16 bits each
    assert ring.keys_bytes == half.hidden_bytes / 64 * 2 * 2 * 16
    assert ring.needed_flops.per_sample == pytest.approx(half.needed_flops.per_sample)


@pytest.mark.parametrize(
    "model", ["llama", "mixtral", *(pytest.param(m, marks=pytest.mark.slow) for m in ("bert", "t5"))]
)
def test_layers_and_parameters_outside_of_them_make_the_model(profile_of, model):
    found = profile_of(model)
    whole = total_bytes(found.outside) + found.layers * total_bytes(found.layer)
    # Of T5 the decoder's layers are the larger ones.
    assert whole == pytest.approx(total_bytes(found.parameters), rel=0.3 if model == "t5" else 1e-9)


def test_most_layers_multiply_in_fp8_and_save_no_weights_cast_to_16_bits(profile_of):
    bf16, fp8 = (profile_of("llama", device="cuda", autocast="bfloat16", float8=there) for there in (False, True))
    assert fp8.parameters == bf16.parameters
    assert fp8.needed_flops.per_sample == pytest.approx(bf16.needed_flops.per_sample)
    products = [work for work in fp8.work if work.kind == CONTRACTION]
    of_8, of_16 = (sum(w.count * w.flops.per_sample for w in products if w.width == width) for width in (1, 2))
    assert 0 < of_16 < of_8  # the first layer's queries and the head stay as they are
    kept = [one.storages.alive[:, ACTIVATION, 0].max() for one in (bf16, fp8)]
    assert kept[1] < kept[0]  # weights


LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 4,
}  # fmt: skip


def test_a_model_that_has_no_trace_is_refused_with_the_reason(spec_of, monkeypatch):
    def fails(*args, **kwargs):
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(profiler, "micro_step", fails)
    with pytest.raises(InputError, match=r"can't be traced, so there is no prediction: no kernel.*for this"):
        profiler.profile(spec_of("llama"), make_family(), Shape(task=Task.CAUSAL_LM, length=16))


# One device's part under tensor parallelism, held against the parts that transformers itself makes

# A model of each type; what has no plan is left out by the test.
MODELS = {entry.model_type: entry.id for entry in reversed(catalogue()) if entry.kind in ("decoder", "vision-language")}


@pytest.fixture(scope="module")
def mesh():
    """Two devices that exchange nothing, of which this process is the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


def few_layers(model: str):
    spec = resolve(model)
    task = default_task(spec)
    config = build_config(spec, task)
    config = shallower(config, {stack.field: stack.base for stack in stacks(config)})
    return build_model(spec, task, dtype="float32", device="meta", config=config)


def sizes(model) -> dict[str, tuple[int, ...]]:
    """Shapes of what this device has of each parameter, tied ones once."""
    local = {name: getattr(p.data, "_local_tensor", p) for name, p in model.named_parameters()}
    return {name: tuple(tensor.shape) for name, tensor in local.items()}


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["every fourth", "all"])
def test_every_model_with_a_plan_is_dealt_out_as_transformers_does_it(mesh, step):
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    wrong, checked = {}, 0
    for name in list(MODELS.values())[::step]:
        ours, theirs = few_layers(name), few_layers(name)
        config = ours.config.get_text_config()
        heads = (getattr(config, f"num_{kind}_heads", None) or 2 for kind in ("attention", "key_value"))
        if not getattr(ours, "tp_plan", None) or any(number % 2 for number in heads):
            continue
        keep_part(ours, 2)
        untie_weights(theirs)  # the steps of `from_pretrained`, in which weights are tied last
        apply_tensor_parallelism(theirs, mesh, theirs._resolve_parallel_plans(DistributedConfig(tp_size=2))[0])
        theirs.tie_weights()
        checked += 1
        found, wanted = sizes(ours), sizes(theirs)
        if found != wanted:
            wrong[name] = {n: (found.get(n), wanted.get(n)) for n in found | wanted if found.get(n) != wanted.get(n)}
    assert wrong == {}
    assert checked > 40 / step


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_a_trial_shares_a_model_whose_head_is_tied(mesh, tmp_path):
    """Of a model on the meta device, as trials make it: each rank then draws its own part."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    model = build_model(
        resolve(str(tmp_path)), Task.CAUSAL_LM, dtype="float32", device="cpu", distributed_config={"tp_size": 2}
    )
    assert sizes(model)["model.embed_tokens.weight"] == (32, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "does not divide num_key_value_heads = 1"),
        ({"num_attention_heads": 1}, "does not divide num_attention_heads = 1"),
        ({"model_type": "gpt2"}, "transformers has no plan for gpt2"),
    ],
)
def test_models_that_no_plan_splits_are_refused(tmp_path, fields, words):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    model = build_model(resolve(str(tmp_path)), Task.CAUSAL_LM, dtype="float32", device="meta")
    with pytest.raises(InputError, match=words):
        keep_part(model, 2)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_a_device_has_half_of_each_matrix_and_all_of_the_norms(profile_of, model_type):
    whole, half = profile_of(model_type), profile_of(model_type, tensor_parallel=2)

    def sizes_of(groups, dimensions):
        return total_bytes([g for g in groups if len(g.shape) == dimensions])

    assert sizes_of(half.layer, 2) == sizes_of(whole.layer, 2) / 2
    assert sizes_of(half.outside, 2) == sizes_of(whole.outside, 2) / 2
    # biases of what is split by its outputs are split too
    assert sizes_of(whole.layer, 1) / 2 <= sizes_of(half.layer, 1) <= sizes_of(whole.layer, 1)
    assert half.hidden_bytes == whole.hidden_bytes > 0
    assert half.needed_flops.per_sample < 0.6 * whole.needed_flops.per_sample
