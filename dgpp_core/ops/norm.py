"""Root-mean-square norm (Zhang and Sennrich, 2019) and layer norm (Ba et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32.

    Args:
        dtype: of the result, rounded once. None keeps that of ``x`` and rounds as Hugging Face models do: before the
            product with ``weight`` as well as after it.
    """
    if x.is_cuda and dtype is not None:
        from dgpp_core.ops.kernels import norms

        return norms.rms_norm(x, weight, eps, dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight if dtype is None else (normed * weight.float()).to(dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis, float32."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return normed * weight.float() + bias.float()
