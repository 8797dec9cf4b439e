"""Attention of prefill rows over paged keys and values: two launches a layer.

`place_rows` finishes the heads (bias, norm, rotation) and writes the step's keys and values. `chunk_attention` then
reads all keys, cached and new, from the pools: a program takes some (row, query head) lines of one segment and key head
and walks the keys from position 0 in tiles at fixed positions.

A line's bits are its own: lines do not meet inside a program, tiles lie at absolute positions, and a tile wholly past a
line multiplies its sums by one and adds zeros. So a prompt gives the same bits in chunks of any size, beside any other.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgpp_core.ops.kernels.cases import TARGETS, CompileCase
from dgpp_core.ops.kernels.heads import HeadShape, head_parameters, raw_heads, turned_heads

TILE = 64
"""Keys of one product: part of the order in which a row's sum is formed."""
SPILLED = 288
"""Bytes of local memory that a thread of four warps with 128 lines may need: it is faster than eight warps without."""
TILE_HEADS = 16
"""Heads of a program of `place_rows`."""


@triton.jit
def place_rows(
    q_out,
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    k_pool,
    v_pool,
    blocks,
    offsets,
    positions,
    eps,
    KV: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Grid (rows, tiles of query heads + tiles of key heads).

    Args:
        q_out: ``[rows, KV * SHARE * WIDTH]``.
        qkv: float32 ``[rows, (KV * SHARE + 2 * KV) * WIDTH]``.
        bias: as wide as a row of qkv; read if BIASED. q_norm, k_norm: ``[WIDTH]``; read if NORMED.
        cos, sin: float32 ``[positions, HALF]``.
        k_pool, v_pool: ``[blocks, KV, BLOCK, WIDTH]``.
        blocks, offsets, positions: int64 ``[rows]``: where each row's key goes, and its position.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    HEADS: tl.constexpr = KV * SHARE
    QUERY_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    n = tl.arange(0, TILE_HEADS)[:, None]
    d = tl.arange(0, SPAN)[None, :]
    mine = qkv + row * ((HEADS + 2 * KV) * WIDTH)
    turn = tl.zeros([TILE_HEADS, 1], tl.int64) + tl.load(positions + row) * HALF
    if tile < QUERY_TILES:
        head = tile * TILE_HEADS + n
        live = head < HEADS
        lead = head * WIDTH
        given = head_parameters(bias + lead, q_norm, cos + turn, sin + turn, live, WIDTH, SPAN, HALF, BIASED, NORMED)
        q = turned_heads(raw_heads(mine + lead, live, WIDTH, SPAN, HALF), given, eps, WIDTH, HALF, BIASED, NORMED)
        spot = q_out + row * (HEADS * WIDTH) + lead + d
        tl.store(spot, q.to(q_out.dtype.element_ty), mask=live & (d < WIDTH))
    else:
        head = (tile - QUERY_TILES) * TILE_HEADS + n
        live = head < KV
        lead = (HEADS + head) * WIDTH
        given = head_parameters(bias + lead, k_norm, cos + turn, sin + turn, live, WIDTH, SPAN, HALF, BIASED, NORMED)
        k = turned_heads(raw_heads(mine + lead, live, WIDTH, SPAN, HALF), given, eps, WIDTH, HALF, BIASED, NORMED)
        lead += KV * WIDTH
        v = tl.load(mine + lead + d, mask=live & (d < WIDTH), other=0.0)
        if BIASED:
            v += tl.load(bias + lead + d, mask=live & (d < WIDTH), other=0.0).to(tl.float32)
        place = ((tl.load(blocks + row) * KV + head) * BLOCK + tl.load(offsets + row)) * WIDTH + d
        tl.store(k_pool + place, k.to(k_pool.dtype.element_ty), mask=live & (d < WIDTH))
        tl.store(v_pool + place, v.to(v_pool.dtype.element_ty), mask=live & (d < WIDTH))


@triton.jit
def _places(table, head, first, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, end):
    """Offsets ``[TILE, 1]`` into a pool of the rows ``first .. first + TILE``; any block where past ``end``."""
    n = first + tl.arange(0, TILE)
    if BLOCK >= TILE:
        block = tl.load(table + first // BLOCK, mask=first < end, other=0)
        return (((block * KV + head) * BLOCK + first % BLOCK) * WIDTH) + ((n - first) * WIDTH)[:, None]
    blocks = tl.load(table + n // BLOCK, mask=n < end, other=0)
    return (((blocks * KV + head) * BLOCK + n % BLOCK) * WIDTH)[:, None]


@triton.jit
def _seen(q, k, v, top, total, value, visible, scale, MASKED: tl.constexpr):
    """The running softmax after one more tile of keys.

    The product with ``scale`` and the difference to the peak are one explicit operation, so that masked and unmasked
    tiles round alike.
    """
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    peak = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + scale, tl.zeros_like(score) - peak[:, None]))
    shrink = tl.exp2(top - peak)
    total = tl.fma(total, shrink, tl.sum(weight, 1))
    value = tl.dot(weight.to(v.dtype), v, value * shrink[:, None], input_precision="ieee")
    return peak, total, value


@triton.jit(do_not_specialize=["table_width"])
def chunk_attention(
    out,
    q,
    k_pool,
    v_pool,
    k_blocks,
    v_blocks,
    tables,
    positions,
    work,
    table_width,
    scale,
    KV: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Grid (KV, pieces of work).

    Args:
        out, q: ``[rows, KV * SHARE * WIDTH]``.
        k_pool, v_pool: ``[blocks, KV, BLOCK, WIDTH]``; the step's rows are written.
        k_blocks, v_blocks: descriptors of the pools as ``[blocks * KV * BLOCK, WIDTH]`` in tiles of a block; read if
            WHOLE, where a tile is a block.
        tables: int64 ``[segments, table_width]``.
        positions: int64 ``[rows]``, consecutive within a segment.
        work: int32 ``[pieces, 4]``, see `chunk_work`.
        scale: of the scores, times log2(e); positive.
    """
    head = tl.program_id(0)
    piece = work + tl.program_id(1) * 4
    segment = tl.load(piece)
    base = tl.load(piece + 1)
    count = tl.load(piece + 2)
    begin = tl.load(piece + 3)
    start = tl.load(positions + base).to(tl.int32)
    end = start + count
    line = begin + tl.arange(0, LINES)
    mine = line // SHARE
    live = (mine < count)[:, None]
    d = tl.arange(0, SPAN)[None, :]
    inside = d < WIDTH
    lead = (base + mine).to(tl.int64) * (KV * SHARE * WIDTH) + (head * SHARE + line % SHARE) * WIDTH
    tile_q = tl.load(q + lead[:, None] + d, mask=live & inside, other=0.0)
    table = tables + segment.to(tl.int64) * table_width
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    value = tl.zeros([LINES, SPAN], tl.float32)
    whole = (start + begin // SHARE + 1) // TILE * TILE
    limit = tl.minimum(start + (begin + LINES - 1) // SHARE + 1, end)
    for first in tl.range(0, whole, TILE, num_stages=STAGES):
        if WHOLE:
            block = ((tl.load(table + first // BLOCK) * KV + head) * BLOCK).to(tl.int32)
            k = k_blocks.load([block, 0])
            v = v_blocks.load([block, 0])
        else:
            place = _places(table, head, first, KV, WIDTH, BLOCK, TILE, end)
            k = tl.load(k_pool + place + d, mask=inside, other=0.0)
            v = tl.load(v_pool + place + d, mask=inside, other=0.0)
        top, total, value = _seen(tile_q, k, v, top, total, value, live, scale, False)
    for first in tl.range(whole, limit, TILE, num_stages=STAGES):
        t = first + tl.arange(0, TILE)
        place = _places(table, head, first, KV, WIDTH, BLOCK, TILE, end)
        there = (t < end)[:, None] & inside
        k = tl.load(k_pool + place + d, mask=there, other=0.0)
        v = tl.load(v_pool + place + d, mask=there, other=0.0)
        visible = t[None, :] <= (start + mine)[:, None]
        top, total, value = _seen(tile_q, k, v, top, total, value, visible, scale, True)
    result = (value / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + lead[:, None] + d, result, mask=live & inside)


def chunk_pieces(counts: tuple[int, ...], share: int, lines: int) -> list[tuple[int, int, int, int]]:
    """What the programs of a key head do: segment, its first row, its rows, first line (row * share + head) each.

    Pieces with more keys before them come first, so that the short ones fill the end.
    """
    pieces, row = [], 0
    for segment, count in enumerate(counts):
        pieces += [(segment, row, count, line) for line in range(0, count * share, lines)]
        row += count
    return sorted(pieces, key=lambda piece: -piece[3])


@lru_cache(maxsize=64)
def chunk_work(counts: tuple[int, ...], share: int, lines: int, device: torch.device) -> Tensor:
    """`chunk_pieces` as an int32 tensor on ``device``; the same for every layer of a step."""
    pieces = torch.tensor(chunk_pieces(counts, share, lines), dtype=torch.int32, pin_memory=device.type == "cuda")
    return pieces.to(device, non_blocking=True)


def place_meta(shape: HeadShape) -> dict[str, Any]:
    """Compile-time arguments of `place_rows`."""
    flags = {"BIASED": shape.biased, "NORMED": shape.normed}
    return {**shape.meta(), "HALF": shape.rotated // 2, **flags, "TILE_HEADS": TILE_HEADS, "num_warps": 4}


def place_tiles(shape: HeadShape) -> int:
    """Programs a row of `place_rows`."""
    return triton.cdiv(shape.kv_heads * shape.share, TILE_HEADS) + triton.cdiv(shape.kv_heads, TILE_HEADS)


class ChunkCut(Struct, frozen=True):
    """How `chunk_attention` is cut.

    Attributes:
        lines, warps, stages: of a program; they change speed only.
        tile: keys of one product; it decides a row's bits.
        whole: whole blocks are loaded by descriptor; a tile must be a block.
    """

    lines: int
    tile: int
    warps: int
    stages: int
    whole: bool


def chunk_cut(shape: HeadShape, capability: int) -> ChunkCut:
    """The cut measured to be best on an H200 (90, with wgmma), and one that leaves room on smaller GPUs."""
    if shape.width > 128:
        return ChunkCut(64, TILE, 8, 1, False)
    if capability != 90:
        return ChunkCut(64, TILE, 8, 2, False)
    # Two programs of four warps share a multiprocessor: one multiplies while the other takes exponentials.
    whole = shape.block == TILE and shape.width in (64, 128)
    return ChunkCut(128, TILE, 4, 3, True) if whole else ChunkCut(128, TILE, 8, 3, False)


def chunk_meta(shape: HeadShape, cut: ChunkCut) -> dict[str, Any]:
    """Compile-time arguments of `chunk_attention`."""
    return {
        **shape.meta(),
        "LINES": cut.lines,
        "TILE": cut.tile,
        "STAGES": cut.stages,
        "WHOLE": cut.whole,
        "num_warps": cut.warps,
    }


def by_blocks(pool: Tensor, cut: ChunkCut) -> Tensor | TensorDescriptor:
    """A pool as `chunk_attention` takes it for whole blocks."""
    rows = pool.view(-1, pool.shape[-1])
    return TensorDescriptor.from_tensor(rows, [cut.tile, pool.shape[-1]]) if cut.whole else pool


def compile_cases() -> list[CompileCase]:
    """The shapes that `HeadShape` names."""
    wide, narrow, whole = torch.float32, torch.bfloat16, torch.int64
    place = (narrow, wide, narrow, narrow, narrow, wide, wide, narrow, narrow, whole, whole, whole, 1e-5)
    cases = []
    for name, shape in HeadShape.served().items():
        cases.append(CompileCase(f"place_rows {name}", place_rows, place, place_meta(shape)))
        for target in TARGETS:
            cut = chunk_cut(shape, target)
            pool = by_blocks(torch.empty(1, 1, shape.block, shape.width, dtype=narrow), cut)
            pools = (pool, pool) if cut.whole else (narrow, narrow)
            args = (narrow, narrow, narrow, narrow, *pools, whole, whole, torch.int32, 128, 0.1)
            meta = chunk_meta(shape, cut)
            cases.append(
                CompileCase(
                    f"chunk_attention {name}, sm_{target}",
                    chunk_attention,
                    args,
                    meta,
                    (target,),
                    SPILLED if target == 90 else 0,
                )
            )
    return cases
