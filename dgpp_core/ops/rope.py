"""Rotary position embedding (Su et al., 2021): half-split, as most checkpoints have it, and of neighbouring pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.formats.resident import POSITION_SLACK


class RotaryTable:
    """Cosines and sines of every position, so that a row's rotation never depends on its batch.

    Args:
        width: of the rotated part of a head; even.
        positions: the positional ceiling.
        theta: base of the frequencies.
        frequencies: optional ``[width / 2]`` inverse frequencies that replace ``theta``'s (scaled rope).
    """

    def __init__(
        self, width: int, positions: int, theta: float, device: torch.device, frequencies: Tensor | None = None
    ) -> None:
        if frequencies is None:
            frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
        angles = torch.outer(torch.arange(positions + POSITION_SLACK, dtype=torch.float32), frequencies)
        self.width = width
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 ``[R]`` positions: two ``[R, 1, width / 2]``, for every layer of a step."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[R, heads, width]`` by the angles of `RotaryTable.at`; float32 inside, the dtype of ``x`` outside.

    A table narrower than the heads turns their first dimensions and leaves the rest (partial rotary embedding).
    """
    turned = 2 * cos.shape[-1]
    first, second = x[..., :turned].chunk(2, dim=-1)
    pair = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return pair if turned == x.shape[-1] else torch.cat((pair, x[..., turned:]), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rotate`, where the dimensions that turn together are neighbours, 2i and 2i + 1, and stay in their places."""
    turned = 2 * cos.shape[-1]
    even, odd = x[..., :turned:2], x[..., 1:turned:2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
    return pairs if turned == x.shape[-1] else torch.cat((pairs, x[..., turned:]), dim=-1)
