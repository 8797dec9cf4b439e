"""The beginning of a forward on a GPU: rows of the embedding table as the residual stream, and their norm.

These kernels wait before they let their successor in. So everything launched before them is done when anything after
them starts, and the attention kernels may read positions, block tables and earlier cache rows ahead of their own wait.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.norms import normed, row_chunks, row_meta, store_chunks


@triton.jit
def embed_norm_rows(table, tokens, weight, residual, out, eps, H: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """residual fp32 ``[M, H]``: rows ``tokens`` of ``table``; out their norm."""
    row = tl.program_id(0).to(tl.int64)
    weights = row_chunks(weight, H, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = row_chunks(table + tl.load(tokens + row) * H, H, CHUNK)
    store_chunks(residual + row * H, x, H, CHUNK)
    store_chunks(out + row * H, normed(x, weights, eps, H, CHUNK), H, CHUNK)


@triton.jit
def draft_input_rows(
    table,
    tokens,
    hidden,
    embed_weight,
    hidden_weight,
    out,
    eps,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out ``[M, 2 H]``: the norm of row ``tokens`` of ``table``, then the norm of ``hidden`` ``[M, H]``."""
    row = tl.program_id(0).to(tl.int64)
    first = row_chunks(embed_weight, H, CHUNK)
    second = row_chunks(hidden_weight, H, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = row_chunks(table + tl.load(tokens + row) * H, H, CHUNK)
    y = row_chunks(hidden + row * H, H, CHUNK)
    spot = out + row * (2 * H)
    store_chunks(spot, normed(x, first, eps, H, CHUNK), H, CHUNK)
    store_chunks(spot + H, normed(y, second, eps, H, CHUNK), H, CHUNK)


def embed_norm(table: Tensor, tokens: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `dgpp_core.ops.residual.embed_norm`, for CUDA tensors."""
    shape = (len(tokens), table.shape[1])
    residual = torch.empty(shape, dtype=torch.float32, device=table.device)
    out = torch.empty(shape, dtype=dtype, device=table.device)
    embed_norm_rows[(len(tokens),)](table, tokens, weight, residual, out, eps, **row_meta(table.shape[1]))
    return residual, out


def draft_input(
    table: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """A draft layer's input ``[M, 2 H]``: the norm of the embedded ``tokens`` beside that of ``hidden`` ``[M, H]``."""
    rows, width = hidden.shape
    out = torch.empty(rows, 2 * width, dtype=dtype, device=hidden.device)
    draft_input_rows[(rows,)](
        table, tokens, hidden.contiguous(), embed_weight, hidden_weight, out, eps, **row_meta(width)
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Rows of GLM-4.7."""
    wide, narrow, meta = torch.float32, torch.bfloat16, row_meta(5120)
    args = (narrow, torch.int64, narrow, wide, narrow, 1e-5)
    drafts = (narrow, torch.int64, narrow, narrow, narrow, narrow, 1e-5)
    return [
        CompileCase("embed_norm 5120", embed_norm_rows, args, meta),
        CompileCase("draft_input 5120", draft_input_rows, drafts, meta),
    ]
