"""The residual stream of a pre-norm decoder: float32 rows, read through a norm, added to by every sublayer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.ops.norm import rms_norm


def residual_norm(residual: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add a sublayer's output to the stream and norm it for the next one.

    Args:
        residual: float32 ``[M, H]``; updated in place.
        parts: float32 ``[S, M, H]``, added in order.
        weight: ``[H]``.
        dtype: of the result.

    Returns:
        ``[M, H]``, the RMS norm of the new residual times ``weight``, rounded once.
    """
    if residual.is_cuda:
        from dgpp_core.ops.kernels import norms

        return norms.residual_norm(residual, parts, weight, eps, dtype)
    for part in parts:
        residual += part
    return rms_norm(residual, weight, eps, dtype)


def embed_norm(table: Tensor, tokens: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The stream's beginning: float32 ``[M, H]`` rows of ``table`` for int64 ``[M]`` ids, and their norm as above."""
    if table.is_cuda:
        from dgpp_core.ops.kernels import embedding

        return embedding.embed_norm(table, tokens, weight, eps, dtype)
    residual = F.embedding(tokens, table).float()
    return residual, rms_norm(residual, weight, eps, dtype)


def draft_input(
    table: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """What a draft layer mixes: the norm of rows ``tokens`` of ``table`` beside that of ``hidden``, ``[M, 2 H]``.

    DeepSeek-V3 (2024), section 2.2, with the embedding first, as released weights want it.

    Args:
        table: ``[N, H]``.
        tokens: int64 ``[M]``, 0 to N - 1.
        hidden: ``[M, H]``.
        embed_weight, hidden_weight: ``[H]``, of the norms.
        dtype: of the result.
    """
    if table.is_cuda:
        from dgpp_core.ops.kernels import embedding

        return embedding.draft_input(table, tokens, hidden, embed_weight, hidden_weight, eps, dtype)
    embedded = rms_norm(F.embedding(tokens, table), embed_weight, eps, dtype)
    return torch.cat((embedded, rms_norm(hidden, hidden_weight, eps, dtype)), dim=-1)
