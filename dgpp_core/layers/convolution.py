"""Short causal convolutions along a text."""

from __future__ import annotations

from torch import Tensor


def causal_convolution(rows: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """One filter a channel, over a row and those before it.

    Args:
        rows: ``[B, (K - 1) * dilation + n, C]``: n rows behind their history.
        weight: ``[C, K]``; the last tap is that of the row itself.

    Returns:
        ``[B, n, C]``, the taps added from the farthest to the nearest.
    """
    taps = weight.shape[1]
    n = rows.shape[1] - (taps - 1) * dilation
    total = rows[:, :n] * weight[:, 0]
    for tap in range(1, taps):
        total = total + rows[:, tap * dilation : tap * dilation + n] * weight[:, tap]
    return total
