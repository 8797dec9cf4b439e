"""Sums along an axis in one fixed order."""

from __future__ import annotations

from torch import Tensor


def fold(x: Tensor, dim: int) -> Tensor:
    """Sum of ``x`` over ``dim``: the second half is added to the first until one entry is left.

    Only elementwise additions, so that a sum has the same bits whatever lies beside it in the tensor. A library's sum
    may take another order for another shape.
    """
    while (size := x.shape[dim]) > 1:
        half = size // 2
        if not size % 2:
            first, second = x.chunk(2, dim)
            x = first + second
            continue
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        head = total.narrow(dim, 0, 1) + x.narrow(dim, size - 1, 1)
        x = head if half == 1 else _with_first(total, head, dim)
    return x.squeeze(dim)


def _with_first(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """A copy of ``x`` with its first entry along ``dim`` replaced."""
    x = x.clone()
    x.narrow(dim, 0, 1).copy_(first)
    return x
