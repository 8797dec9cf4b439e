"""Snapshots of a reply in the making, so that the next turn of the conversation finds the state behind it."""

from __future__ import annotations

from dgpp_core.engine.operations import Snapshot
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.prefix import PrefixIndex
from dgpp_core.scheduler.request import Request

ARENA_SHARE = 4
"""A request in the making may hold two snapshots, so the arena must have this many a slot: most are the cache's."""


class Rolling:
    """The latest block boundary that each request has passed while decoding has a snapshot.

    A step may pass a boundary with any of its rows, and its result is read only after the next one is launched. So each
    step that can pass it is followed by a `Snapshot` of that position, which the device takes if it did; exactly one of
    them does. That it was taken is known when the tokens are.

    Decoded state is kept only where it has the bits that a prefill would have given it.
    """

    def __init__(self, limits: Limits, index: PrefixIndex) -> None:
        self._limits, self._index = limits, index
        enough = limits.snapshots >= ARENA_SHARE * limits.slots
        self._on = limits.needs_snapshot and limits.decode_rows_match_prefill and limits.cache_on and enough

    def take(self, request: Request, width: int) -> Snapshot | None:
        """The snapshot to take behind a step of up to ``width`` tokens that is about to be launched."""
        if not (self._on and request.submit.use_cache):
            return None
        self._settle(request)
        most = len(request.ids) - 1 + request.unread
        if request.passing is None:
            self._aim(request, most, width)
        if request.passing is None:
            return None
        position, arena = request.passing
        least = len(request.ids) - 1 + request.outstanding
        return Snapshot(request.slot, arena, position) if least < position <= most + width else None

    def end(self, request: Request) -> None:
        """The request lets go of its slot: its latest snapshot is one like those of its prompt."""
        self._settle(request)
        if request.rolled is not None:
            request.snapshots.append(request.rolled)
        if request.passing is not None:
            self._index.give_arena(request.passing[1])
        request.passing = request.rolled = None

    def _settle(self, request: Request) -> None:
        """What is known to have been passed was taken; it takes the place of the one before."""
        if request.passing is None or len(request.ids) - 1 < request.passing[0]:
            return
        if request.rolled is not None:
            self._index.give_arena(request.rolled[1])
        request.rolled, request.passing = request.passing, None

    def _aim(self, request: Request, most: int, width: int) -> None:
        """Choose the next boundary that no step in flight can have passed, once this one may."""
        size = self._limits.block_tokens
        position = (most // size + 1) * size
        last = request.prompt_tokens + request.submit.max_tokens - 1
        if position > min(most + width, last) or position < self._limits.snapshot_least:
            return
        arena = self._index.take_arena()
        if arena >= 0:
            request.passing = (position, arena)
