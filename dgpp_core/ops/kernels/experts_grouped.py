"""Routed experts of prefill rows: products of an expert's weights with all rows that chose it, on tensor cores.

A program multiplies 2 W row tiles of one expert with one tile of BN picks, all of K, in one chain of accumulations: a
pick is a column, so its bits depend on neither BN nor its companions. Weights are decoded in registers, where fragment
order is what both `wgmma` (its register operand) and `mma.sync` want; activations come through a ring in shared
memory, gathered row by row. They have the k order of the fragments (`fragment_order`): within a chunk of 64, position
16 j + 8 h + 2 q + i holds k = 16 q + 4 j + 2 h + i.

While the tensor cores work on a chunk, the next one's weights are decoded.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dgpp_core.ops.kernels.dense_nvfp4 import DECODE_CODES, DECODE_SCALES
from dgpp_core.ops.kernels.fragments import bf16_pairs, limited, log2

CHUNK = gl.constexpr(64)


@gluon.constexpr_function
def grouped_layout(W, BN, WGMMA):
    """Accumulator ``[32 W, BN]``: warp w has rows 16 w .. 16 w + 15 of each half."""
    if WGMMA:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BN, 16])
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def word_layout(W, WORDS):
    """``[2, W, WORDS]``: two row tiles a warp; WORDS 128 (codes of a chunk) or 32 (scales of two)."""
    each = WORDS // 32
    registers = [[0, 0, 1 << b] for b in range(log2(each))] + [[1, 0, 0]]
    lanes = [[0, 0, each << b] for b in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 1 << b, 0] for b in range(log2(W))], [], [2, W, WORDS])


@gluon.jit
def word_pointers(words, tile, TILE_WORDS: gl.constexpr, STEP: gl.constexpr, W: gl.constexpr, WORDS: gl.constexpr):
    """Pointers to the first words of tiles tile + w and tile + STEP + w."""
    L: gl.constexpr = word_layout(W, WORDS)
    r = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return words + ((tile + r * STEP + w) * TILE_WORDS + word)


@gluon.jit
def decode_chunk(codes, scales, c: gl.constexpr, W: gl.constexpr):
    """Chunk c of a slot: int32 ``[2, W, 8g, 4q, 2h, 2r]`` of MMA steps 0 to 3, in units of 2^-8."""
    words = codes.reshape([2, W, 8, 4, 2, 2])
    s00, s01, s10, s11 = gl.inline_asm_elementwise(
        DECODE_SCALES, "=r,=r,=r,=r,r", [scales], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    s = gl.join(s00, s01) if c == 0 else gl.join(s10, s11)
    L: gl.constexpr = words.type.layout
    s = gl.convert_layout(s.reshape([2, W, 8, 4, 2]), gl.SliceLayout(4, L), assert_trivial=True)
    s, _ = gl.broadcast(gl.expand_dims(s, 4), words)
    return gl.inline_asm_elementwise(
        DECODE_CODES,
        "=r,=r,=r,=r,r,r",
        [words, s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def chunk_operand(a0, a1, a2, a3, W: gl.constexpr, L: gl.constexpr):
    """The four steps as the A operand ``[32 W, 64]``."""
    a = bf16_pairs(gl.join(gl.join(a0, a2), gl.join(a1, a3)))  # R W g q h r j j i
    a = a.permute([0, 1, 5, 2, 6, 7, 4, 3, 8]).reshape([32 * W, 64])
    return gl.convert_layout(a, gl.DotOperandLayout(0, L, 2), assert_trivial=True)


@gluon.jit
def copy_chunk(rings, sources, chunk: gl.constexpr, slot, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Start to copy chunk ``2 slot + chunk``: activations, codes and, with the even one, the slot's scales.

    Past the end the last one comes again, so that every turn of the loop has the same number of copies in flight.
    """
    x_ring, code_ring, scale_ring = rings
    x, codes, scales = sources
    number = 2 * slot + chunk
    source = gl.minimum(number, CHUNKS - 1)
    async_copy.async_copy_global_to_shared(x_ring.index(number % STAGES), x + source * CHUNK)
    async_copy.async_copy_global_to_shared(code_ring.index(number % STAGES), codes + source * 128)
    if chunk % 2 == 0:
        place = scale_ring.index((number // 2) % (STAGES // 2))
        async_copy.async_copy_global_to_shared(place, scales + (source // 2) * 32)
    async_copy.commit_group()


@gluon.jit
def load_chunk(rings, number, W: gl.constexpr, STAGES: gl.constexpr):
    """Codes and scales of a chunk that has arrived, each lane the words that it copied."""
    codes = rings[1].index(number % STAGES).load(word_layout(W, 128))
    scales = rings[2].index((number // 2) % (STAGES // 2)).load(word_layout(W, 32))
    return codes, scales


@gluon.jit
def multiply_chunk(acc, a, b, L: gl.constexpr, WGMMA: gl.constexpr):
    """Start the product of a chunk; the product of the chunk before is finished on return."""
    a0, a1, a2, a3 = a
    operand = chunk_operand(a0, a1, a2, a3, acc.shape[0] // 32, L)
    if WGMMA:
        acc = warpgroup_mma(operand, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
    else:
        acc = mma_v2(operand, b.load(gl.DotOperandLayout(1, L, 2)), acc)
    return acc


@gluon.jit
def turn(
    acc,
    a,
    rings,
    sources,
    chunk: gl.constexpr,
    slot,
    CHUNKS: gl.constexpr,
    W: gl.constexpr,
    L: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
    FENCE: gl.constexpr,
):
    """Multiply chunk ``2 slot + chunk``, decoded in ``a``, and decode the next.

    Its copy and that of the next chunk have arrived after the wait, so one fence serves two chunks. The place that is
    copied to was read two chunks ago: that product is finished, in every warp since the barrier behind the wait.
    """
    number = 2 * slot + chunk
    async_copy.wait_group(STAGES - 4)
    codes, scales = load_chunk(rings, number + 1, W, STAGES)
    if FENCE and chunk == 0:
        fence_async_shared()
    acc = multiply_chunk(acc, a, rings[0].index(number % STAGES).permute([1, 0]), L, WGMMA)
    copy_chunk(rings, sources, chunk + STAGES - 2, slot, CHUNKS, STAGES)
    return acc, decode_chunk(codes, scales, (chunk + 1) % 2, W)


@gluon.jit
def grouped_product(
    codes,
    scales,
    x,
    K: gl.constexpr,
    W: gl.constexpr,
    L: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
    FENCE: gl.constexpr,
):
    """``[32 W, BN]`` from pointers to the first codes, scales and activations; K in one chain, chunk by chunk."""
    CHUNKS: gl.constexpr = K // 64
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rings = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.int32, [STAGES, 2, W, 128], PLAIN),
        gl.allocate_shared_memory(gl.int32, [STAGES // 2, 2, W, 32], PLAIN),
    )
    sources = (x, codes, scales)
    for chunk in gl.static_range(STAGES - 2):
        copy_chunk(rings, sources, chunk, 0, CHUNKS, STAGES)
    async_copy.wait_group(STAGES - 3)
    first_codes, first_scales = load_chunk(rings, 0, W, STAGES)
    a = decode_chunk(first_codes, first_scales, 0, W)
    acc = gl.zeros([32 * W, BN], gl.float32, L)
    for slot in range(CHUNKS // 2):
        acc, b = turn(acc, a, rings, sources, 0, slot, CHUNKS, W, L, STAGES, WGMMA, FENCE)
        acc, a = turn(acc, b, rings, sources, 1, slot, CHUNKS, W, L, STAGES, WGMMA, FENCE)
    if WGMMA:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    async_copy.wait_group(0)  # and a barrier: what follows may use the rings' memory
    return acc


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
    hp,
    order,
    first,
    count,
    tile,
    y,
    gate_scale,
    up_scale,
    WIDTH: gl.constexpr,
    W: gl.constexpr,
    BN: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """silu(gate) * up of 16 W channels to h in fragment order, rounded once."""
    gate, up = gl.split(y.reshape([2, 16 * W, BN]).permute([1, 2, 0]))
    channel = gl.arange(0, 16 * W, gl.SliceLayout(1, gate.type.layout)) // 16
    gate, up = gate * gl.load(gate_scale + channel)[:, None], up * gl.load(up_scale + channel)[:, None]
    gate, up = limited(gate, up, LIMIT)
    h = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
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


@gluon.jit(do_not_specialize=["picks"])
def grouped_experts(
    wp,
    sp,
    multipliers,
    xp,
    out,
    order,
    tiles,
    picks,
    N: gl.constexpr,
    K: gl.constexpr,
    TOPK: gl.constexpr,
    W: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    WGMMA: gl.constexpr,
    FENCE: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Tile program_id(1) of picks times row tiles of its expert.

    Args:
        wp: int32 codes and sp: int32 scales of all experts, ``[N, K]`` each; multipliers: float32, one a row tile.
        xp: bf16, ``[rows, K]`` in fragment order: x when GATED, otherwise h, a row a pick.
        out: bf16 h ``[picks, N / 2]`` in fragment order when GATED, otherwise float32 y ``[picks, N]``.
        order: int32, picks by expert; tiles: int32 ``[T, 3]`` expert (-1: none), first place in ``order``, picks.
        picks: of routed experts; later ones are of the shared expert, one a row.
        FENCE: order the copies, of the generic proxy, before `wgmma` reads them, as PTX's memory model asks.
        LIMIT: as in `limited`.
    """
    tile = gl.program_id(0)
    expert = gl.load(tiles + gl.program_id(1) * 3)
    if expert >= 0:
        first = gl.load(tiles + gl.program_id(1) * 3 + 1)
        count = gl.load(tiles + gl.program_id(1) * 3 + 2)
        STEP: gl.constexpr = N // 32 if GATED else W
        start = tile * W if GATED else tile * (2 * W)
        entry = expert.to(gl.int64)
        codes = word_pointers(wp + entry * (N * K // 8), start, K * 2, STEP, W, 128)
        scales = word_pointers(sp + entry * (N * K // 64), start, K // 4, STEP, W, 32)
        scale = multipliers + entry * (N // 16) + start
        L: gl.constexpr = grouped_layout(W, BN, WGMMA)
        x = gathered_pointers(xp, order, first, count, picks, K, TOPK if GATED else 0, W, BN)
        y = grouped_product(codes, scales, x, K, W, L, BN, STAGES, WGMMA, FENCE)
        if GATED:
            store_gated(out, order, first, count, tile, y, scale, scale + STEP, N // 2, W, BN, LIMIT)
        else:
            store_outputs(out, order, first, count, tile, y, scale, N, W, BN)


@triton.jit
def fragment_order(xp, out, K: tl.constexpr, BLOCK: tl.constexpr):
    """Row program_id(0) of bf16 x in fragment order, by pairs: int32 ``[M, K / 2]``, 8j + 4h + q from 8q + 2j + h."""
    m = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = p % 32
    source = p - inside + (inside % 4) * 8 + (inside // 8) * 2 + (inside // 4) % 2
    live = p < K // 2
    tl.store(out + m * (K // 2) + p, tl.load(xp + m * (K // 2) + source, mask=live, other=0), mask=live)
