"""Keys, values and queries in the lanes of `mma.sync` m16n8k16: a warp takes strips of 16 keys of one head.

Lane ``4 g + q`` holds keys ``g`` and ``g + 8``, of each 32 dimensions the 8 from ``8 q`` on; of the values it holds
rows ``2 q + {0, 1, 8, 9}``, of each 64 dimensions the 8 from ``8 g`` on: 16 bytes a load, and no word changes its lane.
The products sum over whatever order that gives, the same for both operands.

A step's own rows are finished once, into 16 lines of shared memory: line n holds the token whose number is n modulo 16,
which is where every strip looks for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dgpp_core.ops.kernels.fragments import bf16_pairs, log2, mma_layout


@gluon.constexpr_function
def key_layout(W, WORDS):
    """``[W, 16 keys, WORDS]``, two dimensions a word."""
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 0, 16 << b] for b in range(log2(WORDS // 16))] + [[0, 8, 0]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << b, 0, 0] for b in range(log2(W))], [], [W, 16, WORDS])


@gluon.constexpr_function
def value_layout(W, WORDS):
    """``[W, 16 keys, WORDS]``, two dimensions a word."""
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 0, 32 << b] for b in range(log2(WORDS // 32))] + [[0, 1, 0], [0, 8, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << b, 0, 0] for b in range(log2(W))], [], [W, 16, WORDS])


@gluon.constexpr_function
def line_layout(W, SPAN):
    """``[16 heads or rows, SPAN]`` over four warps, the others hold copies; a lane has dimensions 32 and 64 apart."""
    registers = [[0, 1], [0, 2]] + [[0, 32 << b] for b in range(log2(SPAN // 32))]
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    warps = [[4, 0], [8, 0]] + [[0, 0]] * (log2(W) - 2)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16, SPAN])


@gluon.constexpr_function
def fold_layout(W, SPAN):
    """``[W, 16 heads, SPAN]``, every warp's share in one lane; more than four warps halve the dimensions."""
    dims = [[0, 0, 1], [0, 0, 2]] + [[0, 0, 32 << b] for b in range(log2(SPAN // 32))]
    more = log2(W) - 2
    registers = dims[: len(dims) - more] + [[1 << b, 0, 0] for b in range(log2(W))]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    warps = [[0, 4, 0], [0, 8, 0]] + dims[len(dims) - more :]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [W, 16, SPAN])


@gluon.jit
def strip(
    pool,
    table,
    head,
    first,
    end,
    L: gl.constexpr,
    KV: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCK: gl.constexpr,
    W: gl.constexpr,
):
    """Words ``[W, 16, WORDS]`` of the keys or values from token ``first`` on, 16 a warp; zero from ``end`` on."""
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    t = first + 16 * w
    block = gl.load(table + t // BLOCK, mask=t < end, other=0)
    base = ((block * KV + head) * BLOCK + t % BLOCK) * WORDS
    there = (t + n < end) & (word >= 0)
    return gl.load(pool + (base + (n * WORDS + word)), mask=there, other=0, cache_modifier=".cg")


# $1 an address, $2 whether to ask for the $3 bytes there; $0 is nothing.
FETCH = gl.constexpr("""{
.reg .pred wanted;
setp.ne.s32 wanted, $2, 0;
@wanted cp.async.bulk.prefetch.L2.global [$1], $3;
mov.u32 $0, 0;
}""")


@gluon.jit
def fetch_rows(pool, table, head, first, end, KV: gl.constexpr, WORDS: gl.constexpr, BLOCK: gl.constexpr):
    """Ask the second-level cache for the blocks of tokens ``first`` (a tensor), where those are before ``end``."""
    block = gl.load(table + first // BLOCK, mask=first < end, other=0)
    rows = pool + (block * KV + head) * (BLOCK * WORDS)
    bytes_ = gl.full(first.shape, BLOCK * WORDS * 4, gl.int32, first.type.layout)
    wanted = (first < end).to(gl.int32)
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r,r", [rows.to(gl.int64, bitcast=True), wanted, bytes_], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def with_new(words, lines, first, start, position, L: gl.constexpr, W: gl.constexpr):
    """A strip with the step's own tokens ``start .. position`` taken from the shared ``lines`` ``[16, WORDS]``."""
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    t = first + 16 * w + n
    new, old = gl.broadcast(gl.expand_dims(lines.load(gl.SliceLayout(0, L)), 0), words)
    own, _ = gl.broadcast((t >= start) & (t <= position), words)
    return gl.where(own, new, old)


@gluon.jit
def query_operand(lines, W: gl.constexpr, SPAN: gl.constexpr):
    """Shared queries ``[16, SPAN / 2]`` words as the first operand of every warp, ``[W, 16, SPAN]``."""
    L: gl.constexpr = key_layout(W, SPAN // 2)
    like = gl.full([W, 16, SPAN // 2], 0, gl.int32, L)
    words, _ = gl.broadcast(gl.expand_dims(lines.load(gl.SliceLayout(0, L)), 0), like)
    pairs = bf16_pairs(words.reshape([W, 16, SPAN // 32, 4, 2, 2])).permute([0, 1, 2, 4, 5, 3, 6])
    return gl.convert_layout(
        pairs.reshape([W, 16, SPAN]), gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True
    )


@gluon.jit
def key_operand(words, W: gl.constexpr, SPAN: gl.constexpr):
    """A strip of keys as the second operand, ``[W, SPAN, 16]``."""
    pairs = bf16_pairs(words.reshape([W, 16, SPAN // 32, 4, 2, 2])).permute([0, 2, 4, 5, 3, 6, 1])
    return gl.convert_layout(
        pairs.reshape([W, SPAN, 16]), gl.DotOperandLayout(1, mma_layout(W), 2), assert_trivial=True
    )


@gluon.jit
def value_operand(words, W: gl.constexpr, SPAN: gl.constexpr):
    """A strip of values as the second operand, ``[W, 16, SPAN]``: column (c, e, g) is dimension 64 c + 8 g + e."""
    pairs = bf16_pairs(words.reshape([W, 16, SPAN // 64, 8, 4])).permute([0, 1, 2, 4, 5, 3])
    return gl.convert_layout(
        pairs.reshape([W, 16, SPAN]), gl.DotOperandLayout(1, mma_layout(W), 2), assert_trivial=True
    )


@gluon.jit
def to_words(x, WORDS: gl.constexpr):
    """``[16, 2 WORDS]`` float32 rounded to bf16, two a word."""
    low, high = gl.split(x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32).reshape([16, WORDS, 2]))
    return (low & 0xFFFF) | (high << 16)


@gluon.jit
def angles(table, position, SPAN: gl.constexpr, HALF: gl.constexpr, L: gl.constexpr, other: gl.constexpr):
    """Entries of a table of cosines or sines for lines at ``position`` ``[16, 1, 1]``, ``[16, SPAN / 2 HALF, HALF]``.

    ``other`` for the dimensions that do not turn.
    """
    G: gl.constexpr = SPAN // (2 * HALF)
    group = gl.arange(0, G, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    i = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return gl.load(table + position * HALF + i + 0 * group, mask=(group == 0) & (position >= 0), other=other)


@gluon.jit
def halves(x, SPAN: gl.constexpr, HALF: gl.constexpr):
    """Lines ``[16, SPAN]`` as the two members of each pair that may turn, ``[16, SPAN / 2 HALF, HALF]``."""
    return gl.split(x.reshape([16, SPAN // (2 * HALF), 2, HALF]).permute([0, 1, 3, 2]))


@gluon.jit
def line_parameters(
    weight, cos, sin, position, W: gl.constexpr, SPAN: gl.constexpr, HALF: gl.constexpr, NORMED: gl.constexpr
):
    """The norm's weight ``[SPAN]``, and cosines and sines of lines at ``position`` ``[16]``; unread where absent."""
    L: gl.constexpr = line_layout(W, SPAN)
    d = gl.arange(0, SPAN, gl.SliceLayout(0, L))
    w = d.to(gl.float32)
    c = w
    s = w
    if NORMED:
        w = gl.load(weight + d).to(gl.float32)
    if HALF > 0:
        like, _ = halves(gl.zeros([16, SPAN], gl.float32, L), SPAN, HALF)
        L3: gl.constexpr = like.type.layout
        at = gl.convert_layout(position, gl.SliceLayout(1, gl.SliceLayout(2, L3)), assert_trivial=True)
        at = at[:, None][:, :, None]
        c = angles(cos, at, SPAN, HALF, L3, 1.0)
        s = angles(sin, at, SPAN, HALF, L3, 0.0)
    return w, c, s


@gluon.jit
def normed_and_turned(
    x, parameters, eps, W: gl.constexpr, SPAN: gl.constexpr, HALF: gl.constexpr, NORMED: gl.constexpr
):
    """Heads with bias, one a line, ``[16, SPAN]`` in `line_layout`: normed and turned as `line_parameters` say."""
    w, c, s = parameters
    if NORMED:
        factor = gl.rsqrt(gl.sum(x * x, 1) / SPAN + eps)
        x = x * factor[:, None] * w[None, :]
    if HALF > 0:
        first, second = halves(x, SPAN, HALF)
        turned = gl.join(first * c - second * s, second * c + first * s)
        turned = turned.permute([0, 1, 3, 2]).reshape([16, SPAN])
        x = gl.convert_layout(turned, line_layout(W, SPAN), assert_trivial=True)
    return x
