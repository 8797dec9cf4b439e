"""Grouped-query attention (Ainslie et al., 2023) over paged rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dgpp_core.layers.paged import PagedIndex
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.rope import RotaryTable, rotate


class GroupedQueryAttention:
    """Everything between the two products of an attention layer, for one rank's heads.

    Bias, then the norm of each query and key head, then rotation, then the rows are written and attended to.

    Args:
        heads: query heads; query head h reads key/value head ``h // (heads / kv_heads)``.
        width: of a head.
        scale: applied to the scores.
        bias: ``[(heads + 2 kv_heads) * width]``, or None.
        q_norm, k_norm: ``[width]``, or None.
        rope: turns the first ``rope.width`` dimensions of queries and keys, half-split; None turns nothing.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        width: int,
        scale: float,
        *,
        bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        rope: RotaryTable | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.width, self.scale = heads, kv_heads, width, scale
        self.bias, self.q_norm, self.k_norm, self.eps, self.rope = bias, q_norm, k_norm, eps, rope

    @functools.cached_property
    def _on_gpu(self) -> Callable[[Tensor, PagedIndex, Tensor, Tensor, torch.dtype], Tensor]:
        from dgpp_core.ops.kernels.attention import CudaGqa

        return CudaGqa(
            self.heads, self.kv_heads, self.width, self.scale,
            bias=self.bias, q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps, rope=self.rope,
        )  # fmt: skip

    def __call__(self, qkv: Tensor, index: PagedIndex, k_pool: Tensor, v_pool: Tensor, dtype: torch.dtype) -> Tensor:
        """Attend causally to each request's rows, the step's own included.

        Args:
            qkv: float32 ``[R, (heads + 2 kv_heads) * width]``: queries, keys, values.
            k_pool, v_pool: one layer's pools, ``[blocks, kv_heads, block_tokens, width]``; the step's rows are written.
            dtype: of the result.

        Returns:
            ``[R, heads * width]``.
        """
        if k_pool.is_cuda:
            return self._on_gpu(qkv, index, k_pool, v_pool, dtype)
        if self.bias is not None:
            qkv = qkv + self.bias
        parts = qkv.view(len(qkv), -1, self.width)
        q, k, v = torch.split(parts, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self._placed(q, self.q_norm, index), self._placed(k, self.k_norm, index)
        index.write(k_pool, k)
        index.write(v_pool, v)
        return index.attend(q.to(dtype), k_pool, v_pool, self.scale).flatten(1)

    def _placed(self, heads: Tensor, norm: Tensor | None, index: PagedIndex) -> Tensor:
        """Heads normed and turned to the rows' positions."""
        if norm is not None:
            heads = rms_norm(heads, norm, self.eps, torch.float32)
        return heads if self.rope is None else rotate(heads, *self.rope.at(index.batch.positions))
