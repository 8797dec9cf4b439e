"""Choice of experts from logits, and logits of weights that are not bfloat16."""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def plain_logits(wp, xp, out, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """out fp32 ``[M, E]``: BE logits of row program_id(0), fp32 products summed over K in blocks of BK."""
    m = tl.program_id(0)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    k = tl.arange(0, BK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BE, BK], tl.float32)
    for base in range(0, K, BK):
        there = base + k < K
        x = tl.load(xp + m * K + base + k, mask=there, other=0.0).to(tl.float32)
        w = tl.load(wp + e[:, None] * K + (base + k)[None, :], mask=(e < E)[:, None] & there[None, :], other=0.0)
        acc += w.to(tl.float32) * x[None, :]
    tl.store(out + m * E + e, tl.sum(acc, 1), mask=e < E)


@triton.jit
def _logit(logits, m, e, live, M, E: tl.constexpr, PARTS: tl.constexpr):
    """Logits of experts ``e`` of row m, their parts added in order."""
    z = tl.zeros(e.shape, tl.float32)
    for s in tl.static_range(PARTS):
        z += tl.load(logits + (s * M + m) * E + e, mask=live, other=0.0)
    return z


@triton.jit
def _score(z, most, mass, SCORE: tl.constexpr):
    if SCORE == 1:
        return tl.exp(z - most) / mass
    if SCORE == 0:
        return 1.0 / (1.0 + tl.exp(-z))
    small = tl.exp(-tl.abs(z))
    total = 1.0 + small
    kept = (
        total - 1.0
    )  # log(1 + small), corrected for what the sum has lost of small (Kahan; Goldberg, 1991, theorem 4)
    log = tl.where(kept == 0.0, small, tl.log(total) * (small / kept))
    return tl.sqrt(tl.maximum(z, 0.0) + log)


@triton.jit
def _ordered(v):
    """int32 in the order of finite float32 ``v``: a warp takes the largest of integers with one instruction."""
    bits = v.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kept_groups(v, e, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GP: tl.constexpr):
    """Which experts are in the KEPT groups with the largest sum of their two best ``v``; ties to the lower group."""
    SIZE: tl.constexpr = E // GROUPS
    group = tl.arange(0, GP)
    score = tl.full([GP], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        inside = tl.where(e // SIZE == g, v, float("-inf"))
        best = tl.argmax(inside, 0, tie_break_left=True)
        total = tl.max(inside, 0)
        if SIZE > 1:
            total += tl.max(tl.where(e == best, float("-inf"), inside), 0)
        score = tl.where(group == g, total, score)
    kept = e < 0
    for _ in tl.static_range(KEPT):
        chosen = tl.argmax(score, 0, tie_break_left=True)
        kept = kept | (e // SIZE == chosen)
        score = tl.where(group == chosen, float("-inf"), score)
    return kept


@triton.jit(do_not_specialize=["M"])
def choose_experts(
    logits,
    bias,
    weights,
    ids,
    M,
    scale,
    E: tl.constexpr,
    EP: tl.constexpr,
    PARTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GP: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Top experts of row program_id(0): ids ascending, unbiased scores as weights; SCORE as in `dgpp_core.ops.router`.

    The logit is the sum of PARTS partial ones in order. The largest score + bias win, ties go to the lower id. A NaN
    never wins before a number, and an id is always one of an expert: a poisoned row reads no foreign memory. One warp
    does it all, so its instructions count, and the way to memory and back is taken once.
    """
    LOWEST: tl.constexpr = -3.0e38
    TAKEN: tl.constexpr = -(2**31)
    m = tl.program_id(0)
    e = tl.arange(0, EP)
    real = e < E
    b = tl.load(bias + e, mask=real, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    z = _logit(logits, m, e, real, M, E, PARTS)
    most = 0.0
    mass = 1.0
    if SCORE == 1:
        most = tl.max(tl.where(real, z, float("-inf")), 0)
        mass = tl.sum(tl.where(real, tl.exp(z - most), 0.0), 0)
    score = _score(z, most, mass, SCORE)
    v = score + b
    v = tl.where(v == v, tl.maximum(v, LOWEST), LOWEST)
    if GROUPS > 1:
        v = tl.where(_kept_groups(tl.where(real, v, float("-inf")), e, E, GROUPS, KEPT, GP), v, LOWEST)
    rank = tl.where(real, _ordered(v), TAKEN)
    j = tl.arange(0, KP)
    picks = tl.full([KP], E, tl.int32)
    for r in tl.static_range(TOPK):
        best = tl.min(tl.where(rank == tl.max(rank, 0), e, EP), 0)
        picks = tl.where(j == r, best, picks)
        rank = tl.where(e == best, TAKEN, rank)
    slot = tl.sum((picks[None, :] < picks[:, None]).to(tl.int32), 1)
    chosen = j < TOPK
    weight = tl.gather(score, tl.minimum(picks, EP - 1), 0)
    if NORMALISE:
        weight = weight / (tl.sum(tl.where(chosen, weight, 0.0), 0) + 1e-20)
    tl.store(weights + m * TOPK + slot, weight * scale, mask=chosen)
    tl.store(ids + m * TOPK + slot, picks, mask=chosen)
