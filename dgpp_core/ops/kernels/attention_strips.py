"""Decode attention whose warps work alone: for heads of 64 or 128 dimensions, in the lanes of the matrix instruction.

What `dgpp_core.ops.kernels.attention_decode` says about parts, verify rows, merging and programmatic launch holds here.
The difference is inside a part: each warp takes strips of 16 keys, loads them straight into the registers that the
matrix instruction wants (`dgpp_core.ops.kernels.attention_fragments`) and keeps a softmax of its own. Warps meet at the
end of a part only.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dgpp_core.ops.kernels.attention_decode import PARTS
from dgpp_core.ops.kernels.attention_fragments import (
    fetch_rows,
    fold_layout,
    key_layout,
    key_operand,
    line_layout,
    line_parameters,
    normed_and_turned,
    query_operand,
    strip,
    to_words,
    value_layout,
    value_operand,
    with_new,
)
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.fragments import mma_layout, pdl_launch, pdl_wait
from dgpp_core.ops.kernels.heads import HeadShape

WARPS = 4
STRIP = 16
"""Keys of a warp at a time."""
LEAST = 1
"""Strips a warp of the smallest part."""
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def strip_scores(queries, k, W: gl.constexpr, SPAN: gl.constexpr):
    """Products of the shared queries with every warp's keys, ``[W, 16 heads, 16 keys]``."""
    zero = gl.zeros([W, 16, 16], gl.float32, mma_layout(W))
    return mma_v2(query_operand(queries, W, SPAN), key_operand(k, W, SPAN), zero)


@gluon.jit
def seen_weights(score, top, first, position, scale, W: gl.constexpr):
    """Exponentials over the running peak, the new peak, and what the old sums shrink by.

    A warp that has seen no key yet has a peak of -inf.
    """
    M: gl.constexpr = mma_layout(W)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, M)))[:, None][:, :, None]
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, M)))[None, :][:, None, :]
    seen, score = gl.broadcast(first + 16 * w + n <= position, score * scale)
    score = gl.where(seen, score, float("-inf"))
    peak = gl.maximum(top, gl.max(score, 2))
    base = gl.where(peak == float("-inf"), 0.0, peak)
    return gl.exp2(score - base[:, :, None]), peak, gl.exp2(top - base)


@gluon.jit
def weighted_values(weight, v, value, W: gl.constexpr, SPAN: gl.constexpr):
    """``value`` plus every warp's values times their weights, rounded to bf16."""
    weight = gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)
    return mma_v2(weight, value_operand(v, W, SPAN), value)


@gluon.jit
def fold(top, total, value, values, tops, totals, W: gl.constexpr, SPAN: gl.constexpr):
    """The warps' softmaxes as one: peak ``[16]``, sum ``[16]`` and value ``[16, SPAN]``.

    Args:
        values, tops, totals: float32 shared memory, ``[W, 16, SPAN]`` and twice ``[W, 16]``.
    """
    L: gl.constexpr = fold_layout(W, SPAN)
    values.store(value.reshape([W, 16, SPAN // 64, 8, 8]).permute([0, 1, 2, 4, 3]).reshape([W, 16, SPAN]))
    tops.store(top)
    totals.store(total)
    value = values.load(L)
    top = tops.load(gl.SliceLayout(2, L))
    total = totals.load(gl.SliceLayout(2, L))
    peak = gl.max(top, 0)
    share = gl.exp2(top - peak[None, :])
    return peak, gl.sum(total * share, 0), gl.sum(value * share[:, :, None], 0)


@gluon.jit
def merge_parts(
    out,
    values,
    stats,
    parts,
    SHARE: gl.constexpr,
    W: gl.constexpr,
    SPAN: gl.constexpr,
    MERGED: gl.constexpr,
):
    """Weigh the parts' results by their share of the softmax and add them in ascending order."""
    L: gl.constexpr = line_layout(W, SPAN)
    h = gl.arange(0, 16, gl.SliceLayout(1, L))
    d = gl.arange(0, SPAN, gl.SliceLayout(0, L))
    spot = h[:, None] * SPAN + d[None, :]
    live = (h < SHARE)[:, None] & (d >= 0)[None, :]
    peak = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, L))
    total = gl.zeros([16], gl.float32, gl.SliceLayout(1, L))
    merged = gl.zeros([16, SPAN], gl.float32, L)
    for first in range(0, parts, MERGED):
        tops = ()
        sums = ()
        loaded = ()
        for j in gl.static_range(MERGED):
            there = first + j < parts
            row = stats + (first + j) * 32 + h
            tops = tops + (gl.load(row, mask=(h >= 0) & there, other=float("-inf"), cache_modifier=".cg"),)
            sums = sums + (gl.load(row + 16, mask=(h >= 0) & there, other=0.0, cache_modifier=".cg"),)
            part = values + (first + j) * (SHARE * SPAN) + spot
            loaded = loaded + (gl.load(part, mask=live & there, other=0.0, cache_modifier=".cg"),)
        for j in gl.static_range(MERGED):
            higher = gl.maximum(peak, tops[j])
            before = gl.exp2(peak - higher)
            share = gl.exp2(tops[j] - higher)
            total = total * before + sums[j] * share
            merged = merged * before[:, None] + loaded[j] * share[:, None]
            peak = higher
    gl.store(out + spot, (merged / total[:, None]).to(out.dtype.element_ty), mask=live)


@gluon.jit(do_not_specialize=["table_width", "segment"])
def strip_attention(
    out,
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    k_pool,
    v_pool,
    k_words,
    v_words,
    tables,
    positions,
    values,
    stats,
    arrived,
    table_width,
    segment,
    scale,
    eps,
    KV: gl.constexpr,
    SHARE: gl.constexpr,
    SPAN: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK: gl.constexpr,
    W: gl.constexpr,
    LEAST: gl.constexpr,
    PARTS: gl.constexpr,
    MERGED: gl.constexpr,
    BIASED: gl.constexpr,
    NORMED: gl.constexpr,
    FETCH: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (rows * KV, spread), arguments as of `dgpp_core.ops.kernels.attention_decode.decode_attention`.

    Args:
        k_words, v_words: the pools as int32.
        LEAST: strips a warp of the smallest part.
        FETCH: ask for all later strips before the wait; a tile must be whole blocks.
    """
    TILE: gl.constexpr = 16 * W
    WORDS: gl.constexpr = SPAN // 2
    WIDTH: gl.constexpr = (KV * SHARE + 2 * KV) * SPAN
    LK: gl.constexpr = key_layout(W, WORDS)
    LV: gl.constexpr = value_layout(W, WORDS)
    L: gl.constexpr = line_layout(W, SPAN)
    M: gl.constexpr = mma_layout(W)
    LM: gl.constexpr = gl.SliceLayout(2, M)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line = gl.program_id(0)
    slot = gl.program_id(1)
    spread = gl.num_programs(1)
    row = line // KV
    head = line % KV
    position = gl.load(positions + row).to(gl.int32)
    tiles = position // TILE + 1
    per_part = LEAST
    while per_part * PARTS < tiles:
        per_part = per_part * 2
    parts = (tiles + per_part - 1) // per_part
    if slot < parts:
        start = gl.maximum(position - row % segment, 0)
        table = tables + (row // segment).to(gl.int64) * table_width
        begin = slot * per_part * TILE
        k = strip(k_words, table, head, begin, start, LK, KV, WORDS, BLOCK, W)
        v = strip(v_words, table, head, begin, start, LV, KV, WORDS, BLOCK, W)
        items = ((parts - 1 - slot) // spread + 1) * per_part
        if FETCH and items > 1:
            ahead = 1 + gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
            tile = (slot + (ahead // per_part) * spread) * per_part + ahead % per_part
            end = gl.where(ahead < items, start, 0)
            fetch_rows(k_words, table, head, tile * TILE, end, KV, WORDS, BLOCK)
            fetch_rows(v_words, table, head, tile * TILE, end, KV, WORDS, BLOCK)
        h = gl.arange(0, 16, gl.SliceLayout(1, L))
        d = gl.arange(0, SPAN, gl.SliceLayout(0, L))
        token = start + (h - start) % 16
        token = gl.where(token < start, token + 16, token)
        live = (h < SHARE)[:, None] & (d >= 0)[None, :]
        new = (token <= position)[:, None] & (d >= 0)[None, :]
        lead = head * (SHARE * SPAN) + h[:, None] * SPAN + d[None, :]
        lead_k = (KV * SHARE + head) * SPAN + d
        lead_v = lead_k + KV * SPAN
        if BIASED:
            q_bias = gl.load(bias + lead, mask=live, other=0.0).to(gl.float32)
        for_q = line_parameters(q_norm, cos, sin, 0 * h + position, W, SPAN, HALF, NORMED)
        pdl_wait(PDL)
        mine = qkv + row * WIDTH
        q = gl.load(mine + lead, mask=live, other=0.0)
        owner = slot == (parts - 1) % spread
        k_lines = gl.allocate_shared_memory(gl.int32, [16, WORDS], SHARED)
        v_lines = gl.allocate_shared_memory(gl.int32, [16, WORDS], SHARED)
        q_lines = gl.allocate_shared_memory(gl.int32, [16, WORDS], SHARED)
        fold_values = gl.allocate_shared_memory(gl.float32, [W, 16, SPAN], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
        fold_tops = gl.allocate_shared_memory(gl.float32, [W, 16], SHARED)
        fold_totals = gl.allocate_shared_memory(gl.float32, [W, 16], SHARED)
        last = ((slot + ((items - 1) // per_part) * spread + 1) * per_part) * TILE
        if last > start:
            source = mine + (token - position)[:, None] * WIDTH
            k_new = gl.load(source + lead_k[None, :], mask=new, other=0.0)
            v_new = gl.load(source + lead_v[None, :], mask=new, other=0.0)
            for_k = line_parameters(k_norm, cos, sin, token, W, SPAN, HALF, NORMED)
            if BIASED:
                k_new += gl.load(bias + lead_k).to(gl.float32)[None, :]
                v_new += gl.load(bias + lead_v).to(gl.float32)[None, :]
            k_new = normed_and_turned(k_new, for_k, eps, W, SPAN, HALF, NORMED)
            k_lines.store(to_words(k_new, WORDS))
            v_lines.store(to_words(v_new, WORDS))
            if owner:
                block = gl.load(table + position // BLOCK)
                place = ((block * KV + head) * BLOCK + position % BLOCK) * SPAN
                here = (token == position)[:, None] & (d >= 0)[None, :]
                spot = 0 * h[:, None] + d[None, :]
                gl.store(k_pool + place + spot, k_new.to(gl.bfloat16), mask=here)
                gl.store(v_pool + place + spot, v_new.to(gl.bfloat16), mask=here)
        if BIASED:
            q += q_bias
        q = normed_and_turned(q, for_q, eps, W, SPAN, HALF, NORMED)
        q_lines.store(to_words(q, WORDS))
        pdl_launch(PDL)  # not before: the successor's weights would stand in line before the step's own rows
        top = gl.full([W, 16], float("-inf"), gl.float32, LM)
        total = gl.zeros([W, 16], gl.float32, LM)
        value = gl.zeros([W, 16, SPAN], gl.float32, M)
        for item in range(items):
            part = slot + (item // per_part) * spread
            first = (part * per_part + item % per_part) * TILE
            if first + TILE > start:
                k = with_new(k, k_lines, first, start, position, LK, W)
                v = with_new(v, v_lines, first, start, position, LV, W)
            follower = item + 1
            following = ((slot + (follower // per_part) * spread) * per_part + follower % per_part) * TILE
            limit = gl.where(follower < items, start, 0)
            score = strip_scores(q_lines, k, W, SPAN)
            k = strip(k_words, table, head, following, limit, LK, KV, WORDS, BLOCK, W)
            weight, top, shrink = seen_weights(score, top, first, position, scale, W)
            total = total * shrink + gl.sum(weight, 2)
            value = weighted_values(weight, v, value * shrink[:, :, None], W, SPAN)
            v = strip(v_words, table, head, following, limit, LV, KV, WORDS, BLOCK, W)
            if item % per_part == per_part - 1:
                peak, mass, result = fold(top, total, value, fold_values, fold_tops, fold_totals, W, SPAN)
                index = line * PARTS + part
                LF: gl.constexpr = result.type.layout
                row_h = gl.arange(0, 16, gl.SliceLayout(1, LF))
                row_d = gl.arange(0, SPAN, gl.SliceLayout(0, LF))
                spot = values + index.to(gl.int64) * (SHARE * SPAN) + (row_h[:, None] * SPAN + row_d[None, :])
                gl.store(spot, result, mask=(row_h < SHARE)[:, None] & (row_d >= 0)[None, :])
                LP: gl.constexpr = peak.type.layout
                at = stats + index * 32 + gl.arange(0, 16, LP)
                gl.store(at, peak)
                gl.store(at + 16, mass)
                top = gl.full([W, 16], float("-inf"), gl.float32, LM)
                total = gl.zeros([W, 16], gl.float32, LM)
                value = gl.zeros([W, 16, SPAN], gl.float32, M)
        block_barrier()
        before_me = gl.atomic_add(arrived + line, 1, sem="acq_rel")
        if before_me == gl.minimum(parts, spread) - 1:
            gl.store(arrived + line, 0)
            merge_parts(
                out + line * (SHARE * SPAN),
                values + line.to(gl.int64) * (PARTS * SHARE * SPAN),
                stats + line * (PARTS * 32),
                parts,
                SHARE,
                W,
                SPAN,
                MERGED,
            )


def fits(shape: HeadShape) -> bool:
    """Whether `strip_attention` takes the shape."""
    turns = (0, 64, 128)
    return shape.width in (64, 128) and shape.share <= 16 and shape.rotated in turns and shape.block >= STRIP


def strip_meta(
    shape: HeadShape,
    warps: int = WARPS,
    least: int = LEAST,
    registers: int | None = None,
    fetch: bool = True,
) -> dict[str, Any]:
    """Compile-time arguments, the same for every number of rows and of rows a segment."""
    return {
        "KV": shape.kv_heads,
        "SHARE": shape.share,
        "SPAN": shape.width,
        "HALF": shape.rotated // 2,
        "BLOCK": shape.block,
        "W": warps,
        "LEAST": least,
        "PARTS": PARTS,
        "MERGED": 4,
        "BIASED": shape.biased,
        "NORMED": shape.normed,
        "FETCH": fetch and shape.block == 16 * warps,
        "PDL": True,
        "launch_pdl": True,
        "num_warps": warps,
        **({} if registers is None else {"maxnreg": registers}),
    }


def compile_cases() -> list[CompileCase]:
    """The shapes that `HeadShape` names."""
    wide, narrow, whole, word = torch.float32, torch.bfloat16, torch.int64, torch.int32
    pools = (narrow, narrow, word, word)
    args = (narrow, wide, narrow, narrow, narrow, wide, wide, *pools, whole, whole, wide, wide, word, 128, 1, 0.1, 1e-5)
    return [
        CompileCase(
            f"strip_attention {name}",
            strip_attention,
            args,
            strip_meta(shape),
        )
        for name, shape in HeadShape.served().items()
        if fits(shape)
    ]
