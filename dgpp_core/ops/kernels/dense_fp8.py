"""Decode product of an FP8 (e4m3) matrix whose scales cover blocks of 128 k and at least a row tile."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.fragments import (
    activation_columns,
    activation_pointers,
    bf16_pairs,
    finish,
    first_slots,
    mma_layout,
    next_slots,
    operand_a,
    operand_b,
    pdl_launch,
    pdl_wait,
    slot_pointers,
    tile_of,
)
from dgpp_core.ops.kernels.plan import SERVED, binaries

SLOT_WORDS = gl.constexpr(512)

# Bytes 0, 2 and bytes 1, 3 of a word as pairs of bf16: the fields in place, then times 2^120, exact.
DECODE_E4M3 = gl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $2, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, $2, 4;
lop3.b32 a, b, 0x07F007F0, a, 0xEA;
mul.rn.bf16x2 $0, a, $3;
and.b32 a, $2, 0x80008000;
shr.b32 b, $2, 4;
lop3.b32 a, b, 0x07F007F0, a, 0xEA;
mul.rn.bf16x2 $1, a, $3;
}""")


@gluon.jit
def decode_fp8(words, W: gl.constexpr, R: gl.constexpr):
    """A slot ``[W, R, 512]`` of e4m3 bytes as the first operand ``[W, 16 R, 128]``, k in the order (c, t, h, q, i)."""
    words = words.reshape([W, R, 2, 2, 8, 4, 4])  # W R c r g q t
    scale = gl.full([W, R, 2, 2, 8, 4, 4], 0x7B807B80, gl.int32, words.type.layout)
    even, odd = gl.inline_asm_elementwise(
        DECODE_E4M3, "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = bf16_pairs(gl.join(even, odd))  # W R c r g q t h i
    return operand_a(pairs.permute([0, 1, 3, 4, 2, 6, 7, 5, 8]), W, R * 16, 128)


@gluon.jit
def interleaved_activations(x, W: gl.constexpr, COLUMNS: gl.constexpr):
    """A slot of activations as the second operand, in the order of `decode_fp8`: k = 64 c + 16 q + 4 t + 2 i + h."""
    pairs = bf16_pairs(x.reshape([W, COLUMNS, 2, 4, 4, 2]))  # W n c q t i h
    return operand_b(pairs.permute([0, 2, 4, 6, 3, 5, 1]), W, COLUMNS, 128)


@gluon.jit(do_not_specialize=["M"])
def dense_fp8(
    weights,
    scales,
    x,
    out,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    COLUMNS: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
    AHEAD: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    CACHE: gl.constexpr,
    PDL: gl.constexpr,
):
    """``out[s, m, n]`` = x[m] · weights[n] over split s of K, or gated ``out[m, channel]``.

    Args:
        weights: int32 ``[N/16, K/64, 2, 32, 4]``, scales: float32 ``[N/16, K/128]``; both of `pack_fp8`.
        x: int32 ``[M, K/2]``.
    """
    column, program, split = gl.program_id(0) * COLUMNS, gl.program_id(1), gl.program_id(2)
    WARP_K: gl.constexpr = K // (SPLITS * W)
    SLOTS: gl.constexpr = WARP_K // 128
    L: gl.constexpr = mma_layout(W)
    part = weights + split * (WARP_K * W * 4)
    pointers = slot_pointers(part, program, K * 4, WARP_K * 4, SLOT_WORDS, W, R, N // 16, GATED)
    slots = first_slots(pointers, AHEAD, SLOT_WORDS, CACHE)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    r = gl.arange(0, R * 16, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :] // 16
    tiles = tile_of(program, r if R > 1 else r * 0, R, N // 16, GATED)
    ss = scales + (tiles * (K // 128) + split * (WARP_K * W // 128) + w * SLOTS)
    pdl_launch(PDL)
    pdl_wait(PDL)
    rows = activation_columns(column, M, W, COLUMNS)
    xs = activation_pointers(x + split * (WARP_K * W // 2), rows, K, WARP_K, W, COLUMNS)
    total = gl.zeros([W, R * 16, COLUMNS], gl.float32, L)
    now, scale = gl.load(xs), gl.load(ss)
    for d in gl.static_range(SLOTS):
        then = gl.load(xs + (d + 1) * 64) if d + 1 < SLOTS else now
        next_scale = gl.load(ss + d + 1) if d + 1 < SLOTS else scale
        zero = gl.zeros([W, R * 16, COLUMNS], gl.float32, L)
        product = mma_v2(decode_fp8(slots[0], W, R), interleaved_activations(now, W, COLUMNS), zero)
        total += product * scale[:, :, None]
        slots = next_slots(slots, pointers, d, AHEAD, SLOTS, SLOT_WORDS, CACHE)
        now, scale = then, next_scale
    finish(out, gl.sum(total, 0), program, split, column, M, N, R, COLUMNS, GATED)


def compile_cases() -> list[CompileCase]:
    """The FP8 products of the served models."""
    arguments = (torch.int32, torch.float32, torch.int32, torch.float32, 5)
    return [CompileCase(f"dense_fp8 {name}", dense_fp8, arguments, meta) for name, meta in binaries("fp8", SERVED)]
