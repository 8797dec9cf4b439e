"""Executes the scheduler's operations: one rank's model, state and sampler.

Positions, last tokens, drafts and recurrent candidates of every slot are device tensors, so a step can be launched
before the host has read the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Drafter, EngineError, Model, StateGroup, StepBatch
from dgpp_core.engine.geometry import Geometry, snapshot_bytes
from dgpp_core.engine.operations import (
    Begin,
    Decode,
    Extend,
    Operation,
    Prefill,
    Release,
    SlotResult,
    Snapshot,
    StepResult,
    TokenLogprobs,
)
from dgpp_core.engine.state import StatePools
from dgpp_core.sampling.pick import Picks, Sampler


class SlotInfo(msgspec.Struct):
    """Host-side facts of an occupied slot; the rest is on the device."""

    request: int
    prompt: tuple[int, ...]
    logprobs: bool
    blocks: int
    bound: int  # upper bound of the device's length


class Engine:
    """One rank's engine.

    Args:
        vocab_size: rows of the output head.
        drafter: proposes ``depth`` tokens a step, or None.
        depth: rows beyond the first that a decode step verifies; 0 without a drafter.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None,
        groups: Sequence[StateGroup],
        geometry: Geometry,
        *,
        vocab_size: int,
        depth: int,
        device: torch.device,
    ) -> None:
        self.model, self.drafter, self.depth = model, drafter, depth if drafter else 0
        self.geometry, self.device, self.vocab_size = geometry, device, vocab_size
        self.state = StatePools(groups, geometry, device)
        self.sampler = Sampler(vocab_size, geometry.slots, device)
        slots = geometry.slots

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.lengths, self.candidates, self.last_tokens = zeros(slots), zeros(slots), zeros(slots)
        self.drafts, self.tables = zeros(slots, self.depth), zeros(slots, geometry.table_width)
        self.slots: dict[int, SlotInfo] = {}

    @property
    def needs_snapshot(self) -> bool:
        """Whether a prefix can only be reused where its window and recurrent state was kept."""
        return snapshot_bytes(self.state.groups, self.geometry.step_width) > 0

    @torch.inference_mode()
    def execute(self, tick: int, operations: Sequence[Operation]) -> StepResult:
        """Run one tick's operations in order.

        Raises:
            EngineError: an operation breaks its contract, or a row has no finite logit.
        """
        results: list[SlotResult] = []
        for kind, run in groupby(operations, type):
            if kind is Prefill:
                for together in _rounds([op for op in run if isinstance(op, Prefill)]):
                    results += self._prefill(together)
                continue
            for op in run:
                if isinstance(op, Decode):
                    results += self._decode(op)
                else:
                    self._arrange(op)
        return StepResult(tick=tick, slots=tuple(results))

    def _arrange(self, op: Operation) -> None:
        match op:
            case Begin():
                self._begin(op)
            case Extend(slot=slot, blocks=blocks):
                info = self._info(slot)
                end = info.blocks + len(blocks)
                if end > self.geometry.table_width:
                    raise EngineError(
                        f"slot {slot} would have {end} blocks", expected=f"<= {self.geometry.table_width}"
                    )
                self.tables[slot, info.blocks : end] = torch.tensor(blocks, device=self.device)
                info.blocks = end
            case Snapshot(slot=slot, arena=arena):
                self._info(slot)
                self.state.save(slot, int(self.candidates[slot]), arena)
            case Release(slot=slot):
                del self.slots[slot]
                self.tables[slot].zero_()
                self.sampler.release(slot)
            case _:
                raise EngineError(f"unknown operation {type(op).__name__}")

    def _begin(self, op: Begin) -> None:
        if op.slot in self.slots:
            raise EngineError(f"slot {op.slot} is taken", found=f"request {self.slots[op.slot].request}")
        self.slots[op.slot] = SlotInfo(op.request, op.prompt, op.logprobs >= 0, 0, op.cached)
        self._arrange(Extend(op.slot, op.blocks))
        self.lengths[op.slot], self.candidates[op.slot] = op.cached, 0
        self.state.clear(op.slot)
        if op.arena >= 0:
            self.state.load(op.arena, op.slot)
        self.sampler.begin(op.slot, op.params, op.prompt, op.logprobs)

    def _info(self, slot: int) -> SlotInfo:
        if slot not in self.slots:
            raise EngineError(f"slot {slot} holds no request")
        return self.slots[slot]

    def _batch(self, slots: Sequence[int], counts: tuple[int, ...], tokens: Tensor, *, keep_rows: bool) -> StepBatch:
        """Rows continuing each slot at its device length."""
        which = torch.tensor(slots, device=self.device)
        lengths = self.lengths[which]
        offsets = torch.cat([torch.arange(n, device=self.device) for n in counts])
        starts = torch.repeat_interleave(lengths, torch.tensor(counts, device=self.device))
        bound = max(self.slots[s].bound + n for s, n in zip(slots, counts, strict=True))
        return StepBatch(
            tokens=tokens,
            positions=starts + offsets,
            counts=counts,
            slots=which,
            lengths=lengths,
            block_tables=self.tables[which],
            candidates=self.candidates[which],
            keep_rows=keep_rows,
            max_length=bound,
        )

    def _prefill(self, ops: list[Prefill]) -> list[SlotResult]:
        infos = [self._info(op.slot) for op in ops]
        for op, info in zip(ops, infos, strict=True):
            self._check_rows(op.slot, op.start + op.count)
            if info.bound != op.start or op.start + op.count > len(info.prompt):
                raise EngineError(f"prefill of slot {op.slot} at {op.start}", expected=f"start {info.bound}")
        counts = tuple(op.count for op in ops)
        slots = [op.slot for op in ops]
        ids = [t for op, i in zip(ops, infos, strict=True) for t in i.prompt[op.start : op.start + op.count]]
        batch = self._batch(slots, counts, torch.tensor(ids, device=self.device), keep_rows=False)
        hidden = self.model.forward(batch, self.state.pools)
        for op, info in zip(ops, infos, strict=True):
            info.bound = op.start + op.count
            self.lengths[op.slot], self.candidates[op.slot] = info.bound, 0
        ends = batch.last_rows()
        last = [i for i, op in enumerate(ops) if op.last]
        results: list[SlotResult] = []
        if last:
            chosen, positions = [slots[i] for i in last], [infos[i].bound for i in last]
            picks = self.sampler.pick(self.model.logits(hidden[[ends[i] for i in last]]), chosen, positions)
            self.last_tokens[chosen] = picks.tokens
            for n, i in enumerate(last):
                results.append(self._result(slots[i], picks, n, 1, 0))
        if self.drafter is not None:
            self._draft_after_prefill(self.drafter, batch, hidden, ops, infos)
        return results

    def _draft_after_prefill(
        self, drafter: Drafter, batch: StepBatch, hidden: Tensor, ops: list[Prefill], infos: list[SlotInfo]
    ) -> None:
        """The drafter reads the chunk's rows; each knows its successor, the last one perhaps just picked."""
        following: list[int] = []
        for op, info in zip(ops, infos, strict=True):
            following += info.prompt[op.start + 1 : op.start + op.count + 1]
            if op.last:
                following.append(0)
        next_tokens = torch.tensor(following, device=self.device)
        ends = batch.last_rows()
        for i, op in enumerate(ops):
            if op.last:
                next_tokens[ends[i]] = self.last_tokens[op.slot]
        own = drafter.observe(batch, hidden, next_tokens, self.state.pools)
        last = [i for i, op in enumerate(ops) if op.last]
        if last:
            rows = torch.tensor([ends[i] for i in last], device=self.device)
            self._propose(drafter, batch, torch.tensor(last, device=self.device), rows, own)

    def _propose(self, drafter: Drafter, batch: StepBatch, segments: Tensor, rows: Tensor, own: Tensor) -> None:
        """New drafts for some segments, each from one observed row."""
        slots = batch.slots[segments]
        tail = StepBatch(
            tokens=batch.tokens[rows],
            positions=batch.positions[rows],
            counts=(1,) * len(rows),
            slots=slots,
            lengths=batch.positions[rows],
            block_tables=batch.block_tables[segments],
            candidates=batch.candidates[segments],
            keep_rows=True,
            max_length=batch.max_length,
        )
        self.drafts[slots] = drafter.propose(tail, own[rows], self.last_tokens[slots], self.depth, self.state.pools)

    def _decode(self, op: Decode) -> list[SlotResult]:
        slots, width = list(op.slots), op.depth + 1
        if op.depth > self.depth:
            raise EngineError(f"a step of depth {op.depth}", expected=f"<= {self.depth}")
        for slot in slots:
            self._check_rows(slot, self._info(slot).bound + width)
        which = torch.tensor(slots, device=self.device)
        drafts = self.drafts[which, : op.depth]
        tokens = torch.cat([self.last_tokens[which].unsqueeze(1), drafts], dim=1).flatten()
        batch = self._batch(slots, (width,) * len(slots), tokens, keep_rows=True)
        hidden = self.model.forward(batch, self.state.pools)
        picks = self._verify(hidden, batch, slots, drafts)
        chosen = picks.tokens.view(len(slots), width)
        agree = (chosen[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
        self.lengths[which] += agree + 1
        self.candidates[which] = agree
        self.last_tokens[which] = chosen.gather(1, agree.unsqueeze(1)).squeeze(1)
        if self.drafter is not None:
            own = self.drafter.observe(batch, hidden, picks.tokens, self.state.pools)
            segments = torch.arange(len(slots), device=self.device)
            self._propose(self.drafter, batch, segments, segments * width + agree, own)
        results = []
        for i, (slot, accepted) in enumerate(zip(slots, agree.tolist(), strict=True)):
            self.slots[slot].bound += accepted + 1
            results.append(self._result(slot, picks, i * width, accepted + 1, op.depth))
        return results

    def _verify(self, hidden: Tensor, batch: StepBatch, slots: list[int], drafts: Tensor) -> Picks:
        width = drafts.shape[1] + 1
        row_slots = [s for s in slots for _ in range(width)]
        assumed = [row[:i] for row in drafts.tolist() for i in range(width)] if width > 1 else None
        return self.sampler.pick(self.model.logits(hidden), row_slots, (batch.positions + 1).tolist(), assumed)

    def _result(self, slot: int, picks: Picks, first: int, count: int, drafted: int) -> SlotResult:
        tokens = tuple(picks.tokens[first : first + count].tolist())
        info, logprobs = self.slots[slot], None
        if info.logprobs:
            logprobs = tuple(p or TokenLogprobs(0.0) for p in picks.logprobs[first : first + count])
        self.sampler.commit(slot, tokens)
        return SlotResult(slot=slot, request=info.request, tokens=tokens, logprobs=logprobs, drafted=drafted)

    def _check_rows(self, slot: int, end: int) -> None:
        if end > self._info(slot).blocks * self.geometry.block_tokens:
            covered = self.slots[slot].blocks * self.geometry.block_tokens
            raise EngineError(f"slot {slot} would write rows up to {end}", expected=f"<= {covered}, its block table")


def _rounds(ops: Sequence[Prefill]) -> Iterator[list[Prefill]]:
    """Runs of prefills that share one forward: a slot's next chunk needs its last one's state."""
    together: list[Prefill] = []
    for op in ops:
        if any(op.slot == other.slot for other in together):
            yield together
            together = []
        together.append(op)
    yield together
