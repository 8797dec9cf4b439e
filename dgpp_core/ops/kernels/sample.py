"""Sampled tokens on a GPU, without the host: temperature, top-k, min-p, top-p and the draw, exactly.

The rule and its integers are those of `dgpp_core.sampling.draw`: a token weighs
``floor(exp((logit - largest) / temperature) * unit)``, tokens stand in canonical order (logit descending, then id
ascending), and the pick is the first whose running sum exceeds ``u`` times the mass. Most draws fall among a row's
candidates. For one that does not, the order is searched by bisection over the whole row: slower, and the same rule.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels import pick
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.pick import CANDIDATES, CHUNK, _index_of, _ranked

COLUMNS = 8
"""Numbers kept of each slot: mode, seed, the bits of 1 / temperature, of the least scaled logit and of the unit, top_k
(0 is off), and top_p as part / 2**power."""
MODE = tl.constexpr(0)
SEED = tl.constexpr(1)
INVERSE = tl.constexpr(2)
FLOOR = tl.constexpr(3)
UNIT = tl.constexpr(4)
TOP_K = tl.constexpr(5)
PART = tl.constexpr(6)
POWER = tl.constexpr(7)
LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _scaled(value, peak, row_of):
    """Logits below the largest over the temperature, float64."""
    inverse = tl.load(row_of + INVERSE).to(tl.float64, bitcast=True)
    return (value.to(tl.float64) - peak.to(tl.float64)) * inverse


@triton.jit
def _weight(scaled, row_of):
    """int64 weights; 0 below the floor."""
    unit = tl.load(row_of + UNIT).to(tl.float64, bitcast=True)
    floor = tl.load(row_of + FLOOR).to(tl.float64, bitcast=True)
    return tl.where(scaled < floor, 0, (tl.exp(scaled) * unit).to(tl.int64))


@triton.jit
def _mix(state):
    """One output of splitmix64 whose state is ``state``, uint64."""
    z = state + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _shifted(a, b, power):
    """floor(a b / 2**power) and whether something was left, for 0 <= a b < 2**(63 + power) and 0 < power < 64."""
    high = tl.umulhi(a, b).to(tl.uint64)
    low = (a * b).to(tl.uint64)
    shift = power.to(tl.uint64)
    whole = (high << (64 - shift)) | (low >> shift)
    return whole.to(tl.int64), (low << (64 - shift)) != 0


@triton.jit
def _goal(mass, row_of):
    """The least running sum that is top_p of the mass."""
    part = tl.load(row_of + PART)
    whole, left = _shifted(mass, part, tl.load(row_of + POWER))
    return whole + left.to(tl.int64)


@triton.jit
def _target(mass, row_of, position):
    """The running sum that the picked token exceeds, from the row's own uniform number."""
    counter = (position * 4).to(tl.uint64)
    seed = tl.load(row_of + SEED).to(tl.uint64, bitcast=True)
    number = (_mix(_mix(counter) ^ seed) >> 11).to(tl.int64)
    return _shifted(number, mass, tl.full((), 53, tl.int64))[0]


@triton.jit
def row_weights(
    logits,
    picked,
    slots,
    ways,
    weights,
    masses,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (CHUNKS, rows): weights int64 ``[rows, V]`` and masses ``[rows, CHUNKS]`` of the rows that sample."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_of = ways + tl.load(slots + row // WIDTH) * 8
    if tl.load(row_of + MODE) != 0:
        x = tl.load(logits + row * V + i, mask=i < V, other=float("-inf"))
        peak = tl.load(logits + row * V + tl.load(picked + row))
        weight = _weight(_scaled(x, peak, row_of), row_of)
        tl.store(weights + row * V + i, weight, mask=i < V)
        tl.store(masses + row * CHUNKS + chunk, tl.sum(weight, 0))


@triton.jit
def _above(logits, weights, row, threshold, least, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Over tokens whose rank is at least both bounds: how many they are, or what they weigh."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + i, mask=i < V, other=float("-inf"))
        there = (i < V) & (_ranked(x, i) >= tl.maximum(threshold, least))
        if COUNT:
            total += tl.sum(there.to(tl.int64), 0)
        else:
            total += tl.sum(tl.load(weights + row * V + i, mask=there, other=0), 0)
    return total


@triton.jit
def _highest(logits, weights, row, goal, least, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The highest rank at which as many, or as much, as ``goal`` is reached from the top."""
    low = tl.full((), LOWEST, tl.int64)
    high = tl.full((), -(LOWEST + 1), tl.int64)
    while low < high:
        # The mean rounded up, without overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        if _above(logits, weights, row, middle, least, COUNT, V, BLOCK) >= goal:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def choose_tokens(
    logits,
    weights,
    masses,
    values,
    tokens,
    slots,
    positions,
    ways,
    picked,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): picked int64 ``[rows]`` of the rows that sample, in place of their likeliest tokens."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KEPT)
    c = tl.arange(0, SPAN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_of = ways + tl.load(slots + row // WIDTH) * 8
    if tl.load(row_of + MODE) != 0:
        position = tl.load(positions + row) + 1
        top_k = tl.load(row_of + TOP_K)
        power = tl.load(row_of + POWER)
        value = tl.load(values + row * KEPT + k)
        scaled = _scaled(value, tl.max(value, 0), row_of)
        inside = (top_k == 0) | (k < top_k)
        weight = tl.where(inside, _weight(scaled, row_of), 0)
        floor = tl.load(row_of + FLOOR).to(tl.float64, bitcast=True)
        kept = tl.sum((inside & (scaled >= floor)).to(tl.int64), 0)
        running = tl.cumsum(weight, 0)
        mass = tl.sum(weight, 0)
        if top_k == 0:
            mass = tl.sum(tl.load(masses + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)
        covered = top_k <= KEPT
        if power > 0:
            crossing = tl.sum(((running < _goal(mass, row_of)) & (k < kept)).to(tl.int64), 0)
            covered = covered & (crossing < kept)
            kept = crossing + 1
            mass = tl.sum(tl.where(k == crossing, running, 0), 0)
        at = tl.sum(((running <= _target(mass, row_of, position)) & (k < kept)).to(tl.int64), 0)
        token = tl.sum(tl.where(k == at, tl.load(tokens + row * KEPT + k), 0), 0)
        if (covered & (at < kept)) == 0:
            least = tl.full((), LOWEST, tl.int64)
            if top_k > 0:
                least = _highest(logits, weights, row, top_k, least, True, V, BLOCK)
            mass = _above(logits, weights, row, least, least, False, V, BLOCK)
            if power > 0:
                rank = _highest(logits, weights, row, _goal(mass, row_of), least, False, V, BLOCK)
                mass = _above(logits, weights, row, rank, least, False, V, BLOCK)
            goal = _target(mass, row_of, position) + 1
            token = _index_of(_highest(logits, weights, row, goal, least, False, V, BLOCK)).to(tl.int64)
        tl.store(picked + row, tl.minimum(tl.maximum(token, 0), V - 1))  # of a row of NaN the searches find no id


def sample(logits: Tensor, picked: Tensor, slots: Tensor, positions: Tensor, ways: Tensor) -> None:
    """Replace the picks of rows whose slot samples; the others keep theirs.

    Args:
        logits: float32 ``[R, V]``, contiguous; rows that are not sound give any token of the vocabulary.
        picked: int64 ``[R]``, the likeliest token of each row; updated.
        slots: int64 ``[B]``, of R / B rows each.
        positions: int64 ``[R]``, of the rows; their tokens stand one further.
        ways: int64 ``[slots, COLUMNS]``.
    """
    rows, vocab = logits.shape
    width, chunks = rows // len(slots), triton.cdiv(vocab, CHUNK)
    weights = torch.empty(rows, vocab, dtype=torch.int64, device=logits.device)
    masses = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    best = pick.candidates(logits)
    row_weights[(chunks, rows)](
        logits, picked, slots, ways, weights, masses,
        V=vocab, WIDTH=width, CHUNK=CHUNK, CHUNKS=chunks, PDL=True, num_warps=8, launch_pdl=True,
    )  # fmt: skip
    choose_tokens[(rows,)](
        logits, weights, masses, best.values, best.tokens, slots, positions, ways, picked,
        V=vocab, WIDTH=width, KEPT=CANDIDATES, CHUNKS=chunks, SPAN=triton.next_power_of_2(chunks), BLOCK=2048,
        PDL=True, num_warps=8, launch_pdl=True,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The vocabulary of GLM-4.7, one row a request."""
    wide, whole = torch.float32, torch.int64
    sizes = {"V": 151552, "WIDTH": 1, "CHUNKS": 148, "PDL": True, "launch_pdl": True}
    return [
        CompileCase("row_weights", row_weights, (wide, *(whole,) * 5), {**sizes, "CHUNK": CHUNK, "num_warps": 8}),
        CompileCase(
            "choose_tokens",
            choose_tokens,
            (wide, whole, whole, wide, *(whole,) * 5),
            {**sizes, "KEPT": CANDIDATES, "SPAN": 256, "BLOCK": 2048, "num_warps": 8},
        ),
    ]
