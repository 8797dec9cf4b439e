"""How GLM-5.3-Flash takes images: whole where they fit, on a canvas of 28-pixel squares with black to the right and
below."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from dgpp_core.api import Canvas, Vision, processor_count, require_processor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
LEAST_TOKENS, MOST_TOKENS = 16, 8000
_FIXED: Mapping[str, object] = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "patch_expand_factor": 1,
    "image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD), "rescale_factor": 1 / 255, "resample": 3,
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
}  # fmt: skip
"""What preprocessor_config.json may say; sizes apart, images are cut in one way."""


def flash_vision(processor: Mapping[str, Any], placeholder: int) -> Vision:
    """Images of GLM-5.3-Flash.

    Args:
        processor: preprocessor_config.json, or nothing.
        placeholder: `image_token_id` of config.json.

    Raises:
        ConfigError: the checkpoint asks for another way.
    """
    require_processor(processor, _FIXED)
    least = processor_count(processor, "min_image_tokens", LEAST_TOKENS)
    most = processor_count(processor, "max_image_tokens", MOST_TOKENS)
    return Vision(
        placeholder=placeholder, patch_size=14, merge_size=2, frames=2, mean=CLIP_MEAN, std=CLIP_STD, most_tokens=most,
        canvas=partial(canvas, least_tokens=least),
    )  # fmt: skip


def canvas(height: int, width: int, most_tokens: int, least_tokens: int = LEAST_TOKENS) -> Canvas:
    """The canvas of an image, as `transformers` has it for ``glm5_next``."""
    square = 28
    rows, columns = -(-height // square), -(-width // square)
    least = least_tokens * square * square
    if rows * columns < least_tokens:
        scale = math.sqrt(least / (height * width))
        rows, columns = (-(-max(1, math.ceil(side * scale)) // square) for side in (height, width))
    if rows * columns > most_tokens:
        rows, columns = _fitting(height, width, square, most_tokens)
    scale = min(rows * square / height, columns * square / width)
    if height * width >= least:
        scale = min(1.0, scale)
    return Canvas(
        height=rows * square,
        width=columns * square,
        content_height=max(1, min(rows * square, math.floor(height * scale))),
        content_width=max(1, min(columns * square, math.floor(width * scale))),
    )


def _fitting(height: int, width: int, square: int, most: int) -> tuple[int, int]:
    """Rows and columns of the tallest content of the image's shape that ``most`` squares hold."""
    low, high, best = 1, height, (1, 1)
    while low <= high:
        middle = (low + high) // 2
        rows, columns = -(-middle // square), -(-max(1, math.floor(width * middle / height)) // square)
        if rows * columns <= most:
            low, best = middle + 1, (rows, columns)
        else:
            high = middle - 1
    return best
