"""Sizes of what speech models are fed with."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from autotune.training.inputs import audio_input, fixed_frames, labels_of, least_frames, takes_sound

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("frames", [10, 49, 128])
@pytest.mark.parametrize("model_type", ["wav2vec2", "hubert", "sew"])
def test_a_waveform_is_just_long_enough_for_its_frames(model_type, frames):
    convolutions = 13 if model_type == "sew" else 7
    config = CONFIG_MAPPING[model_type](**SIZES, conv_dim=[8] * convolutions, num_conv_pos_embedding_groups=2)
    name, (samples,) = audio_input(config, frames)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert name == model.main_input_name
    assert int(model._get_feat_extract_output_lengths(torch.tensor(samples))) == frames
    assert int(model._get_feat_extract_output_lengths(torch.tensor(samples - 1))) == frames - 1


def test_a_second_has_fifty_frames():
    assert audio_input(CONFIG_MAPPING["wav2vec2"](), 50)[1][0] == pytest.approx(16_000, rel=0.01)


def test_whisper_hears_half_a_minute_always():
    assert fixed_frames("whisper", {}) == 1500
    assert fixed_frames("whisper", {"max_source_positions": 60}) == 60
    assert audio_input(CONFIG_MAPPING["whisper"](num_mel_bins=128), 7) == ("input_features", (128, 3000))


def test_wav2vec2_hears_any_length_that_holds_a_hidden_span():
    assert fixed_frames("wav2vec2", {}) is None
    assert least_frames("wav2vec2", {}) == 10
    assert least_frames("wav2vec2", {"mask_time_length": 4}) == 4
    assert least_frames("wav2vec2", {"apply_spec_augment": False}) == 1


def test_a_transcript_leaves_room_for_blanks():
    assert all(0 < labels_of(frames) <= max(1, frames // 2) for frames in range(1, 500))


def test_types_whose_inputs_are_not_known_are_not_supported():
    assert takes_sound("wavlm")
    assert not takes_sound("voxtral")
