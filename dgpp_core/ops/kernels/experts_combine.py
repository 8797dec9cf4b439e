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
from dgpp_core.ops.kernels.norms import normed, row_chunks, row_meta, store_chunks
from dgpp_core.ops.router import Routing


@triton.jit
def sum_of_experts(y, weights, m, M, H: tl.constexpr, CHUNK: tl.constexpr, TOPK: tl.constexpr, SHARED: tl.constexpr):
    """Chunks of row m: weight * contribution in slot order, which is ascending id, then the shared expert.

    Everything is loaded before anything is added: one program has the whole row, and waits for memory once.
    """
    factors = (tl.load(weights + m * TOPK),)
    rows = (row_chunks(y + m * TOPK * H, H, CHUNK),)
    for s in tl.static_range(1, TOPK):
        factors = factors + (tl.load(weights + (m * TOPK + s)),)
        rows = rows + (row_chunks(y + (m * TOPK + s) * H, H, CHUNK),)
    if SHARED:
        rows = rows + (row_chunks(y + (M * TOPK + m) * H, H, CHUNK),)
    chunks = ()
    for c in tl.static_range(len(rows[0])):
        total = factors[0] * rows[0][c]
        for s in tl.static_range(1, TOPK):
            total += factors[s] * rows[s][c]
        if SHARED:
            total += rows[TOPK][c]
        chunks = chunks + (total,)
    return chunks


@triton.jit(do_not_specialize=["M"])
def combine_rows(
    y,
    weights,
    out,
    M,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out fp32 ``[M, H]``."""
    m = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    store_chunks(out + m * H, sum_of_experts(y, weights, m, M, H, CHUNK, TOPK, SHARED), H, CHUNK)


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
    CHUNK: tl.constexpr,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual fp32 ``[M, H]`` += experts; out = residual / rms * gain, rounded once.

    The successor is let in when everything is loaded: its weights would stand in line before these rows, and before the
    last ones of the experts (4 % of a step with bf12).
    """
    m = tl.program_id(0).to(tl.int64)
    gains = row_chunks(gain, H, CHUNK)
    if PDL:
        gdc_wait()
    before = row_chunks(residual + m * H, H, CHUNK)
    added = sum_of_experts(y, weights, m, M, H, CHUNK, TOPK, SHARED)
    if PDL:
        gdc_launch_dependents()
    x = ()
    for c in tl.static_range(len(before)):
        x = x + (before[c] + added[c],)
    store_chunks(residual + m * H, x, H, CHUNK)
    store_chunks(out + m * H, normed(x, gains, eps, H, CHUNK), H, CHUNK)


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
    return {**row_meta(width), "TOPK": top_k, "SHARED": shared, "PDL": int(pdl), "launch_pdl": pdl}


def compile_cases() -> list[CompileCase]:
    """Width 5120, top 8, with a shared expert."""
    f32, bf16 = torch.float32, torch.bfloat16
    meta = _options(5120, 8, True, True)
    return [
        CompileCase("combine 5120 top 8", combine_rows, (f32, f32, f32, 7), meta),
        CompileCase("combine and norm 5120 top 8", combine_norm_rows, (f32, f32, f32, bf16, bf16, 7, 1e-5), meta),
    ]
