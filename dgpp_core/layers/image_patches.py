"""What the encoders of images have in common: patches in squares, each of which sees all others of its image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import Shard

THETA = 10_000.0
"""Base of the frequencies."""


class Dense:
    """A product with a bias, of the parameters ``part.weight`` and ``part.bias``; an axis of inputs or several."""

    def __init__(self, shard: Shard, part: str) -> None:
        self.weight, self.bias = shard.weights.take(f"{part}.weight").flatten(1), shard.weights.take(f"{part}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """``[n, inputs]`` to ``[n, outputs]``."""
        return F.linear(x, self.weight, self.bias)


def places(rows: int, columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, int64 ``[rows * columns * merge ** 2]``, as `dgpp_core.images.patches` orders them.

    Args:
        rows, columns: of squares.
        merge: patches a side of a square.
    """
    shape = (rows, columns, merge, merge)
    along = torch.arange(max(rows, columns) * merge, device=device).view(-1, merge)
    row = along[:rows].view(rows, 1, merge, 1).expand(shape)
    column = along[:columns].view(1, columns, 1, merge).expand(shape)
    return row.reshape(-1), column.reshape(-1)


def turns(row: Tensor, column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `dgpp_core.ops.rope.rotate`, float32 ``[n, 1, width / 2]`` each.

    The first half of a head's pairs turns by the patch's row, the second by its column (Qwen2-VL: Wang et al., 2024).
    """
    quarter = width // 4
    frequencies = 1.0 / THETA ** (torch.arange(quarter, dtype=torch.float32, device=row.device) / quarter)
    angles = torch.cat((row.unsqueeze(1) * frequencies, column.unsqueeze(1) * frequencies), dim=1).unsqueeze(1)
    return angles.cos(), angles.sin()


def see_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of every patch to every patch of its image, ``[n, heads, width]`` each to ``[n, heads * width]``."""
    # The kernels that need no table of n by n scores take four axes only: 4,096 patches would be 2 GiB of them.
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
