"""Several residual streams, mixed around each sublayer by coefficients that the streams themselves give.

Manifold-constrained hyper-connections (Xie et al., 2026, after Zhu et al., 2024): a sublayer reads one weighted sum of
the streams, its output is added to each stream with a weight of its own, and the streams are mixed among themselves by
a matrix whose rows and columns sum to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dgpp_core.ops.activation import sigmoid
from dgpp_core.ops.fold import fold
from dgpp_core.ops.linear import Linear


class Coefficients(NamedTuple):
    """Of one sublayer, float32.

    Attributes:
        pre: ``[R, S]``, of each stream in what the sublayer reads.
        post: ``[R, S]``, of the sublayer's output in each stream.
        mix: ``[R, S, S]``, row j and column i: of stream j in the new stream i.
    """

    pre: Tensor
    post: Tensor
    mix: Tensor


class HyperConnection:
    """The coefficients of one sublayer.

    ``m = fn f / sqrt(mean(f^2) + norm_eps)`` of all streams ``f`` beside each other, in three parts; then
    ``pre = sigmoid(scale_0 m_0 + base_0) + eps``, ``post = 2 sigmoid(scale_1 m_1 + base_1)``, and ``mix`` is the
    softmax of each row of ``scale_2 m_2 + base_2``, plus eps, with its columns and rows divided by their sums in turn
    (Sinkhorn and Knopp, 1967); each of those sums gets eps added.

    Args:
        fn: from ``streams * hidden`` to ``streams * (2 + streams)`` values: pre, post, mix by rows.
        base: of each value.
        scale: ``[3]``.
        rounds: times that columns are divided; rows are divided in between.
    """

    def __init__(
        self, fn: Linear, base: Tensor, scale: Tensor, *, streams: int, eps: float, norm_eps: float, rounds: int
    ) -> None:
        self.fn, self.streams, self.eps, self.norm_eps, self.rounds = fn, streams, eps, norm_eps, rounds
        self.base, self.scale = torch.split(base.float(), [streams, streams, streams * streams]), scale.float()

    def __call__(self, streams: Tensor, decode: bool = True) -> Coefficients:
        """From ``[R, S, hidden]``; ``decode`` as in `dgpp_core.ops.linear.Product`."""
        wide = streams.float().flatten(1)
        length = fold(wide.square(), 1).unsqueeze(1) / wide.shape[1]
        made = self.fn.wide(wide, decode) * torch.rsqrt(length + self.norm_eps)
        parts = torch.split(made, [len(base) for base in self.base], dim=1)
        pre, post, mix = (part * self.scale[i] + self.base[i] for i, part in enumerate(parts))
        return Coefficients(sigmoid(pre) + self.eps, 2.0 * sigmoid(post), self._balanced(mix))

    def _balanced(self, mix: Tensor) -> Tensor:
        rows = mix.view(-1, self.streams, self.streams)
        weights = torch.exp(rows - rows.amax(2, keepdim=True))
        weights = weights / fold(weights, 2).unsqueeze(2) + self.eps
        weights = weights / (fold(weights, 1).unsqueeze(1) + self.eps)
        for _ in range(self.rounds - 1):
            weights = weights / (fold(weights, 2).unsqueeze(2) + self.eps)
            weights = weights / (fold(weights, 1).unsqueeze(1) + self.eps)
        return weights


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """What a sublayer reads, before its norm: float32 ``[R, hidden]`` from ``[R, S, hidden]``."""
    return fold(streams.float() * pre.unsqueeze(2), 1)


def expand(streams: Tensor, given: Tensor, coefficients: Coefficients) -> Tensor:
    """The new streams, float32 ``[R, S, hidden]``: mixed, in ascending order of stream, and then ``given`` in each.

    Args:
        streams: ``[R, S, hidden]``.
        given: the sublayer's output, ``[R, hidden]``.
    """
    wide, mix = streams.float(), coefficients.mix.unsqueeze(3)
    total = wide[:, :1] * mix[:, 0]
    for source in range(1, wide.shape[1]):
        total = total + wide[:, source : source + 1] * mix[:, source]
    return total + given.float().unsqueeze(1) * coefficients.post.unsqueeze(2)
