"""How Qwen3.8-Flash-Next takes images: filled out to the nearest canvas of 32-pixel squares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from dgpp_core.api import Canvas, ConfigError, RequestError, Vision, processor_count, require_processor

SQUARE = 32
LEAST_PIXELS, MOST_PIXELS = 65_536, 16_777_216
LONGEST = 200
"""Times that one side may be as long as the other."""
_FIXED: Mapping[str, object] = {
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "rescale_factor": 1 / 255, "resample": 3, "do_resize": True, "do_rescale": True, "do_normalize": True,
    "do_convert_rgb": True,
}  # fmt: skip
"""What preprocessor_config.json may say; sizes apart, images are cut in one way."""


def flash_vision(processor: Mapping[str, Any], placeholder: int) -> Vision:
    """Images of Qwen3.8-Flash-Next.

    Args:
        processor: preprocessor_config.json, or nothing.
        placeholder: `image_token_id` of config.json.

    Raises:
        ConfigError: the checkpoint asks for another way.
    """
    require_processor(processor, _FIXED)
    size = processor.get("size", {})
    if not isinstance(size, Mapping):
        raise ConfigError("preprocessor_config.json: size is no object", where="size", found=repr(size))
    least = processor_count(size, "shortest_edge", LEAST_PIXELS)
    most = processor_count(size, "longest_edge", MOST_PIXELS)
    half = (0.5, 0.5, 0.5)
    return Vision(
        placeholder=placeholder, patch_size=16, merge_size=2, frames=2, mean=half, std=half, positions="grid",
        most_tokens=most // SQUARE**2, canvas=partial(canvas, least_pixels=least),
    )  # fmt: skip


def canvas(height: int, width: int, most_tokens: int, least_pixels: int = LEAST_PIXELS) -> Canvas:
    """The canvas of an image, as Qwen2-VL's processor has it (Wang et al., 2024).

    Raises:
        RequestError: one side is too many times as long as the other.
    """
    longer, shorter = max(height, width), min(height, width)
    if longer > LONGEST * shorter:
        what = f"an image of {width} x {height} pixels is too long: one side may be {LONGEST} times the other"
        raise RequestError(what, code="invalid_image")
    # Python rounds halves to even, which is what the processor does.
    rows, columns = round(height / SQUARE), round(width / SQUARE)
    most = most_tokens * SQUARE**2
    if rows * columns * SQUARE**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / SQUARE)) for side in (height, width))
    elif rows * columns * SQUARE**2 < least_pixels:
        grow = math.sqrt(least_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / SQUARE) for side in (height, width))
    size = (rows * SQUARE, columns * SQUARE)
    return Canvas(height=size[0], width=size[1], content_height=size[0], content_width=size[1])
