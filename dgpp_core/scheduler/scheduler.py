"""The tick: a pure state machine from arrivals and results to the engine's next operations.

No clock, socket, thread, random source or device is used, and nothing depends on the order of a hash: the same inputs
give the same operations in every process.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import insort

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.engine.operations import Decode, Operation, Prefill, SlotResult, StepResult
from dgpp_core.images.picture import prompt_keys
from dgpp_core.scheduler.counters import Counters
from dgpp_core.scheduler.depths import Depths
from dgpp_core.scheduler.door import refusal
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Ending, Reason, Stats, Submit, Update
from dgpp_core.scheduler.request import Request
from dgpp_core.scheduler.residency import Miss, Residency

BYPASS = 64
"""Younger admissions that may pass a waiting request before it holds all others back."""


class TickInput(msgspec.Struct, frozen=True):
    """What happened since the last tick, each in order of arrival; unknown ids to cancel or stop came late."""

    submissions: tuple[Submit, ...] = ()
    cancels: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    results: tuple[StepResult, ...] = ()


class TickOutput(msgspec.Struct, frozen=True):
    """What the engine has to do, in order, and what the clients get."""

    tick: int
    operations: tuple[Operation, ...]
    updates: tuple[Update, ...]
    endings: tuple[Ending, ...]


class _Step(msgspec.Struct, frozen=True):
    """A launched operation that will commit up to ``most`` tokens for a request as admitted in tick ``admitted``."""

    request: Request
    slot: int
    admitted: int
    most: int


class Scheduler:
    """Decides admission, prefill chunks, the decode set, reservations and the prefix cache.

    Results may arrive in the next tick or one tick later; a request has at most two steps in flight.

    Args:
        limits: what may be handed out.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = Residency(limits)
        self._live: dict[int, Request] = {}
        self._queue: list[Request] = []
        self._running: list[Request] = []
        self._launched: dict[int, tuple[_Step, ...]] = {}
        self._depths = Depths(limits)
        self._counters = Counters()
        self._arrivals = 0
        self._tick = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._digest = bytes(8)
        self._operations: list[Operation] = []
        self._updates: list[Update] = []
        self._endings: list[Ending] = []
        self._steps: list[_Step] = []

    @property
    def idle(self) -> bool:
        """Nothing is queued, prefilling or active, and no result is outstanding."""
        return not self._live and not self._launched

    @property
    def digest(self) -> int:
        """64 bits over every operation so far; equal on ranks that were given the same inputs."""
        return int.from_bytes(self._digest, "little")

    @property
    def last_misses(self) -> tuple[Miss, ...]:
        """The latest prefix cache misses with their reasons, oldest first."""
        return tuple(self._held.misses)

    def tick(self, inputs: TickInput) -> TickOutput:
        """One pass.

        Raises:
            EngineError: an id was submitted twice, or a result does not answer what was launched.
        """
        self._tick += 1
        self._operations, self._updates, self._endings, self._steps = [], [], [], []
        for submit in inputs.submissions:
            self._accept(submit)
        self._interrupt(inputs.cancels, "cancelled")
        self._interrupt(inputs.stops, "stop")
        for result in inputs.results:
            self._take(result)
        if self._limits.admission == "grow":
            self._grow()
        steppable = [request for request in self._running if request.steppable]
        self._prefill(busy=bool(steppable))
        self._decode(steppable)
        return self._close()

    def stats(self) -> Stats:
        """Counters since the start and gauges of now.

        ``blocks_in_use`` counts every block handed out, ``blocks_cached`` those of them that only the prefix cache
        holds and that are given up on demand.
        """
        held, prefilling = self._held, [request for request in self._running if not request.decoding]
        return Stats(
            ticks=self._tick,
            active=len(self._running) - len(prefilling),
            prefilling=len(prefilling),
            queued=len(self._queue),
            slots=self._limits.slots,
            blocks_total=held.pool.total,
            blocks_in_use=held.pool.in_use,
            blocks_cached=held.index.idle,
            snapshots_total=self._limits.snapshots,
            snapshots_in_use=held.index.arenas_in_use,
            cache_hits=held.hits,
            cache_misses=held.missed,
            cache_misses_by=held.missed_by,
            cache_unasked=held.unasked,
            cache_tokens_saved=held.saved,
            cache_evictions=held.index.evictions,
            prefills=tuple(request.progress() for request in prefilling),
            **msgspec.structs.asdict(self._counters),
        )

    def _accept(self, submit: Submit) -> None:
        if submit.id in self._live:
            raise EngineError(
                "a request id was submitted twice",
                found=f"request {submit.id}, which is live",
                expected="ids that are unique in this process",
            )
        error = refusal(self._limits, submit, len(self._live))
        if error:
            self._endings.append(Ending(id=submit.id, reason="error", error=error))
            return
        self._arrivals += 1
        ids = array("q", submit.tokens)
        keys = prompt_keys(ids, submit.pictures) if submit.pictures else ids
        request = Request(submit=submit, order=self._arrivals, ids=ids, keys=keys)
        self._live[submit.id] = request
        self._queue.append(request)

    def _interrupt(self, ids: tuple[int, ...], reason: Reason) -> None:
        for name in ids:
            request = self._live.get(name)
            if request is not None:
                self._end(request, reason)

    def _take(self, result: StepResult) -> None:
        """Commit a step's tokens; those of requests that ended or lost their slot since the launch are dropped."""
        steps = self._launched.pop(result.tick, None)
        if steps is None:
            raise EngineError("a result of no launched step", found=f"tick {result.tick}")
        answers = {answer.slot: answer for answer in result.slots}
        current = [step for step in steps if step.request.admitted == step.admitted]
        for step in current:
            self._commit(step, answers.get(step.slot))
        self._depths.read([answers[step.slot] for step in current])

    def _commit(self, step: _Step, answer: SlotResult | None) -> None:
        request = step.request
        submit = request.submit
        if answer is None or answer.request != submit.id or not 1 <= len(answer.tokens) <= step.most:
            raise EngineError(
                "a result does not answer the step that was launched",
                where=f"request {submit.id}, slot {step.slot}",
                found="nothing" if answer is None else f"request {answer.request}, {len(answer.tokens)} tokens",
                expected=f"request {submit.id}, 1 to {step.most} tokens",
            )
        request.outstanding -= 1
        request.unread -= step.most
        if answer.fault:
            self._end(request, "error", f"the reply cannot be held to its grammar: {answer.fault}")
            return
        tokens, reason = request.until_ending(answer.tokens)
        if len(request.ids) == request.prompt_tokens:
            self._counters.prefilled(request.prompt_tokens)
        request.commit(tokens)
        request.confidence = answer.confidence
        logprobs = answer.logprobs[: len(tokens)] if answer.logprobs is not None else None
        self._updates.append(Update(id=submit.id, tokens=tokens, logprobs=logprobs))
        self._counters.committed(tokens=len(tokens), drafted=answer.drafted, accepted=len(answer.tokens) - 1)
        if reason is not None:
            self._end(request, reason)

    def _end(self, request: Request, reason: Reason, error: str = "") -> None:
        """The one place where an accepted request ends."""
        if request.slot >= 0:
            self._running.remove(request)
            self._operations.append(self._held.release(request, keep=reason != "cancelled"))
        else:
            self._queue.remove(request)
        del self._live[request.submit.id]
        self._endings.append(
            Ending(
                id=request.submit.id,
                reason=reason,
                cached_tokens=max(0, request.cached_tokens),
                error=error,
                known_tokens=request.known_tokens,
                miss=request.miss,
            )
        )
        self._counters.end(reason)

    def _grow(self) -> None:
        """Make every reservation cover the next step, oldest first, at the cost of the youngest."""
        for request in tuple(self._running):
            while request.steppable and (need := self._held.lacking(request)):
                extend = self._held.grow(request, need)
                if extend is None:
                    self._preempt(self._running[-1])
                else:
                    self._operations.append(extend)

    def _preempt(self, request: Request) -> None:
        """Back to the queue with the committed tokens as part of the prompt; nobody younger passes it there.

        Draws depend on absolute positions, so the reply goes on as if nothing had happened.
        """
        self._running.remove(request)
        self._operations.append(self._held.release(request, keep=True))
        request.passed = BYPASS
        insort(self._queue, request, key=_order)
        self._counters.requests_preempted += 1

    def _prefill(self, busy: bool) -> None:
        """Spend the tick's prompt budget: prompts in progress first, then new ones, oldest first."""
        limits = self._limits
        budget = (limits.prefill_budget if busy else limits.prefill_idle_budget or limits.prefill_budget) or sys.maxsize
        advanced = []
        for request in self._running:
            if budget and not request.decoding:
                budget -= self._advance(request, budget)
                advanced.append(request)
        while budget and (admitted := self._admit()):
            budget -= self._advance(admitted, budget)
            advanced.append(admitted)
        for request in advanced:
            self._held.publish(request)

    def _admit(self) -> Request | None:
        """Admit the oldest queued request that fits, unless one that was passed too often is waiting for room."""
        if not self._held.slots:
            return None
        prefilling = [request for request in self._running if request.published < request.base]
        for at, request in enumerate(self._queue):
            begin = self._held.admit(request, self._tick, prefilling)
            if begin is not None:
                for older in self._queue[:at]:
                    older.passed += 1
                del self._queue[at]
                insort(self._running, request, key=_order)
                self._operations.append(begin)
                return request
            if request.passed >= BYPASS:
                break
        if self._queue and not self._running:
            raise EngineError(
                "admission deadlock: nothing runs and the oldest request does not fit",
                where=f"request {self._queue[0].submit.id}",
                found=f"{self._held.pool.free} of {self._limits.blocks} blocks free",
                hint="report this as a bug",
            )
        return None

    def _advance(self, request: Request, budget: int) -> int:
        """Launch up to ``budget`` tokens of a prompt, stopping at snapshot cuts on the way; returns how many."""
        stop = min(request.base, request.computed + budget)
        count = stop - request.computed
        for end in (*(cut for cut in request.cuts if request.computed < cut < stop), stop):
            start, request.computed = request.computed, end
            self._operations.append(Prefill(slot=request.slot, start=start, count=end - start, last=request.decoding))
            snapshot = self._held.snapshot(request)
            if snapshot is not None:
                self._operations.append(snapshot)
        if request.decoding:
            self._launch(request, most=1)
        self._counters.prompt_tokens_computed += count
        return count

    def _decode(self, requests: list[Request]) -> None:
        if not requests:
            return
        depth = self._depths.choose(requests)
        self._operations.append(Decode(slots=tuple(sorted(request.slot for request in requests)), depth=depth))
        for request in requests:
            snapshot = self._held.rolling.take(request, depth + 1)
            if snapshot is not None:
                self._operations.append(snapshot)
            self._launch(request, most=depth + 1)
        self._counters.decode(len(requests), depth + 1)

    def _launch(self, request: Request, most: int) -> None:
        request.outstanding += 1
        request.unread += most
        self._steps.append(_Step(request, request.slot, request.admitted, most))

    def _close(self) -> TickOutput:
        """Remember what was launched, fold the digest and hand everything out."""
        operations = tuple(self._operations)
        if any(isinstance(operation, Prefill | Decode) for operation in operations):
            self._launched[self._tick] = tuple(self._steps)
        if operations:
            body = self._encoder.encode((self._tick, operations))
            self._digest = hashlib.blake2b(self._digest + body, digest_size=8).digest()
        return TickOutput(self._tick, operations, tuple(self._updates), tuple(self._endings))


def _order(request: Request) -> int:
    return request.order
