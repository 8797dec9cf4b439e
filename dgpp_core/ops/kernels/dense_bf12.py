"""Decode product of a BF16 matrix kept in 12 bits a weight: the same bits as `dense_bf16`, three quarters of the bytes.

A row's exponents lie in a window of 16, so four bits and a base give them back; sign and mantissa are a byte. The few
weights outside the window (about 8 in 100,000) are put back into the registers before the product: a word for each row
tile and slot is zero, or holds one such weight, or leads to a list of them. The word is the same in all lanes of a
warp, so a warp without one takes a single branch.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.fragments import (
    activation_columns,
    activation_operand,
    activation_pointers,
    bf16_pairs,
    finish,
    first_slots,
    log2,
    mma_layout,
    next_slots,
    operand_a,
    pdl_launch,
    pdl_wait,
    slot_layout,
    slot_pointers,
    tile_of,
    tile_pointers,
)
from dgpp_core.ops.kernels.plan import SERVED, binaries

BYTE_WORDS = gl.constexpr(512)
CODE_WORDS = gl.constexpr(256)

# $4 eight exponent codes (pair p of half i at bits 4 p + 16 i), $5 and $6 sign and mantissa bytes (byte h + 2 i),
# $7 the base exponent in place in both halves.
DECODE_BF12 = gl.constexpr("""{
.reg .b32 u, t, e;
shl.b32 u, $5, 8;
and.b32 t, $5, 0x007F007F;
lop3.b32 t, u, 0x80008000, t, 0xEA;
shl.b32 e, $4, 7;
lop3.b32 t, e, 0x07800780, t, 0xEA;
add.u32 $0, t, $7;
shr.b32 u, $5, 8;
and.b32 t, $5, 0x80008000;
lop3.b32 t, u, 0x007F007F, t, 0xEA;
shl.b32 e, $4, 3;
lop3.b32 t, e, 0x07800780, t, 0xEA;
add.u32 $1, t, $7;
shl.b32 u, $6, 8;
and.b32 t, $6, 0x007F007F;
lop3.b32 t, u, 0x80008000, t, 0xEA;
shr.b32 e, $4, 1;
lop3.b32 t, e, 0x07800780, t, 0xEA;
add.u32 $2, t, $7;
shr.b32 u, $6, 8;
and.b32 t, $6, 0x80008000;
lop3.b32 t, u, 0x007F007F, t, 0xEA;
shr.b32 e, $4, 5;
lop3.b32 t, e, 0x07800780, t, 0xEA;
add.u32 $3, t, $7;
}""")

WORDS_A_LANE = 32


def _patch() -> str:
    """Assembly that puts the listed weights into a lane's 32 words.

    An entry: bits 0-1 its kind (1 the last, 3 more follow, 2 no weight but a link), 2-6 the lane, 7-11 the word, 12 the
    half, 16-31 the bf16; a link has the list's index in bits 2-31. Operands: 32 results, 32 words, 32 times the entry,
    32 numbers of the words (constants, in the order of registers), 32 times the list's address.
    """
    n = WORDS_A_LANE
    entry, numbers, address = f"${2 * n}", 3 * n, f"${4 * n}"
    moves = [f"mov.b32 ${k}, ${n + k};" for k in range(n)]
    puts = [f"setp.eq.u32 p, w, ${numbers + k};\n@p prmt.b32 ${k}, ${k}, v, s;" for k in range(n)]
    return "\n".join(
        [
            "{",
            ".reg .pred p;",
            ".reg .b32 t, v, s, w, l;",
            ".reg .b64 a;",
            *moves,
            f"mov.b32 t, {entry};",
            "setp.eq.u32 p, t, 0;",
            "@p bra.uni DONE;",
            "mov.u32 l, %laneid;",
            f"mov.b64 a, {address};",
            "and.b32 s, t, 3;",
            "setp.ne.u32 p, s, 2;",
            "@p bra.uni PUT;",
            "shr.u32 t, t, 2;",
            "mad.wide.u32 a, t, 4, a;",
            "ld.global.nc.b32 t, [a];",
            "PUT:",
            "bfe.u32 w, t, 7, 5;",
            "bfe.u32 s, t, 2, 5;",
            "setp.ne.u32 p, s, l;",
            f"@p mov.b32 w, {n};",
            "shr.u32 v, t, 16;",
            "and.b32 s, t, 0x1000;",
            "setp.eq.u32 p, s, 0;",
            "selp.b32 s, 0x3254, 0x5410, p;",
            *puts,
            "and.b32 s, t, 3;",
            "setp.eq.u32 p, s, 1;",
            "@p bra.uni DONE;",
            "add.u64 a, a, 4;",
            "ld.global.nc.b32 t, [a];",
            "bra.uni PUT;",
            "DONE:",
            "}",
        ]
    )


PATCH = gl.constexpr(_patch())
PATCH_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * WORDS_A_LANE + ["r"] * (3 * WORDS_A_LANE) + ["l"] * WORDS_A_LANE))


@gluon.constexpr_function
def base_layout(W, R):
    """``[R, 16]``: the two rows of each tile that a lane holds, the same in all warps."""
    registers = [[0, 8]] + [[1 << b, 0] for b in range(log2(R))]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0] for _ in range(log2(W))], [], [R, 16])


@gluon.jit
def quadruple(a, b, c, d):
    """Four equal tensors joined in two new dimensions: ``[..., h, jl]``, a b the h of jl 0, c d those of jl 1."""
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def word_numbers(W: gl.constexpr, R: gl.constexpr):
    """Number 16 c + 8 r + 4 jj + 2 jl + h of each decoded word, constant in every register."""
    L: gl.constexpr = slot_layout(W, R, 256)
    d = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    d, _ = gl.broadcast(d, gl.zeros([W, R, 256], gl.int32, L))
    n = (((d >> 7) * 16) + ((d & 3) * 4)).reshape([W, R, 2, 8, 4, 2, 2])
    return quadruple(n, n + 1, n + 2, n + 3)


@gluon.jit
def words_bf12(signs, codes, base, entries, exceptions, W: gl.constexpr, R: gl.constexpr):
    """A slot as int32 words of two bf16 each, exact: ``[W, R, 2c, 8g, 4q, 2r, 2jj, 2h, 2jl]``.

    Args:
        signs: int32 ``[W, R, 512]``, codes: int32 ``[W, R, 256]``, base: int32 ``[R, 16]``.
        entries: int32 ``[W, R, 32]``, one entry a row tile in every lane; exceptions: the list it may lead to.
    """
    codes = codes.reshape([W, R, 2, 8, 4, 2, 2])  # W R c g q r jj
    L: gl.constexpr = codes.type.layout
    low, high = gl.split(signs.reshape([W, R, 2, 2, 8, 4, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6, 7]))
    low = gl.convert_layout(low, L, assert_trivial=True)
    high = gl.convert_layout(high, L, assert_trivial=True)
    BASE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(6, L))))
    base = gl.convert_layout(base.reshape([R, 2, 8]).permute([0, 2, 1]), BASE, assert_trivial=True)  # R g r
    base = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(base, 0), 2), 4), 6)
    base, _ = gl.broadcast(base, codes)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        DECODE_BF12,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [codes, low, high, base],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    words = quadruple(o0, o1, o2, o3)  # W R c g q r jj h jl
    ENTRY: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(5, gl.SliceLayout(6, L)))
    entry = gl.convert_layout(entries.reshape([W, R, 8, 4]), ENTRY, assert_trivial=True)
    entry = gl.expand_dims(gl.expand_dims(gl.expand_dims(entry, 2), 5), 6)
    entry, _ = gl.broadcast(entry, codes)
    SHAPE: gl.constexpr = [W, R, 2, 8, 4, 2, 2, 2, 2]
    address = gl.full(SHAPE, exceptions.to(gl.int64, bitcast=True), gl.int64, words.type.layout)
    return gl.inline_asm_elementwise(
        PATCH,
        PATCH_CONSTRAINTS,
        [words, quadruple(entry, entry, entry, entry), word_numbers(W, R), address],
        dtype=gl.int32,
        is_pure=True,
        pack=32,
    )


@gluon.jit
def decode_bf12(signs, codes, base, entries, exceptions, W: gl.constexpr, R: gl.constexpr):
    """A slot as the first operand ``[W, 16 R, 128]``, k in the order (c, j, h, q, i)."""
    pairs = bf16_pairs(words_bf12(signs, codes, base, entries, exceptions, W, R))  # W R c g q r jj h jl i
    return operand_a(pairs.permute([0, 1, 5, 3, 2, 6, 8, 7, 4, 9]), W, R * 16, 128)


@gluon.jit(do_not_specialize=["M"])
def dense_bf12(
    signs,
    codes,
    bases,
    entries,
    exceptions,
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
        signs: int32 ``[N/16, K/64, 2, 32, 4]``, codes: int32 ``[N/16, K/64, 32, 4]``, bases: int32 ``[N]``,
            entries: int32 ``[N/16, K/128]``, exceptions: int32 list; all of `pack_bf12`.
        x: int32 ``[M, K/2]``.
    """
    column, program, split = gl.program_id(0) * COLUMNS, gl.program_id(1), gl.program_id(2)
    WARP_K: gl.constexpr = K // (SPLITS * W)
    SLOTS: gl.constexpr = WARP_K // 128
    TILES: gl.constexpr = N // 16
    sign_part, code_part = signs + split * (WARP_K * W * 4), codes + split * (WARP_K * W * 2)
    entry_part = entries + split * (WARP_K * W // 128)
    sign_pointers = slot_pointers(sign_part, program, K * 4, WARP_K * 4, BYTE_WORDS, W, R, TILES, GATED)
    code_pointers = slot_pointers(code_part, program, K * 2, WARP_K * 2, CODE_WORDS, W, R, TILES, GATED)
    entry_pointers = tile_pointers(entry_part, program, K // 128, SLOTS, W, R, TILES, GATED)
    B: gl.constexpr = base_layout(W, R)
    tile = tile_of(program, gl.arange(0, R, gl.SliceLayout(1, B)), R, TILES, GATED)
    base = gl.load(bases + tile[:, None] * 16 + gl.arange(0, 16, gl.SliceLayout(0, B))[None, :])
    sign_slots = first_slots(sign_pointers, AHEAD, BYTE_WORDS, CACHE)
    code_slots = first_slots(code_pointers, AHEAD, CODE_WORDS, CACHE)
    entry_slots = first_slots(entry_pointers, AHEAD, 1, "")
    pdl_launch(PDL)
    pdl_wait(PDL)
    rows = activation_columns(column, M, W, COLUMNS)
    xs = activation_pointers(x + split * (WARP_K * W // 2), rows, K, WARP_K, W, COLUMNS)
    total = gl.zeros([W, R * 16, COLUMNS], gl.float32, mma_layout(W))
    for d in gl.static_range(SLOTS):
        now = gl.load(xs + d * 64)
        a = decode_bf12(sign_slots[0], code_slots[0], base, entry_slots[0], exceptions, W, R)
        total = mma_v2(a, activation_operand(now, W, COLUMNS), total)
        sign_slots = next_slots(sign_slots, sign_pointers, d, AHEAD, SLOTS, BYTE_WORDS, CACHE)
        code_slots = next_slots(code_slots, code_pointers, d, AHEAD, SLOTS, CODE_WORDS, CACHE)
        entry_slots = next_slots(entry_slots, entry_pointers, d, AHEAD, SLOTS, 1, "")
    finish(out, gl.sum(total, 0), program, split, column, M, N, R, COLUMNS, GATED)


@gluon.jit
def expand_bf12(signs, codes, bases, entries, exceptions, out, K: gl.constexpr):
    """The same weights as int32 words of `pack_bf16`, a row tile and slot a program of one warp."""
    tile, slot = gl.program_id(0), gl.program_id(1)
    sign_pointers = slot_pointers(signs + slot * BYTE_WORDS, tile, K * 4, 0, BYTE_WORDS, 1, 1, 1, False)
    code_pointers = slot_pointers(codes + slot * CODE_WORDS, tile, K * 2, 0, CODE_WORDS, 1, 1, 1, False)
    entry_pointers = tile_pointers(entries + slot, tile, K // 128, 0, 1, 1, 1, False)
    B: gl.constexpr = base_layout(1, 1)
    row = (tile + gl.arange(0, 1, gl.SliceLayout(1, B)))[:, None] * 16 + gl.arange(0, 16, gl.SliceLayout(0, B))[None, :]
    words = words_bf12(
        gl.load(sign_pointers), gl.load(code_pointers), gl.load(bases + row), gl.load(entry_pointers), exceptions, 1, 1
    )
    L: gl.constexpr = slot_layout(1, 1, 1024)
    words = words.permute([0, 1, 2, 5, 6, 3, 4, 8, 7]).reshape([1, 1, 1024])  # W R c r jj g q jl h
    target = slot_pointers(out + slot * 1024, tile, K * 8, 0, 1024, 1, 1, 1, False)
    gl.store(target, gl.convert_layout(words, L, assert_trivial=True))


def compile_cases() -> list[CompileCase]:
    """The products in bf12 of the served models."""
    arguments = (*[torch.int32] * 6, torch.float32, 5)
    cases = [CompileCase(f"dense_bf12 {name}", dense_bf12, arguments, meta) for name, meta in binaries("bf12", SERVED)]
    return [*cases, CompileCase("expand_bf12 5120", expand_bf12, (*[torch.int32] * 6,), {"K": 5120, "num_warps": 1})]
