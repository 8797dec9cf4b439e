"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024, "Gated Delta Networks").

Rows go one by one in prefill too: the chunked form of the recurrence is equal only in exact arithmetic.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.layers.convolution import causal_convolution
from dgpp_core.layers.history import with_history
from dgpp_core.layers.recurrent import scan
from dgpp_core.ops.activation import sigmoid, silu, softplus
from dgpp_core.ops.fold import fold

LENGTH_EPS = 1e-6
"""Added to the squared length of a query or key before it is made a unit vector."""


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """One token: the state forgets, corrects what it answers to the key, and answers the query.

    ``S <- decay S;  S <- S + k (rate (v - S^T k))^T;  o = S^T q``

    Args:
        state: float32 ``[B, H, Dk, Dv]``.
        q, k: ``[B, H, Dk]``.
        v: ``[B, H, Dv]``.
        decay: ``[B, H, 1]``, or ``[B, H, Dk]`` where each key dimension has its own.
        rate: ``[B, H, 1]``, how much of the error is corrected.

    Returns:
        the new state, and ``[B, H, Dv]``.
    """
    state = state * decay.unsqueeze(-1)
    error = rate * (v - fold(state * k.unsqueeze(-1), -2))
    state = state + k.unsqueeze(-1) * error.unsqueeze(-2)
    return state, fold(state * q.unsqueeze(-1), -2)


def unit(x: Tensor) -> Tensor:
    """Vectors along the last axis, scaled to length 1."""
    return x * torch.rsqrt(fold(x.square(), -1).unsqueeze(-1) + LENGTH_EPS)


def short_convolution(batch: StepBatch, rows: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
    """SiLU of each channel's causal convolution.

    Args:
        rows: ``[R, channels]``.
        ring: one layer's ``rows`` of earlier steps, ``[slots, 1, ring, channels]``, of a window of at least K - 1.
        weight: float32 ``[channels, K]``.

    Returns:
        float32 ``[R, channels]``.
    """
    runs = with_history(batch, rows.unsqueeze(1), ring, weight.shape[1] - 1)
    return silu(torch.cat([causal_convolution(run.squeeze(2).float(), weight).flatten(0, 1) for run in runs]))


def normed_heads(out: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head's ``[R, heads, width]``, float32 ``[R, heads * width]``."""
    mean = fold(out.square(), -1).unsqueeze(-1) / out.shape[-1]
    return (out * torch.rsqrt(mean + eps) * weight).flatten(1)


class GatedDeltaNet:
    """Everything between the products of a gated delta layer, for one rank's heads.

    Short convolution and SiLU; unit queries and keys; the recurrence; an RMS norm of each head, and the output gate.

    Args:
        key_heads: of queries and keys; value head h reads key head ``h // (value_heads / key_heads)``.
        key_width, value_width: of a head.
        conv: ``[channels, K]``, channels in the order queries, keys, values.
        a_log, dt_bias: ``[value_heads]``.
        norm: ``[value_width]``.
        gate: what is applied to ``z``.
    """

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_width: int,
        value_width: int,
        *,
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        gate: Literal["sigmoid", "silu"] = "silu",
    ) -> None:
        self.key_heads, self.value_heads, self.key_width, self.value_width = (
            key_heads, value_heads, key_width, value_width,
        )  # fmt: skip
        self.conv, self.norm, self.eps = conv.float(), norm.float(), eps
        self.speed, self.dt_bias = torch.exp(a_log.float()), dt_bias.float()
        self.gate = sigmoid if gate == "sigmoid" else silu

    def __call__(
        self,
        batch: StepBatch,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        ring: Tensor,
        states: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Run the rows of a step.

        Args:
            qkv: ``[R, channels]``, before the convolution.
            z: ``[R, value_heads * value_width]``, the output gate.
            a, b: ``[R, value_heads]``: how fast the state decays, how much it corrects.
            ring: one layer's rows of ``qkv``, ``[slots, 1, ring, channels]``, of a window of at least K - 1.
            states: one layer's states, float32 ``[slots, candidates, value_heads, key_width, value_width]``.
            dtype: of the result.

        Returns:
            ``[R, value_heads * value_width]``.
        """
        q, k, v = self._convolved(batch, qkv, ring)
        decay = torch.exp(-self.speed * softplus(a.float() + self.dt_bias)).unsqueeze(-1)
        rate = sigmoid(b.float()).unsqueeze(-1)
        out = scan(batch, states, (q, k, v, decay, rate), delta_step)
        return (normed_heads(out, self.norm, self.eps) * self.gate(z.float())).to(dtype)

    def _convolved(self, batch: StepBatch, qkv: Tensor, ring: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys ``[R, value_heads, key_width]`` and values ``[R, value_heads, value_width]``."""
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        mixed = short_convolution(batch, qkv, ring, self.conv)
        q, k, v = torch.split(mixed, [keys, keys, values], dim=1)
        share = self.value_heads // self.key_heads
        q = unit(q.reshape(len(q), self.key_heads, -1)) * self.key_width**-0.5
        k = unit(k.reshape(len(k), self.key_heads, -1))
        v = v.reshape(len(v), self.value_heads, -1)
        return q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1), v
