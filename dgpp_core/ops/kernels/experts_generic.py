"""Routed experts over row-major weights: for shapes and formats that the fragment kernels do not take.

Decode and prefill rows go the same way. A pick is a column of a `tl.dot` whose K runs in one chain, so its bits do not
depend on its companions.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.experts_order import PickTables


@triton.jit
def _weight_tile(wp, row, live, k, K: tl.constexpr):
    return tl.load(wp + row.to(tl.int64)[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["picks"])
def plain_experts(
    wp,
    multipliers,
    xp,
    out,
    order,
    tiles,
    picks,
    N: tl.constexpr,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BN: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """BO outputs of tile program_id(1) of picks.

    Args:
        wp: ``[entries, N, K]``; multipliers: float32, one a row, applied to the finished product.
        xp: ``[M, K]`` when GATED, otherwise h, a row a pick.
        LIMIT: of gate and up, 0 for none.
        out: h ``[., N / 2]`` when GATED (gate rows come first in wp), otherwise float32 ``[., N]``.
        order, tiles: as `dgpp_core.ops.kernels.experts_order` makes them; picks: those of routed experts.
    """
    entry = tl.load(tiles + tl.program_id(1) * 3)
    if entry >= 0:
        WIDTH: tl.constexpr = N // 2 if GATED else N
        first = tl.load(tiles + tl.program_id(1) * 3 + 1)
        n = tl.arange(0, BN)
        live = n < tl.load(tiles + tl.program_id(1) * 3 + 2)
        pick = tl.load(order + first + n, mask=live, other=0)
        source = pick
        if GATED:
            source = tl.where(pick < picks, pick // TOPK, pick - picks)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        row = entry * N + o
        acc = tl.zeros([BO, BN], tl.float32)
        up = tl.zeros([BO, BN], tl.float32)
        for base in range(0, K, BK):
            k = base + tl.arange(0, BK)
            at = xp + source.to(tl.int64)[None, :] * K + k[:, None]
            x = tl.load(at, mask=live[None, :] & (k < K)[:, None], other=0.0)
            acc = tl.dot(_weight_tile(wp, row, o < WIDTH, k, K), x, acc, input_precision="ieee")
            if GATED:
                up = tl.dot(_weight_tile(wp, row + WIDTH, o < WIDTH, k, K), x, up, input_precision="ieee")
        acc = acc * tl.load(multipliers + row, mask=o < WIDTH, other=0.0)[:, None]
        if GATED:
            up = up * tl.load(multipliers + row + WIDTH, mask=o < WIDTH, other=0.0)[:, None]
            if LIMIT > 0:
                acc = tl.minimum(acc, LIMIT)
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            acc = acc / (1.0 + tl.exp(-acc)) * up
        at = out + pick.to(tl.int64)[None, :] * WIDTH + o[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=live[None, :] & (o < WIDTH)[:, None])


def row_major(matrix: Matrix, entries: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[entries, N, K]`` in ``dtype`` and float32 multipliers ``[entries * N]``, on ``device``.

    NVFP4 keeps its global scales apart: code times block scale is exact in bfloat16.
    """
    rows, columns = matrix.shape
    multipliers = torch.ones(rows, dtype=torch.float32, device=device)
    if isinstance(matrix, Nvfp4Matrix):
        multipliers = matrix.globals.to(device).float().repeat_interleave(matrix.segment)
        matrix = Nvfp4Matrix(matrix.codes, matrix.scales, torch.ones_like(matrix.globals))
    each = rows // entries
    weight = torch.empty(entries, each, columns, dtype=dtype, device=device)
    for entry in range(entries):
        weight[entry] = matrix.rows(entry * each, each).to(device).dequantise().to(dtype)
    return weight, multipliers


def run(
    weights: tuple[Tensor, ...],
    x: Tensor,
    out: Tensor,
    tables: PickTables,
    picks: int,
    top_k: int,
    gated: bool,
    tile: int,
    limit: float | None = None,
) -> None:
    """Fill ``out`` with one product of all picks."""
    weight, multipliers = weights
    meta = _meta(weight.shape[1], weight.shape[2], top_k, gated, tile, limit)
    grid = (triton.cdiv(out.shape[1], meta["BO"]), tables.tiles.shape[0])
    plain_experts[grid](weight, multipliers, x, out, tables.order, tables.tiles, picks, **meta)


def _meta(rows: int, columns: int, top_k: int, gated: bool, tile: int, limit: float | None = None) -> dict[str, Any]:
    options = {"N": rows, "K": columns, "TOPK": top_k, "GATED": gated, "LIMIT": limit or 0.0}
    return {**options, "BN": tile, "BO": 64, "BK": 64, "num_warps": 4, "num_stages": 2}


def compile_cases() -> list[CompileCase]:
    """Both products of a small model, for decode and prefill tiles."""
    bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
    cases = []
    for tile in (16, 64):
        for gated, rows, columns in ((True, 128, 128), (False, 128, 64)):
            args = (bf16, f32, bf16, bf16 if gated else f32, i32, i32, 7)
            name = f"plain experts {rows}x{columns} tiles of {tile}{' gated' if gated else ''}"
            cases.append(CompileCase(name, plain_experts, args, _meta(rows, columns, 2, gated, tile)))
    args = (bf16, f32, bf16, bf16, i32, i32, 7)
    cases.append(CompileCase("plain experts with a limit", plain_experts, args, _meta(128, 128, 2, True, 16, 10.0)))
    return cases
