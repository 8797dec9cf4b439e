"""The gated first half of a feed-forward (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor

from dgpp_core.api.model import Shard
from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.activation import swiglu
from dgpp_core.ops.linear import Linear, device_of, load_product


class Gated(Protocol):
    """``silu(x @ gate.T) * (x @ up.T)`` on some device."""

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, I]``."""
        ...


class GatedLinear:
    """The two products at once, then the gate."""

    def __init__(self, linear: Linear, limit: float | None = None) -> None:
        self._linear, self._limit = linear, limit

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        return swiglu(self._linear.wide(x, decode), self._limit).to(x.dtype)


class GateUp:
    """``silu(x @ gate.T) * (x @ up.T)``.

    Args:
        weight: ``[2 I, K]``, the rows of gate and then those of up.
        gated: ready for the weight; by default made of it.
        limit: of gate and up, as `dgpp_core.ops.activation.swiglu` has it.
    """

    def __init__(self, weight: Tensor | Matrix, gated: Gated | None = None, *, limit: float | None = None) -> None:
        self.width = weight.shape[0] // 2
        self._gated = gated or _make(weight, limit)

    @classmethod
    def load(cls, shard: Shard, target: str, *, limit: float | None = None) -> Self:
        """The gate of the checkpoint's matrix ``target``; a GPU's form of it is kept in the resident image."""
        matrix = shard.weights.matrix(target)
        if shard.device.type == "cpu":
            return cls(matrix, limit=limit)
        if limit is not None:
            return cls(matrix, GatedLinear(Linear(matrix, load_product(shard, target, matrix)), limit))
        from dgpp_core.ops.kernels.dense import CudaGateUp

        def make() -> Mapping[str, Tensor]:
            return CudaGateUp(matrix, shard.device, target, consume=True).prepared()

        return cls(matrix, CudaGateUp.from_prepared(shard.weights.prepared(target, "gate and up", make)))

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, I]`` in the dtype of ``x``, rounded once; ``decode`` as in `dgpp_core.ops.linear`."""
        return self._gated(x, decode)


def _make(weight: Tensor | Matrix, limit: float | None) -> Gated:
    if (device := device_of(weight)).type == "cpu" or limit is not None:
        return GatedLinear(Linear(weight), limit)
    from dgpp_core.ops.kernels.dense import CudaGateUp

    return CudaGateUp(weight, device)
