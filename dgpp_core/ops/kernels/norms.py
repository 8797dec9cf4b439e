"""RMS norms on a GPU, with the sum of partial products that feeds them.

One program a row, so a row's bits are its own. Formulas: `dgpp_core.ops.norm` and `dgpp_core.ops.residual`. The
successor is let in at once, to fetch its weights.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import CompileCase


@triton.jit
def row_chunks(row, H: tl.constexpr, CHUNK: tl.constexpr):
    """The row at pointer ``row`` as float32 chunks of CHUNK, zero past H: every lane has 16 bytes of each."""
    chunks = ()
    for first in tl.static_range(0, H, CHUNK):
        i = first + tl.arange(0, CHUNK)
        chunks = chunks + (tl.load(row + i, mask=i < H, other=0.0).to(tl.float32),)
    return chunks


@triton.jit
def store_chunks(row, chunks, H: tl.constexpr, CHUNK: tl.constexpr):
    """Write chunks to the row at pointer ``row``, rounded to its dtype."""
    for c in tl.static_range(len(chunks)):
        i = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(row + i, chunks[c].to(row.dtype.element_ty), mask=i < H)


@triton.jit
def normed(chunks, weights, eps, H: tl.constexpr, CHUNK: tl.constexpr):
    """A row over its root mean square, times its weights."""
    squares = tl.zeros([CHUNK], tl.float32)
    for c in tl.static_range(len(chunks)):
        squares += chunks[c] * chunks[c]
    factor = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    scaled = ()
    for c in tl.static_range(len(chunks)):
        scaled = scaled + (chunks[c] * factor * weights[c],)
    return scaled


@triton.jit(do_not_specialize=["M"])
def residual_norm_rows(
    residual, parts, weight, out, M, eps, H: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    """residual fp32 ``[M, H]`` += parts fp32 ``[PARTS, M, H]`` in order; out its norm."""
    row = tl.program_id(0).to(tl.int64)
    weights = row_chunks(weight, H, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = row_chunks(residual + row * H, H, CHUNK)
    for part in tl.static_range(PARTS):
        more = row_chunks(parts + (part * M + row) * H, H, CHUNK)
        total = ()
        for c in tl.static_range(len(x)):
            total = total + (x[c] + more[c],)
        x = total
    store_chunks(residual + row * H, x, H, CHUNK)
    store_chunks(out + row * H, normed(x, weights, eps, H, CHUNK), H, CHUNK)


@triton.jit
def norm_rows(x, weight, out, eps, H: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """out ``[M, H]``: the norm of x ``[M, H]`` of any float dtype."""
    row = tl.program_id(0).to(tl.int64)
    weights = row_chunks(weight, H, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide = row_chunks(x + row * H, H, CHUNK)
    store_chunks(out + row * H, normed(wide, weights, eps, H, CHUNK), H, CHUNK)


def row_meta(width: int) -> dict[str, Any]:
    """Compile-time arguments for rows of ``width``."""
    warps = max(1, min(8, triton.next_power_of_2(width) // 256))
    return {"H": width, "CHUNK": 128 * warps, "PDL": True, "num_warps": warps, "launch_pdl": True}


def residual_norm(residual: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `dgpp_core.ops.residual.residual_norm`, for a contiguous stream."""
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    rows, width = residual.shape
    meta = {**row_meta(width), "PARTS": len(parts)}
    residual_norm_rows[(rows,)](residual, parts.contiguous(), weight, out, rows, eps, **meta)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `dgpp_core.ops.norm.rms_norm` with a ``dtype``, for CUDA rows ``[..., H]``."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        width = x.shape[-1]
        norm_rows[(x.numel() // width,)](x.contiguous(), weight, out, eps, **row_meta(width))
    return out


def compile_cases() -> list[CompileCase]:
    """Rows of GLM-4.7."""
    wide, narrow, meta = torch.float32, torch.bfloat16, row_meta(5120)
    pairs = [
        CompileCase(
            f"residual_norm 5120, {parts} parts",
            residual_norm_rows,
            (wide, wide, narrow, narrow, 1, 1e-5),
            {**meta, "PARTS": parts},
        )
        for parts in (1, 2, 3, 4, 8)
    ]
    return [
        *pairs,
        CompileCase("rms_norm 5120", norm_rows, (wide, narrow, narrow, 1e-5), meta),
        CompileCase("rms_norm 5120, bfloat16 rows", norm_rows, (narrow, narrow, narrow, 1e-5), meta),
    ]
