"""What speech models and vision-language models of every type are fed with is what they take."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel
from vision_language import FAMILIES, edge, tiny_vision_language, with_images

from autotune.errors import InputError
from autotune.training.adapters import adapter_arguments, put_on
from autotune.training.build import build_config, build_model
from autotune.training.dataset import IGNORED, training_data
from autotune.training.facts import facts_of
from autotune.training.inputs import fixed_frames, image_or_sound, image_text, labels_of, least_frames
from autotune.training.resolve import default_task
from autotune.values.model import Task
from autotune.values.techniques import LoraAdapter

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("frames", [10, 49, 128])
@pytest.mark.parametrize("model_type", ["wav2vec2", "hubert", "sew"])
def test_a_waveform_is_just_long_enough_for_its_frames(model_type, frames):
    convolutions = 13 if model_type == "sew" else 7
    config = CONFIG_MAPPING[model_type](**SIZES, conv_dim=[8] * convolutions, num_conv_pos_embedding_groups=2)
    name, (samples,), _ = image_or_sound(config, frames)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert name == model.main_input_name
    assert int(model._get_feat_extract_output_lengths(torch.tensor(samples))) == frames
    assert int(model._get_feat_extract_output_lengths(torch.tensor(samples - 1))) == frames - 1


def test_a_second_has_fifty_frames_and_whisper_hears_half_a_minute_always():
    assert image_or_sound(CONFIG_MAPPING["wav2vec2"](), 50)[1][0] == pytest.approx(16_000, rel=0.01)
    assert fixed_frames("whisper", {}) == 1500
    assert fixed_frames("whisper", {"max_source_positions": 60}) == 60
    assert image_or_sound(CONFIG_MAPPING["whisper"](num_mel_bins=128), 7) == ("input_features", (128, 3000), None)


def test_wav2vec2_hears_any_length_that_holds_a_hidden_span_and_a_transcript_leaves_room_for_blanks():
    assert fixed_frames("wav2vec2", {}) is None
    assert least_frames("wav2vec2", {}) == 10
    assert least_frames("wav2vec2", {"mask_time_length": 4}) == 4
    assert least_frames("wav2vec2", {"apply_spec_augment": False}) == 1
    assert all(0 < labels_of(frames) <= max(1, frames // 2) for frames in range(1, 500))


TASK = Task.IMAGE_TEXT_TO_TEXT


def made(spec, name, *, images, samples=3):
    """Return a batch for a model, and its images."""
    shown = image_text(build_config(spec, TASK), images, edge(name))
    workload = with_images(spec, name, images=images, words=16, global_batch_size=samples)
    data, collate = training_data(workload, build_config(spec, TASK), samples=samples, directory=None)
    return collate([data[index] for index in range(samples)]), shown


@pytest.mark.parametrize("name", FAMILIES)
def test_the_usual_head_learns_from_two_images_a_sample(tmp_path, name):
    spec = tiny_vision_language(tmp_path, name)
    assert default_task(spec) is TASK
    batch, shown = made(spec, name, images=2)
    placeholders = batch["input_ids"] == shown.token
    assert placeholders.sum(dim=1).tolist() == [2 * sum(shown.image.runs)] * 3
    assert (batch["labels"][placeholders] == IGNORED).all()
    assert (batch["labels"][~placeholders] != IGNORED).all()
    model = build_model(spec, TASK, dtype="float32", device="cpu")
    model(**batch)["loss"].backward()  # it raises unless there is a placeholder for each feature of its vision part
    seen = [p.grad for n, p in model.named_parameters() if "vision" in n or "visual" in n]
    assert any(grad is not None for grad in seen)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_frozen_vision_part_is_all_that_is_frozen_and_its_parameters_are_counted(tmp_path, name):
    spec = tiny_vision_language(tmp_path, name).model_copy(update={"freeze_vision": True})
    model = build_model(spec, TASK, dtype="float32", device="meta")
    parts = {is_trained: set() for is_trained in (True, False)}
    for path, parameter in model.named_parameters():
        parts[parameter.requires_grad].add(path.split(".")[1])
    assert len(parts[False]) == 1
    assert not parts[False] & parts[True]
    left = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert 0 < left == facts_of(model, TASK).frozen_parameters


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "smolvlm"])
def test_adapters_are_put_on_the_language_model_alone(tmp_path, name):
    model = build_model(tiny_vision_language(tmp_path, name), TASK, dtype="float32", device="meta")
    model = put_on(model, adapter_arguments(LoraAdapter(), TASK))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not [n for n in trained if "vision" in n or "visual" in n]


@pytest.mark.parametrize(
    ("name", "size", "pixels", "tokens"),
    [
        ("qwen2_vl", 56, (196, 96), 49),  # a feature of 8 x 8 pixels
        ("smolvlm", 32, (1, 3, 32, 32), 4),
        ("smolvlm", 90, (10, 3, 32, 32), 40),
        ("internvl", 64, (5, 3, 32, 32), 5 * 4),
    ],
)
def test_a_larger_image_is_more_patches_or_tiles(tmp_path, name, size, pixels, tokens):
    shown = image_text(build_config(tiny_vision_language(tmp_path, name), TASK), 1, size)
    assert (shown.pixels[-len(pixels) :], sum(shown.image.runs)) == (pixels, tokens)


def test_the_tokens_of_published_models_are_those_that_their_processors_make():
    llava = CONFIG_MAPPING["llava"](text_config={"model_type": "llama", "vocab_size": 32064})
    assert image_text(llava, None, None).image.runs == (576,)  # LLaVA 1.5: 24 x 24
    assert image_text(CONFIG_MAPPING["qwen2_vl"](), None, 448).image.runs == (256,)
    vision = {"image_size": 896, "patch_size": 14}
    assert image_text(CONFIG_MAPPING["gemma3"](vision_config=vision), None, None).image.runs == (256,)
    assert image_text(CONFIG_MAPPING["internvl"](), None, None).image.runs == (256,)


def test_a_size_that_a_model_does_not_take_is_refused(tmp_path):
    with pytest.raises(InputError, match="--image-size 48: llava makes every image 32 pixels wide and high"):
        image_text(build_config(tiny_vision_language(tmp_path, "llava"), TASK), None, 48)


def test_sizes_and_lengths_of_a_batch_do_not_depend_on_the_sample(tmp_path):
    batch, shown = made(tiny_vision_language(tmp_path, "qwen2_vl"), "qwen2_vl", images=3, samples=2)
    assert batch["image_grid_thw"].tolist() == [[1, 8, 8]] * 6
    assert batch["pixel_values"].shape == (6 * 64, 96)
    assert torch.equal(batch["mm_token_type_ids"] == 1, batch["input_ids"] == shown.token)
