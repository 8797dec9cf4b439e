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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dgpp_core.ops.kernels.dense_nvfp4 import DECODE_CODES, DECODE_SCALES
from dgpp_core.ops.kernels.experts_rows import gathered_pointers, store_group
from dgpp_core.ops.kernels.fragments import bf16_pairs, log2

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
def copy_chunk(
    rings, sources, chunk: gl.constexpr, slot, STEPS: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr,
    COUNT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start to copy chunk ``2 slot + chunk``: activations, codes and, with the even one, the slot's scales.

    The chunks of COUNT row tile groups, TILES tiles apart, follow each other. Past the end the last one comes again,
    so that every turn of the loop has the same number of copies in flight.
    """
    x_ring, code_ring, scale_ring = rings
    x, codes, scales = sources
    number = 2 * slot + chunk
    source = gl.minimum(number, STEPS - 1)
    k = source % CHUNKS if COUNT > 1 else source
    group = source // CHUNKS if COUNT > 1 else 0
    async_copy.async_copy_global_to_shared(x_ring.index(number % STAGES), x + k * CHUNK)
    async_copy.async_copy_global_to_shared(
        code_ring.index(number % STAGES), codes + (group * (TILES * CHUNKS * 128) + k * 128)
    )
    if chunk % 2 == 0:
        place = scale_ring.index((number // 2) % (STAGES // 2))
        words = scales + (group * (TILES * CHUNKS * 16) + (k // 2) * 32)
        async_copy.async_copy_global_to_shared(place, words)
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
    acc, a, rings, sources, chunk: gl.constexpr, slot, W: gl.constexpr, L: gl.constexpr, CHUNKS: gl.constexpr,
    TILES: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, WGMMA: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Multiply chunk ``2 slot + chunk``, decoded in ``a``, and decode the next.

    Its copy and that of the next chunk have arrived after the wait. The place that is copied to was read two chunks
    ago: that product is finished, in every warp since the barrier behind the wait.
    """
    number = 2 * slot + chunk
    async_copy.wait_group(STAGES - 4)
    codes, scales = load_chunk(rings, number + 1, W, STAGES)
    if FENCE:
        fence_async_shared()
    acc = multiply_chunk(acc, a, rings[0].index(number % STAGES).permute([1, 0]), L, WGMMA)
    copy_chunk(rings, sources, chunk + STAGES - 2, slot, COUNT * CHUNKS, CHUNKS, TILES, COUNT, STAGES)
    return acc, decode_chunk(codes, scales, (chunk + 1) % 2, W)


@gluon.jit
def group_product(
    a, rings, sources, group, W: gl.constexpr, L: gl.constexpr, BN: gl.constexpr, CHUNKS: gl.constexpr,
    TILES: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, WGMMA: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """``[32 W, BN]`` of one row tile group, K in one chain, and the first chunk of the next, decoded."""
    acc = gl.zeros([32 * W, BN], gl.float32, L)
    for slot in range(group * (CHUNKS // 2), (group + 1) * (CHUNKS // 2)):
        acc, b = turn(acc, a, rings, sources, 0, slot, W, L, CHUNKS, TILES, COUNT, STAGES, WGMMA, FENCE)
        acc, a = turn(acc, b, rings, sources, 1, slot, W, L, CHUNKS, TILES, COUNT, STAGES, WGMMA, FENCE)
    if WGMMA:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    return acc, a


@gluon.jit
def make_rings(W: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of activations, codes and scales."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], SWIZZLED),
        gl.allocate_shared_memory(gl.int32, [STAGES, 2, W, 128], PLAIN),
        gl.allocate_shared_memory(gl.int32, [STAGES // 2, 2, W, 32], PLAIN),
    )


@gluon.jit
def serve_tile(
    tensors, places, expert, picks, N: gl.constexpr, K: gl.constexpr, TOPK: gl.constexpr,
    W: gl.constexpr, BN: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    WGMMA: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """COUNT groups of row tiles of one expert times up to BN picks; arguments as in `grouped_experts`."""
    wp, sp, multipliers, xp, out = tensors
    order, first, count = places
    STEP: gl.constexpr = N // 32 if GATED else W
    TILES: gl.constexpr = W if GATED else 2 * W
    CHUNKS: gl.constexpr = K // 64
    L: gl.constexpr = grouped_layout(W, BN, WGMMA)
    group = gl.program_id(0) * COUNT
    entry = expert.to(gl.int64)
    codes = word_pointers(wp + entry * (N * K // 8), group * TILES, K * 2, STEP, W, 128)
    scales = word_pointers(sp + entry * (N * K // 64), group * TILES, K // 4, STEP, W, 32)
    factors = multipliers + entry * (N // 16)
    x = gathered_pointers(xp, order, first, count, picks, K, TOPK if GATED else 0, W, BN)
    rings = make_rings(W, BN, STAGES)
    sources = (x, codes, scales)
    for chunk in gl.static_range(STAGES - 2):
        copy_chunk(rings, sources, chunk, 0, COUNT * CHUNKS, CHUNKS, TILES, COUNT, STAGES)
    async_copy.wait_group(STAGES - 3)
    first_codes, first_scales = load_chunk(rings, 0, W, STAGES)
    a = decode_chunk(first_codes, first_scales, 0, W)
    if COUNT == 1:
        y, a = group_product(a, rings, sources, 0, W, L, BN, CHUNKS, TILES, COUNT, STAGES, WGMMA, FENCE)
        async_copy.wait_group(0)  # and a barrier: what is stored may take its way through the rings' memory
        store_group(out, order, factors, first, count, group, y, N, W, BN, GATED)
    else:
        for i in range(COUNT):
            y, a = group_product(a, rings, sources, i, W, L, BN, CHUNKS, TILES, COUNT, STAGES, WGMMA, FENCE)
            store_group(out, order, factors, first, count, group + i, y, N, W, BN, GATED)
        async_copy.wait_group(0)


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
    COUNT: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    WGMMA: gl.constexpr,
    FENCE: gl.constexpr,
    HALF: gl.constexpr,
):
    """Tile program_id(1) of picks times COUNT groups of row tiles of its expert: 2 W, or W of gate and W of up.

    Several groups share one stream of copies, and the results of one are written while the next is fetched. With HALF
    a tile of at most BN / 2 picks is multiplied with half the columns.

    Args:
        wp: int32 codes and sp: int32 scales of all experts, ``[N, K]`` each; multipliers: float32, one a row tile.
        xp: bf16, ``[rows, K]`` in fragment order: x when GATED, otherwise h, a row a pick.
        out: bf16 h ``[picks, N / 2]`` in fragment order when GATED, otherwise float32 y ``[picks, N]``.
        order: int32, picks by expert; tiles: int32 ``[T, 3]`` expert (-1: none), first place in ``order``, picks.
        picks: of routed experts; later ones are of the shared expert, one a row.
    """
    expert = gl.load(tiles + gl.program_id(1) * 3)
    if expert >= 0:
        first = gl.load(tiles + gl.program_id(1) * 3 + 1)
        count = gl.load(tiles + gl.program_id(1) * 3 + 2)
        places = (order, first, count)
        tensors = (wp, sp, multipliers, xp, out)
        if HALF:
            if count > BN // 2:
                serve_tile(tensors, places, expert, picks, N, K, TOPK, W, BN, COUNT, STAGES, GATED, WGMMA, FENCE)
            else:
                serve_tile(tensors, places, expert, picks, N, K, TOPK, W, BN // 2, COUNT, STAGES, GATED, WGMMA, FENCE)
        else:
            serve_tile(tensors, places, expert, picks, N, K, TOPK, W, BN, COUNT, STAGES, GATED, WGMMA, FENCE)
