"""Contributions of the chosen experts, weighted and added in ascending order of the expert, the shared expert last."""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.router import Routing


@triton.jit
def _sum_of_experts(y, weights, i, ok, m, M, H: tl.constexpr, TOPK: tl.constexpr, SHARED: tl.constexpr):
    """Elements ``i`` of row m: weight * contribution in slot order, which is ascending id, then the shared expert."""
    total = tl.zeros(i.shape, tl.float32)
    for s in tl.static_range(TOPK):
        row = (m * TOPK + s).to(tl.int64)
        total += tl.load(weights + row) * tl.load(y + row * H + i, mask=ok, other=0.0)
    if SHARED:
        total += tl.load(y + (M * TOPK + m).to(tl.int64) * H + i, mask=ok, other=0.0)
    return total


@triton.jit(do_not_specialize=["M"])
def combine_rows(
    y,
    weights,
    out,
    M,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out fp32 ``[M, H]``."""
    m = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    ok = i < H
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out + m * H + i, _sum_of_experts(y, weights, i, ok, m, M, H, TOPK, SHARED), mask=ok)


@triton.jit(do_not_specialize=["M"])
def combine_norm_rows(
    y,
    weights,
    residual,
    gain,
    out,
    M,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual fp32 ``[M, H]`` += experts; out = residual / rms * gain, rounded once."""
    m = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    ok = i < H
    g = tl.load(gain + i, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.load(residual + m * H + i, mask=ok, other=0.0)
    r += _sum_of_experts(y, weights, i, ok, m, M, H, TOPK, SHARED)
    tl.store(residual + m * H + i, r, mask=ok)
    mean = tl.sum(r * r, 0) / H
    tl.store(out + m * H + i, (r * tl.rsqrt(mean + eps) * g).to(out.dtype.element_ty), mask=ok)


def combine(contributions: Tensor, routing: Routing, launch_pdl: bool = True) -> Tensor:
    """float32 ``[M, H]``: weight j of row m times row m * k + j of ``contributions``, added in order of j.

    Args:
        contributions: float32 ``[M * k, H]``, or ``[M * k + M, H]`` with the shared expert's rows last, unweighted.
    """
    weights = routing.weights
    rows, width = weights.shape[0], contributions.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=contributions.device)
    if rows:
        combine_rows[(rows,)](contributions, weights, out, rows, **_meta(contributions, weights, launch_pdl))
    return out


def combine_norm(
    residual: Tensor,
    contributions: Tensor,
    routing: Routing,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    launch_pdl: bool = True,
) -> Tensor:
    """``residual`` float32 ``[M, H]`` += `combine` in place; its RMSNorm times ``weight`` ``[H]``, in ``dtype``."""
    weights = routing.weights
    rows = weights.shape[0]
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    if rows:
        meta = _meta(contributions, weights, launch_pdl)
        combine_norm_rows[(rows,)](contributions, weights, residual, weight, out, rows, eps, **meta)
    return out


def _meta(contributions: Tensor, weights: Tensor, launch_pdl: bool) -> dict[str, Any]:
    rows, top_k = weights.shape
    return _options(contributions.shape[1], top_k, contributions.shape[0] > rows * top_k, launch_pdl)


def _options(width: int, top_k: int, shared: bool, pdl: bool) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    options = {"H": width, "BLOCK": block, "TOPK": top_k, "SHARED": shared, "PDL": int(pdl)}
    return {**options, "num_warps": min(8, max(1, block // 512)), "launch_pdl": pdl}


def compile_cases() -> list[CompileCase]:
    """Width 5120, top 8, with a shared expert."""
    f32, bf16 = torch.float32, torch.bfloat16
    meta = _options(5120, 8, True, True)
    return [
        CompileCase("combine 5120 top 8", combine_rows, (f32, f32, f32, 7), meta),
        CompileCase("combine and norm 5120 top 8", combine_norm_rows, (f32, f32, f32, bf16, bf16, 7, 1e-5), meta),
    ]
