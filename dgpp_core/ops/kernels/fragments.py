"""Weights in the order in which `mma.sync` m16n8k16 wants them in registers, and what kernels that read them share.

A weight matrix ``[N, K]`` is cut into row tiles of 16 rows and chunks of 64 k. A warp's lane ``4 g + q`` holds rows
``g`` and ``g + 8`` of a tile and the 16 consecutive k ``64 c + 16 q ..`` of chunk c; step j of the chunk's four
multiplies k ``64 c + 16 q + 4 j + 2 h + i``, where the instruction's own k index is ``8 h + 2 q + i``. Both operands
use that order, so activations stay as they are in memory. 128 k are a slot: what a warp loads at once.

The warps of a program split K ("K over warps"): the product is batched over warps, and one sum over them ends it. A
row of activations is one column of the product, so its sum never meets its neighbours: its bits depend on the number
of warps W, the splits of K and the order of slots, all fixed by the weight's shape, and not on the number of rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def log2(n):
    """Exponent of the power of two ``n``."""
    return n.bit_length() - 1


@gluon.constexpr_function
def mma_layout(W):
    """Accumulator of ``[W, rows, columns]``, one batch entry a warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def slot_layout(W, R, WORDS):
    """``[W, R, WORDS]`` words of weights: R row tiles a warp, 16 contiguous bytes a lane, 512 a warp instruction.

    With fewer than 128 words a lane holds one word of 32 (scales).
    """
    each = 4 if WORDS >= 128 else 1
    registers = [[0, 0, 1 << b] for b in range(log2(each))]
    registers += [[0, 0, (32 * each) << b] for b in range(log2(WORDS // (32 * each)))]
    registers += [[0, 1 << b, 0] for b in range(log2(R))]
    lanes = [[0, 0, each << b] for b in range(5)]
    warps = [[1 << b, 0, 0] for b in range(log2(W))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [W, R, WORDS])


@gluon.constexpr_function
def activation_layout(W, COLUMNS):
    """``[W, COLUMNS, 64]`` words (128 k): lane ``4 n + q`` holds 8 contiguous words of each chunk of column n."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]] + [[0, 8 << b, 0] for b in range(log2(COLUMNS // 8))]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << b, 0, 0] for b in range(log2(W))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [W, COLUMNS, 64])


@gluon.jit
def pdl_wait(PDL: gl.constexpr):
    """Wait until the kernel before this one is complete and its writes are visible (programmatic dependent launch)."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pdl_launch(PDL: gl.constexpr):
    """Let the kernel after this one start: until its own wait it may read weights only."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def bf16_pairs(words):
    """int32 words of two bf16 each to ``[..., 2]`` bf16. Only renames registers."""
    low = (words & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def tile_of(program, r, R: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr):
    """Row tile number r of a program. Gated: the first half of its R tiles are gate rows, the others their up rows."""
    if GATED:
        HALF: gl.constexpr = R // 2
        return program * HALF + r % HALF + (r // HALF) * (TILES // 2)
    return program * R + r


@gluon.jit
def slot_pointers(
    weights,
    program,
    TILE_WORDS: gl.constexpr,
    WARP_WORDS: gl.constexpr,
    WORDS: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Pointers to the first slot of every warp and row tile; slot d is ``d * WORDS`` words on.

    Args:
        TILE_WORDS: words of a row tile over all of K.
        WARP_WORDS: words between the parts of K of two warps.
    """
    L: gl.constexpr = slot_layout(W, R, WORDS)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    first = tile_of(program, 0, R, TILES, GATED).to(gl.int64) * TILE_WORDS
    return weights + first + (tile_of(0, r, R, TILES, GATED) * TILE_WORDS + w * WARP_WORDS + word)


@gluon.jit
def tile_pointers(
    values,
    program,
    TILE_VALUES: gl.constexpr,
    WARP_VALUES: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Like `slot_pointers` for one value a row tile and slot, the same in all lanes: ``[W, R, 32]``."""
    L: gl.constexpr = slot_layout(W, R, 32)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return values + (tile_of(program, r, R, TILES, GATED) * TILE_VALUES + w * WARP_VALUES + lane * 0)


@gluon.jit
def activation_columns(first, M, W: gl.constexpr, COLUMNS: gl.constexpr):
    """The row of activations behind each column of a tile; columns past the last row read that row again."""
    n = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, activation_layout(W, COLUMNS))))
    return gl.minimum(first + n, M - 1)


@gluon.jit
def activation_pointers(x, rows, K: gl.constexpr, WARP_K: gl.constexpr, W: gl.constexpr, COLUMNS: gl.constexpr):
    """Pointers to a warp's first slot of each activation row; ``x`` int32 words (two bf16), slot d is 64 words on."""
    L: gl.constexpr = activation_layout(W, COLUMNS)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    word = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return x + (rows[None, :][:, :, None] * (K // 2) + w * (WARP_K // 2) + word)


@gluon.jit
def weight_words(pointers, CACHE: gl.constexpr):
    """Words at ``pointers``; CACHE: the modifier of the load, or ``evict_first`` where nothing reads them again.

    What a step writes and reads again, and its kernels' instructions, then stay in the second-level cache beside
    gigabytes of weights.
    """
    if CACHE == "evict_first":
        words = gl.load(pointers, eviction_policy=CACHE)
    else:
        words = gl.load(pointers, cache_modifier=CACHE)
    return words


@gluon.jit
def first_slots(pointers, SLOTS: gl.constexpr, STRIDE: gl.constexpr, CACHE: gl.constexpr):
    """The first SLOTS slots, as a tuple: loads in flight."""
    slots = ()
    for d in gl.static_range(SLOTS):
        slots = slots + (weight_words(pointers + d * STRIDE, CACHE),)
    return slots


@gluon.jit
def next_slots(
    slots,
    pointers,
    d: gl.constexpr,
    AHEAD: gl.constexpr,
    SLOTS: gl.constexpr,
    STRIDE: gl.constexpr,
    CACHE: gl.constexpr,
):
    """The tuple without slot d and with slot ``d + AHEAD``, where there is one."""
    left = slots[1:]
    if d + AHEAD < SLOTS:
        left = left + (weight_words(pointers + (d + AHEAD) * STRIDE, CACHE),)
    return left


@gluon.jit
def operand_a(words, W: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr):
    """bf16 ``[W, ROWS, DEPTH]`` already in the lanes of the instruction's first operand."""
    a = words.reshape([W, ROWS, DEPTH])
    return gl.convert_layout(a, gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)


@gluon.jit
def operand_b(words, W: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr):
    """bf16 ``[W, DEPTH, COLUMNS]`` already in the lanes of the second operand."""
    b = words.reshape([W, DEPTH, COLUMNS])
    return gl.convert_layout(b, gl.DotOperandLayout(1, mma_layout(W), 2), assert_trivial=True)


@gluon.jit
def activation_operand(x, W: gl.constexpr, COLUMNS: gl.constexpr):
    """A slot of activations as the second operand, k in the order (c, j, h, q, i)."""
    pairs = bf16_pairs(x.reshape([W, COLUMNS, 2, 4, 4, 2]))  # W n c q j h i
    return operand_b(pairs.permute([0, 2, 4, 5, 3, 6, 1]), W, COLUMNS, 128)


@gluon.jit
def limited(gate, up, LIMIT: gl.constexpr):
    """No gate above LIMIT and no up beyond it on either side; 0 is no limit."""
    if LIMIT > 0:
        gate, up = gl.minimum(gate, LIMIT), gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    return gate, up


@gluon.jit
def swiglu(y, R: gl.constexpr, COLUMNS: gl.constexpr):
    """``[16 R, COLUMNS]`` of gate tiles then up tiles to ``silu(gate) up`` ``[8 R, COLUMNS]``."""
    gate, up = gl.split(y.reshape([2, R * 8, COLUMNS]).permute([1, 2, 0]))
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def store_columns(out, y, row, column, M, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """``y`` ``[ROWS, COLUMNS]`` to ``out[column + c, row + r]`` of ``[M, N]``, rounded once to the dtype of ``out``."""
    L: gl.constexpr = y.type.layout
    r = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    mask = (c < M)[None, :] & (r >= 0)[:, None]
    gl.store(out + c[None, :] * N + (row + r)[:, None], y.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def finish(
    out,
    y,
    program,
    split,
    column,
    M,
    N: gl.constexpr,
    R: gl.constexpr,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Write a program's finished ``[16 R, COLUMNS]``: its share of split ``split`` of the output, or gated channels."""
    if GATED:
        store_columns(out, swiglu(y, R, COLUMNS), program * (8 * R), column, M, N // 2, R * 8, COLUMNS)
    else:
        store_columns(out + split * (M * N), y, program * (16 * R), column, M, N, R * 16, COLUMNS)
