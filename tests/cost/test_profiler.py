"""Every kind of model is traced, and what comes out is that model's."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from factories import make_workload
from profiles import make_family, make_group, parts_of
from transformers import BertConfig, BertForSequenceClassification

from autotune.cost import full_depth, profiler
from autotune.cost.family import Shape, shape_of
from autotune.cost.profile import TRANSFER, layers_of
from autotune.cost.profiler import profile
from autotune.estimates.forecast import Traces
from autotune.training.build import build_model, frozen_layers, frozen_paths
from autotune.training.resolve import resolve
from autotune.value import read_value, write_value
from autotune.values.model import ModelSpec, Task

MIXED = {"device": "cuda", "autocast": "bfloat16"}
HEADS = [
    ("llama", Task.CAUSAL_LM), ("llama", Task.SEQUENCE_CLASSIFICATION), ("bert", Task.MASKED_LM),
    ("bert", Task.SEQUENCE_CLASSIFICATION), ("bert", Task.CAUSAL_LM), ("t5", Task.SEQ2SEQ_LM),
    ("t5", Task.SEQUENCE_CLASSIFICATION),  # of the states at the tokens that end the samples
    ("vit", Task.IMAGE_CLASSIFICATION), ("wav2vec2", Task.SPEECH_CTC),
    pytest.param("wav2vec2", Task.AUDIO_CLASSIFICATION, marks=pytest.mark.slow), ("whisper", Task.SPEECH_SEQ2SEQ),
    ("mixtral", Task.CAUSAL_LM), ("switch", Task.SEQ2SEQ_LM), ("a leading dense layer", Task.CAUSAL_LM),
    ("layers of two kinds", Task.CAUSAL_LM), ("an odd layer", Task.CAUSAL_LM),
    ("a depth that can't be set", Task.MASKED_LM),
]  # fmt: skip

EMBEDDINGS = [f"bert.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")]
PRODUCTS = ("attention.self", "attention.output.dense", "intermediate", "output.dense")


def peak(traced, samples: int = 8) -> float:
    return parts_of(traced, "sgd", samples, 1).allocated


def is_extended(traced) -> bool:
    """Whether it was traced with few layers, which repeat."""
    return len(set(traced.names)) < len(traced.names)


def trained(traced) -> int:
    return sum(g.count * g.elements for g in traced.parameters if g.trained)


def test_in_a_row_of_several_samples_each_layers_mask_has_all_pairs_of_its_tokens(spec_of):
    samples, length = 4, 64
    task, how = Task.CAUSAL_LM, {"dtype": "float32", "attn_implementation": "sdpa"}
    model = build_model(spec_of("llama"), task, device="cpu", **how).train()
    model.config.use_cache = False
    ids, positions = torch.ones((samples, length), dtype=torch.long), torch.arange(length).repeat(samples)[None]
    padding = torch.ones_like(ids)
    padding[0, 0] = 0
    rows = {"input_ids": ids, "labels": ids, "attention_mask": padding}
    row = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "position_ids": positions}

    def masks(inputs):
        found = {}

        def note(tensor):
            if tensor.ndim == 4 and tensor.shape[1] == 1 and tensor.shape[-1] == tensor.shape[-2]:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(**inputs)
        assert output.loss.requires_grad
        return sum(found.values())

    shape = Shape(task=task, length=length, padded=True)
    storages = profile(spec_of("llama"), make_family(), shape).storages

    def kept(storages):
        made, freed, fixed, of_sample = storages.rows.T[:4]
        is_kept = (made < storages.forward_end) & (storages.forward_end < freed)
        return (fixed + of_sample * samples)[is_kept].sum()

    more = masks(row) - masks(rows)
    assert more > 0
    assert kept(storages.of_one_row(samples, length)) - kept(storages) == more


@pytest.mark.parametrize(("model", "task"), HEADS)
def test_every_head_is_traced_with_all_its_parameters(profile_of, facts_of, model, task):
    traced = profile_of(model, task)
    assert sum(g.count * g.elements for g in traced.parameters) == facts_of(model, task).parameters
    without = {"wav2vec2": 64}.get(model, 0)  # the vector for frames that are masked by chance
    assert trained(traced) == facts_of(model, task).parameters - without
    assert peak(traced) > traced.weights_bytes
    assert traced.needed_flops.per_sample > 0


@pytest.mark.parametrize(
    ("model", "extended"),
    [("wav2vec2", True), ("whisper", True), ("an odd layer", False), ("layers that share keys", False)],
)
def test_models_are_traced_without_values_from_few_layers_unless_these_do_not_repeat(profile_of, model, extended):
    """Of speech all layers count, whatever a step leaves out."""
    assert is_extended(profile_of(model)) == extended


@pytest.mark.parametrize("model", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_more_layers_are_checkpointed_the_less_is_kept_and_the_more_computed(profile_of, model):
    kinds = ("none", "every-4th", "every-2nd", "full")
    found = [profile_of(model, **MIXED, checkpointing=kind) for kind in kinds]
    peaks, works = [peak(p, 64) for p in found], [work(p) for p in found]
    assert peaks == sorted(peaks, reverse=True)
    assert works == sorted(works)
    assert len(set(peaks)) == len(set(works)) == len(kinds)


def test_offloaded_activations_leave_the_device_and_come_back(profile_of):
    kept, offloaded = (profile_of("llama", **MIXED, checkpointing=kind) for kind in ("full", "offload"))
    moved = [w for w in offloaded.work if w.kind == TRANSFER]
    out_and_back = sum(w.count * w.moved_bytes.at(8) for w in moved)
    layers, width, length = 4, 64, 64
    assert out_and_back >= 2 * layers * 8 * length * width * 4  # the input of each layer, in fp32
    assert peak(offloaded, 64) <= peak(kept, 64) - (layers - 2) * 64 * length * width * 4


@pytest.mark.parametrize("kind", ["eager", pytest.param("batched_mm", marks=pytest.mark.slow), "grouped_mm"])
def test_experts_are_traced_in_each_way_of_running_them(profile_of, kind):
    traced = profile_of("mixtral", experts_implementation=kind)
    one = profile_of("mixtral", experts_implementation=kind, experts_per_token=1)
    assert one.weights_bytes == traced.weights_bytes
    assert one.needed_flops.per_sample < traced.needed_flops.per_sample


def work(traced) -> float:
    return sum(w.count * w.flops.at(8) for w in traced.work)


def test_needed_work_is_6_operations_a_parameter_and_token_and_that_of_attention(profile_of):
    """Fused attention: two products forward and five backward of 2 x length x width each, halved by the mask."""
    traced = profile_of("llama")
    used = sum(g.count * g.elements for g in traced.parameters if len(g.shape) > 1 and not g.embedding)
    layers, width, length = 4, 64, 64
    assert traced.needed_flops.per_sample == (6 * used + layers * 7 * width * length) * length


def test_pure_16_bits_halve_weights_and_gradients_and_autocast_only_runs_products_in_them(profile_of):
    full, half, mixed = (profile_of("llama", **fields) for fields in ({}, {"dtype": "bfloat16"}, MIXED))
    assert half.gradients_bytes == full.gradients_bytes / 2
    assert half.weights_bytes == pytest.approx(full.weights_bytes / 2, rel=0.01)  # buffers stay in fp32
    assert {g.element_bytes for g in mixed.parameters} == {4.0}
    assert {w.width for w in mixed.work if w.flops.per_sample > 1e6} == {2}


def test_a_change_is_made_before_the_trace(spec_of):
    def freeze(model):
        model.requires_grad_(False)
        model.get_output_embeddings().requires_grad_(True)
        return model

    shape = Shape(task=Task.CAUSAL_LM, length=8)
    assert trained(profile(spec_of("llama"), make_family(), shape, change=freeze)) == 512 * 64


def test_each_trained_parameter_has_a_gradient_of_its_size(profile_of):
    traced = profile_of("llama", **MIXED)
    gradients = traced.storages.rows[traced.storages.rows[:, 4] > 0]
    assert len(gradients) == len(traced.order) == sum(g.count for g in traced.parameters)
    assert gradients[:, 2].sum() == traced.gradients_bytes


def test_families_that_differ_in_checkpointing_share_an_evaluation(tiny_llama, monkeypatch):
    evaluated, step = [], profiler.evaluation_step

    def counted(*args):
        evaluated.append(args)
        return step(*args)

    monkeypatch.setattr(profiler, "evaluation_step", counted)
    spec, shape, known = resolve(str(tiny_llama)), Shape(task=Task.CAUSAL_LM, length=32), {}
    plain, full = (
        profile(spec, make_family(**MIXED, checkpointing=kind), shape, known=known) for kind in ("none", "full")
    )
    assert full.evaluation == plain.evaluation
    assert full.evaluation is not None
    assert len(evaluated) == 4  # two depths with two micro-batches


@pytest.mark.parametrize(
    ("model", "unlike", "found"),
    [("opt-1.3b", 0.2, [[(2, 1)], [(6, 6)]]), ("opt-125m", 0.2, [[(2, 1)], []]), ("opt-125m", 0.01, [[(2, 1)]])],
)
def test_where_checkpointed_layers_compile_to_unlike_programs_more_are_traced(monkeypatch, model, unlike, found):
    def extended(self, config, stacks, parameters):
        traced.append([(stack.base, stack.period) for stack in stacks])
        return SimpleNamespace(unlike=unlike)

    traced = []
    monkeypatch.setattr(profiler._Profiler, "extended", extended)
    family = make_family(device="cuda", checkpointing="full", compiled=True)
    profile(resolve(f"facebook/{model}"), family, Shape(task=Task.CAUSAL_LM, length=8))
    assert traced == found


BODIES = [f"bert.encoder.layer.*.{part}" for part in PRODUCTS]
FROZEN = {  # by the names of parameters: what is frozen, its paths, and how many layers differ
    "all but the head": (r"bert\.", ("bert",), 0, "cpu"),
    "the first layers": (r"bert\.(embeddings|encoder\.layer\.[012]\.)",
                         ("bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(3))), 3, "cuda"),
    "all but norms": (r"(?!.*(LayerNorm|classifier))", (*EMBEDDINGS, *BODIES, "bert.pooler"), 0, "cuda"),
    "the last layers": (r"bert\.encoder\.layer\.[67]\.", ("bert.encoder.layer.6", "bert.encoder.layer.7"), 8, "cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("frozen", "named", "layers", "device"), FROZEN.values(), ids=list(FROZEN))
def test_frozen_weights_are_named_and_traced_from_few_layers_as_whole(frozen, named, layers, device):
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=8, num_attention_heads=2, intermediate_size=64)
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.match(frozen, name))
    paths = frozen_paths(model)
    assert paths == named
    assert frozen_layers(paths) == layers
    spec = ModelSpec(
        reference="mine", name="mine", source="own", model_type="bert", kind="encoder", frozen=paths,
        config=json.loads(config.to_json_string(use_diff=False)),
    )  # fmt: skip
    family, shape = make_family(device=device), Shape(task=Task.SEQUENCE_CLASSIFICATION, length=8)
    total = sum(p.numel() for p in model.parameters())
    few, whole = (profile(spec, family, shape, parameters=count) for count in (total, -1))
    assert is_extended(few) is (layers < 8)
    assert trained(few) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert few.needed_flops == whole.needed_flops
    assert sum(w.count for w in few.work) == sum(w.count for w in whole.work)
    assert peak(few) == pytest.approx(peak(whole), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "task", "attention"),
    [("llama", Task.CAUSAL_LM, "sdpa"), pytest.param("t5", Task.SEQ2SEQ_LM, "eager", marks=pytest.mark.slow)],
)
def test_the_loss_of_smoothed_labels_holds_the_logits_once_more(spec_of, model, task, attention):
    """The gradients of its two parts: `LabelSmoother` of transformers."""
    spec, length = spec_of(model), 512
    sizes = {"model": spec, "task": task, "sequence_length": length, "target_length": length}
    family = make_family(attn_implementation=attention)
    plain, smoothed = (
        profile(spec, family, shape_of(make_workload(**sizes, fixed_arguments=given)))
        for given in ({}, {"label_smoothing_factor": 0.1})
    )
    at = [parts_of(one, "sgd", 8, 1) for one in (plain, smoothed)]
    assert at[1].allocated - at[0].allocated == pytest.approx(8 * length * 512 * 4, rel=0.05)


def test_a_real_models_profile_survives_its_file(profile_of, tmp_path):
    traces = Traces(profiles=(profile_of("llama", device="cuda", autocast="bfloat16"),))
    write_value(traces, tmp_path / "answer.json")
    assert read_value(Traces, tmp_path / "answer.json") == traces


@pytest.mark.parametrize(
    ("names", "sizes", "found"),
    [
        (["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "lm_head.weight"],
         (5, 3, 3, 7), ((make_group(3),), (make_group(5), make_group(7)), 2)),
        # A later number counts experts.
        ([f"layers.0.experts.{i}.weight" for i in range(4)], (3,) * 4, ((make_group(3, count=4),), (), 1)),
        (["weight"], (3,), ((), (make_group(3),), 0)),
    ],
    ids=["layers", "experts", "no numbers"],
)  # fmt: skip
def test_the_first_number_of_a_name_counts_layers_and_the_rest_is_outside(names, sizes, found):
    assert layers_of(names, [make_group(size) for size in sizes]) == found


def test_a_layer_is_found_unless_names_around_it_change_places():
    assert full_depth.stretch("abLMNcd", "abLMNLMNcd") == (5, 3)
    with pytest.raises(full_depth.NotLinear):
        full_depth.stretch("abLMNcd", "abLMNLMNdc")
    with pytest.raises(full_depth.NotLinear):
        full_depth.stretch("abLMNLMNcd", "abLMNcd")
