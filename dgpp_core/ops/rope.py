"""Rotary position embedding (Su et al., 2021): half-split, as most checkpoints have it, and of neighbouring pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.formats.resident import POSITION_SLACK


class RotaryTable:
    """Cosines and sines of every position, so that a row's rotation never depends on its batch.

    Args:
        width: of the rotated part of a head; even.
        positions: the positional ceiling.
        theta: base of the frequencies.
        frequencies: optional ``[width / 2]`` inverse frequencies that replace ``theta``'s (`yarn_frequencies`).
        scale: of cosines and sines alike (`yarn_scale`).
        axes: for each of the ``width / 2`` frequencies, whether it turns by a position's time, row or column (0, 1, 2).
    """

    def __init__(
        self,
        width: int,
        positions: int,
        theta: float,
        device: torch.device,
        frequencies: Tensor | None = None,
        scale: float = 1.0,
        axes: Sequence[int] = (),
    ) -> None:
        if frequencies is None:
            frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
        angles = torch.outer(torch.arange(positions + POSITION_SLACK, dtype=torch.float32), frequencies)
        self.width = width
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)
        self._lanes = torch.arange(len(axes), device=device)
        self.cos, self.sin = (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 ``[R]`` positions: two ``[R, 1, width / 2]``, for every layer of a step."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def of(self, batch: StepBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `at`, for a position of each row's request, turned to where ``batch.places`` has it, if it says so."""
        if batch.places is None:
            return self.at(positions)
        if batch.uniform is not None:
            slots = batch.slots.repeat_interleave(batch.uniform)
        else:
            slots = torch.cat([batch.slots[at].expand(count) for at, count in enumerate(batch.counts)])
        seen = batch.places[slots, :, positions][:, self._axes].long()
        return self.cos[seen, self._lanes].unsqueeze(1), self.sin[seen, self._lanes].unsqueeze(1)


def yarn_scale(factor: float) -> float:
    """What YaRN multiplies cosines and sines with, for queries and keys alike."""
    return 0.1 * math.log(factor) + 1.0


def yarn_frequencies(
    width: int, theta: float, factor: float, length: float, fast: float = 32.0, slow: float = 1.0
) -> Tensor:
    """Inverse frequencies ``[width / 2]`` for ``factor`` times as many positions (YaRN: Peng et al., 2023).

    Those that turn more than ``fast`` times over ``length`` positions stay, those that turn less than ``slow`` times
    are divided by ``factor``, and between the two the share of the divided grows along a line.

    Args:
        length: positions the model was trained for; some engines take a multiple of them.
    """
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)

    def dimension(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    share = ramp.clamp(0, 1)
    return plain / factor * share + plain * (1 - share)


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
