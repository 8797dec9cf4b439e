"""What the scheduler knows of one request."""

from __future__ import annotations

from array import array

import msgspec

from dgpp_core.scheduler.messages import PrefillProgress, Reason, Submit
from dgpp_core.scheduler.prefix import Node


class Request(msgspec.Struct, eq=False, kw_only=True):
    """A live request: queued (no slot), prefilling, or decoding.

    Attributes:
        order: arrival number; older is smaller.
        ids: the prompt and every token committed so far.
        keys: what blocks of them are known by: the ids, and what images show; one array with them where there are none.
        known: nodes of the prefix index that match, while queued.
        passed: younger requests admitted before this one while it waited.
        cached_tokens: where the first admission attached to the prefix cache; -1 before it.
        known_tokens: how far the prefix cache had rows of the prompt then, with their state or without.
        miss: why nothing was reused then; empty where something was.
        admitted: tick of this admission; -1 while queued. Results of steps from before it are void.
        base: ids that this admission's prefill computes; more than the prompt after a preemption.
        computed: ids of ``base`` that are attached or whose prefill is launched.
        published: ``computed`` as of the end of the last tick that prefilled.
        cuts: positions inside ``base`` where a snapshot is due, ascending.
        blocks: the slot's block table.
        chain: nodes of the prefix index that own the first blocks of the table.
        snapshots: (position, arena) of snapshots that no node holds yet.
        passing: (position, arena) of the one that the steps in flight take if they pass there.
        rolled: the same of the latest one that steps took.
        outstanding: launched steps whose result has not come.
        unread: most tokens that those steps commit.
        confidence: of the newest result, see `SlotResult`.
    """

    submit: Submit
    order: int
    ids: array[int]
    keys: array[int]
    known: list[Node] = []
    passed: int = 0
    cached_tokens: int = -1
    known_tokens: int = 0
    miss: str = ""
    slot: int = -1
    admitted: int = -1
    base: int = 0
    computed: int = 0
    published: int = 0
    cuts: tuple[int, ...] = ()
    blocks: list[int] = []
    chain: list[Node] = []
    snapshots: list[tuple[int, int]] = []
    passing: tuple[int, int] | None = None
    rolled: tuple[int, int] | None = None
    outstanding: int = 0
    unread: int = 0
    confidence: tuple[float, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as submitted."""
        return len(self.submit.tokens)

    @property
    def left(self) -> int:
        """Tokens still to commit."""
        return self.submit.max_tokens - (len(self.ids) - self.prompt_tokens)

    @property
    def decoding(self) -> bool:
        """Whether the prompt's last row has been launched."""
        return self.slot >= 0 and self.computed == self.base

    @property
    def steppable(self) -> bool:
        """Whether a decode step may be launched: at most one is outstanding, and that one cannot be the last."""
        return self.decoding and self.outstanding <= 1 and self.outstanding < self.left

    @property
    def rows(self) -> int:
        """Rows in the state that hold known tokens: the newest token's row is written by the step after it."""
        return len(self.ids) - 1 if len(self.ids) > self.base else self.computed

    def until_ending(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Reason | None]:
        """The next tokens that count, and why the request ends with the last of them, if it does."""
        for at, token in enumerate(tokens, 1):
            if token in self.submit.eos_ids:
                return tokens[:at], "eos"
            if at == self.left:
                return tokens[:at], "length"
        return tokens, None

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append tokens of the reply."""
        self.ids.extend(tokens)
        if self.keys is not self.ids:
            self.keys.extend(tokens)

    def progress(self) -> PrefillProgress:
        """How far the prompt is."""
        return PrefillProgress(
            id=self.submit.id,
            slot=self.slot,
            prompt_tokens=self.prompt_tokens,
            processed_tokens=self.computed,
            cached_tokens=self.cached_tokens,
        )

    def hold(self, *, slot: int, tick: int, chain: list[Node], blocks: list[int], cached: int) -> None:
        """Admission: take a slot and a block table of which ``cached`` tokens are there."""
        self.slot, self.admitted = slot, tick
        self.base, self.computed, self.published = len(self.ids), cached, cached
        self.chain, self.blocks = chain, blocks
        self.known = []

    def drop(self) -> None:
        """The slot and everything that hung on it is gone."""
        self.slot = self.admitted = -1
        self.base = self.computed = self.published = self.outstanding = self.unread = 0
        self.chain, self.blocks, self.snapshots, self.cuts = [], [], [], ()
        self.passing = self.rolled = None
        self.confidence = ()
