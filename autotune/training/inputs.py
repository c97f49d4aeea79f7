"""What a speech model is fed with: the name and the size of its input for so many frames of sound.

A frame is what the encoder attends over: 20 ms of sound for wav2vec 2.0 and its kin (320 samples at 16 kHz) and for
Whisper (two log-mel frames of 10 ms). Some models take one length alone, as Whisper its 30 s. Pure; called by who makes
samples, traced inputs and plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# What a model of images is fed with: pixels of the config's size, or the colour clusters that ImageGPT reads. Pure;
# called by who makes samples and traced inputs.

_DEFAULT_SIZE = 224  # of ImageNet models whose config doesn't tell, such as ResNet


class ImageInput(NamedTuple):
    """What stands for one image."""

    name: str
    shape: tuple[int, ...]
    clusters: int | None  # of colours, where the input is one for each pixel


def image_input(config: Any) -> ImageInput:
    """Return the input of one image for a library config."""
    if config.model_type == "imagegpt":  # the last token of the vocabulary starts the sequence
        return ImageInput("input_ids", (config.n_positions,), config.vocab_size - 1)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _DEFAULT_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    return ImageInput("pixel_values", (getattr(vision, "num_channels", 3), height, width), None)


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

# Where the encoder has a table of positions for one length of sound, the field that says it, with the default of the
# config's class: WhisperConfig, ASTConfig.
_FIXED = {"whisper": ("max_source_positions", 1500), "audio-spectrogram-transformer": ("max_length", 1024)}

# Labels of a transcript per frame: some 15 characters a second are spoken, at 50 frames. CTC needs fewer than frames.
LABELS_PER_FRAME = 0.25


# Spans that SpecAugment hides are so many frames long, and a sample has to hold one: `mask_time_length` of the configs.
_HIDDEN_SPAN = 10


class AudioInput(NamedTuple):
    """What stands for one sample of sound."""

    name: str
    shape: tuple[int, ...]


def is_supported(model_type: str) -> bool:
    """Whether inputs can be made for this type of model."""
    return model_type in _WAVEFORM | _FEATURES


def fixed_frames(model_type: str, figures: Mapping[str, Any]) -> int | None:
    """Return the one length that a type of model takes, by its config's figures; None: any."""
    if model_type not in _FIXED:
        return None
    field, default = _FIXED[model_type]
    return int(figures.get(field, default))


def least_frames(model_type: str, figures: Mapping[str, Any]) -> int:
    """Return the shortest sample that a type of model can be trained on, by its config's figures."""
    if model_type in ("moonshine", "speech_to_text") or not figures.get("apply_spec_augment", True):
        return 1
    return int(figures.get("mask_time_length", _HIDDEN_SPAN))


def audio_input(config: Any, frames: int) -> AudioInput:
    """Return the input of one sample for a library config.

    Args:
        config: Of a supported type.
        frames: Positions of the encoder that the sample fills; of no matter where the length is fixed.
    """
    model_type = config.model_type
    if model_type == "whisper":
        return AudioInput("input_features", (config.num_mel_bins, 2 * config.max_source_positions))
    if model_type == "audio-spectrogram-transformer":
        return AudioInput("input_values", (config.max_length, config.num_mel_bins))
    if model_type == "speech_to_text":
        features = config.input_feat_per_channel * config.input_channels
        return AudioInput("input_features", (frames * 2**config.num_conv_layers, features))
    if model_type == "wav2vec2-bert":
        return AudioInput("input_features", (frames, config.feature_projection_input_dim))
    if model_type == "moonshine":
        return AudioInput("input_values", (_before(_MOONSHINE, frames),))
    convolutions = tuple(zip(config.conv_kernel, config.conv_stride, strict=True))
    return AudioInput("input_values", (_before(convolutions, frames),))


def labels_of(frames: int) -> int:
    """Return the length of a transcript of so many frames, for CTC."""
    return max(1, int(frames * LABELS_PER_FRAME))


def _before(convolutions: tuple[tuple[int, int], ...], length: int) -> int:
    """Return the least length that (kernel, stride) convolutions, in order, bring down to `length`."""
    for kernel, stride in reversed(convolutions):
        length = (length - 1) * stride + kernel
    return length
