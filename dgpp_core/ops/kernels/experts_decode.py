"""Routed experts of up to 64 rows: each chosen expert's weights are read once for every eight rows that chose it.

The grid is (column tiles, picks + 1). A program looks its pick's expert up, leaves when an earlier pick has the same
one, and otherwise serves all of that expert's picks, eight at a time; the first serves the shared expert. There are no
tables, no sort and no atomics. A pick is one column of a product whose K order is fixed, so its bits depend on
neither its column nor its companions. Pick m * k + j is expert j of row m; the ids of a row are distinct.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dgpp_core.ops.kernels.dense_nvfp4 import CODE_WORDS, SCALE_WORDS, nvfp4_product
from dgpp_core.ops.kernels.fragments import (
    activation_layout,
    activation_pointers,
    first_slots,
    limited,
    log2,
    pdl_launch,
    pdl_wait,
    slot_pointers,
)

COLUMNS = gl.constexpr(8)
BEYOND = gl.constexpr(1 << 20)


@gluon.constexpr_function
def pick_layout(P, W):
    """``[P]`` spread over the lanes of a warp, the same in every warp: reductions need no shared memory."""
    registers = [[32 << b] for b in range(log2(P // 32))]
    return gl.DistributedLinearLayout(registers, [[1 << b] for b in range(5)], [[0] for _ in range(log2(W))], [], [P])


@gluon.jit
def expert_pointers(
    wp, sp, program, K: gl.constexpr, W: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr
):
    """Pointers to the first slots of codes and scales of expert 0; each expert has TILES row tiles."""
    codes = slot_pointers(wp, program, K * 2, K * 2 // W, CODE_WORDS, W, R, TILES, GATED)
    scales = slot_pointers(sp, program, K // 4, K // 4 // W, SCALE_WORDS, W, R, TILES, GATED)
    return codes, scales


@gluon.constexpr_function
def lines_of(words):
    """Lines of 128 bytes, and the power of two that holds as many."""
    lines = (words + 31) // 32
    return lines, 1 << (lines - 1).bit_length()


@gluon.jit
def fetch(words, WORDS: gl.constexpr, W: gl.constexpr):
    """Ask for WORDS consecutive words to be brought into the second-level cache."""
    LINES: gl.constexpr = lines_of(WORDS)
    line = gl.minimum(gl.arange(0, LINES[1], gl.BlockedLayout([1], [32], [W], [0])), LINES[0] - 1)
    address = (words + line * 32).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def served_pick(picks, SHARED: gl.constexpr):
    """The pick that this program looks up; ``picks`` for the shared expert, whose programs come first."""
    a = gl.program_id(1)
    if SHARED:
        a = gl.where(a == 0, picks, a - 1)
    return a


@gluon.jit
def expert_of(ids, a, picks, P: gl.constexpr, W: gl.constexpr, ONE: gl.constexpr):
    """Of pick a: its expert, whether it is that expert's first pick, the expert's picks in number and by position.

    The ids bypass the first-level cache: it may hold those of an earlier layer, and `decode_down` has not waited.
    """
    p = gl.arange(0, P, pick_layout(P, W))
    expert = gl.load(ids + gl.minimum(a, picks - 1), cache_modifier=".cg")
    if ONE:
        return expert, a >= 0, a * 0 + 1, p
    chosen = gl.load(ids + p, mask=p < picks, other=-1, cache_modifier=".cg") == expert
    earlier = gl.sum(gl.where(chosen & (p < a), 1, 0), 0)
    total = gl.sum(gl.where(chosen, 1, 0), 0)
    return expert, earlier == 0, total, gl.where(chosen, p, BEYOND)


@gluon.jit
def next_picks(mine, last, total, a, base, picks, M, shared_row, LN: gl.constexpr, ONE: gl.constexpr):
    """Rows of h for columns base .. base + 7 and the last pick taken; columns past the last pick repeat it."""
    n = gl.arange(0, COLUMNS, LN)
    rows = gl.zeros([COLUMNS], gl.int32, LN)
    if ONE:
        return rows + gl.where(a == picks, shared_row, a), last
    if a == picks:
        rows = shared_row + gl.minimum(base + n, M - 1)
    else:
        for i in range(gl.minimum(total - base, COLUMNS)):
            last = gl.min(gl.where(mine > last, mine, BEYOND), 0)
            rows = gl.where(n >= i, last, rows)
    return rows, last


@gluon.jit(do_not_specialize=["M", "shared_row"])
def decode_gate_up(
    wp,
    sp,
    multipliers,
    xp,
    hp,
    ids,
    M,
    shared_row,
    P: gl.constexpr,
    TOPK: gl.constexpr,
    E: gl.constexpr,
    SHARED: gl.constexpr,
    K: gl.constexpr,
    I: gl.constexpr,  # noqa: E741
    W: gl.constexpr,
    D: gl.constexpr,
    ONE: gl.constexpr,
    CACHE: gl.constexpr,
    PDL: gl.constexpr,
    FETCH: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """h[row] = silu(gate x) * up x, bf16, of one tile of 16 channels; LIMIT as in `limited`.

    The shared expert needs no routing: its weights are fetched while the kernel before this one still chooses.
    """
    t = gl.program_id(0)
    KW: gl.constexpr = K // W
    LN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, activation_layout(W, COLUMNS)))
    picks = M * TOPK
    a = served_pick(picks, SHARED)
    codes, scales = expert_pointers(wp, sp, t, K, W, 2, I // 8, True)
    if FETCH and SHARED:  # noqa: SIM102 - the compiler knows these two, the next only the program
        if a == picks:
            for r in gl.static_range(2):
                tile = E * (I // 8) + r * (I // 16) + t
                fetch(wp + tile.to(gl.int64) * (K * 2), K * 2, W)
                fetch(sp + tile.to(gl.int64) * (K // 4), K // 4, W)
    pdl_wait(PDL)
    pdl_launch(PDL)
    expert, first, count, mine = expert_of(ids, a, picks, P, W, ONE)
    shared = a == picks
    if first | shared:
        entry = gl.where(shared, E, expert).to(gl.int64)
        total = gl.where(shared, M, count)
        wc = codes + entry * (2 * I * K // 8)
        ws = scales + entry * (2 * I * K // 64)
        gate_multiplier = gl.load(multipliers + entry * (I // 8) + t)
        up_multiplier = gl.load(multipliers + entry * (I // 8) + I // 16 + t)
        last = -1
        for base in range(0, total, COLUMNS):
            first_codes = first_slots(wc, D, CODE_WORDS, CACHE)
            first_scales = first_slots(ws, D, SCALE_WORDS, CACHE)
            rows, last = next_picks(mine, last, total, a, base, picks, M, shared_row, LN, ONE)
            source = gl.where(shared, rows - shared_row, rows // TOPK)
            x = activation_pointers(xp, source, K, KW, W, COLUMNS)
            y = nvfp4_product(wc, ws, first_codes, first_scales, x, KW // 128, W, 2, COLUMNS, D, CACHE)
            gate, up = gl.split(y.reshape([2, 16, COLUMNS]).permute([1, 2, 0]))
            LO: gl.constexpr = gate.type.layout
            gate, up = limited(gate * gate_multiplier, up * up_multiplier, LIMIT)
            h = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
            channel = gl.arange(0, 16, gl.SliceLayout(1, LO))
            column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LO)) + base
            to = gl.convert_layout(rows, gl.SliceLayout(0, LO))
            live = (column < total)[None, :] & (channel >= 0)[:, None]
            gl.store(hp + to[None, :] * I + (t * 16 + channel)[:, None], h, mask=live)


@gluon.jit(do_not_specialize=["M", "shared_row"])
def decode_down(
    wp,
    sp,
    multipliers,
    hp,
    yp,
    ids,
    M,
    shared_row,
    P: gl.constexpr,
    TOPK: gl.constexpr,
    E: gl.constexpr,
    SHARED: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    ONE: gl.constexpr,
    CACHE: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[row] = down h[row], float32, of R tiles of 16 outputs.

    The ids are read before the wait: the kernel before this one waited for them before it let this one start.
    """
    t = gl.program_id(0)
    KW: gl.constexpr = K // W
    LN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, activation_layout(W, COLUMNS)))
    picks = M * TOPK
    a = served_pick(picks, SHARED)
    codes, scales = expert_pointers(wp, sp, t, K, W, R, N // 16, False)
    pdl_launch(PDL)
    expert, first, count, mine = expert_of(ids, a, picks, P, W, ONE)
    shared = a == picks
    if first | shared:
        entry = gl.where(shared, E, expert).to(gl.int64)
        total = gl.where(shared, M, count)
        wc = codes + entry * (N * K // 8)
        ws = scales + entry * (N * K // 64)
        last = -1
        for base in range(0, total, COLUMNS):
            first_codes = first_slots(wc, D, CODE_WORDS, CACHE)
            first_scales = first_slots(ws, D, SCALE_WORDS, CACHE)
            rows, last = next_picks(mine, last, total, a, base, picks, M, shared_row, LN, ONE)
            pdl_wait(PDL)
            x = activation_pointers(hp, rows, K, KW, W, COLUMNS)
            y = nvfp4_product(wc, ws, first_codes, first_scales, x, KW // 128, W, R, COLUMNS, D, CACHE)
            LO: gl.constexpr = y.type.layout
            output = gl.arange(0, R * 16, gl.SliceLayout(1, LO))
            y = y * gl.load(multipliers + entry * (N // 16) + t * R + output // 16)[:, None]
            column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LO)) + base
            to = gl.convert_layout(rows, gl.SliceLayout(0, LO))
            live = (column < total)[None, :] & (output >= 0)[:, None]
            gl.store(yp + to[None, :] * N + (t * (R * 16) + output)[:, None], y, mask=live)
