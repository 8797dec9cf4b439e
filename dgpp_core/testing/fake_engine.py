"""An engine without a model: it executes a scheduler's operations on token ids and checks every promise behind them.

A KV row is a hash of all ids up to it, a snapshot is the hash at its position, and the next token is a function of all
ids before it. So a row in the wrong block, a stale prefix, a snapshot of another request or a lost token shows up as a
`ViolationError` or as a reply that differs from `solo`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

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
)
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Reason, Submit

Pick = Callable[[Sequence[int]], int]
"""All ids so far to the next one."""

Accept = Callable[[int, int], int]
"""(request, position of the next token) to how many drafts of the step stand; clipped to its depth."""

START, GARBAGE = 1, 0
_MASK = (1 << 64) - 1


class ViolationError(AssertionError):
    """An operation that a real engine could not carry out correctly."""


def fold(state: int, token: int) -> int:
    """The hash of a sequence from the hash of all but its last token (a splitmix64 round)."""
    mixed = (state ^ (token + 0x9E3779B97F4A7C15)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) | 2


def hashed_pick(vocab: int) -> Pick:
    """A next token that depends on every id before it and on their number."""

    def pick(ids: Sequence[int]) -> int:
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % vocab

    return pick


def solo(submit: Submit, pick: Pick) -> tuple[tuple[int, ...], Reason]:
    """The reply that a request gets when it is alone, undrafted and uncached."""
    ids = list(submit.tokens)
    for count in range(1, submit.max_tokens + 1):
        ids.append(pick(ids))
        if ids[-1] in submit.eos_ids:
            return tuple(ids[-count:]), "eos"
    return tuple(ids[len(submit.tokens) :]), "length"


class _Slot(msgspec.Struct, kw_only=True):
    """A request on the fake device; ``ids`` runs one ahead of ``rows`` once the first token is picked.

    ``trail`` has the state at each length that the last step passed.
    """

    request: int
    ids: list[int]
    base: int
    table: list[int]
    shared: int
    rows: int
    state: int
    trail: dict[int, int] = {}


class FakeEngine:
    """Executes operations at once and hands results out like a real one.

    Args:
        limits: what the scheduler was given.
        lag: 0 hands a tick's result out in the same tick, 1 one tick later.
        pick: the next token; by default a hash of all ids so far.
        accept: how many drafts stand; by default none.
        vocab: ids of the default pick.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        lag: int = 0,
        pick: Pick | None = None,
        accept: Accept = lambda request, position: 0,
        vocab: int = 1000,
    ) -> None:
        self._limits, self._lag, self._accept = limits, lag, accept
        self._pick = pick or hashed_pick(vocab)
        self._rows = [[GARBAGE] * limits.block_tokens for _ in range(limits.blocks + 1)]
        self._decoded: set[tuple[int, int]] = set()
        self._arena = [GARBAGE] * limits.snapshots
        self._slots: dict[int, _Slot] = {}
        self._pending: deque[StepResult | None] = deque()

    @property
    def slots_held(self) -> dict[int, int]:
        """Slot to request, of all that have begun and are not released."""
        return {slot: held.request for slot, held in self._slots.items()}

    @property
    def blocks_held(self) -> set[int]:
        """Blocks in the table of any slot."""
        return {block for held in self._slots.values() for block in held.table}

    @property
    def results_due(self) -> bool:
        """Whether a computed result has not been handed out yet."""
        return any(result is not None for result in self._pending)

    def execute(self, tick: int, operations: Sequence[Operation]) -> tuple[StepResult, ...]:
        """Carry out one tick.

        Returns:
            the results that are ready now: this tick's, or with ``lag`` 1 the one of the tick before.

        Raises:
            ViolationError: an operation breaks a promise.
        """
        answers: list[SlotResult] = []
        for operation in operations:
            answers.extend(self._run(operation))
        computed = any(isinstance(operation, Prefill | Decode) for operation in operations)
        self._pending.append(StepResult(tick, tuple(answers)) if computed else None)
        ready = [self._pending.popleft() for _ in range(len(self._pending) - self._lag)]
        return tuple(result for result in ready if result is not None)

    def _run(self, operation: Operation) -> list[SlotResult]:
        match operation:
            case Begin():
                self._begin(operation)
            case Extend():
                slot = self._held(operation.slot)
                self._fresh(operation.blocks)
                slot.table.extend(operation.blocks)
            case Snapshot():
                self._snapshot(operation)
            case Release():
                self._held(operation.slot)
                del self._slots[operation.slot]
            case Prefill():
                return self._prefill(operation)
            case Decode():
                _require(list(operation.slots) == sorted(set(operation.slots)), "decode slots ascend")
                depths = self._limits.ladder or (self._limits.depth,)
                _require(operation.depth in depths, "the configured depth is used")
                return [self._step(slot, operation.depth) for slot in operation.slots]
        return []

    def _held(self, slot: int) -> _Slot:
        held = self._slots.get(slot)
        if held is None:
            raise ViolationError(f"slot {slot} is used without a request in it")
        return held

    def _begin(self, begin: Begin) -> None:
        size = self._limits.block_tokens
        _require(0 <= begin.slot < self._limits.slots, f"slot {begin.slot} exists")
        _require(begin.slot not in self._slots, f"slot {begin.slot} is free")
        _require(begin.cached % size == 0 and begin.cached < len(begin.prompt), "whole blocks and a rest to compute")
        shared = begin.cached // size
        self._fresh(begin.blocks[shared:])
        _require(len(set(begin.blocks)) == len(begin.blocks), "a table names a block once")
        state = START
        for position, token in enumerate(begin.prompt[: begin.cached]):
            state = fold(state, token)
            block = begin.blocks[position // size]
            found = self._rows[block][position % size]
            prefilled = self._limits.decode_rows_match_prefill or (block, position % size) not in self._decoded
            _require(prefilled, f"cached row {position} of request {begin.request} was prefilled")
            _require(found == state, f"cached row {position} of request {begin.request} holds its prompt")
        if self._limits.needs_snapshot and begin.cached:
            _require(begin.arena >= 0 and self._arena[begin.arena] == state, "the snapshot is of the cached prefix")
        self._slots[begin.slot] = _Slot(
            request=begin.request,
            ids=list(begin.prompt),
            base=len(begin.prompt),
            table=list(begin.blocks),
            shared=shared,
            rows=begin.cached,
            state=state,
        )

    def _fresh(self, blocks: Sequence[int]) -> None:
        """Blocks that a table gets for itself: nobody else reads them, and what was in them is gone."""
        for block in blocks:
            _require(1 <= block <= self._limits.blocks, f"block {block} exists")
            _require(all(block not in slot.table for slot in self._slots.values()), f"block {block} is free")
            self._rows[block] = [GARBAGE] * self._limits.block_tokens
            self._decoded -= {(block, offset) for offset in range(self._limits.block_tokens)}

    def _snapshot(self, snapshot: Snapshot) -> None:
        _require(0 <= snapshot.arena < len(self._arena), f"arena slot {snapshot.arena} exists")
        slot = self._held(snapshot.slot)
        position = slot.rows if snapshot.position < 0 else snapshot.position
        _require(position % self._limits.block_tokens == 0, "a snapshot lies on a block boundary")
        if snapshot.position < 0:
            self._arena[snapshot.arena] = slot.state
        elif position in slot.trail:
            self._arena[snapshot.arena] = slot.trail[position]

    def _prefill(self, prefill: Prefill) -> list[SlotResult]:
        slot = self._held(prefill.slot)
        end = prefill.start + prefill.count
        _require(prefill.start == slot.rows and prefill.count > 0 and end <= slot.base, "prefill goes on where it was")
        _require(prefill.last == (end == slot.base), "the last chunk is the one marked")
        for token in slot.ids[prefill.start : end]:
            self._commit_row(slot, token)
        if not prefill.last:
            return []
        self._spoil(slot, self._limits.step_rows - self._limits.step_width)
        slot.ids.append(self._pick(slot.ids))
        return [SlotResult(prefill.slot, slot.request, (slot.ids[-1],))]

    def _step(self, number: int, depth: int) -> SlotResult:
        slot = self._held(number)
        _require(len(slot.ids) == slot.rows + 1, "a step follows the prompt's last chunk")
        accepted = min(depth, self._accept(slot.request, len(slot.ids)))
        slot.trail = {}
        for _ in range(accepted + 1):
            at, offset = divmod(slot.rows, self._limits.block_tokens)
            self._commit_row(slot, slot.ids[slot.rows])
            self._decoded.add((slot.table[at], offset))
            slot.trail[slot.rows] = slot.state
            slot.ids.append(self._pick(slot.ids))
        self._spoil(slot, max(depth - accepted, self._limits.step_rows - self._limits.step_width))
        tokens, sure = tuple(slot.ids[-accepted - 1 :]), self._sure(slot) if self._limits.confident else ()
        return SlotResult(number, slot.request, tokens, drafted=depth, confidence=sure)

    def _sure(self, slot: _Slot) -> tuple[float, ...]:
        """Of each draft a logit from -3 to 5 that follows from the ids so far."""
        state, out = slot.state, []
        for place in range(self._limits.depth):
            state = fold(state, place)
            out.append(state % 2048 / 256 - 3)
        return tuple(out)

    def _commit_row(self, slot: _Slot, token: int) -> None:
        slot.state = fold(slot.state, token)
        self._write(slot, slot.rows, slot.state)
        slot.rows += 1

    def _spoil(self, slot: _Slot, count: int) -> None:
        """Rejected and provisional rows past the committed end."""
        for position in range(slot.rows, slot.rows + count):
            self._write(slot, position, GARBAGE)

    def _write(self, slot: _Slot, position: int, value: int) -> None:
        size = self._limits.block_tokens
        at = position // size
        _require(at >= slot.shared, f"row {position} of request {slot.request} is not in a shared block")
        _require(at < len(slot.table), f"row {position} of request {slot.request} has a block")
        block = slot.table[at]
        readers = sum(block in other.table for other in self._slots.values())
        _require(readers == 1, f"block {block} is read by nobody but its writer")
        self._rows[block][position % size] = value


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise ViolationError(f"broken promise: {promise}")
