"""Prefill products: many rows on the tensor cores, from the same resident weights as the decode products.

A program takes eight row tiles of the weight, one a warp, and up to 256 rows of activations through all of K, a slot of
128 k at a time. Weights go through registers, where codes become bf16 in their natural order of k, into one of two
buffers of shared memory (BF16 is copied there as it is); activations are copied ahead into buffers of their own. While
the tensor cores (`wgmma`) multiply slot d, slot d + 1 is decoded. Where there is no `wgmma` the same loop multiplies
with `mma.sync`.

A row of activations is one column of the product, and every row's sum goes through K in the same order: tiles of fewer
rows give the same bits.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.dense_fp8 import DECODE_E4M3
from dgpp_core.ops.kernels.dense_nvfp4 import decode_nvfp4
from dgpp_core.ops.kernels.fragments import bf16_pairs, log2, slot_layout
from dgpp_core.ops.kernels.plan import SERVED, prefill_meta


@gluon.constexpr_function
def total_layout(W, COLUMNS, WGMMA):
    """Accumulator ``[16 W, COLUMNS]``: a row tile a warp."""
    if WGMMA:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, COLUMNS, 16])
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def natural_layout(W, DEPTH):
    """``[16 W, DEPTH]`` weights, natural k, in the lanes that load them: 16 k of a chunk for each of two rows."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]] + [[0, 64 << b] for b in range(log2(DEPTH // 64))]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16 << b, 0] for b in range(log2(W))], [], [16 * W, DEPTH])


@gluon.constexpr_function
def slot_words(FORM):
    """int32 words of a row tile's slot."""
    return {"bf16": 1024, "fp8": 512, "nvfp4": 256}[FORM]


@gluon.jit
def tile_of_warp(program, w, W: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr):
    """Row tile of warp w, past the last one the last. Gated: half of the warps load gate rows, half their up rows."""
    if GATED:
        HALF: gl.constexpr = W // 2
        return gl.minimum(program * HALF + w % HALF, TILES // 2 - 1) + (w // HALF) * (TILES // 2)
    return gl.minimum(program * W + w, TILES - 1)


@gluon.jit
def place_of(program, n, W: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr):
    """Row tile and half of it that row n of the first operand comes from.

    Gated: rows in the order (tile, half, gate or up, 8 rows), so that one thread ends with a channel's gate and up.
    """
    if GATED:
        return tile_of_warp(program, n // 32 + n // 8 % 2 * (W // 2), W, TILES, GATED), n // 16 % 2
    return tile_of_warp(program, n // 16, W, TILES, GATED), n // 8 % 2


@gluon.jit
def row_tiles(
    base,
    program,
    TILE_WORDS: gl.constexpr,
    WORDS: gl.constexpr,
    W: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Pointers to slot 0 of W row tiles, ``[W, 1, WORDS]``."""
    L: gl.constexpr = slot_layout(W, 1, WORDS)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    r = gl.arange(0, 1, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return base + tile_of_warp(program, w, W, TILES, GATED).to(gl.int64) * TILE_WORDS + r + word


@gluon.jit
def bf16_pointers(
    base,
    program,
    K: gl.constexpr,
    W: gl.constexpr,
    TILES: gl.constexpr,
    DEPTH: gl.constexpr,
    GATED: gl.constexpr,
):
    """Pointers to the weights of slot 0 of W row tiles in natural order, ``[16 W, DEPTH]`` bfloat16."""
    L: gl.constexpr = natural_layout(W, DEPTH)
    n = gl.arange(0, 16 * W, gl.SliceLayout(1, L))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, L))
    tile, half = place_of(program, n, W, TILES, GATED)
    row = tile.to(gl.int64) * (16 * K) + half * 512 + n % 8 * 32
    column = k // 64 * 1024 + k // 8 % 2 * 256 + k // 16 % 4 * 8 + k % 8
    return base + row[:, None] + column[None, :]


@gluon.jit
def natural_fp8(words, W: gl.constexpr):
    """``[W, 1, 512]`` words of `pack_fp8` to bf16 ``[16 W, 128]`` in natural order."""
    words = words.reshape([W, 1, 2, 2, 8, 4, 4])  # W R c r g q t
    power = gl.full([W, 1, 2, 2, 8, 4, 4], 0x7B807B80, gl.int32, words.type.layout)
    even, odd = gl.inline_asm_elementwise(
        DECODE_E4M3, "=r,=r,r,r", [words, power], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = bf16_pairs(gl.join(even, odd))  # W R c r g q t h i, k = 4 t + 2 i + h
    return pairs.permute([0, 1, 3, 4, 2, 5, 6, 8, 7]).reshape([W * 16, 128])


@gluon.jit
def natural_nvfp4(codes, scales, W: gl.constexpr):
    """``[W, 1, 256]`` codes and ``[W, 1, 32]`` scales of `pack_nvfp4` to the same, in units of 2^-8."""
    a0, a1, a2, a3 = decode_nvfp4(codes, scales, W, 1)
    pairs = bf16_pairs(gl.join(gl.join(a0, a2), gl.join(a1, a3)))  # W R c g q h r j1 j0 i
    return pairs.permute([0, 1, 6, 3, 2, 4, 7, 8, 5, 9]).reshape([W * 16, 128])


@gluon.jit
def load_slot(pointers, scale_pointers, d, FORM: gl.constexpr):
    """Words of slot d, and its scales where the form decodes with them."""
    words = gl.load(pointers + d * slot_words(FORM), cache_modifier=".cg")
    return words, gl.load(scale_pointers + d * 32, cache_modifier=".cg") if FORM == "nvfp4" else d


@gluon.jit
def decode_into(buffer, words, scales, FORM: gl.constexpr, W: gl.constexpr, WGMMA: gl.constexpr, GATED: gl.constexpr):
    """A slot, decoded, into shared memory, where the tensor cores may read it after the next barrier."""
    a = natural_fp8(words, W) if FORM == "fp8" else natural_nvfp4(words, scales, W)
    if GATED:
        a = a.reshape([2, W // 2, 2, 8, 128]).permute([1, 2, 0, 3, 4]).reshape([16 * W, 128])
    buffer.store(a)
    if WGMMA:
        fence_async_shared()


@gluon.jit
def gated_rows(y, W: gl.constexpr, COLUMNS: gl.constexpr):
    """``[16 W, COLUMNS]`` in the gated order of `place_of` to ``silu(gate) up`` ``[8 W, COLUMNS]``."""
    gate, up = gl.split(y.reshape([W, 2, 8, COLUMNS]).permute([0, 2, 3, 1]))
    return (gate / (1.0 + gl.exp(-gate)) * up).reshape([8 * W, COLUMNS])


@gluon.jit
def store_rows(out, y, row, column, M, N: gl.constexpr, W: gl.constexpr, HEIGHT: gl.constexpr, COLUMNS: gl.constexpr):
    """``y`` ``[HEIGHT, COLUMNS]`` to ``out[column + c, row + r]``, in runs of 16 bytes and more."""
    L: gl.constexpr = gl.BlockedLayout([8, 1], [HEIGHT // 8, 256 // HEIGHT], [1, W], [0, 1])
    y = gl.convert_layout(y.to(out.dtype.element_ty), L)
    r = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, L))
    c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    mask = (c < M)[None, :] & (r < N)[:, None]
    gl.store(out + c.to(gl.int64)[None, :] * N + r[:, None], y, mask=mask)


@gluon.jit(do_not_specialize=["M"])
def prefill_product(
    weights,
    scales,
    multipliers,
    x,
    out,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    FORM: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    W: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
    GATED: gl.constexpr,
):
    """``out[m, n]`` = x[m] · weights[n], or gated ``out[m, channel]``, rounded once to the dtype of ``out``.

    Args:
        weights: bfloat16 of `pack_bf16`, or words of `pack_fp8` or `pack_nvfp4`; scales (FP8: float32 ``[N/16,
            K/128]``) and multipliers of the forms that have them, any pointer otherwise.
        x: bfloat16 ``[M, K]``.
        DEPTH: k of a slot: 128, or 64 for BF16.
        STAGES: slots of activations in shared memory.
    """
    column, program = gl.program_id(0) * COLUMNS, gl.program_id(1)
    SLOTS: gl.constexpr = K // DEPTH
    TILES: gl.constexpr = N // 16
    COPIED: gl.constexpr = FORM == "bf16"
    L: gl.constexpr = total_layout(W, COLUMNS, WGMMA)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    A_STAGES: gl.constexpr = STAGES if COPIED else 2
    xb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, DEPTH], SHARED)
    wb = gl.allocate_shared_memory(gl.bfloat16, [A_STAGES, 16 * W, DEPTH], SHARED)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [W, 1], [1, 0])
    m = gl.minimum(column + gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY)), M - 1)
    xs = x + (m.to(gl.int64)[:, None] * K + gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))[None, :])
    if COPIED:
        ws = bf16_pointers(weights, program, K, W, TILES, DEPTH, GATED)
    else:
        ws = row_tiles(weights, program, SLOTS * slot_words(FORM), slot_words(FORM), W, TILES, GATED)
        ss = row_tiles(scales, program, SLOTS * 32, 32, W, TILES, GATED) if FORM == "nvfp4" else ws
    tile, _ = place_of(program, gl.arange(0, 16 * W, gl.SliceLayout(1, L)), W, TILES, GATED)
    for s in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(xb.index(s), xs + min(s, SLOTS - 1) * DEPTH)
        if COPIED:
            async_copy.async_copy_global_to_shared(wb.index(s), ws + min(s, SLOTS - 1) * (16 * DEPTH))
        async_copy.commit_group()
    if not COPIED:
        words, slot_scales = load_slot(ws, ss, 0, FORM)
        decode_into(wb.index(0), words, slot_scales, FORM, W, WGMMA, GATED)
        words, slot_scales = load_slot(ws, ss, min(1, SLOTS - 1), FORM)
    total = gl.zeros([16 * W, COLUMNS], gl.float32, L)
    if WGMMA and FORM != "fp8":
        running = warpgroup_mma_init(total)
    # A bound that the compiler cannot know: short loops that it unrolls whole end Triton 3.6's ptxas with a fault.
    for d in range(SLOTS + gl.minimum(M, 0)):
        async_copy.wait_group(STAGES - 2)
        a, b = wb.index(d % A_STAGES), xb.index(d % STAGES).permute((1, 0))
        if WGMMA:
            fence_async_shared()
            if FORM == "fp8":
                part = warpgroup_mma(a, b, total, use_acc=False, is_async=True)
            else:
                running = warpgroup_mma_wait(0, deps=[running])
                running = warpgroup_mma(a, b, running, is_async=True)
        else:
            start = gl.zeros([16 * W, COLUMNS], gl.float32, L) if FORM == "fp8" else total
            part = mma_v2(a.load(gl.DotOperandLayout(0, L, 2)), b.load(gl.DotOperandLayout(1, L, 2)), start)
        ahead = d + STAGES - 1
        from_slot = gl.minimum(ahead, SLOTS - 1)
        async_copy.async_copy_global_to_shared(xb.index(ahead % STAGES), xs + from_slot * DEPTH)
        if COPIED:
            async_copy.async_copy_global_to_shared(wb.index(ahead % STAGES), ws + from_slot * (16 * DEPTH))
        async_copy.commit_group()
        if not COPIED:
            then, then_scales = load_slot(ws, ss, gl.minimum(d + 2, SLOTS - 1), FORM)
            decode_into(wb.index((d + 1) % 2), words, slot_scales, FORM, W, WGMMA, GATED)
            words, slot_scales = then, then_scales
        if FORM == "fp8":
            block = gl.load(scales + tile * SLOTS + d)
            if WGMMA:
                part = warpgroup_mma_wait(0, deps=[part])
            total += part * block[:, None]
        elif not WGMMA:
            total = part
    async_copy.wait_group(0)
    if WGMMA and FORM != "fp8":
        total = warpgroup_mma_wait(0, deps=[running])
    if FORM == "nvfp4":
        total = total * gl.load(multipliers + tile)[:, None]
    if GATED:
        store_rows(out, gated_rows(total, W, COLUMNS), program * (8 * W), column, M, N // 2, W, 8 * W, COLUMNS)
    else:
        store_rows(out, total, program * (16 * W), column, M, N, W, 16 * W, COLUMNS)


def compile_cases() -> list[CompileCase]:
    """The prefill products of the served models, and one of few slots."""
    cases = []
    for form, rows, columns, gated in (*SERVED, ("bf16", 256, 384, False)):
        if form == "bf12" or rows > 65536:
            continue
        weights = torch.bfloat16 if form == "bf16" else torch.int32
        scales = torch.float32 if form == "fp8" else torch.int32
        for target in (90, 121):
            for m in (1, 4096):
                meta = prefill_meta(form, rows, columns, m, target, gated)
                kind = f"{form} {rows}x{columns}{' gated' if gated else ''}"
                name = f"prefill {kind}, tiles of {meta['COLUMNS']} rows, {'wgmma' if target == 90 else 'mma.sync'}"
                arguments = (weights, scales, torch.float32, torch.bfloat16, torch.bfloat16, 5)
                cases.append(CompileCase(name, prefill_product, arguments, meta, (target,)))
    return cases
