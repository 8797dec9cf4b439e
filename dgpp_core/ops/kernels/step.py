"""Both ends of a decode step on a GPU: rows gathered from what is kept of each slot, and the picks committed to it.

One launch each: the twenty small operations that they replace cost more than a layer.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.step import Outbox

ENTRIES = 1024
"""Block table entries that one program copies."""


@triton.jit
def gather_rows(
    slots,
    lengths,
    candidates,
    last_tokens,
    drafts,
    tables,
    tokens,
    positions,
    starts,
    chosen,
    rows_tables,
    INERT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    TABLE: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (segments, ceil(TABLE / ENTRIES)): see `gather`. DEPTH is the row stride of drafts, SPAN >= WIDTH."""
    segment = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + segment)
    e = piece * ENTRIES + tl.arange(0, ENTRIES)
    entries = tl.load(tables + slot * TABLE + e, mask=e < TABLE, other=0)
    tl.store(rows_tables + segment * TABLE + e, entries, mask=e < TABLE)
    if piece == 0:
        start = tl.load(lengths + slot)
        i = tl.arange(0, SPAN)
        there = i < WIDTH
        token = tl.load(drafts + slot * DEPTH + i - 1, mask=there & (i > 0), other=0)
        token = tl.where(i == 0, tl.load(last_tokens + slot), token)
        token = tl.where(slot == INERT, 0, token)
        tl.store(tokens + segment * WIDTH + i, token, mask=there)
        tl.store(positions + segment * WIDTH + i, start + i, mask=there)
        tl.store(starts + segment, start)
        tl.store(chosen + segment, tl.load(candidates + slot))


@triton.jit
def _write_result(row, pick, i, there, accepted, fault, start, WIDTH: tl.constexpr):
    tl.store(row + i, pick, mask=there)
    tl.store(row + WIDTH, accepted)
    tl.store(row + WIDTH + 1, fault)
    tl.store(row + WIDTH + 2, start)


@triton.jit
def commit_rows(
    slots,
    starts,
    tokens,
    picked,
    fine,
    judged,
    lengths,
    candidates,
    last_tokens,
    results,
    tail,
    posted,
    turns,
    INERT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    JUDGED: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (segments,): see `commit`.

    Args:
        posted: int64 ``[KEPT, segments, WIDTH + 4]``, and turns ``[segments]``: a `dgpp_core.ops.step.Outbox`.
        SPAN: a power of two >= WIDTH.
        KEPT: steps that ``posted`` holds, 0 where there is none.
    """
    segment = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPAN)
    there = i < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + segment)
    start = tl.load(starts + segment)
    pick = tl.load(picked + segment * WIDTH + i, mask=there, other=0)
    if JUDGED:
        accepted = tl.load(judged + segment)
    else:
        draft = tl.load(tokens + segment * WIDTH + i + 1, mask=i + 1 < WIDTH, other=-1)
        accepted = tl.min(tl.where((pick == draft) & (i + 1 < WIDTH), SPAN, i), 0).to(tl.int64)
    sound = tl.load(fine + segment * WIDTH + i, mask=there, other=1)
    fault = tl.min(tl.where(sound != 0, WIDTH, i), 0).to(tl.int64)
    live = slot != INERT
    newest = tl.where(live, tl.sum(tl.where(i == accepted, pick, 0), 0), 0)
    tl.store(lengths + slot, tl.where(live, start + accepted + 1, 0))
    tl.store(candidates + slot, tl.where(live, accepted, 0))
    tl.store(last_tokens + slot, newest)
    segments = tl.num_programs(0)
    tl.store(tail + segment, segment * WIDTH + accepted)
    tl.store(tail + segments + segment, tl.load(tokens + segment * WIDTH + accepted))
    tl.store(tail + 2 * segments + segment, start + accepted)
    tl.store(tail + 3 * segments + segment, newest)
    if KEPT > 0:
        turn = tl.load(turns + segment)
        tl.store(turns + segment, turn + 1)
        post = posted + ((turn % KEPT) * segments + segment) * (WIDTH + 4)
        _write_result(post, pick, i, there, accepted, fault, start, WIDTH)
        tl.store(post + WIDTH + 3, turn)
    _write_result(results + segment * (WIDTH + 3), pick, i, there, accepted, fault, start, WIDTH)


@triton.jit
def copy_rows(x, rows, out, H: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """Grid (B, ceil(H / SPAN)): out ``[B, H]`` are ``rows`` of x ``[R, H]``."""
    segment = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows + segment)
    tl.store(out + segment * H + h, tl.load(x + row * H + h, mask=h < H), mask=h < H)


@triton.jit
def place_drafts(held, slots, drafts, DEPTH: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """Grid (B,): rows ``slots`` of held ``[slots + 1, DEPTH]`` are those of drafts ``[B, DEPTH]``."""
    segment = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPAN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + segment)
    draft = tl.load(drafts + segment * DEPTH + i, mask=i < DEPTH)
    tl.store(held + slot * DEPTH + i, draft, mask=i < DEPTH)


def gather(
    slots: Tensor,
    lengths: Tensor,
    candidates: Tensor,
    last_tokens: Tensor,
    drafts: Tensor,
    tables: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `dgpp_core.ops.step.gather`, for CUDA tensors."""
    segments, table = len(slots), tables.shape[1]
    flat, single = torch.empty(2, segments * width, dtype=torch.int64, device=slots.device), torch.empty_like
    tokens, positions = flat
    starts, chosen, found = single(slots), single(slots), tables.new_empty(segments, table)
    gather_rows[(segments, triton.cdiv(table, ENTRIES))](
        slots, lengths, candidates, last_tokens, drafts, tables, tokens, positions, starts, chosen, found,
        INERT=len(lengths) - 1, WIDTH=width, SPAN=triton.next_power_of_2(width), DEPTH=drafts.shape[1], TABLE=table,
        ENTRIES=ENTRIES, PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return tokens, positions, starts, chosen, found


def commit(
    slots: Tensor,
    starts: Tensor,
    tokens: Tensor,
    picked: Tensor,
    fine: Tensor,
    judged: Tensor | None,
    lengths: Tensor,
    candidates: Tensor,
    last_tokens: Tensor,
    inert: int,
    outbox: Outbox | None = None,
) -> tuple[Tensor, ...]:
    """As `dgpp_core.ops.step.commit`, for CUDA tensors."""
    segments = len(slots)
    width = len(tokens) // segments
    results = slots.new_empty(segments, width + 3)
    tail = slots.new_empty(4, segments)
    commit_rows[(segments,)](
        slots, starts, tokens, picked, fine, starts if judged is None else judged, lengths, candidates, last_tokens,
        results, tail, *((slots, slots) if outbox is None else (outbox.rows, outbox.turns)),
        INERT=inert, WIDTH=width, SPAN=triton.next_power_of_2(width), JUDGED=judged is not None,
        KEPT=0 if outbox is None else len(outbox.rows), PDL=True, num_warps=1, launch_pdl=True,
    )  # fmt: skip
    return results, *tail


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """As `dgpp_core.ops.step.rows_of`, for CUDA tensors."""
    out = x.new_empty(len(rows), *x.shape[1:])
    if out.numel():
        width = out[0].numel()
        copy_rows[(len(rows), triton.cdiv(width, ENTRIES))](
            x.contiguous(), rows, out, H=width, SPAN=ENTRIES, PDL=True, num_warps=4, launch_pdl=True
        )
    return out


def keep_drafts(held: Tensor, slots: Tensor, drafts: Tensor) -> None:
    """As `dgpp_core.ops.step.keep_drafts`, for CUDA tensors."""
    depth = held.shape[1]
    span = triton.next_power_of_2(max(1, depth))
    place_drafts[(len(slots),)](
        held, slots, drafts.contiguous(), DEPTH=depth, SPAN=span, PDL=True, num_warps=1, launch_pdl=True
    )


def compile_cases() -> list[CompileCase]:
    """Steps without drafts and with three."""
    whole, options = torch.int64, {"PDL": True, "launch_pdl": True}
    copied = {"H": 5120, "SPAN": ENTRIES, **options, "num_warps": 4}
    placed = {"DEPTH": 3, "SPAN": 4, **options, "num_warps": 1}
    cases = [
        CompileCase("copy_rows 5120", copy_rows, (torch.bfloat16, whole, torch.bfloat16), copied),
        CompileCase("place_drafts 3", place_drafts, (whole,) * 3, placed),
    ]
    for width, span, depth in ((1, 1, 0), (4, 4, 3)):
        rows = {"INERT": 16, "WIDTH": width, "SPAN": span}
        table = {"DEPTH": depth, "TABLE": 130, "ENTRIES": ENTRIES}
        cases.append(
            CompileCase(f"gather_rows {width}", gather_rows, (whole,) * 11, rows | table | options | {"num_warps": 4})
        )
        given = (whole,) * 4 + (torch.bool,) + (whole,) * 8
        mode = {"JUDGED": False, "KEPT": 4, "num_warps": 1}
        cases.append(CompileCase(f"commit_rows {width}", commit_rows, given, rows | mode | options))
    return cases
