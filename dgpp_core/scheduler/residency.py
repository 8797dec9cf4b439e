"""Who holds which slot, KV blocks, cached prefix and snapshots: admission, growth and release of one request."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

import msgspec

from dgpp_core.engine.operations import Begin, Extend, Release, Snapshot
from dgpp_core.scheduler.blocks import BlockPool
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import MISS_REASONS, MissReason
from dgpp_core.scheduler.prefix import Node, PrefixIndex
from dgpp_core.scheduler.request import Request
from dgpp_core.scheduler.rolling import Rolling

BODY_CHUNK = 512
MISSES_KEPT = 64


class Miss(msgspec.Struct, frozen=True):
    """A request that found no reusable prefix, and why; for a debug line."""

    request: int
    tick: int
    prompt_tokens: int
    reason: MissReason


class Residency:
    """The slots, the block pool and the prefix index, always changed together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.slots = list(range(limits.slots))
        self.pool = BlockPool(limits.blocks)
        self.index = PrefixIndex(self.pool, limits.block_tokens, limits.snapshots, limits.needs_snapshot)
        self.misses: deque[Miss] = deque(maxlen=MISSES_KEPT)
        self.rolling = Rolling(limits, self.index)
        self.hits = self.missed = self.saved = self.unasked = 0
        self._reasons = dict.fromkeys(MISS_REASONS, 0)

    @property
    def missed_by(self) -> tuple[int, ...]:
        """Misses by reason, in the order of `MISS_REASONS`."""
        return tuple(self._reasons.values())

    def admit(self, request: Request, tick: int, prefilling: Iterable[Request]) -> Begin | None:
        """Give a request a slot and its reservation.

        None, and nothing changes, where blocks are short or one of ``prefilling`` is about to publish what would
        otherwise be computed twice: the choices of one request, conversations with one system prompt.
        """
        limits, known = self._limits, request.known
        cacheable = self._cacheable(request)
        if cacheable:
            self.index.match(request.keys, self._reusable(request), known)
        chain = self.index.usable(known)
        if cacheable and any(self._shares(request, len(chain), other) for other in prefilling):
            return None
        need = limits.blocks_for(self._reservation(request)) - len(chain)
        if need > self.pool.free + self.index.idle - self.index.idle_in(chain):
            return None
        self.index.attach(chain)
        self.index.reclaim(need)
        cached = len(chain) * limits.block_tokens
        if request.cached_tokens < 0:
            request.cached_tokens, request.known_tokens = cached, len(known) * limits.block_tokens
            if cacheable:
                self._count(request, tick, cached)
            else:
                self.unasked += 1
                request.miss = "opted out" if limits.cache_on else "off"
        blocks = [node.block for node in chain] + self.pool.take(need)
        request.hold(slot=heapq.heappop(self.slots), tick=tick, chain=chain, blocks=blocks, cached=cached)
        request.cuts = self._cuts(request) if cacheable and limits.needs_snapshot else ()
        return Begin(
            slot=request.slot,
            request=request.submit.id,
            prompt=request.submit.tokens if len(request.ids) == request.prompt_tokens else tuple(request.ids),
            params=request.submit.params,
            logprobs=request.submit.logprobs,
            blocks=tuple(blocks),
            cached=cached,
            arena=chain[-1].arena if chain else -1,
            grammar=request.submit.grammar,
            replied=len(request.ids) - request.prompt_tokens,
            pictures=request.submit.pictures,
        )

    def lacking(self, request: Request) -> int:
        """Blocks that the table lacks for the request's next decode step."""
        rows = len(request.ids) - 1 + request.unread + self._limits.step_rows
        return max(0, self._limits.blocks_for(rows) - len(request.blocks))

    def grow(self, request: Request, need: int) -> Extend | None:
        """Append ``need`` blocks, up to a window where they are free; None where the pool cannot serve ``need``."""
        limits = self._limits
        full = limits.blocks_for(limits.rows(len(request.ids), request.left)) - len(request.blocks)
        wish = min(full, max(need, limits.blocks_for(limits.admission_window)))
        count = wish if wish <= self.pool.free else need
        if not self.index.reclaim(count):
            return None
        blocks = self.pool.take(count)
        request.blocks.extend(blocks)
        return Extend(slot=request.slot, blocks=tuple(blocks))

    def snapshot(self, request: Request) -> Snapshot | None:
        """Take the snapshot due at ``request.computed``; None where none is due or no arena slot can be had."""
        if request.computed not in request.cuts:
            return None
        arena = self.index.take_arena()
        if arena < 0:
            return None
        request.snapshots.append((request.computed, arena))
        return Snapshot(slot=request.slot, arena=arena)

    def publish(self, request: Request) -> None:
        """Let other requests reuse what this one's prefill has launched so far.

        Called when the tick's prefills are planned, so that none of them reads what another writes in the same tick.
        """
        request.published = request.computed
        if not self._cacheable(request):
            return
        self.index.adopt(request.keys, request.blocks, request.chain, self._keepable(request))
        private = []
        for position, arena in request.snapshots:
            node = self._node(request, position // self._limits.block_tokens)
            if node is None:
                private.append((position, arena))
            else:
                self.index.pin_snapshot(node, arena)
        request.snapshots = private

    def release(self, request: Request, keep: bool) -> Release:
        """Take everything back; with ``keep`` the full blocks of known tokens go to the prefix index."""
        keep = keep and self._cacheable(request)
        self.rolling.end(request)
        count = max(len(request.chain), self._keepable(request)) if keep else len(request.chain)
        path = self.index.leave(request.keys, request.blocks, request.chain, count)
        for position, arena in request.snapshots:
            depth = position // self._limits.block_tokens
            if depth <= len(path):
                self.index.pin_snapshot(path[depth - 1], arena)
            else:
                self.index.give_arena(arena)
        slot = request.slot
        heapq.heappush(self.slots, slot)
        request.drop()
        return Release(slot=slot)

    def _cacheable(self, request: Request) -> bool:
        return self._limits.cache_on and request.submit.use_cache

    def _reusable(self, request: Request) -> int:
        """Most tokens that may come from the prefix cache: all but those whose rows have to be computed again."""
        most, tail = len(request.ids) - 1, self._limits.prefill_tail
        return min(most, max(0, request.prompt_tokens - tail)) if tail else most

    def _shares(self, request: Request, attached: int, other: Request) -> bool:
        """Whether ``other`` will publish a prefix of ``request`` that is longer than ``attached`` blocks."""
        if not self._cacheable(other):
            return False
        size, key = self._limits.block_tokens, self.index.key
        ends = other.cuts if self._limits.needs_snapshot else ((attached + 1) * size,)
        return any(
            attached * size < end <= min(other.base, self._reusable(request))
            # One block tells almost all prompts apart, before the whole prefix is compared.
            and key(request.keys, end // size - 1) == key(other.keys, end // size - 1)
            and request.keys[:end] == other.keys[:end]
            for end in ends
        )

    def _reservation(self, request: Request) -> int:
        """Rows reserved at admission."""
        limits, base = self._limits, len(request.ids)
        full = limits.rows(base, request.left)
        if limits.admission == "full":
            return full
        return min(full, base + max(limits.admission_window, 2 * limits.step_width))

    def _cuts(self, request: Request) -> tuple[int, ...]:
        """Where snapshots are taken, by what they are good for, as far as the arena reaches; all at block boundaries.

        The deepest one leaves a token to compute, or what no prefix may hold: choices of one prompt, and turns after
        one that the template repeats as it was. At the last end of a message: turns after one whose reply the template
        begins in another way. In the body of long prompts: others that change near their end. At the first end of a
        message: other conversations with the same instructions.
        """
        limits, size, base = self._limits, self._limits.block_tokens, request.base
        least = max(size, limits.snapshot_least)
        ends = [end // size * size for end in request.submit.turns if least <= end < base]
        ends = [end for end in ends if end >= least]
        wanted = [min(base - 1, self._reusable(request)) // size * size, *ends[-1:]]
        if base >= 4 * BODY_CHUNK:
            wanted.append((base // BODY_CHUNK - 1) * BODY_CHUNK // size * size)
        if limits.snapshot_heads:
            wanted += ends[:1]
        distinct = [cut for cut in dict.fromkeys(wanted) if cut >= least][: limits.snapshots]
        return tuple(sorted(cut for cut in distinct if cut > request.computed))

    def _keepable(self, request: Request) -> int:
        """Full blocks worth a node: all of known tokens or, where snapshots are needed, those up to the deepest one.

        The row of a drafter at the end of a prefix also saw the token after it, which may be another's. It is kept all
        the same: that happens where two prompts part at exactly a block's end, to one row of many, and can cost a
        draft but no token.
        """
        if self._limits.needs_snapshot:
            return request.snapshots[-1][0] // self._limits.block_tokens if request.snapshots else 0
        rows = request.rows if self._limits.decode_rows_match_prefill else min(request.rows, request.base)
        return rows // self._limits.block_tokens

    def _node(self, request: Request, depth: int) -> Node | None:
        """The node of the request's first ``depth`` blocks, its own or another's."""
        if len(request.chain) >= depth:
            return request.chain[depth - 1]
        known: list[Node] = []
        self.index.match(request.keys, depth * self._limits.block_tokens, known)
        return known[-1] if len(known) == depth else None

    def _count(self, request: Request, tick: int, cached: int) -> None:
        if cached:
            self.hits += 1
            self.saved += cached
            return
        reason = self._reason(request)
        request.miss = reason
        self.missed += 1
        self._reasons[reason] += 1
        self.misses.append(Miss(request.submit.id, tick, len(request.ids), reason))

    def _reason(self, request: Request) -> MissReason:
        """Why nothing could be reused: what is missing first."""
        limits, rows = self._limits, len(request.ids) - 1
        if rows < limits.block_tokens:
            return "below a block"
        if limits.needs_snapshot and rows < limits.snapshot_least:
            return "below the minimum"
        if request.known:
            return "snapshot evicted" if any(node.lost for node in request.known) else "no snapshot"
        return "evicted" if self.index.was_evicted(request.keys) else "never seen"
