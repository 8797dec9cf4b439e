"""The gated first half of a feed-forward (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.activation import swiglu
from dgpp_core.ops.linear import Linear


class GateUp:
    """``silu(x @ gate.T) * (x @ up.T)``.

    Args:
        weight: ``[2 I, K]``, the rows of gate and then those of up.
    """

    def __init__(self, weight: Tensor | Matrix) -> None:
        self._linear = Linear(weight)
        self.width = weight.shape[0] // 2

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, I]`` in the dtype of ``x``, rounded once; ``decode`` as in `dgpp_core.ops.linear`."""
        return swiglu(self._linear.wide(x, decode)).to(x.dtype)
