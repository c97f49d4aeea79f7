"""What a model of images is fed with: pixels of the config's size, or the colour clusters that ImageGPT reads.

Pure; called by who makes samples and traced inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
