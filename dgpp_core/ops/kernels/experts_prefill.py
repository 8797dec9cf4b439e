"""Launches of the grouped expert products, and how they are cut: by the device and the number of picks."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.experts_grouped import fragment_order, grouped_experts
from dgpp_core.ops.kernels.experts_order import PickTables

WARPS = 8
TILES = (32, 64, 128)
"""Picks a tile: a row's bits are the same in each."""
_ORDER_BLOCK = 1024


def tile_size(picks: int, experts: int, wgmma: bool) -> int:
    """Picks a tile: most experts' picks fit one tile, and few of its columns are empty."""
    most = TILES if wgmma else TILES[:2]
    return next((tile for tile in most if picks * 5 <= experts * tile * 4), most[-1])


def rows_of_tiles(experts: int, top_k: int, wgmma: bool) -> tuple[int, ...]:
    """Row counts that between them meet every tile size: what a warm-up has to run."""
    tiles = TILES if wgmma else TILES[:2]
    return (1, *(experts * tile * 4 // (5 * top_k) + 1 for tile in tiles[:-1]))


def in_fragment_order(x: Tensor) -> Tensor:
    """bfloat16 ``[M, K]`` with k as `grouped_experts` wants it."""
    rows, width = x.shape
    out = torch.empty_like(x)
    grid = (rows, triton.cdiv(width // 2, _ORDER_BLOCK))
    fragment_order[grid](x.view(torch.int32), out.view(torch.int32), **_order_meta(width))
    return out


def run(
    weights: tuple[Tensor, ...],
    shape: tuple[int, int],
    x: Tensor,
    out: Tensor,
    tables: PickTables,
    picks: int,
    top_k: int,
    gated: bool,
    tile: int,
    wgmma: bool,
    limit: float | None = None,
) -> None:
    """Fill ``out`` with one product of all picks; arguments as in `grouped_experts`, ``shape`` of an expert's weight.

    Raises:
        EngineError: more elements than the kernel counts.
    """
    if max(out.numel(), x.numel()) >= 2**31:
        raise EngineError(
            "too many rows for one product of experts",
            where=f"prefill of {x.shape[0]} rows",
            found=f"{out.numel()} results",
            expected=f"fewer than {2**31}",
            hint="prefill in smaller chunks",
        )
    meta = grouped_meta(shape, top_k, gated, tile, wgmma, limit)
    grid = (shape[0] // (32 * meta["W"]), tables.tiles.shape[0])
    grouped_experts[grid](*weights, x, out, tables.order, tables.tiles, picks, **meta)


def grouped_meta(
    shape: tuple[int, int], top_k: int, gated: bool, tile: int, wgmma: bool, limit: float | None = None
) -> dict[str, Any]:
    """Compile-time arguments of `grouped_experts`; shared memory holds 8 stages where `wgmma` is, 4 elsewhere."""
    stages = 8 if wgmma else 4
    options = {"N": shape[0], "K": shape[1], "TOPK": top_k, "W": WARPS, "BN": tile, "STAGES": stages}
    return {**options, "GATED": gated, "WGMMA": wgmma, "FENCE": wgmma, "LIMIT": limit or 0.0, "num_warps": WARPS}


def _order_meta(width: int) -> dict[str, Any]:
    return {"K": width, "BLOCK": _ORDER_BLOCK, "num_warps": 4}


def compile_cases() -> list[CompileCase]:
    """GLM-4.7's experts, whole and at tensor parallel 4."""
    i32, bf16, f32 = torch.int32, torch.bfloat16, torch.float32
    cases = [CompileCase("fragment order 5120", fragment_order, (i32, i32), _order_meta(5120))]
    for target in (90, 121):
        wgmma = target == 90
        for width in (1536, 384):
            for tile in TILES if wgmma else TILES[:2]:
                for gated, shape in ((True, (2 * width, 5120)), (False, (5120, width))):
                    args = (i32, i32, f32, bf16, bf16 if gated else f32, i32, i32, 7)
                    what = f"{shape[0]}x{shape[1]} tiles of {tile}{' gated' if gated else ''}"
                    name = f"grouped experts {what} {'wgmma' if wgmma else 'mma'}"
                    meta = grouped_meta(shape, 8, gated, tile, wgmma)
                    cases.append(CompileCase(name, grouped_experts, args, meta, targets=(target,)))
        args, meta = (i32, i32, f32, bf16, bf16, i32, i32, 7), grouped_meta((1024, 4096), 8, True, 32, wgmma, 10.0)
        name = f"grouped experts 1024x4096 with a limit, {'wgmma' if wgmma else 'mma'}"
        cases.append(CompileCase(name, grouped_experts, args, meta, targets=(target,)))
    return cases
