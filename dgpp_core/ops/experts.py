"""Mixture of experts: each row through its chosen experts and the shared one, and the sum of what they give.

Contributions are kept apart until `combine` adds them in one order, so that a row's bits depend neither on the other
rows nor on the order in which experts ran.
"""

from __future__ import annotations

import functools
from typing import Protocol, Self

import torch
from torch import Tensor

from dgpp_core.api.model import Shard
from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.linear import Linear, device_of
from dgpp_core.ops.mlp import GateUp
from dgpp_core.ops.residual import residual_norm
from dgpp_core.ops.router import Routing


class ExpertProducts(Protocol):
    """All experts of a layer on some device."""

    def __call__(self, x: Tensor, routing: Routing, decode: bool = True) -> Tensor:
        """See `Experts`."""
        ...


class Experts:
    """Gated feed-forwards ``f_e(x) = down_e (silu(gate_e x) * up_e x)``, stacked.

    Args:
        gate_up: ``[entries * 2 I, H]``; an entry's rows are gate and then up. The shared expert is the last entry.
        down: ``[entries * H, I]``.
        experts: routed experts; the entries are these and the shared one.
        shared: whether there is a shared expert.
        limit: of gate and up, as `dgpp_core.ops.activation.swiglu` has it.
        products: ready for the weights; by default made of them.

    Attributes:
        experts, shared: as given.
    """

    def __init__(
        self,
        gate_up: Matrix,
        down: Matrix,
        *,
        experts: int,
        shared: bool = True,
        limit: float | None = None,
        products: ExpertProducts | None = None,
    ) -> None:
        self.experts, self.shared = experts, shared
        self._products = products or _make(gate_up, down, experts, shared, limit)

    @classmethod
    def load(cls, shard: Shard, target: str, *, experts: int, shared: bool = True, limit: float | None = None) -> Self:
        """The experts of ``target``.gate_up and .down; a GPU's form of them is kept in the resident image."""
        gate_up, down = shard.weights.matrix(f"{target}.gate_up"), shard.weights.matrix(f"{target}.down")
        if shard.device.type == "cpu":
            return cls(gate_up, down, experts=experts, shared=shared, limit=limit)
        from dgpp_core.ops.kernels.experts import PARTS, CudaExperts, prepare_part

        tensors: dict[str, Tensor] = {}
        for part in PARTS:
            make = functools.partial(
                prepare_part, part, gate_up, down, experts + shared, shard.device, target, consume=True
            )
            tensors |= shard.weights.prepared(f"{target}.{part}", "experts", make)
        products = CudaExperts.from_prepared(tensors, experts=experts, shared=shared, limit=limit)
        return cls(gate_up, down, experts=experts, shared=shared, products=products)

    def __call__(self, x: Tensor, routing: Routing, decode: bool = True) -> Tensor:
        """What each expert gives for each of its rows, unweighted.

        Args:
            x: ``[M, H]``.
            decode: as in `dgpp_core.ops.linear`.

        Returns:
            float32 ``[M * k + M, H]``: row ``m * k + j`` is ``f(x[m])`` of expert ``routing.ids[m, j]``, row
            ``M * k + m`` that of the shared expert; without one ``[M * k, H]``.
        """
        return self._products(x, routing, decode)


class ExpertLoop:
    """One expert after the other, each over the rows that chose it."""

    def __init__(self, gate_up: Matrix, down: Matrix, experts: int, shared: bool, limit: float | None = None) -> None:
        self.experts, self.shared = experts, shared
        entries = experts + shared
        up_rows, down_rows = gate_up.shape[0] // entries, down.shape[0] // entries
        self._hidden = down_rows
        self._gate_up = [GateUp(gate_up.rows(e * up_rows, up_rows), limit=limit) for e in range(entries)]
        self._down = [Linear(down.rows(e * down_rows, down_rows)) for e in range(entries)]

    def __call__(self, x: Tensor, routing: Routing, decode: bool = True) -> Tensor:
        rows, top_k = routing.ids.shape
        out = torch.empty(rows * top_k + rows * self.shared, self._hidden, dtype=torch.float32, device=x.device)
        picks = routing.ids.flatten()
        for expert in torch.unique(picks).tolist():
            places = (picks == expert).nonzero().squeeze(1)
            out[places] = self._run(expert, x[places // top_k], decode)
        if self.shared:
            out[rows * top_k :] = self._run(self.experts, x, decode)
        return out

    def _run(self, entry: int, x: Tensor, decode: bool) -> Tensor:
        return self._down[entry].wide(self._gate_up[entry](x, decode), decode)


def _make(gate_up: Matrix, down: Matrix, experts: int, shared: bool, limit: float | None) -> ExpertProducts:
    if (device := device_of(gate_up)).type == "cpu":
        return ExpertLoop(gate_up, down, experts, shared, limit)
    from dgpp_core.ops.kernels.experts import CudaExperts

    return CudaExperts(gate_up, down, experts=experts, shared=shared, limit=limit, device=device)


def combine(contributions: Tensor, routing: Routing) -> Tensor:
    """float32 ``[M, H]``: the weighted contributions of `Experts` in ascending expert id, the shared one last."""
    if contributions.is_cuda:
        from dgpp_core.ops.kernels import experts_combine

        return experts_combine.combine(contributions, routing)
    rows, top_k = routing.ids.shape
    routed = contributions[: rows * top_k].view(rows, top_k, -1)
    total = routing.weights[:, :1] * routed[:, 0]
    for pick in range(1, top_k):
        total = total + routing.weights[:, pick : pick + 1] * routed[:, pick]
    return total + contributions[rows * top_k :] if len(contributions) > rows * top_k else total


def combine_norm(
    residual: Tensor, contributions: Tensor, routing: Routing, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """`combine` added to ``residual`` and its norm, as `dgpp_core.ops.residual.residual_norm`."""
    if residual.is_cuda:
        from dgpp_core.ops.kernels import experts_combine

        return experts_combine.combine_norm(residual, contributions, routing, weight, eps, dtype)
    return residual_norm(residual, combine(contributions, routing).unsqueeze(0), weight, eps, dtype)
