"""The inputs of models, by the library config: special ids of texts; name and shape of images and of sound.

The length of sound is counted in frames, the positions that the encoder attends over: 20 ms for wav2vec 2.0 and its kin
(320 samples at 16 kHz) and for Whisper (two log-mel frames of 10 ms). Some models take one length alone, Whisper 30 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEFAULT_SIZE = 224  # pixels of an edge, where the config of an ImageNet model doesn't tell, such as ResNet's

# Encoders over convolutions of the waveform, whose kernels and strides their configs list.
_WAVEFORM = frozenset(
    {
        "wav2vec2", "wav2vec2-conformer", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d",
        "data2vec-audio",
    }
)  # fmt: skip
_FEATURES = frozenset({"whisper", "speech_to_text", "audio-spectrogram-transformer", "wav2vec2-bert", "moonshine"})

# Convolutions (kernel, stride) of Moonshine's encoder, which are not in its config: `MoonshineEncoder.__init__`.
_MOONSHINE = ((127, 64), (7, 3), (3, 2))

# The config field of the one length that an encoder has positions for, with the default of WhisperConfig, ASTConfig.
_FIXED = {"whisper": ("max_source_positions", 1500), "audio-spectrogram-transformer": ("max_length", 1024)}

# Labels of a transcript per frame: some 15 characters are spoken in a second, which has 50 frames. CTC needs fewer
# labels than frames.
LABELS_PER_FRAME = 0.25

# Frames of a span that SpecAugment hides, by default of the configs' `mask_time_length`; a sample has to hold one.
_HIDDEN_SPAN = 10


def image_input(config: Any) -> tuple[str, tuple[int, ...], int | None]:
    """Return name and shape of the input of one image for a library config, and the number of its colours.

    That is None but for ImageGPT, where each pixel is the id of one.
    """
    if config.model_type == "imagegpt":  # the last token of the vocabulary starts the sequence
        return "input_ids", (config.n_positions,), config.vocab_size - 1
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _DEFAULT_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    return "pixel_values", (getattr(vision, "num_channels", 3), height, width), None


def special_ids(config: Any, name: str) -> list[int]:
    """Return the ids of a name such as 'eos_token_id', of which a config has none, one or several."""
    value = getattr(config.get_text_config(), name, None)
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def is_supported(model_type: str) -> bool:
    """Return whether inputs can be made for this type of model."""
    return model_type in _WAVEFORM | _FEATURES


def fixed_frames(model_type: str, figures: Mapping[str, Any]) -> int | None:
    """Return the only length in frames that a type of model takes, by its config's figures; None: any."""
    if model_type not in _FIXED:
        return None
    field, default = _FIXED[model_type]
    return int(figures.get(field, default))


def least_frames(model_type: str, figures: Mapping[str, Any]) -> int:
    """Return the shortest length in frames that a type of model can be trained on, by its config's figures."""
    if model_type in ("moonshine", "speech_to_text") or not figures.get("apply_spec_augment", True):
        return 1
    return int(figures.get("mask_time_length", _HIDDEN_SPAN))


def audio_input(config: Any, frames: int) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of the input of one recording for the library config of a supported type.

    `frames` is its length, which doesn't matter where the length is fixed.
    """
    model_type = config.model_type
    if model_type == "whisper":
        return "input_features", (config.num_mel_bins, 2 * config.max_source_positions)
    if model_type == "audio-spectrogram-transformer":
        return "input_values", (config.max_length, config.num_mel_bins)
    if model_type == "speech_to_text":
        features = config.input_feat_per_channel * config.input_channels
        return "input_features", (frames * 2**config.num_conv_layers, features)
    if model_type == "wav2vec2-bert":
        return "input_features", (frames, config.feature_projection_input_dim)
    if model_type == "moonshine":
        return "input_values", (_before(_MOONSHINE, frames),)
    convolutions = tuple(zip(config.conv_kernel, config.conv_stride, strict=True))
    return "input_values", (_before(convolutions, frames),)


def labels_of(frames: int) -> int:
    """Return the length of the transcript of so many frames, for CTC."""
    return max(1, int(frames * LABELS_PER_FRAME))


def _before(convolutions: tuple[tuple[int, int], ...], length: int) -> int:
    """Return the least input length from which (kernel, stride) convolutions, in order, make `length`."""
    for kernel, stride in reversed(convolutions):
        length = (length - 1) * stride + kernel
    return length
