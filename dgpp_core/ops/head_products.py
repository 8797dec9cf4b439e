"""A matrix product of its own for each head, with a row's bits independent of the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.ops.linear import Linear


class HeadProducts:
    """``y[r, h] = weight[h] @ x[r, h]``.

    Args:
        weight: ``[heads, N, K]``; each head's part becomes a `dgpp_core.ops.linear.Linear`.
    """

    def __init__(self, weight: Tensor) -> None:
        self._heads = [Linear(part.contiguous()) for part in weight]

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[R, heads, K]`` to float32 ``[R, heads, N]``; ``decode`` as in `dgpp_core.ops.linear.Product`."""
        return torch.stack(
            [head.wide(x[:, number].contiguous(), decode) for number, head in enumerate(self._heads)], dim=1
        )
