"""Choice of tokens on a GPU: the largest logit of a row, the candidates a sampler needs, and the normaliser.

A row is cut into chunks at fixed ids, and what the chunks found is joined in ascending order, so a row's result is its
own. Order is (logit descending, id ascending) everywhere; a NaN ranks below every number.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.api.errors import EngineError
from dgpp_core.ops.kernels.cases import CompileCase

CHUNK = 1024
"""Ids that one program of the first launch takes."""
GROUP = 256
"""Ids whose exponentials are summed first: the chunks of the exact normaliser."""
CANDIDATES = 128
"""Candidates a row."""


@triton.jit
def _ranked(value, index):
    """An int64 that orders (value descending, index ascending) as numbers do; NaN lowest, -0 equal to 0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(value == value, ordered, -2147483648)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _ranked_ids(value, index, V: tl.constexpr):
    """`_ranked`; ids from V on rank below everything, so that of a row of NaN a token's id is picked too."""
    return tl.where(index < V, _ranked(value, index), -9223372036854775808)


@triton.jit
def _value_of(ranked):
    """The value in `_ranked`; a NaN comes back as one."""
    ordered = (ranked >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(ranked):
    """The index in `_ranked`."""
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def chunk_peaks(logits, ranks, sound, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """Grid (CHUNKS, rows): ranks int64 ``[rows, CHUNKS]`` the chunk's best, sound int32 whether no logit is NaN or inf.

    -inf is a legal logit: that of a forbidden token.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
    tl.store(ranks + row * CHUNKS + chunk, tl.max(_ranked_ids(x, i, V), 0))
    tl.store(sound + row * CHUNKS + chunk, tl.min((x < float("inf")).to(tl.int32), 0))


@triton.jit
def row_peak(ranks, sound, tokens, fine, CHUNKS: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows,): tokens int64 the best id; fine bool: no NaN, no inf, and at least one finite logit."""
    row = tl.program_id(0)
    i = tl.arange(0, SPAN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    there = i < CHUNKS
    best = tl.max(tl.load(ranks + row * CHUNKS + i, mask=there, other=-9223372036854775808), 0)
    good = tl.min(tl.load(sound + row * CHUNKS + i, mask=there, other=1), 0)
    tl.store(tokens + row, _index_of(best).to(tl.int64))
    tl.store(fine + row, (good == 1) & (_value_of(best) > float("-inf")))


@triton.jit
def chunk_candidates(
    logits,
    ranks,
    peaks,
    sums,
    sound,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (CHUNKS, rows): each chunk's KEPT best in order, and of each GROUP ids the peak and sum of exponentials."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
    group = row * (CHUNKS * GROUPS) + chunk * GROUPS + tl.arange(0, GROUPS)
    grouped = x.reshape([GROUPS, GROUP])
    peak = tl.max(grouped, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + group, peak)
    tl.store(sums + group, tl.sum(tl.exp(grouped - base[:, None]), 1))
    tl.store(sound + row * CHUNKS + chunk, tl.min((x < float("inf")).to(tl.int32), 0))
    best = tl.topk(_ranked_ids(x, i, V), KEPT)
    tl.store(ranks + (row * CHUNKS + chunk) * KEPT + tl.arange(0, KEPT), best)


@triton.jit
def join_candidates(
    ranks,
    joined,
    COUNT: tl.constexpr,
    MERGED: tl.constexpr,
    KEPT: tl.constexpr,
    LISTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(LISTS / MERGED), rows): the KEPT best of MERGED lists of KEPT each."""
    piece = tl.program_id(0)
    row = tl.program_id(1)
    i = piece * (MERGED * KEPT) + tl.arange(0, MERGED * KEPT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(ranks + row * (LISTS * KEPT) + i, mask=i < LISTS * KEPT, other=-9223372036854775808)
    tl.store(joined + (row * COUNT + piece) * KEPT + tl.arange(0, KEPT), tl.topk(x, KEPT))


@triton.jit
def finish_candidates(
    ranks,
    peaks,
    sums,
    sound,
    values,
    tokens,
    normaliser,
    fine,
    CHUNKS: tl.constexpr,
    CHUNK_SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,): values fp32 and tokens int64 ``[rows, KEPT]``, normaliser fp64, fine bool as in `row_peak`."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k = tl.arange(0, KEPT)
    best = tl.load(ranks + row * KEPT + k)
    tl.store(values + row * KEPT + k, _value_of(best))
    tl.store(tokens + row * KEPT + k, _index_of(best).to(tl.int64))
    g = tl.arange(0, GROUP_SPAN)
    peak = tl.load(peaks + row * GROUPS + g, mask=g < GROUPS, other=float("-inf")).to(tl.float64)
    total = tl.load(sums + row * GROUPS + g, mask=g < GROUPS, other=0.0).to(tl.float64)
    top = tl.max(peak, 0)
    base = tl.where(top > float("-inf"), top, 0.0)
    c = tl.arange(0, CHUNK_SPAN)
    good = tl.min(tl.load(sound + row * CHUNKS + c, mask=c < CHUNKS, other=1), 0)
    tl.store(normaliser + row, base + tl.log(tl.sum(total * tl.exp(peak - base), 0)))
    tl.store(fine + row, (good == 1) & (top > float("-inf")))


MERGED = 16
"""Lists of candidates that one program joins."""


class Candidates(Struct, frozen=True, eq=False):
    """What a sampler needs of some rows of logits.

    Attributes:
        values: float32 ``[M, CANDIDATES]``, the largest logits in order; ``tokens`` int64, their ids.
        normaliser: float64 ``[M]``, the logarithm of the sum of all exponentials.
        fine: bool ``[M]``: no logit is NaN or inf and at least one is finite.
    """

    values: Tensor
    tokens: Tensor
    normaliser: Tensor
    fine: Tensor


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id of each row's largest logit, int64 ``[M]``, ties to the lower id, and whether the row is fine, bool.

    Args:
        logits: float32 ``[M, V]``, contiguous, on a GPU. Rows with a NaN or an inf, or without any finite logit, are
            not fine; their pick must not be used.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    ranks = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    sound = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    fine = torch.empty(rows, dtype=torch.bool, device=logits.device)
    chunk_peaks[(chunks, rows)](
        logits, ranks, sound, V=vocab, CHUNK=CHUNK, CHUNKS=chunks, PDL=True, num_warps=4, launch_pdl=True
    )
    row_peak[(rows,)](
        ranks, sound, tokens, fine,
        CHUNKS=chunks, SPAN=triton.next_power_of_2(chunks), PDL=True, num_warps=1, launch_pdl=True,
    )  # fmt: skip
    return tokens, fine


def candidates(logits: Tensor) -> Candidates:
    """Each row's largest logits and its normaliser.

    Args:
        logits: as for `greedy`.

    Raises:
        EngineError: the vocabulary is smaller than `CANDIDATES`.
    """
    rows, vocab = logits.shape
    if vocab < CANDIDATES:
        raise EngineError("the vocabulary is too small", found=str(vocab), expected=f"at least {CANDIDATES} ids")
    chunks, groups, device = triton.cdiv(vocab, CHUNK), CHUNK // GROUP, logits.device
    ranks = torch.empty(rows, chunks, CANDIDATES, dtype=torch.int64, device=device)
    peaks, sums = torch.empty(2, rows, chunks * groups, dtype=torch.float32, device=device)
    sound = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    chunk_candidates[(chunks, rows)](
        logits, ranks, peaks, sums, sound, V=vocab, CHUNK=CHUNK, CHUNKS=chunks, GROUP=GROUP, KEPT=CANDIDATES,
        PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    while ranks.shape[1] > 1:
        lists = ranks.shape[1]
        count = triton.cdiv(lists, MERGED)
        joined = torch.empty(rows, count, CANDIDATES, dtype=torch.int64, device=device)
        join_candidates[(count, rows)](
            ranks, joined, COUNT=count, MERGED=MERGED, KEPT=CANDIDATES, LISTS=lists,
            PDL=True, num_warps=8, launch_pdl=True,
        )  # fmt: skip
        ranks = joined
    found = Candidates(
        torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device),
        torch.empty(rows, CANDIDATES, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float64, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )
    finish_candidates[(rows,)](
        ranks, peaks, sums, sound, found.values, found.tokens, found.normaliser, found.fine,
        CHUNKS=chunks, CHUNK_SPAN=triton.next_power_of_2(chunks), GROUPS=chunks * groups,
        GROUP_SPAN=triton.next_power_of_2(chunks * groups), KEPT=CANDIDATES, PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return found


def compile_cases() -> list[CompileCase]:
    """The vocabulary of GLM-4.7, whole."""
    wide, whole, word, vocab = torch.float32, torch.int64, torch.int32, 151552
    options = {"PDL": True, "num_warps": 4, "launch_pdl": True}
    chunk = {"V": vocab, "CHUNK": CHUNK, "CHUNKS": 148}
    spans = {"CHUNKS": 148, "CHUNK_SPAN": 256, "GROUPS": 592, "GROUP_SPAN": 1024, "KEPT": CANDIDATES}
    lists = (wide, whole, wide, wide, word)
    finish = (whole, wide, wide, word, wide, whole, torch.float64, torch.bool)
    join = {"MERGED": MERGED, "KEPT": CANDIDATES, **options, "num_warps": 8}
    return [
        CompileCase("chunk_peaks", chunk_peaks, (wide, whole, word), chunk | options),
        CompileCase(
            "row_peak",
            row_peak,
            (whole, word, whole, torch.bool),
            {"CHUNKS": 148, "SPAN": 256, **options, "num_warps": 1},
        ),
        CompileCase(
            "chunk_candidates", chunk_candidates, lists, {**chunk, "GROUP": GROUP, "KEPT": CANDIDATES, **options}
        ),
        CompileCase("join_candidates 148", join_candidates, (whole, whole), {"COUNT": 10, "LISTS": 148, **join}),
        CompileCase("join_candidates 10", join_candidates, (whole, whole), {"COUNT": 1, "LISTS": 10, **join}),
        CompileCase("finish_candidates", finish_candidates, finish, {**spans, **options}),
    ]
