"""The device's side of a decode step: rows from the registers, forward, picks, commit, new drafts.

Nothing here reads a device value on the host or depends on one, so the same code runs eagerly and under capture.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Drafter, Model, State, StepBatch
from dgpp_core.engine.registers import Registers

Judge = Callable[[Tensor, int], Tensor]

RESULT_EXTRA = 3
"""Columns of a result after the picked tokens: accepted drafts, first faulty row (the width where none), length."""


class Verified(msgspec.Struct, frozen=True, eq=False):
    """A step up to its picks: B segments of 1 + depth rows, R rows in all.

    Attributes:
        drafts: int64 ``[B, depth]``, the tokens that rows 1 .. depth took for granted.
        logits: float32 ``[R, vocab]``.
        greedy: int64 ``[R]``, the likeliest token of each row, ties to the lower id.
        finite: bool ``[R]``, whether that token's logit is a number.
    """

    batch: StepBatch
    drafts: Tensor
    hidden: Tensor
    logits: Tensor
    greedy: Tensor
    finite: Tensor


def pack(tokens: Tensor, accepted: Tensor, finite: Tensor, lengths: Tensor) -> Tensor:
    """Results for the host, int64 ``[B, width + RESULT_EXTRA]``.

    Args:
        tokens: ``[B, width]``.
        accepted: ``[B]``.
        finite: ``[B, width]``.
        lengths: ``[B]``, before the step.
    """
    width = tokens.shape[1]
    rows = torch.arange(width, device=tokens.device)
    fault = torch.where(finite, width, rows).amin(dim=1)
    return torch.cat([tokens, torch.stack((accepted, fault, lengths), dim=1)], dim=1)


class DecodeProgram:
    """Decode steps of one model and its drafter.

    Attributes:
        judge: for measuring: how many drafts stand, given lengths ``[B]`` and depth, in place of what the picks say.
    """

    def __init__(self, model: Model, drafter: Drafter | None, pools: State, registers: Registers) -> None:
        self.model, self.drafter, self.pools, self.registers = model, drafter, pools, registers
        self.judge: Judge | None = None

    def verify(self, slots: Tensor, width: int, max_length: int) -> Verified:
        """Run ``width`` rows for each of ``slots``: its newest token and its drafts.

        Args:
            slots: int64 ``[B]``; `Registers.inert` may come several times.
            max_length: host-side bound on the rows' positions + 1.
        """
        held = self.registers
        lengths, drafts = held.lengths[slots], held.drafts[slots, : width - 1]
        tokens = torch.cat([held.last_tokens[slots].unsqueeze(1), drafts], dim=1).flatten()
        positions = (lengths.unsqueeze(1) + torch.arange(width, device=slots.device)).flatten()
        batch = StepBatch(
            tokens=tokens,
            positions=positions,
            counts=(width,) * len(slots),
            slots=slots,
            lengths=lengths,
            block_tables=held.tables[slots],
            candidates=held.candidates[slots],
            keep_rows=True,
            max_length=max_length,
        )
        hidden = self.model.forward(batch, self.pools)
        logits = self.model.logits(hidden)
        peaks, greedy = logits.max(dim=1)
        return Verified(batch, drafts, hidden, logits, greedy, peaks.isfinite())

    def commit(self, step: Verified, picked: Tensor) -> Tensor:
        """Make the picks up to the first wrong draft the requests' own, and draft anew.

        Args:
            picked: int64 ``[R]``.

        Returns:
            int64 ``[B, width + RESULT_EXTRA]``, see `pack`.
        """
        held, batch = self.registers, step.batch
        segments, width = len(batch.counts), step.drafts.shape[1] + 1
        chosen = picked.view(segments, width)
        if self.judge is None:
            accepted = (chosen[:, :-1] == step.drafts).long().cumprod(dim=1).sum(dim=1)
        else:
            accepted = self.judge(batch.lengths, width - 1)
        live = (batch.slots != held.inert).long()
        held.lengths[batch.slots] = (batch.lengths + accepted + 1) * live
        held.candidates[batch.slots] = accepted * live
        last = chosen.gather(1, accepted.unsqueeze(1)).squeeze(1) * live
        held.last_tokens[batch.slots] = last
        if self.drafter is not None:
            own = self.drafter.observe(batch, step.hidden, picked, self.pools)
            every = torch.arange(segments, device=picked.device)
            drafts = self.draft(self.drafter, batch, every, every * width + accepted, own, last)
            held.drafts[batch.slots] = drafts * live.unsqueeze(1)
        return pack(chosen, accepted, step.finite.view(segments, width), batch.lengths)

    def draft(
        self, drafter: Drafter, batch: StepBatch, segments: Tensor, rows: Tensor, own: Tensor, tokens: Tensor
    ) -> Tensor:
        """Drafts for some segments, each from one observed row and the token after it: ``[len(segments), depth]``."""
        tail = StepBatch(
            tokens=batch.tokens[rows],
            positions=batch.positions[rows],
            counts=(1,) * len(rows),
            slots=batch.slots[segments],
            lengths=batch.positions[rows],
            block_tables=batch.block_tables[segments],
            candidates=batch.candidates[segments],
            keep_rows=True,
            max_length=batch.max_length,
        )
        return drafter.propose(tail, own[rows], tokens, self.registers.drafts.shape[1], self.pools)
