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
def normed(x, weight, eps, H: tl.constexpr):
    """``x`` over its root mean square, times ``weight``; elements past H are zero in both."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * weight


@triton.jit(do_not_specialize=["M"])
def residual_norm_rows(
    residual, parts, weight, out, M, eps, H: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    """residual fp32 ``[M, H]`` += parts fp32 ``[PARTS, M, H]`` in order; out its norm."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPAN)
    there = i < H
    w = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(residual + row * H + i, mask=there, other=0.0)
    for part in tl.static_range(PARTS):
        x += tl.load(parts + (part * M + row) * H + i, mask=there, other=0.0)
    tl.store(residual + row * H + i, x, mask=there)
    tl.store(out + row * H + i, normed(x, w, eps, H).to(out.dtype.element_ty), mask=there)


@triton.jit
def norm_rows(x, weight, out, eps, H: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """out ``[M, H]``: the norm of x ``[M, H]`` of any float dtype."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPAN)
    there = i < H
    w = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide = tl.load(x + row * H + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * H + i, normed(wide, w, eps, H).to(out.dtype.element_ty), mask=there)


def row_meta(width: int) -> dict[str, Any]:
    """Compile-time arguments for rows of ``width``."""
    span = triton.next_power_of_2(width)
    warps = max(1, min(8, span // 256))
    return {"H": width, "SPAN": span, "PDL": True, "num_warps": warps, "launch_pdl": True}


def residual_norm(residual: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `dgpp_core.ops.residual.residual_norm`, for contiguous CUDA tensors."""
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    rows, width = residual.shape
    residual_norm_rows[(rows,)](residual, parts, weight, out, rows, eps, PARTS=len(parts), **row_meta(width))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `dgpp_core.ops.norm.rms_norm` with a ``dtype``, for contiguous CUDA rows ``[M, H]``."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    norm_rows[(len(x),)](x, weight, out, eps, **row_meta(x.shape[1]))
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
