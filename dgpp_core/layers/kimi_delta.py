"""Kimi Delta Attention (Kimi Team, 2025, "Kimi Linear"): the gated delta rule with a decay for each key dimension.

Rows go one by one in prefill too, as in `dgpp_core.layers.gated_delta`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.layers.gated_delta import delta_step, normed_heads, short_convolution, unit
from dgpp_core.layers.recurrent import scan
from dgpp_core.ops.activation import sigmoid


class KimiDeltaAttention:
    """Everything between the products of such a layer, for one rank's heads.

    Short convolution and SiLU; unit queries and keys; the recurrence, whose decay of a key dimension is
    ``exp(lowest * sigmoid(exp(a_log) (f + dt_bias)))``; an RMS norm of each head, and a sigmoid gate.

    Args:
        heads: of queries, keys and values alike.
        width: of a head.
        conv: ``[3 * heads * width, K]``, channels in the order queries, keys, values.
        a_log: ``[heads]``.
        dt_bias: ``[heads * width]``.
        norm: ``[width]``.
        lowest: logarithm of the strongest decay, below zero.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        lowest: float,
    ) -> None:
        self.heads, self.width, self.eps, self.lowest = heads, width, eps, lowest
        self.conv, self.norm = conv.float(), norm.float()
        self.speed, self.dt_bias = torch.exp(a_log.float()).unsqueeze(1), dt_bias.float().view(heads, width)

    def __call__(
        self,
        batch: StepBatch,
        qkv: Tensor,
        f: Tensor,
        b: Tensor,
        z: Tensor,
        ring: Tensor,
        states: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Run the rows of a step.

        Args:
            qkv: ``[R, 3 * heads * width]``, before the convolution.
            f: ``[R, heads * width]``: how fast each key dimension is forgotten.
            b: ``[R, heads]``: how much the state corrects.
            z: ``[R, heads * width]``, the output gate.
            ring: one layer's rows of ``qkv``, ``[slots, 1, ring, 3 * heads * width]``, of a window of at least K - 1.
            states: one layer's states, float32 ``[slots, candidates, heads, width, width]``, keys before values.
            dtype: of the result.

        Returns:
            ``[R, heads * width]``.
        """
        shape = (len(f), self.heads, self.width)
        q, k, v = (part.reshape(shape) for part in short_convolution(batch, qkv, ring, self.conv).chunk(3, dim=1))
        pace = self.lowest * sigmoid(self.speed * (f.float().view(shape) + self.dt_bias))
        rate = sigmoid(b.float()).unsqueeze(2)
        inputs = (unit(q) * self.width**-0.5, unit(k), v, torch.exp(pace), rate)
        out = scan(batch, states, inputs, delta_step)
        return (normed_heads(out, self.norm, self.eps) * sigmoid(z.float())).to(dtype)
