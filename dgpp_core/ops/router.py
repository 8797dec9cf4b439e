"""Choice of experts: which ``k`` of ``E`` a row goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import Tensor

from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.activation import sigmoid, softplus
from dgpp_core.ops.linear import Linear, device_of

Score = Literal["sigmoid", "softmax", "sqrt_softplus"]


class Routing(msgspec.Struct, frozen=True, eq=False):
    """Where the rows of a step go.

    Attributes:
        ids: int32 ``[M, k]``, expert ids, ascending in each row.
        weights: float32 ``[M, k]``, of the expert beside it.
    """

    ids: Tensor
    weights: Tensor


class Router:
    """Top-k routing with a selection bias (DeepSeek-V3, 2024, section 2.1.2).

    The bias decides who is chosen, the unbiased scores weigh. With ``groups``, experts are divided into that many equal
    runs; only the ``top_groups`` with the largest sum of their two best biased scores take part. Ties go to the lower
    id.

    Args:
        weight: ``[E, H]``.
        bias: float32 ``[E]``.
        normalise: divide the chosen weights by their sum.
        scale: applied to the weights last.
        score: of a row's logits; ``sqrt_softplus`` is the root of ``log(1 + exp(z))`` (DeepSeek-V4, 2026).
    """

    def __init__(
        self,
        weight: Tensor | Matrix,
        bias: Tensor,
        top_k: int,
        *,
        groups: int = 1,
        top_groups: int = 1,
        normalise: bool = True,
        scale: float = 1.0,
        score: Score = "sigmoid",
    ) -> None:
        self.top_k, self._choose = (
            top_k,
            _router_class(weight)(
                weight, bias, top_k, groups=groups, top_groups=top_groups, normalise=normalise, scale=scale, score=score
            ),
        )

    def __call__(self, x: Tensor, decode: bool = True) -> Routing:
        """Routing of ``[M, H]`` rows; product and scores in float32."""
        return self._choose(x, decode)


class ReferenceRouter:
    """Sorts; see `Router`."""

    def __init__(
        self,
        weight: Tensor | Matrix,
        bias: Tensor,
        top_k: int,
        *,
        groups: int,
        top_groups: int,
        normalise: bool,
        scale: float,
        score: Score,
    ) -> None:
        self._linear, self._bias, self.top_k = Linear(weight), bias, top_k
        self._groups, self._top_groups = groups, top_groups
        self._normalise, self._scale, self._score = normalise, scale, score

    def __call__(self, x: Tensor, decode: bool = True) -> Routing:
        logits = self._linear.wide(x.float(), decode)
        scores = _scores(logits, self._score)
        chosen = best(self._eligible(scores + self._bias.float()), self.top_k).sort(-1).values
        weights = scores.gather(-1, chosen)
        if self._normalise:
            weights = weights / (_row_sum(weights) + 1e-20)
        return Routing(chosen.int(), weights * self._scale)

    def _eligible(self, biased: Tensor) -> Tensor:
        if self._groups == 1:
            return biased
        runs = biased.view(len(biased), self._groups, -1)
        strength = runs.topk(min(2, runs.shape[-1]), dim=-1).values
        kept = best(_row_sum(strength).squeeze(-1), self._top_groups)
        mask = torch.zeros_like(runs[..., 0], dtype=torch.bool).scatter_(1, kept, True)
        return runs.masked_fill(~mask.unsqueeze(-1), -torch.inf).view_as(biased)


def _router_class(weight: Tensor | Matrix) -> Callable[..., Callable[[Tensor, bool], Routing]]:
    if device_of(weight).type == "cpu":
        return ReferenceRouter
    from dgpp_core.ops.kernels.router import CudaRouter

    return CudaRouter


def _scores(logits: Tensor, score: Score) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, -1)
    return sigmoid(logits) if score == "sigmoid" else softplus(logits).sqrt()


def best(scores: Tensor, count: int) -> Tensor:
    """int64 ``[M, count]``: columns of the largest ``scores`` of each row, the lower column where they tie."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _row_sum(values: Tensor) -> Tensor:
    """Sum over the last axis, kept, in its order: a library's sum may take another order for other row counts."""
    total = values[..., :1]
    for column in range(1, values.shape[-1]):
        total = total + values[..., column : column + 1]
    return total
