"""Rows of the grouped expert products: how they are brought into fragment order, gathered and written."""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def fragment_order(xp, out, K: tl.constexpr, BLOCK: tl.constexpr):
    """Row program_id(0) of bf16 x in fragment order, by pairs: int32 ``[M, K / 2]``, 8j + 4h + q from 8q + 2j + h."""
    m = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = p % 32
    source = p - inside + (inside % 4) * 8 + (inside // 8) * 2 + (inside // 4) % 2
    live = p < K // 2
    tl.store(out + m * (K // 2) + p, tl.load(xp + m * (K // 2) + source, mask=live, other=0), mask=live)


@gluon.jit
def gathered_pointers(
    xp, order, first, count, picks, K: gl.constexpr, TOPK: gl.constexpr, W: gl.constexpr, BN: gl.constexpr
):
    """Pointers to the first chunk of a tile's rows ``[BN, 64]``: of x (TOPK picks a row) or of h (TOPK 0, a pick)."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    n = gl.minimum(gl.arange(0, BN, gl.SliceLayout(1, L)), count - 1)
    row = gl.load(order + first + n)
    if TOPK > 0:
        row = gl.where(row < picks, row // TOPK, row - picks)
    k = gl.arange(0, 64, gl.SliceLayout(0, L))
    return xp + row[:, None] * K + k[None, :]


@gluon.jit
def store_gated(
    hp, order, first, count, tile, y, gate_scale, up_scale, WIDTH: gl.constexpr, W: gl.constexpr, BN: gl.constexpr
):
    """silu(gate) * up of 16 W channels to h in fragment order, rounded once."""
    gate, up = gl.split(y.reshape([2, 16 * W, BN]).permute([1, 2, 0]))
    channel = gl.arange(0, 16 * W, gl.SliceLayout(1, gate.type.layout)) // 16
    gate = gate * gl.load(gate_scale + channel)[:, None]
    h = (gate / (1.0 + gl.exp(-gate)) * (up * gl.load(up_scale + channel)[:, None])).to(gl.bfloat16)
    h = h.reshape([W // 4, 4, 4, 2, 2, BN]).permute([5, 0, 2, 3, 1, 4]).reshape([BN, 16 * W])  # n c j h q i
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16 // W, 2 * W], [W, 1], [1, 0])
    h = gl.convert_layout(h, L)
    n = gl.arange(0, BN, gl.SliceLayout(1, L))
    k = gl.arange(0, 16 * W, gl.SliceLayout(0, L))
    row = gl.load(order + first + n, mask=n < count, other=0)
    gl.store(
        hp + row[:, None] * WIDTH + (tile * (16 * W) + k)[None, :], h, mask=(n < count)[:, None] & (k >= 0)[None, :]
    )


@gluon.jit
def store_outputs(yp, order, first, count, tile, y, scale, N: gl.constexpr, W: gl.constexpr, BN: gl.constexpr):
    """32 W outputs of each pick, float32."""
    L: gl.constexpr = y.type.layout
    output = gl.arange(0, 32 * W, gl.SliceLayout(1, L))
    y = y * gl.load(scale + output // 16)[:, None]
    n = gl.arange(0, BN, gl.SliceLayout(0, L))
    row = gl.load(order + first + n, mask=n < count, other=0)
    live = (n < count)[None, :] & (output >= 0)[:, None]
    gl.store(yp + row[None, :] * N + (tile * (32 * W) + output)[:, None], y, mask=live)


@gluon.jit
def store_group(
    out, order, multipliers, first, count, group, y, N: gl.constexpr, W: gl.constexpr, BN: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Row tile group ``group`` of an expert; its multipliers."""
    if GATED:
        gate = multipliers + group * W
        store_gated(out, order, first, count, group, y, gate, gate + N // 32, N // 2, W, BN)
    else:
        store_outputs(out, order, first, count, group, y, multipliers + group * (2 * W), N, W, BN)
