"""Attention of decode and verify rows over paged keys and values: one launch a layer.

A program takes parts of one row's keys for one key head and all query heads that share it. It finishes the queries
(bias, norm, rotation), attends to each of its parts, and the program that arrives last at the row merges the parts in
ascending order. Only who merges is left to chance.

How a row's keys are cut depends on the row's position alone: parts of `TILE` keys, doubled until `PARTS` of them cover
the position. So a row's bits are the same alone, in a batch of any size, and as a verify row.

In a verify step a segment has several consecutive rows. What a row needs of those before it is computed again from
their projections, with the function that writes them, instead of read back from programs that may not have run; each
row's key and value are written by the program that takes the row's last part.

Programmatic launch: everything is waited for before the successor is let in, so it may prefetch its weights while this
kernel runs. Before the wait only positions, block tables and rows of earlier steps are read. They are complete if at
least one launch between their writer and this one waited before it triggered, or was an ordinary launch: the embedding
at the head of every forward does.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import TARGETS, CompileCase
from dgpp_core.ops.kernels.heads import HeadShape, head_parameters, raw_heads, turned_heads

TILE = 64
"""Keys that one product takes."""
PARTS = 32
"""Most parts of one row."""
MERGED = 8
"""Parts whose results are in flight at once when they are merged."""


@triton.jit
def _tile(
    pool,
    table,
    head,
    first,
    end,
    KV: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows ``first .. first + TILE`` of one request's head, ``[TILE, SPAN]``; zero from ``end`` on."""
    n = tl.arange(0, TILE)
    d = tl.arange(0, SPAN)[None, :]
    there = (first + n < end)[:, None] & (d < WIDTH)
    if BLOCK >= TILE:
        block = tl.load(table + first // BLOCK, mask=first < end, other=0)
        rows = pool + ((block * KV + head) * BLOCK + first % BLOCK) * WIDTH
        return tl.load(rows + (n * WIDTH)[:, None] + d, mask=there, other=0.0)
    blocks = tl.load(table + (first + n) // BLOCK, mask=first + n < end, other=0)
    rows = ((blocks * KV + head) * BLOCK + (first + n) % BLOCK) * WIDTH
    return tl.load(pool + rows[:, None] + d, mask=there, other=0.0)


@triton.jit
def _fetch(pointers):
    """Ask for the lines of memory at ``pointers``: weights that nobody has read since the last step."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _merge(
    out,
    values,
    stats,
    parts,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Weigh the parts' results by their share of the softmax and add them in ascending order."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, SPAN)[None, :]
    there = (h < SHARE)[:, None] & (d < WIDTH)
    p = tl.arange(0, PARTS)[:, None]
    tops = tl.load(stats + p * (2 * HEADS) + h[None, :], mask=p < parts, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(stats + p * (2 * HEADS) + HEADS + h[None, :], mask=p < parts, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp2(tops - top[None, :]), 0)
    merged = tl.zeros([HEADS, SPAN], tl.float32)
    for first in range(0, parts, MERGED):
        loaded = ()
        weights = ()
        for j in tl.static_range(MERGED):
            live = first + j < parts
            part = values + (first + j) * (SHARE * WIDTH) + h[:, None] * WIDTH + d
            loaded = loaded + (tl.load(part, mask=there & live, other=0.0, cache_modifier=".cg"),)
            peak = stats + (first + j) * (2 * HEADS) + h
            weights = weights + (tl.load(peak, mask=(h >= 0) & live, other=float("-inf"), cache_modifier=".cg"),)
        for j in tl.static_range(MERGED):
            merged += loaded[j] * tl.exp2(weights[j] - top)[:, None]
    tl.store(out + h[:, None] * WIDTH + d, (merged / total[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["table_width", "segment"])
def decode_attention(
    out,
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    k_pool,
    v_pool,
    tables,
    positions,
    values,
    stats,
    arrived,
    table_width,
    segment,
    scale,
    eps,
    KV: tl.constexpr,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    MERGED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows * KV, spread): program (row, head; s) takes parts s, s + spread, ... of the row.

    Args:
        out: ``[rows, KV * SHARE * WIDTH]``.
        qkv: float32 ``[rows, (KV * SHARE + 2 * KV) * WIDTH]``: queries, keys, values as projected, without bias.
        bias: as wide as a row of qkv; read if BIASED.
        q_norm, k_norm: ``[WIDTH]``; read if NORMED.
        cos, sin: float32 ``[positions, HALF]``.
        k_pool, v_pool: ``[blocks, KV, BLOCK, WIDTH]``.
        tables: int64 ``[segments, table_width]``; a segment has ``segment`` rows, at most NEW.
        positions: int64 ``[rows]``, consecutive within a segment.
        values: float32 ``[rows, KV, PARTS, SHARE, WIDTH]``, scratch: each part's sum over its own peak.
        stats: float32 ``[rows, KV, PARTS, 2, HEADS]``, scratch: each part's peak score and sum of weights.
        arrived: int32 ``[rows * KV]``, zero before and after.
        scale: of the scores, times log2(e).
        HEADS: the power of two >= 16 that holds SHARE.
    """
    line = tl.program_id(0)
    slot = tl.program_id(1)
    spread = tl.num_programs(1)
    row = line // KV
    head = line % KV
    position = tl.load(positions + row).to(tl.int32)
    tiles = position // TILE + 1
    per_part = 1
    while per_part * PARTS < tiles:
        per_part *= 2
    parts = (tiles + per_part - 1) // per_part
    if slot < parts:
        start = tl.maximum(position - row % segment, 0)
        table = tables + (row // segment).to(tl.int64) * table_width
        begin = slot * per_part * TILE
        k = _tile(k_pool, table, head, begin, start, KV, WIDTH, SPAN, BLOCK, TILE)
        v = _tile(v_pool, table, head, begin, start, KV, WIDTH, SPAN, BLOCK, TILE)
        d = tl.arange(0, SPAN)[None, :]
        h = tl.arange(0, HEADS)
        n = tl.arange(0, NEW)[:, None]
        live = (h < SHARE)[:, None]
        new = start + n <= position
        width: tl.constexpr = (KV * SHARE + 2 * KV) * WIDTH
        lead = (head * SHARE + h[:, None]) * WIDTH
        lead_k = (KV * SHARE + head) * WIDTH
        lead_v = lead_k + KV * WIDTH
        lead_n = lead_k + 0 * n
        at = 0 * h[:, None] + position * HALF
        at_n = (start + n) * HALF
        block = tl.load(table + position // BLOCK)
        place = ((block * KV + head) * BLOCK + position % BLOCK) * WIDTH
        if PDL:
            piece = tl.minimum(tl.arange(0, SPAN // 16)[None, :] * 16, WIDTH - 1)
            if BIASED:
                _fetch(bias + tl.where(live, lead, 0) + piece)
                _fetch(bias + lead_k + piece)
                _fetch(bias + lead_v + piece)
            if NORMED:
                _fetch(q_norm + piece)
                _fetch(k_norm + piece)
            if HALF > 0:
                _fetch(cos + position * HALF + tl.minimum(piece, HALF - 1))
                _fetch(sin + position * HALF + tl.minimum(piece, HALF - 1))
            gdc_wait()
            gdc_launch_dependents()
        mine = qkv + row * width
        lines = mine + (start - position + n) * width
        raw_q = raw_heads(mine + lead, live, WIDTH, SPAN, HALF)
        raw_k = raw_heads(lines + lead_k, new, WIDTH, SPAN, HALF)
        v_new = tl.load(lines + lead_v + d, mask=new & (d < WIDTH), other=0.0)
        for_q = head_parameters(bias + lead, q_norm, cos + at, sin + at, live, WIDTH, SPAN, HALF, BIASED, NORMED)
        for_k = head_parameters(bias + lead_n, k_norm, cos + at_n, sin + at_n, new, WIDTH, SPAN, HALF, BIASED, NORMED)
        q = turned_heads(raw_q, for_q, eps, WIDTH, HALF, BIASED, NORMED).to(k.dtype)
        k_new = turned_heads(raw_k, for_k, eps, WIDTH, HALF, BIASED, NORMED).to(k.dtype)
        if BIASED:
            v_new += tl.load(bias + lead_v + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        if slot == (parts - 1) % spread:
            own_line = (start + n == position) & (d < WIDTH)
            tl.store(k_pool + place + 0 * n + d, k_new, mask=own_line)
            tl.store(v_pool + place + 0 * n + d, v_new.to(v.dtype), mask=own_line)
        own_score = tl.dot(q, tl.trans(k_new), input_precision="ieee")
        top = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        value = tl.zeros([HEADS, SPAN], tl.float32)
        items = ((parts - 1 - slot) // spread + 1) * per_part
        for item in range(items):
            part = slot + (item // per_part) * spread
            first = (part * per_part + item % per_part) * TILE
            t = first + tl.arange(0, TILE)
            if first + TILE > start:
                fresh = (t >= start) & (t <= position)
                rows = mine + (t - position)[:, None] * width + lead_v + d
                v_tile = tl.load(rows, mask=fresh[:, None] & (d < WIDTH), other=0.0)
                if BIASED:
                    v_tile += tl.load(bias + lead_v + d, mask=d < WIDTH, other=0.0).to(tl.float32)
                v = tl.where(fresh[:, None], v_tile.to(v.dtype), v)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            held = v
            follower = item + 1
            following = ((slot + (follower // per_part) * spread) * per_part + follower % per_part) * TILE
            limit = tl.where(follower < items, start, 0)
            k = _tile(k_pool, table, head, following, limit, KV, WIDTH, SPAN, BLOCK, TILE)
            v = _tile(v_pool, table, head, following, limit, KV, WIDTH, SPAN, BLOCK, TILE)
            newest = tl.minimum(tl.maximum(t - start, 0), NEW - 1)
            near = tl.gather(own_score, tl.broadcast_to(newest[None, :], [HEADS, TILE]), 1)
            score = tl.where((t >= start)[None, :], near, score) * scale
            score = tl.where((t <= position)[None, :], score, float("-inf"))
            before = tl.where(item % per_part == 0, float("-inf"), top)
            top = tl.maximum(before, tl.max(score, 1))
            shrink = tl.exp2(before - top)
            weight = tl.exp2(score - top[:, None])
            total = total * shrink + tl.sum(weight, 1)
            value = tl.dot(weight.to(v.dtype), held, value * shrink[:, None], input_precision="ieee")
            if item % per_part == per_part - 1:
                index = line * PARTS + part
                spot = values + index.to(tl.int64) * (SHARE * WIDTH) + h[:, None] * WIDTH + d
                tl.store(spot, value, mask=live & (d < WIDTH))
                tl.store(stats + index * (2 * HEADS) + h, top)
                tl.store(stats + index * (2 * HEADS) + HEADS + h, total)
        tl.debug_barrier()
        before_me = tl.atomic_add(arrived + line, 1, sem="acq_rel")
        if before_me == tl.minimum(parts, spread) - 1:
            tl.store(arrived + line, 0)
            _merge(
                out + (row * KV + head) * (SHARE * WIDTH),
                values + line.to(tl.int64) * (PARTS * SHARE * WIDTH),
                stats + line * (PARTS * 2 * HEADS),
                parts, SHARE, HEADS, WIDTH, SPAN, PARTS, MERGED,
            )  # fmt: skip


MAX_ROWS = 256
"""Most rows of one launch."""
MAX_SEGMENT = 16
"""Most rows of one segment."""


def query_lines(shape: HeadShape) -> int:
    """Lines of the tile that holds the query heads of a key head."""
    return max(16, triton.next_power_of_2(shape.share))


def decode_meta(shape: HeadShape, capability: int) -> dict[str, Any]:
    """Compile-time arguments, the same for every number of rows and of rows a segment.

    On a capability of 90 two programs are to share a multiprocessor.
    """
    registers = {"maxnreg": 128} if capability == 90 and shape.width <= 128 else {}
    return {
        **shape.meta(),
        "HEADS": query_lines(shape),
        "HALF": shape.rotated // 2,
        "NEW": MAX_SEGMENT,
        "TILE": TILE,
        "PARTS": PARTS,
        "MERGED": MERGED,
        "BIASED": shape.biased,
        "NORMED": shape.normed,
        "PDL": True,
        "launch_pdl": True,
        "num_warps": 8,
        **registers,
    }


def spread_of(lines: int) -> int:
    """Programs for each of ``lines`` (row, head) pairs: about two a multiprocessor in all, as measured on an H200."""
    return max(1, min(16, 256 // lines))


def compile_cases() -> list[CompileCase]:
    """The shapes that `HeadShape` names."""
    wide, narrow, whole = torch.float32, torch.bfloat16, torch.int64
    args = (narrow, wide, narrow, narrow, narrow, wide, wide, narrow, narrow, whole, whole, wide, wide, torch.int32)
    return [
        CompileCase(
            f"decode_attention {name}, sm_{target}",
            decode_attention,
            (*args, 128, 1, 0.1, 1e-5),
            decode_meta(shape, target),
            (target,),
        )
        for target in TARGETS
        for name, shape in HeadShape.served().items()
    ]
