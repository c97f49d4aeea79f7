"""Models that are shown images are traced on the meta device, extended from few layers, at any micro-batch."""

import functools

import pytest
import torch
from profiles import make_family, parts_of
from transformers import AutoModelForCausalLM
from vision_language import FAMILIES, edge, tiny_vision_language

from autotune.cost import profiler
from autotune.cost.family import Shape
from autotune.training.build import build_config, describe
from autotune.training.inputs import image_text
from autotune.values.model import Task

TASK = Task.IMAGE_TEXT_TO_TEXT


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return a function that traces a tiny model."""

    @functools.cache
    def profile(name, *, whole=False, images=1, frozen=False, **family):
        spec = tiny_vision_language(tmp_path_factory.mktemp("models"), name)
        spec = spec.model_copy(update={"freeze_vision": frozen})
        shown = image_text(build_config(spec, TASK), images, edge(name))
        shape = Shape(task=TASK, length=shown.tokens + 16, images=images, image_size=shown.image.size)
        parameters = -1 if whole else describe(spec, TASK).parameters
        return profiler.profile(spec, make_family(**family), shape, parameters=parameters)

    return profile


def peak(profile, samples=8):
    return parts_of(profile, "adamw_torch", samples, 1).allocated


# Attention in windows, to one vector of features an image, and to tiles.
BY_DEFAULT = ("qwen2_5_vl", "llava", "idefics3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_is_traced_without_values_from_few_layers(traced, name):
    few, whole = traced(name), traced(name, whole=True)
    assert peak(few) == pytest.approx(peak(whole), rel=1e-3)
    assert few.needed_flops.per_sample == pytest.approx(whole.needed_flops.per_sample)


def test_more_images_are_more_memory_and_work_and_a_frozen_vision_part_less(traced):
    frozen, one, three = traced("llava", frozen=True), traced("llava"), traced("llava", images=3)
    assert peak(frozen) < peak(one) < peak(three)
    assert frozen.needed_flops.per_sample < one.needed_flops.per_sample < three.needed_flops.per_sample / 2


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_images_are_attended_to_one_by_one_whatever_the_kernel(traced, attention):
    """In a vision part that attends over all images at once the work would grow with their square."""
    fields = {"device": "cuda", "autocast": "bfloat16", "attn_implementation": attention}
    assert traced("qwen2_5_vl", **fields).needed_flops.constant == pytest.approx(0, abs=1)


def test_features_of_each_image_are_cast_with_the_outputs(traced):
    mixed = traced("llava", device="cuda", autocast="bfloat16")
    assert peak(mixed) < peak(traced("llava", device="cuda"))


def test_parameters_without_a_gradient_are_not_trained(traced):
    """LLaVA takes the features before CLIP's last layer, and none that its last norm makes."""
    hidden, inner = 32, 64
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    unused = sum(g.count * g.elements for g in traced("llava").parameters if not g.trained)
    assert unused == layer + 2 * hidden


def test_a_vision_part_that_texts_alone_never_reach_is_not_trained(tmp_path):
    """Gemma 3 under `causal-lm`: what gets no gradient has no optimizer states either."""
    spec = tiny_vision_language(tmp_path, "gemma3")
    found = profiler.profile(spec, make_family(), Shape(task=Task.CAUSAL_LM, length=32))
    model = AutoModelForCausalLM.from_config(build_config(spec, Task.CAUSAL_LM))
    ids = torch.ones((1, 32), dtype=torch.long)
    model(input_ids=ids, labels=ids, token_type_ids=torch.zeros_like(ids)).loss.backward()
    parameters = list(model.parameters())
    assert any(p.grad is None for p in parameters)
    assert found.gradients_bytes == sum(p.nbytes for p in parameters if p.grad is not None)
