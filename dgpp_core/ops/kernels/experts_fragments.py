"""NVFP4 weights in the order of tensor-core fragments: registers, decode, products.

The k order inside a chunk of 64 is permuted alike for weights and activations: lane q of a quad owns k = 64c + 16q ..
16q + 15, one scale group, and MMA step j takes k = 64c + 16q + 4j + 2h + i (h: register half of the step, i: element
of the pair). Dimension letters in comments: W warp, R row tile of 16, c chunk of 64, g lane / 4, q lane % 4, r row
g or g + 8, n column, j step, h, i as above.
"""
# ruff: noqa: N803, N806, RUF005
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def log2(n):
    """Exponent of the power of two ``n``."""
    return n.bit_length() - 1


@gluon.constexpr_function
def product_layout(W):
    """Accumulator ``[W, rows, columns]`` of a product batched over warps: each warp has its own part of K."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def activation_layout(W, NT):
    """``[W, NT, 64 words]``, 128 k a warp: lane q owns 8 contiguous words of each chunk, lane / 4 is the column."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]] + [[0, 8 << b, 0] for b in range(log2(NT // 8))]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << b, 0, 0] for b in range(log2(W))], [], [W, NT, 64])


@gluon.constexpr_function
def code_layout(W, R):
    """``[W, R, 256 words]``: two chunks of 128 words, 16 contiguous bytes a lane in each."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 128]] + [[0, 1 << b, 0] for b in range(log2(R))]
    lanes = [[0, 0, 4 << b] for b in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << b, 0, 0] for b in range(log2(W))], [], [W, R, 256])


@gluon.constexpr_function
def scale_layout(W, R):
    """``[W, R, 32 words]``: one word a lane, byte 2c + r."""
    registers = [[0, 1 << b, 0] for b in range(log2(R))]
    lanes = [[0, 0, 1 << b] for b in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << b, 0, 0] for b in range(log2(W))], [], [W, R, 32])


@gluon.jit
def pdl_wait(PDL: gl.constexpr):
    """Wait until the kernels before this one have finished."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pdl_launch(PDL: gl.constexpr):
    """Let the next kernel start."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def bf16_pair(word):
    """int32 holding two bf16 to ``[..., 2]`` bf16."""
    low = (word & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (word >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


# Eight codes of a word times a scale: four words of two bf16, one for each MMA step. The bits of a word lie so that a
# rotation and a mask leave sign and code of two elements in place as subnormal bf16 (code * 2^-126).
DECODE_CODES = gl.constexpr("""{
.reg .b32 t;
and.b32 t, $4, 0x81C081C0; mul.rn.bf16x2 $0, t, $5;
shf.r.wrap.b32 t, $4, $4, 3; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $1, t, $5;
shf.r.wrap.b32 t, $4, $4, 6; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $2, t, $5;
and.b32 t, $4, 0x001B001B; mul.lo.u32 t, t, 0x1084; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $3, t, $5;
}""")

# Four scale bytes: byte into both halves, then exponent and mantissa into place: s * 2^118 as two equal bf16.
DECODE_SCALES = gl.constexpr("""{
.reg .b32 t;
prmt.b32 t, $4, 0, 0x4040; mad.lo.u32 $0, t, 16, 0x75807580;
prmt.b32 t, $4, 0, 0x4141; mad.lo.u32 $1, t, 16, 0x75807580;
prmt.b32 t, $4, 0, 0x4242; mad.lo.u32 $2, t, 16, 0x75807580;
prmt.b32 t, $4, 0, 0x4343; mad.lo.u32 $3, t, 16, 0x75807580;
}""")


@gluon.jit
def decode_scales(s):
    """Scale words to the four bf16 pairs (c, r) = 00, 01, 10, 11."""
    return gl.inline_asm_elementwise(
        DECODE_SCALES,
        "=r,=r,=r,=r,r",
        [s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_codes(w, s):
    """Code words times scale pairs: bf16 pairs of steps 0 to 3."""
    return gl.inline_asm_elementwise(
        DECODE_CODES,
        "=r,=r,=r,=r,r,r",
        [w, s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def weight_operand(words, W: gl.constexpr, R: gl.constexpr):
    """int32 ``[W, R, c, g, q, h, r]`` of one step to the A operand ``[W, 16 R, 32]``."""
    a = bf16_pair(words).permute([0, 1, 6, 3, 2, 5, 4, 7]).reshape([W, R * 16, 32])
    return gl.convert_layout(a, gl.DotOperandLayout(0, product_layout(W), 2), assert_trivial=True)


@gluon.jit
def activation_operand(x, NT: gl.constexpr, W: gl.constexpr):
    """bf16 ``[W, n, c, q, h, i]`` of one step to the B operand ``[W, 32, NT]``."""
    b = x.permute([0, 2, 4, 3, 5, 1]).reshape([W, 32, NT])
    return gl.convert_layout(b, gl.DotOperandLayout(1, product_layout(W), 2), assert_trivial=True)


@gluon.jit
def activation_steps(x, NT: gl.constexpr, W: gl.constexpr):
    """int32 ``[W, NT, 64]`` to the B operands of steps 0 to 3."""
    pairs = bf16_pair(x.reshape([W, NT, 2, 4, 2, 2, 2])).permute([0, 1, 2, 3, 6, 7, 4, 5])  # W n c q h i j j
    even, odd = gl.split(pairs)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        activation_operand(x0, NT, W),
        activation_operand(x1, NT, W),
        activation_operand(x2, NT, W),
        activation_operand(x3, NT, W),
    )


@gluon.jit
def multiply_slot(acc, w, s, b0, b1, b2, b3, W: gl.constexpr, R: gl.constexpr):
    """``acc`` plus 128 k a warp: codes int32 ``[W, R, 256]``, scales int32 ``[W, R, 32]``."""
    w = w.reshape([W, R, 2, 8, 4, 2, 2])
    LW: gl.constexpr = w.type.layout
    s00, s01, s10, s11 = decode_scales(s)
    pairs = gl.join(gl.join(s00, s10), gl.join(s01, s11)).reshape([W, R, 8, 4, 2, 2]).permute([0, 1, 4, 2, 3, 5])
    pairs = gl.convert_layout(pairs, gl.SliceLayout(5, LW), assert_trivial=True)
    pairs, _ = gl.broadcast(gl.expand_dims(pairs, 5), w)
    a0, a1, a2, a3 = decode_codes(w, pairs)
    acc = mma_v2(weight_operand(a0, W, R), b0, acc)
    acc = mma_v2(weight_operand(a1, W, R), b1, acc)
    acc = mma_v2(weight_operand(a2, W, R), b2, acc)
    return mma_v2(weight_operand(a3, W, R), b3, acc)


@gluon.jit
def weight_pointers(
    wp, sp, tile, KW: gl.constexpr, K: gl.constexpr, W: gl.constexpr, R: gl.constexpr, RUN: gl.constexpr, STEP
):
    """Pointers to the first slot of R row tiles: tile .. tile + RUN - 1, then the same STEP tiles further on."""
    LW: gl.constexpr = code_layout(W, R)
    LS: gl.constexpr = scale_layout(W, R)
    w0 = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LW)))[:, None][:, :, None]
    w1 = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, LW)))[None, :][:, :, None]
    w2 = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, LW)))[None, :][:, None, :]
    s0 = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LS)))[:, None][:, :, None]
    s1 = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :][:, :, None]
    s2 = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, :][:, None, :]
    codes = wp + ((tile + w1 % RUN + (w1 // RUN) * STEP) * (K * 2) + w0 * (KW * 2) + w2)
    scales = sp + ((tile + s1 % RUN + (s1 // RUN) * STEP) * (K // 4) + s0 * (KW // 4) + s2)
    return codes, scales


@gluon.jit
def activation_pointers(xp, rows, KW: gl.constexpr, K: gl.constexpr, W: gl.constexpr, NT: gl.constexpr):
    """Pointers to the first slot of activation rows ``rows`` ``[NT]``, row-major bf16 read as int32."""
    LX: gl.constexpr = activation_layout(W, NT)
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None][:, :, None]
    word = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, :][:, None, :]
    return xp + (rows[None, :][:, :, None] * (K // 2) + warp * (KW // 2) + word)


@gluon.jit
def first_slots(codes, scales, D: gl.constexpr):
    """Start the loads of the first D slots."""
    ws = ()
    ss = ()
    for d in gl.static_range(D):
        ws = ws + (gl.load(codes + d * 256, cache_modifier=".cg"),)
        ss = ss + (gl.load(scales + d * 32, cache_modifier=".cg"),)
    return ws, ss


@gluon.jit
def warp_split_product(
    codes, scales, x, ws, ss, C: gl.constexpr, W: gl.constexpr, R: gl.constexpr, NT: gl.constexpr, D: gl.constexpr
):
    """``[16 R, NT]``: C slots of 128 k a warp in order, then the sum over warps in order; ws, ss: D slots in flight."""
    acc = gl.zeros([W, R * 16, NT], gl.float32, product_layout(W))
    now = gl.load(x)
    for d in gl.static_range(C):
        if d + 1 < C:
            following = gl.load(x + (d + 1) * 64)
        b0, b1, b2, b3 = activation_steps(now, NT, W)
        acc = multiply_slot(acc, ws[0], ss[0], b0, b1, b2, b3, W, R)
        if d + D < C:
            ws = ws[1:] + (gl.load(codes + (d + D) * 256, cache_modifier=".cg"),)
            ss = ss[1:] + (gl.load(scales + (d + D) * 32, cache_modifier=".cg"),)
        else:
            ws = ws[1:]
            ss = ss[1:]
        if d + 1 < C:
            now = following
    return gl.sum(acc, 0)
