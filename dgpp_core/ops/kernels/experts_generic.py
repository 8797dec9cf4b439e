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

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.experts_order import PickTables
from dgpp_core.ops.kernels.stored import StoredWeight, stored_cases, weight_tile


@triton.jit(do_not_specialize=["picks"])
def plain_experts(
    codes,
    scales,
    multipliers,
    xp,
    out,
    order,
    tiles,
    picks,
    KIND: tl.constexpr,
    SN: tl.constexpr,
    SK: tl.constexpr,
    SEGMENT: tl.constexpr,
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
        codes, scales, multipliers, KIND, SN, SK, SEGMENT: the weights ``[entries * N, K]``, a
            `dgpp_core.ops.kernels.stored.StoredWeight`; its values are rounded to the dtype of ``xp``.
        xp: ``[M, K]`` when GATED, otherwise h, a row a pick.
        LIMIT: of gate and up, 0 for none.
        out: h ``[., N / 2]`` when GATED (gate rows come first), otherwise float32 ``[., N]``.
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
        row = (entry * N + o).to(tl.int64)
        acc = tl.zeros([BO, BN], tl.float32)
        up = tl.zeros([BO, BN], tl.float32)
        for base in range(0, K, BK):
            k = base + tl.arange(0, BK)
            at = xp + source.to(tl.int64)[None, :] * K + k[:, None]
            x = tl.load(at, mask=live[None, :] & (k < K)[:, None], other=0.0)
            inside, at_k = (o < WIDTH)[:, None] & (k < K)[None, :], k[None, :]
            w = weight_tile(codes, scales, row[:, None], at_k, inside, K, KIND, SN, SK).to(x.dtype)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if GATED:
                w = weight_tile(codes, scales, row[:, None] + WIDTH, at_k, inside, K, KIND, SN, SK).to(x.dtype)
                up = tl.dot(w, x, up, input_precision="ieee")
        if SEGMENT > 0:
            acc = acc * tl.load(multipliers + row // SEGMENT, mask=o < WIDTH, other=0.0)[:, None]
            if GATED:
                up = up * tl.load(multipliers + (row + WIDTH) // SEGMENT, mask=o < WIDTH, other=0.0)[:, None]
        if GATED:
            if LIMIT > 0:
                acc = tl.minimum(acc, LIMIT)
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            acc = acc / (1.0 + tl.exp(-acc)) * up
        at = out + pick.to(tl.int64)[None, :] * WIDTH + o[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=live[None, :] & (o < WIDTH)[:, None])


def run(
    weight: StoredWeight,
    entries: int,
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
    rows, columns = weight.shape
    meta = _meta(weight.meta(), rows // entries, columns, top_k, gated, tile, limit)
    grid = (triton.cdiv(out.shape[1], meta["BO"]), tables.tiles.shape[0])
    plain_experts[grid](*weight.operands(), x, out, tables.order, tables.tiles, picks, **meta)


def _meta(
    weight: dict[str, Any], rows: int, columns: int, top_k: int, gated: bool, tile: int, limit: float | None = None
) -> dict[str, Any]:
    """With twice the warps for formats whose decoding would not fit a thread's registers."""
    options = {"N": rows, "K": columns, "TOPK": top_k, "GATED": gated, "LIMIT": limit or 0.0}
    warps = 4 if weight["KIND"] in ("dense", "fp8") else 8
    return weight | options | {"BN": tile, "BO": 64, "BK": 64, "num_warps": warps, "num_stages": 2}


def compile_cases() -> list[CompileCase]:
    """Both products of a small model, for decode and prefill tiles, and the gated one in every stored form."""
    f32, i32, bf16 = torch.float32, torch.int32, torch.bfloat16
    (_, held, dense), *others = (case for case in stored_cases() if case[0] != "float32")
    cases = []
    for tile in (16, 64):
        for gated, rows, columns in ((True, 128, 128), (False, 128, 64)):
            args = (*held, f32, bf16, bf16 if gated else f32, i32, i32, 7)
            name = f"plain experts {rows}x{columns} tiles of {tile}{' gated' if gated else ''}"
            cases.append(CompileCase(name, plain_experts, args, _meta(dense, rows, columns, 2, gated, tile)))
        for name, dtypes, meta in others:
            args = (*dtypes, f32, bf16, bf16, i32, i32, 7)
            options = _meta(meta, 128, 256, 2, True, tile, 10.0)
            cases.append(CompileCase(f"plain experts {name} tiles of {tile}", plain_experts, args, options))
    return cases
