"""Latent rows in and out of their stored form (`dgpp_core.formats.latent_layout`).

A pool's dtype and width say which form it has, so that whoever reads one need not be told.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.formats.cache_rows import decode_fp4_rows, decode_fp8_rows, encode_fp4_rows, encode_fp8_rows
from dgpp_core.formats.latent_layout import KV_DTYPES, LatentLayout, latent_layout


def layout_of(pool: Tensor, rank: int, turned: int) -> LatentLayout:
    """The layout of a pool ``[..., width]``."""
    if pool.dtype != torch.uint8:
        return LatentLayout(rank, turned)
    quantised = (latent_layout(kind, rank, turned) for kind in KV_DTYPES[1:])
    return next(layout for layout in quantised if layout.width == pool.shape[-1])


def encode_latent_rows(layout: LatentLayout, latent: Tensor, key: Tensor) -> Tensor:
    """Rows ``[..., width]`` of latents ``[..., rank]`` and shared keys ``[..., turned]``."""
    if not layout.codes:
        return torch.cat((latent, key), dim=-1)
    if layout.blocks:
        codes, blocks, scale = encode_fp4_rows(latent)
        parts = [codes, blocks.view(torch.uint8)]
    else:
        codes, scale = encode_fp8_rows(latent)
        parts = [codes.view(torch.uint8)]
    return torch.cat((*parts, _bytes(scale.unsqueeze(-1)), _bytes(key.to(torch.bfloat16))), dim=-1)


def decode_latent_rows(layout: LatentLayout, rows: Tensor) -> Tensor:
    """``[..., rank + turned]`` of rows ``[..., width]``: float32, or as they are where they are stored so."""
    if not layout.codes:
        return rows
    codes, blocks, scale, key = torch.split_with_sizes(
        rows, [layout.codes, layout.blocks, layout.scale, layout.key], dim=-1
    )
    row_scale = scale.contiguous().view(torch.float32).squeeze(-1)
    if layout.blocks:
        latent = decode_fp4_rows(codes, blocks.contiguous().view(torch.float8_e4m3fn), row_scale)
    else:
        latent = decode_fp8_rows(codes.contiguous().view(torch.float8_e4m3fn), row_scale)
    return torch.cat((latent, key.contiguous().view(torch.bfloat16).float()), dim=-1)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
