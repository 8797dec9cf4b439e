"""The gated first half of a feed-forward (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor

from dgpp_core.api.model import Shard
from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.activation import swiglu
from dgpp_core.ops.linear import Linear, device_of


class Gated(Protocol):
    """``silu(x @ gate.T) * (x @ up.T)`` on some device."""

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, I]``."""
        ...


class GatedLinear:
    """The two products at once, then the gate."""

    def __init__(self, weight: Tensor | Matrix) -> None:
        self._linear = Linear(weight)

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        return swiglu(self._linear.wide(x, decode)).to(x.dtype)


class GateUp:
    """``silu(x @ gate.T) * (x @ up.T)``.

    Args:
        weight: ``[2 I, K]``, the rows of gate and then those of up.
        gated: ready for the weight; by default made of it.
    """

    def __init__(self, weight: Tensor | Matrix, gated: Gated | None = None) -> None:
        self.width = weight.shape[0] // 2
        self._gated = gated or _make(weight)

    @classmethod
    def load(cls, shard: Shard, target: str) -> Self:
        """The gate of the checkpoint's matrix ``target``; a GPU's form of it is kept in the resident image."""
        matrix = shard.weights.matrix(target)
        if shard.device.type == "cpu":
            return cls(matrix)
        from dgpp_core.ops.kernels.dense import CudaGateUp

        def make() -> Mapping[str, Tensor]:
            return CudaGateUp(matrix, shard.device, target, consume=True).prepared()

        return cls(matrix, CudaGateUp.from_prepared(shard.weights.prepared(target, "gate and up", make)))

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, I]`` in the dtype of ``x``, rounded once; ``decode`` as in `dgpp_core.ops.linear`."""
        return self._gated(x, decode)


def _make(weight: Tensor | Matrix) -> Gated:
    if (device := device_of(weight)).type == "cpu":
        return GatedLinear(weight)
    from dgpp_core.ops.kernels.dense import CudaGateUp

    return CudaGateUp(weight, device)
