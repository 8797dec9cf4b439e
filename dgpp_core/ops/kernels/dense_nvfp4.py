"""Decode product of an NVFP4 matrix, codes and scales decoded by a few integer operations a word."""

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

CODE_WORDS = gl.constexpr(256)
SCALE_WORDS = gl.constexpr(32)

# A word's eight codes as four pairs of bf16 in units of 2^-126, each pair times its block's scale.
DECODE_CODES = gl.constexpr("""{
.reg .b32 a, b, c, d;
and.b32 a, $4, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
shf.r.wrap.b32 b, $4, $4, 3;
and.b32 b, b, 0x81C081C0;
mul.rn.bf16x2 $1, b, $5;
shf.r.wrap.b32 c, $4, $4, 6;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 $2, c, $5;
and.b32 d, $4, 0x001B001B;
mul.lo.u32 d, d, 0x1084;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 $3, d, $5;
}""")

# Four scale codes of a byte each to bf16 pairs: scale · 2^118.
DECODE_SCALES = gl.constexpr("""{
.reg .b32 a;
prmt.b32 a, $4, 0, 0x4040;
mad.lo.u32 $0, a, 16, 0x75807580;
prmt.b32 a, $4, 0, 0x4141;
mad.lo.u32 $1, a, 16, 0x75807580;
prmt.b32 a, $4, 0, 0x4242;
mad.lo.u32 $2, a, 16, 0x75807580;
prmt.b32 a, $4, 0, 0x4343;
mad.lo.u32 $3, a, 16, 0x75807580;
}""")


@gluon.jit
def decode_nvfp4(codes, scales, W: gl.constexpr, R: gl.constexpr):
    """Pairs of bf16 ``[W, R, 2c, 8g, 4q, 2h, 2r]`` of the four steps, as int32, in units of 2^-8.

    Args:
        codes: int32 ``[W, R, 256]``, a slot of scattered codes.
        scales: int32 ``[W, R, 32]``, byte ``2 c + r`` the scale code of row half r and chunk c.
    """
    words = codes.reshape([W, R, 2, 8, 4, 2, 2])
    L: gl.constexpr = words.type.layout
    s00, s01, s10, s11 = gl.inline_asm_elementwise(
        DECODE_SCALES, "=r,=r,=r,=r,r", [scales], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    s = gl.join(gl.join(s00, s10), gl.join(s01, s11)).reshape([W, R, 8, 4, 2, 2]).permute([0, 1, 4, 2, 3, 5])
    s = gl.convert_layout(s, gl.SliceLayout(5, L), assert_trivial=True)  # W R c g q r
    s, _ = gl.broadcast(gl.expand_dims(s, 5), words)
    return gl.inline_asm_elementwise(
        DECODE_CODES,
        "=r,=r,=r,=r,r,r",
        [words, s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def step_operand(words, W: gl.constexpr, R: gl.constexpr):
    """Step j of both chunks of a slot as the first operand: ``[W, 16 R, 32]``."""
    pairs = bf16_pairs(words)  # W R c g q h r i
    return operand_a(pairs.permute([0, 1, 6, 3, 2, 5, 4, 7]), W, R * 16, 32)


@gluon.jit
def step_activations(pairs, W: gl.constexpr, COLUMNS: gl.constexpr):
    """``[W, COLUMNS, 2c, 4q, 2h, 2i]`` as the second operand: ``[W, 32, COLUMNS]``."""
    return operand_b(pairs.permute([0, 2, 4, 3, 5, 1]), W, COLUMNS, 32)


@gluon.jit
def split_steps(x, W: gl.constexpr, COLUMNS: gl.constexpr):
    """A slot of activations as the second operands of its four steps."""
    pairs = bf16_pairs(x.reshape([W, COLUMNS, 2, 4, 2, 2, 2])).permute([0, 1, 2, 3, 6, 7, 4, 5])  # W n c q h i j1 j0
    even, odd = gl.split(pairs)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        step_activations(x0, W, COLUMNS),
        step_activations(x1, W, COLUMNS),
        step_activations(x2, W, COLUMNS),
        step_activations(x3, W, COLUMNS),
    )


@gluon.jit
def nvfp4_slot(total, codes, scales, x, W: gl.constexpr, R: gl.constexpr, COLUMNS: gl.constexpr):
    """``total`` plus the product of one slot."""
    b0, b1, b2, b3 = split_steps(x, W, COLUMNS)
    a0, a1, a2, a3 = decode_nvfp4(codes, scales, W, R)
    total = mma_v2(step_operand(a0, W, R), b0, total)
    total = mma_v2(step_operand(a1, W, R), b1, total)
    total = mma_v2(step_operand(a2, W, R), b2, total)
    return mma_v2(step_operand(a3, W, R), b3, total)


@gluon.jit
def nvfp4_product(
    codes,
    scales,
    first_codes,
    first_scales,
    xs,
    SLOTS: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
    COLUMNS: gl.constexpr,
    AHEAD: gl.constexpr,
    CACHE: gl.constexpr,
):
    """``[16 R, COLUMNS]`` float32 in units of 2^-8 and the matrix's multiplier: the product over all warps' slots.

    Args:
        codes, scales, xs: pointers to every warp's first slot.
        first_codes, first_scales: tuples of the first AHEAD slots, loads in flight.
    """
    total = gl.zeros([W, R * 16, COLUMNS], gl.float32, mma_layout(W))
    now = gl.load(xs)
    for d in gl.static_range(SLOTS):
        then = gl.load(xs + (d + 1) * 64) if d + 1 < SLOTS else now
        total = nvfp4_slot(total, first_codes[0], first_scales[0], now, W, R, COLUMNS)
        first_codes = next_slots(first_codes, codes, d, AHEAD, SLOTS, CODE_WORDS, CACHE)
        first_scales = next_slots(first_scales, scales, d, AHEAD, SLOTS, SCALE_WORDS, CACHE)
        now = then
    return gl.sum(total, 0)


@gluon.jit(do_not_specialize=["M"])
def dense_nvfp4(
    codes,
    scales,
    multipliers,
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
        codes: int32 ``[N/16, K/64, 32, 4]``, scales: int32 ``[N/16, K/128, 32]``, multipliers: float32 ``[N/16]``,
            one a row tile, times 2^8; all of `pack_nvfp4`.
        x: int32 ``[M, K/2]``.
    """
    column, program, split = gl.program_id(0) * COLUMNS, gl.program_id(1), gl.program_id(2)
    WARP_K: gl.constexpr = K // (SPLITS * W)
    SLOTS: gl.constexpr = WARP_K // 128
    code_part, scale_part = codes + split * (WARP_K * W * 2), scales + split * (WARP_K * W // 4)
    code_pointers = slot_pointers(code_part, program, K * 2, WARP_K * 2, CODE_WORDS, W, R, N // 16, GATED)
    scale_pointers = slot_pointers(scale_part, program, K // 4, WARP_K // 4, SCALE_WORDS, W, R, N // 16, GATED)
    first_codes = first_slots(code_pointers, AHEAD, CODE_WORDS, CACHE)
    first_scales = first_slots(scale_pointers, AHEAD, SCALE_WORDS, CACHE)
    r = gl.arange(0, R * 16, gl.SliceLayout(1, gl.SliceLayout(0, mma_layout(W)))) // 16
    multiplier = gl.load(multipliers + tile_of(program, r, R, N // 16, GATED))
    pdl_launch(PDL)
    pdl_wait(PDL)
    rows = activation_columns(column, M, W, COLUMNS)
    xs = activation_pointers(x + split * (WARP_K * W // 2), rows, K, WARP_K, W, COLUMNS)
    y = nvfp4_product(code_pointers, scale_pointers, first_codes, first_scales, xs, SLOTS, W, R, COLUMNS, AHEAD, CACHE)
    finish(out, y * multiplier[:, None], program, split, column, M, N, R, COLUMNS, GATED)


def compile_cases() -> list[CompileCase]:
    """The NVFP4 products of the served models."""
    arguments = (torch.int32, torch.int32, torch.float32, torch.int32)
    return [
        CompileCase(
            f"dense_nvfp4 {name}",
            dense_nvfp4,
            (*arguments, torch.bfloat16 if meta["GATED"] else torch.float32, 5),
            meta,
        )
        for name, meta in binaries("nvfp4", SERVED)
    ]
