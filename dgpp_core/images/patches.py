"""From a picture's pixels to what an encoder reads, and where rotary embeddings see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dgpp_core.api.vision import Vision
from dgpp_core.images.picture import Picture


def patches(picture: Picture, vision: Vision) -> NDArray[np.float32]:
    """float32 ``[tokens * merge_size ** 2, 3 * frames * patch_size ** 2]``.

    Squares come row by row, the patches of a square row by row; a patch is laid out colour, frame, row, column. That is
    the order of Qwen2-VL's processor (Wang et al., 2024), which the families here have in common.
    """
    p, m = vision.patch_size, vision.merge_size
    rows, columns = vision.grid(picture.height, picture.width)
    pixels = np.frombuffer(picture.rgb, dtype=np.uint8).reshape(rows, m, p, columns, m, p, 3)
    ordered = pixels.transpose(0, 3, 1, 4, 6, 2, 5)
    scaled = np.empty(ordered.shape, dtype=np.float32)
    for colour, values in enumerate(_values(vision)):
        scaled[:, :, :, :, colour] = values[ordered[:, :, :, :, colour]]
    count = rows * columns * m * m
    repeated = np.repeat(scaled.reshape(count, 3, 1, p * p), vision.frames, axis=2)
    return repeated.reshape(count, 3 * vision.frames * p * p)


def _values(vision: Vision) -> NDArray[np.float32]:
    """What each of the 256 values of each colour becomes, ``[3, 256]``, rounded as reference processors round."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(part, dtype=np.float32)[:, None] for part in (vision.mean, vision.std))
    found: NDArray[np.float32] = (scaled[None] - mean) / std
    return found


def grid_places(tokens: int, pictures: Sequence[Picture], vision: Vision) -> NDArray[np.int32]:
    """Time, row and column of each of the first ``tokens`` positions, ``[3, tokens]``, under ``grid`` positions.

    A picture that comes when the count is at n has time n, and rows and columns from n on; the count goes on at n plus
    the longer of its sides (Qwen2-VL: Wang et al., 2024, section 2.1).

    Args:
        pictures: in the order of their place.
    """
    places = np.tile(np.arange(tokens, dtype=np.int32), (3, 1))
    for picture in pictures:
        first = int(places[0, picture.start])
        rows, columns = vision.grid(picture.height, picture.width)
        places[0, picture.start : picture.end] = first
        places[1, picture.start : picture.end] = first + np.repeat(np.arange(rows, dtype=np.int32), columns)
        places[2, picture.start : picture.end] = first + np.tile(np.arange(columns, dtype=np.int32), rows)
        places[:, picture.end :] -= picture.tokens - max(rows, columns)
    return places
