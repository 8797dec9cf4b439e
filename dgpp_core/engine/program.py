"""The device's side of a decode step: rows from the registers, forward, picks, commit, new drafts.

Nothing here reads a device value on the host or depends on one, so the same code runs eagerly and under capture.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from torch import Tensor

from dgpp_core.api import Confident, Drafter, Model, State, StepBatch
from dgpp_core.engine.registers import Registers
from dgpp_core.ops.forbid import forbid
from dgpp_core.ops.pick import greedy
from dgpp_core.ops.step import GatheredRows, Outbox, commit, gather, keep_drafts, rows_of, with_values

Judge = Callable[[Tensor, int], Tensor]


class Verified(msgspec.Struct, frozen=True, eq=False):
    """A step up to its picks: B segments of 1 + depth rows, R rows in all.

    Attributes:
        logits: float32 ``[R, vocab]``.
        picked: int64 ``[R]``, the likeliest token of each row; may be overwritten before the step is committed.
        fine: bool ``[R]``, whether the row's logits are sound.
    """

    batch: StepBatch
    rows: GatheredRows
    hidden: Tensor
    logits: Tensor
    picked: Tensor
    fine: Tensor

    @property
    def drafts(self) -> Tensor:
        """int64 ``[B, depth]``, the tokens that rows 1 .. depth took for granted."""
        return self.rows.tokens.view(len(self.batch.counts), -1)[:, 1:]


class DecodeProgram:
    """Decode steps of one model and its drafter.

    Attributes:
        samples: whether the device can sample, to the bit as the host's sampler does.
        posts: whether `commit` can leave all of its results in an outbox: how sure a drafter is comes too late for it.
        judge: for measuring: how many drafts stand, given lengths ``[B]`` and depth, in place of what the picks say.
    """

    def __init__(self, model: Model, drafter: Drafter | None, pools: State, registers: Registers) -> None:
        self.model, self.drafter, self.pools, self.registers = model, drafter, pools, registers
        self.judge: Judge | None = None
        self.samples = False
        self.posts = not isinstance(drafter, Confident)

    def verify(self, slots: Tensor, width: int, max_length: int) -> Verified:
        """Run ``width`` rows for each of ``slots``: its newest token and its drafts.

        Args:
            slots: int64 ``[B]``; `Registers.inert` may come several times.
            max_length: host-side bound on the rows' positions + 1.
        """
        held = self.registers
        rows = gather(slots, held.lengths, held.candidates, held.last_tokens, held.drafts, held.tables, width)
        batch = StepBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            counts=(width,) * len(slots),
            slots=slots,
            lengths=rows.starts,
            block_tables=rows.tables,
            candidates=rows.candidates,
            keep_rows=True,
            max_length=max_length,
            places=held.places,
        )
        hidden = self.model.forward(batch, self.pools)
        logits = self.model.logits(hidden)
        return Verified(batch, rows, hidden, logits, *greedy(logits))

    def restrict(self, logits: Tensor, picked: Tensor, fine: Tensor, masks: Tensor) -> None:
        """Forbid what the rows' grammars leave out, and choose the likeliest token again; all three are updated.

        Args:
            logits: ``[R, vocab]``.
            picked: int64 ``[R]``.
            fine: bool ``[R]``, of the rows as they were; from now on also whether anything is left to choose.
            masks: of `dgpp_core.ops.forbid.forbid`, ``[R, ...]``.
        """
        forbid(logits, masks)
        likeliest, left = greedy(logits)
        picked.copy_(likeliest)
        fine.logical_and_(left)

    def sample(self, logits: Tensor, picked: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Replace the likeliest tokens by sampled ones where a slot samples; on a GPU.

        Args:
            logits: ``[R, vocab]``.
            picked: int64 ``[R]``; updated.
            slots: int64 ``[B]``, of R / B rows each.
            positions: int64 ``[R]``, of the rows.
        """
        from dgpp_core.ops.kernels.sample import sample

        sample(logits, picked, slots, positions, self.registers.ways)

    def commit(self, step: Verified, outbox: Outbox | None = None) -> Tensor:
        """Make ``step.picked`` up to the first wrong draft the requests' own, and draft anew.

        Args:
            outbox: gets the results too, without how sure the drafter is; on a GPU.

        Returns:
            `dgpp_core.ops.step.CommittedRows.results`, int64 ``[B, width + 3]``, and behind them how sure the drafter
            is of each draft, where it says so.
        """
        held, batch = self.registers, step.batch
        judged = None if self.judge is None else self.judge(batch.lengths, batch.counts[0] - 1)
        done = commit(
            batch.slots, step.rows, step.picked, step.fine, held.lengths, held.candidates, held.last_tokens,
            judged=judged, outbox=outbox,
        )  # fmt: skip
        if self.drafter is not None:
            own = self.drafter.observe(batch, step.hidden, step.picked, self.pools)
            tail = tail_of(
                done.tokens, done.positions, batch.slots, batch.block_tables, batch.candidates, batch.max_length,
                batch.places,
            )  # fmt: skip
            sure = self.draft(self.drafter, tail, rows_of(own, done.rows), done.last)
            if sure is not None:
                return with_values(done.results, sure)
        return done.results

    def draft(self, drafter: Drafter, tail: StepBatch, own: Tensor, tokens: Tensor) -> Tensor | None:
        """Draft after each segment's newest token, into the registers.

        Args:
            tail: see `tail_of`.
            own: what the drafter made of those rows.
            tokens: int64 ``[B]``, the token after each.

        Returns:
            how sure the drafter is of each, as `dgpp_core.api.Confident` says it; None where it does not.
        """
        held, sure = self.registers.drafts, None
        if isinstance(drafter, Confident):
            drafts, sure = drafter.drafted(tail, own, tokens, held.shape[1], self.pools)
        else:
            drafts = drafter.propose(tail, own, tokens, held.shape[1], self.pools)
        keep_drafts(held, tail.slots, drafts)
        return sure


def tail_of(
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    candidates: Tensor,
    max_length: int,
    places: Tensor | None = None,
) -> StepBatch:
    """One row a segment, as a drafter goes on from it; arguments as the fields of `StepBatch`."""
    return StepBatch(
        tokens=tokens,
        positions=positions,
        counts=(1,) * len(slots),
        slots=slots,
        lengths=positions,
        block_tables=block_tables,
        candidates=candidates,
        keep_rows=True,
        max_length=max_length,
        places=places,
    )
