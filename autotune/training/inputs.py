"""The inputs of models, by the library config: special ids of texts, images, recordings, and texts with images.

The length of sound is counted in frames, the positions that the encoder attends over: 20 ms for wav2vec 2.0 and its kin
(320 samples at 16 kHz) and for Whisper, which takes 30 s alone. An image stands in a text as a run of placeholder
tokens, one for each feature that the vision part makes of it, as the model's processor decides (transformers 5.23,
`image_processing_*.py` and `processing_*.py` of each type). Images here are square; ordinary tokens part the runs.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from autotune.errors import InputError

# Parts of these models that see images. Their other parts are the language model, what joins the two, and the head.
VISION_PARTS = frozenset({"visual", "vision_tower", "vision_model"})

# A classifier's `problem_type` where a label is a class; elsewhere it is numbers, as one for each of several classes.
OF_ONE_CLASS = (None, "single_label_classification")


def special_ids(config: Any, name: str) -> list[int]:
    """Return the ids of a name such as 'eos_token_id', of which a config has none, one or several."""
    value = getattr(config.get_text_config(), name, None)
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _waveform(convolutions: Iterable[tuple[int, int]], frames: int) -> tuple[str, tuple[int, ...]]:
    """Return the least input from which (kernel, stride) convolutions, in order, make so many frames."""
    for kernel, stride in reversed(list(convolutions)):
        frames = (frames - 1) * stride + kernel
    return "input_values", (frames,)


# Name and shape of the input of one recording, by the type of model; frames don't matter where the length is fixed.
SOUND: dict[str, Callable[[Any, int], tuple[str, tuple[int, ...]]]] = {
    **dict.fromkeys(
        (
            "wav2vec2", "wav2vec2-conformer", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d",
            "data2vec-audio",
        ),
        lambda config, frames: _waveform(zip(config.conv_kernel, config.conv_stride, strict=True), frames),
    ),
    "moonshine": lambda _, frames: _waveform(((127, 64), (7, 3), (3, 2)), frames),  # `MoonshineEncoder.__init__`
    "whisper": lambda config, _: ("input_features", (config.num_mel_bins, 2 * config.max_source_positions)),
    "audio-spectrogram-transformer": lambda config, _: ("input_values", (config.max_length, config.num_mel_bins)),
    "speech_to_text": lambda config, frames: (
        "input_features",
        (frames * 2**config.num_conv_layers, config.input_feat_per_channel * config.input_channels),
    ),
    "wav2vec2-bert": lambda config, frames: ("input_features", (frames, config.feature_projection_input_dim)),
}  # fmt: skip


def image_or_sound(config: Any, frames: int) -> tuple[str, tuple[int, ...], int | None]:
    """Return name and shape of the input of one image or recording, and the number of colours if its pixels are ids."""
    if config.model_type in SOUND:
        return (*SOUND[config.model_type](config, frames), None)
    if config.model_type == "imagegpt":  # the last token of the vocabulary starts the sequence
        return "input_ids", (config.n_positions,), config.vocab_size - 1
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224  # such as ResNet, whose config doesn't tell
    height, width = (size, size) if isinstance(size, int) else size
    return "pixel_values", (getattr(vision, "num_channels", 3), height, width), None


def fixed_frames(model_type: str, figures: Mapping[str, Any]) -> int | None:
    """Return the only length in frames that a type of model takes, by its config's figures; None: any."""
    known = {"whisper": ("max_source_positions", 1500), "audio-spectrogram-transformer": ("max_length", 1024)}
    return int(figures.get(*known[model_type])) if model_type in known else None


def least_frames(model_type: str, figures: Mapping[str, Any]) -> int:
    """Return the shortest length in frames that a type of model can be trained on, by its config's figures."""
    if model_type in ("moonshine", "speech_to_text") or not figures.get("apply_spec_augment", True):
        return 1
    return int(figures.get("mask_time_length", 10))  # a sample has to hold a span that SpecAugment hides


def labels_of(frames: int) -> int:
    """Return the labels of so many frames, for CTC: some 15 characters are spoken in a second, which has 50 frames."""
    return max(1, int(frames * 0.25))


class Image(NamedTuple):
    """One image of a sample, as a processor makes it."""

    size: int  # edge in pixels
    runs: tuple[int, ...]  # placeholder tokens that follow one another, between ordinary ones
    pixels: tuple[int, ...]  # shape of `pixel_values`, to be joined along the first dimension
    numbers: tuple[int, ...] = ()  # a row of the input `named`
    named: str | None = None
    is_stacked: bool = False  # whether the images of a sample are joined along a dimension of their own, the second


class ImageText(NamedTuple):
    """The images of a sample, and where their placeholders stand."""

    image: Image
    images: int
    token: int  # id of the placeholder
    types: tuple[str, int, int] | None

    @property
    def tokens(self) -> int:
        """Placeholders of a sample, and a token before, between and behind their runs."""
        return self.images * sum(run + 1 for run in self.image.runs) + 1

    @property
    def described(self) -> str:
        one = f"of {self.image.size} pixels as {sum(self.image.runs)} tokens"
        return f"an image {one} in each sample" if self.images == 1 else f"{self.images} images {one} in each sample"

    @property
    def pixels(self) -> tuple[int, ...]:
        """Shape of the `pixel_values` of a sample."""
        first, *rest = self.image.pixels
        return (*(1,) * self.image.is_stacked, self.images * first, *rest)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Beginnings and ends of the runs of placeholders in a sample, which exported scripts list."""
        runs = self.image.runs * self.images
        starts = itertools.accumulate((run + 1 for run in runs), initial=1)
        return [(start, start + run) for start, run in zip(starts, runs, strict=False)]

    @property
    def positions(self) -> list[int]:
        return [position for start, end in self.ranges for position in range(start, end)]

    def marks(self, length: int) -> dict[str, list[Any]]:
        """Return a sample's further inputs: the sizes of its images, and for each token whether it is of an image."""
        found: dict[str, list[Any]] = {}
        if self.image.named is not None:
            found[self.image.named] = [list(self.image.numbers)] * self.images
        if self.types is not None:
            name, of_image, of_text = self.types
            shown = set(self.positions)
            found[name] = [of_image if position in shown else of_text for position in range(length)]
        return found


def image_text(config: Any, images: int | None, size: int | None) -> ImageText:
    """Return the images of a sample, by default one as the model was made for; `size` is the edge in pixels."""
    model_type = config.model_type
    token, vocabulary = config.image_token_id, config.get_text_config().vocab_size
    # These look up a placeholder as another token, so that it may lie beyond the vocabulary.
    if token is None or (token >= vocabulary and model_type not in ("gemma3", "paligemma")):
        raise InputError(f"{model_type}: the placeholder of images (image_token_id {token}) is not in the vocabulary")
    types = {  # fields that tell images from text, with their values for an image's tokens and for text
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("mm_token_type_ids", 1, 0)),
        "gemma3": ("token_type_ids", 1, 0),
        "paligemma": ("token_type_ids", 0, 1),  # the prefix, and what is learned
    }
    return ImageText(IMAGES[model_type](config, size), images or 1, int(token), types.get(model_type))


def _qwen(config: Any, size: int | None) -> Image:
    """Return patches of an image, rounded to features (`smart_resize` of Qwen2-VL's processor), by default 256."""
    vision = config.vision_config
    merge = vision.spatial_merge_size
    features = max(1, round((size or 448) / (vision.patch_size * merge)))
    patches = features * merge
    pixels = (patches**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    return Image(patches * vision.patch_size, (features**2,), pixels, (1, patches, patches), "image_grid_thw")


def _whole(config: Any, size: int | None) -> Image:
    """Return one image of the one size that a model takes: patches, and CLIP's class token unless it is left out."""
    (edge, shape), vision = _tile(config), config.vision_config
    of_class = vision.model_type == "clip_vision_model"
    if size not in (None, edge):
        raise InputError(f"--image-size {size}: {config.model_type} makes every image {edge} pixels wide and high")
    strategy = getattr(config, "vision_feature_select_strategy", None)
    if strategy is not None and not of_class and vision.model_type != "siglip_vision_model":
        raise InputError(f"{config.model_type}: images for {vision.model_type} are not made here")
    features = int(edge // vision.patch_size) ** 2 + of_class - (strategy == "default")
    return Image(edge, (int(getattr(config, "mm_tokens_per_image", None) or features),), (1, *shape))


def _tiled(config: Any, size: int | None) -> Image:
    """Return tiles of an image that is no smaller than one, and the whole image if there are several.

    InternVL's grid is the largest square one whose area the image fills by half, of at most 12 tiles
    (`get_optimal_tiled_canvas`); its tiles are one run.
    """
    edge, shape = _tile(config)
    patch, is_internvl = config.vision_config.patch_size, config.model_type == "internvl"
    across = math.ceil((size or 4 * edge) / edge)  # `size` of the processors of Idefics 3 and SmolVLM
    if is_internvl:
        fills = (n for n in range(2, math.isqrt(12) + 1) if 2 * (size or edge) ** 2 > (n * edge) ** 2)
        across = max(fills, default=1)
    tiles = across**2 + 1 if across > 1 else 1
    patches = edge // (patch[0] if isinstance(patch, list | tuple) else patch)
    if is_internvl:
        runs: tuple[int, ...] = (int(patches * config.downsample_ratio) ** 2 * tiles,)
    else:
        runs = (patches**2 // config.scale_factor**2,) * tiles
    return Image(across * edge, runs, (tiles, *shape), is_stacked=not is_internvl)


def _tile(config: Any) -> tuple[int, tuple[int, int, int]]:
    """Return the edge of a tile in pixels, and its shape."""
    size = config.vision_config.image_size
    edge = int(size[0] if isinstance(size, list | tuple) else size)
    return edge, (int(getattr(config.vision_config, "num_channels", 3)), edge, edge)


# How each type cuts an image.
IMAGES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _qwen),
    **dict.fromkeys(("llava", "paligemma", "gemma3"), _whole),
    **dict.fromkeys(("idefics3", "smolvlm", "internvl"), _tiled),
}


def freeze(model: Any, is_frozen: Callable[[str], object]) -> None:
    for name, parameter in model.named_parameters():
        if is_frozen(name):
            parameter.requires_grad_(False)


def is_vision(name: str) -> bool:
    return not VISION_PARTS.isdisjoint(name.split("."))
