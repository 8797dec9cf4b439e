"""Both ends of a decode step: its rows from what is kept of each slot, and its picks committed there.

B segments of W rows each. Tensors of slots have one row for each and one more, the inert one, for segments that fill a
shape up: it always reads length 0 and candidate 0, and its rows have token 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError


class GatheredRows(msgspec.Struct, frozen=True, eq=False):
    """The rows of a step.

    Attributes:
        tokens, positions: int64 ``[B * W]``.
        starts: int64 ``[B]``, each segment's first position.
        candidates: int64 ``[B]``.
        tables: int64 ``[B, table width]``.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    candidates: Tensor
    tables: Tensor


class CommittedRows(msgspec.Struct, frozen=True, eq=False):
    """What a step came to.

    Attributes:
        results: int64 ``[B, W + 3]``: the picks, how many drafts stood, the first row whose logits are at fault (W
            where none is), the length before.
        rows: int64 ``[B]``, the last row that stood.
        tokens, positions: int64 ``[B]``, of that row.
        last: int64 ``[B]``, the pick of that row; 0 for an inert segment.
    """

    results: Tensor
    rows: Tensor
    tokens: Tensor
    positions: Tensor
    last: Tensor


class Outbox(msgspec.Struct, frozen=True, eq=False):
    """Page-locked host memory to which a GPU writes what a step came to: no copy stands between two steps.

    Attributes:
        rows: int64 ``[N, B, W + 4]``, of the N newest steps: a row of `CommittedRows.results` and the step's number.
        turns: int64 ``[B]`` on the device, the number of the next step, the same for all segments.
    """

    rows: Tensor
    turns: Tensor


def gather(
    slots: Tensor,
    lengths: Tensor,
    candidates: Tensor,
    last_tokens: Tensor,
    drafts: Tensor,
    tables: Tensor,
    width: int,
) -> GatheredRows:
    """The newest token of each segment and its first ``width - 1`` drafts, at the positions after what it has.

    Args:
        slots: int64 ``[B]``; only the inert one may come twice.
        lengths, candidates, last_tokens: int64 ``[slots + 1]``.
        drafts: int64 ``[slots + 1, at least width - 1]``.
        tables: int64 ``[slots + 1, table width]``.
    """
    if slots.is_cuda:
        from dgpp_core.ops.kernels import step

        return GatheredRows(*step.gather(slots, lengths, candidates, last_tokens, drafts, tables, width))
    starts = lengths[slots]
    tokens = torch.cat([last_tokens[slots].unsqueeze(1), drafts[slots, : width - 1]], dim=1)
    tokens = tokens * (slots != len(lengths) - 1).unsqueeze(1)
    positions = starts.unsqueeze(1) + torch.arange(width)
    return GatheredRows(tokens.flatten(), positions.flatten(), starts, candidates[slots], tables[slots])


def commit(
    slots: Tensor,
    rows: GatheredRows,
    picked: Tensor,
    fine: Tensor,
    lengths: Tensor,
    candidates: Tensor,
    last_tokens: Tensor,
    *,
    judged: Tensor | None = None,
    outbox: Outbox | None = None,
) -> CommittedRows:
    """Make the picks up to the first wrong draft the slots' own.

    Args:
        rows: as `gather` gave them.
        picked: int64 ``[B * W]``, the token after each row.
        fine: bool ``[B * W]``, whether the row's logits are sound.
        lengths, candidates, last_tokens: int64 ``[slots + 1]``; updated.
        judged: int64 ``[B]``, how many drafts stand, in place of what the picks say.
        outbox: gets the results too; on a GPU.
    """
    inert = len(lengths) - 1
    if slots.is_cuda:
        from dgpp_core.ops.kernels import step

        return CommittedRows(
            *step.commit(
                slots, rows.starts, rows.tokens, picked, fine, judged, lengths, candidates, last_tokens, inert, outbox
            )
        )
    chosen, guessed = picked.view(len(slots), -1), rows.tokens.view(len(slots), -1)
    width = chosen.shape[1]
    accepted = judged
    if accepted is None:
        accepted = (chosen[:, :-1] == guessed[:, 1:]).long().cumprod(dim=1).sum(dim=1)
    live = (slots != inert).long()
    last = chosen.gather(1, accepted.unsqueeze(1)).squeeze(1) * live
    lengths[slots] = (rows.starts + accepted + 1) * live
    candidates[slots] = accepted * live
    last_tokens[slots] = last
    results = pack(chosen, accepted, fine.view(len(slots), width), rows.starts)
    stood = torch.arange(len(slots)) * width + accepted
    return CommittedRows(results, stood, rows.tokens[stood], rows.positions[stood], last)


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """``[B, ...]``: rows int64 ``[B]`` of ``x`` ``[R, ...]``."""
    if x.is_cuda:
        from dgpp_core.ops.kernels import step

        return step.rows_of(x, rows)
    return x[rows]


def keep_drafts(held: Tensor, slots: Tensor, drafts: Tensor) -> None:
    """Make ``drafts`` the rows ``slots`` of ``held``; the inert slot's row means nothing.

    Args:
        held: int64 ``[slots + 1, depth]``; updated.
        slots: int64 ``[B]``; only the inert one may come twice.
        drafts: int64 ``[B, depth]``.

    Raises:
        EngineError: the drafts have another shape or dtype, which a kernel would not notice.
    """
    wanted = (len(slots), held.shape[1])
    if drafts.shape != wanted or drafts.dtype != torch.int64:
        raise EngineError(
            "a drafter's drafts cannot be kept", found=f"{drafts.dtype} {list(drafts.shape)}",
            expected=f"{torch.int64} {list(wanted)}", hint="report this to the author of the model's plugin",
        )  # fmt: skip
    if held.is_cuda:
        from dgpp_core.ops.kernels import step

        step.keep_drafts(held, slots, drafts)
    else:
        held[slots] = drafts


def pack(tokens: Tensor, accepted: Tensor, fine: Tensor, lengths: Tensor) -> Tensor:
    """`CommittedRows.results` from tokens and fine ``[B, W]``, accepted and lengths ``[B]``."""
    width = tokens.shape[1]
    rows = torch.arange(width, device=tokens.device)
    fault = torch.where(fine, width, rows).amin(dim=1)
    return torch.cat([tokens, torch.stack((accepted, fault, lengths), dim=1)], dim=1)


def with_values(results: Tensor, values: Tensor) -> Tensor:
    """`CommittedRows.results` and behind them float32 ``[B, N]``, as integers: one copy brings both to the host."""
    return torch.cat([results, values.view(torch.int32).long()], dim=1)


def values_of(row: Sequence[int]) -> tuple[float, ...]:
    """The float32 values of a row that `with_values` put behind its results."""
    return struct.unpack(f"{len(row)}f", struct.pack(f"{len(row)}i", *row))
