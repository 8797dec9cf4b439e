"""Which rows go to which expert, as tables on the device: no host waits for them, no atomics, one order.

Picks (pick m * k + j is expert j of row m) are listed by expert and within one by row, the shared expert's last. Tiles
are cut from that list, each of one expert.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
from msgspec import Struct
from torch import Tensor
from triton import language as tl

from dgpp_core.ops.kernels.cases import CompileCase


@triton.jit(do_not_specialize=["picks"])
def count_picks(ids, counts, picks, BLOCK: tl.constexpr):
    """counts[e]: picks of expert e = program_id(0)."""
    expert = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for base in range(0, picks, BLOCK):
        found += (tl.load(ids + base + p, mask=base + p < picks, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["rows", "picks", "last_tile"])
def place_picks(
    ids,
    counts,
    order,
    tiles,
    rows,
    picks,
    last_tile,
    E: tl.constexpr,
    EP: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entry e = program_id(0) writes its picks to ``order`` and its tiles, ``[T, 3]``: entry, first place, picks.

    The last program gives the tiles that are left over the entry -1.
    """
    entry = tl.program_id(0)
    e = tl.arange(0, EP)
    count = tl.load(counts + e, mask=e < E, other=0)
    if SHARED:
        count = tl.where(e == E, rows, count)
    first = tl.sum(tl.where(e < entry, count, 0), 0)
    mine = tl.sum(tl.where(e == entry, count, 0), 0)
    cut = (count + BN - 1) // BN
    tile = tl.sum(tl.where(e < entry, cut, 0), 0)
    p = tl.arange(0, BLOCK)
    for base in range(0, mine, BN * BLOCK):
        start = base + p * BN
        at = tiles + (tile + start // BN) * 3
        tl.store(at, entry + p * 0, mask=start < mine)
        tl.store(at + 1, first + start, mask=start < mine)
        tl.store(at + 2, tl.minimum(mine - start, BN), mask=start < mine)
    if entry == tl.num_programs(0) - 1:
        for base in range(tile + (mine + BN - 1) // BN, last_tile, BLOCK):
            tl.store(tiles + (base + p) * 3, p * 0 - 1, mask=base + p < last_tile)
    if entry < E:
        place = first
        for base in range(0, picks, BLOCK):
            chosen = (tl.load(ids + base + p, mask=base + p < picks, other=-1) == entry).to(tl.int32)
            tl.store(order + place + tl.cumsum(chosen, 0) - 1, base + p, mask=chosen == 1)
            place += tl.sum(chosen, 0)
    else:
        for base in range(0, rows, BLOCK):
            tl.store(order + picks + base + p, picks + base + p, mask=base + p < rows)


class PickTables(Struct, frozen=True, eq=False):
    """Attributes:
    order: int32 ``[picks + rows]`` (``[picks]`` without a shared expert).
    tiles: int32 ``[T, 3]``: expert (-1 for none), first place in ``order``, picks.
    """

    order: Tensor
    tiles: Tensor


def order_picks(ids: Tensor, experts: int, shared: bool, tile: int) -> PickTables:
    """Tables for int32 ``ids`` ``[M, k]`` with tiles of up to ``tile`` picks."""
    rows, picks = ids.shape[0], ids.numel()
    total = picks + rows * shared
    most = picks // tile + min(experts, picks) + triton.cdiv(rows, tile) * shared
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(total, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(most, 3, dtype=torch.int32, device=ids.device)
    count_picks[(experts,)](ids, counts, picks, **_COUNT_META)
    meta = _place_meta(experts, shared, tile)
    place_picks[(experts + shared,)](ids, counts, order, tiles, rows, picks, most, **meta)
    return PickTables(order, tiles)


_COUNT_META: dict[str, Any] = {"BLOCK": 2048, "num_warps": 8}


def _place_meta(experts: int, shared: bool, tile: int) -> dict[str, Any]:
    padded = triton.next_power_of_2(experts + 1)
    return {"E": experts, "EP": padded, "SHARED": shared, "BN": tile, "BLOCK": 2048, "num_warps": 8}


def compile_cases() -> list[CompileCase]:
    """160 experts and a shared one, every tile."""
    i32 = torch.int32
    cases = [CompileCase("count picks", count_picks, (i32, i32, 7), _COUNT_META)]
    for tile in (16, 32, 64, 128):
        meta = _place_meta(160, True, tile)
        cases.append(CompileCase(f"place picks, tiles of {tile}", place_picks, (i32, i32, i32, i32, 7, 56, 9), meta))
    return cases
