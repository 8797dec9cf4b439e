"""The simulator finds bugs: each of `PLANTS`, a small change of one thing in the real code, within 2,000 seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import pytest

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster import frames, vigil
from dgpp_core.cluster.follower import Follower
from dgpp_core.cluster.frames import HEADER, Unpacker
from dgpp_core.cluster.leader import Leader
from dgpp_core.cluster.rank import Rank
from dgpp_core.cluster.records import Tick
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import Fate, Vigil
from dgpp_core.scheduler.blocks import BlockPool
from dgpp_core.scheduler.prefix import PrefixIndex
from dgpp_core.scheduler.request import Request
from dgpp_core.scheduler.residency import Residency
from dgpp_core.scheduler.rolling import Rolling
from dgpp_core.scheduler.scheduler import Scheduler, TickInput
from dgpp_core.scheduler.stepper import Stepper, _read
from dgpp_core.server.engine_client import EngineClient
from dgpp_core.testing.sim.runs import Violation, play

MOST = 2000
Function = Callable[..., Any]


class Plant(NamedTuple):
    """``owner.name`` becomes what ``change`` makes of it."""

    what: str
    owner: Any
    name: str
    change: Callable[[Function], Any]


def _attach(_: Function) -> Function:
    def attach(self: PrefixIndex, chain: list[Any]) -> None:
        for node in chain:
            node.users += 1

    return attach


def _take(_: Function) -> Function:
    def take(self: Scheduler, result: Any) -> None:
        answers = {answer.slot: answer for answer in result.slots}
        for step in self._launched.pop(result.tick):
            self._commit(step, answers.get(step.slot))

    return take


def _until_ending(_: Function) -> Function:
    def until_ending(self: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        kept = tokens[: self.left]
        if kept[-1] in self.submit.eos_ids:
            return kept, "eos"
        return kept, "length" if len(kept) == self.left else None

    return until_ending


def _prompt_alone(admit: Function) -> Function:
    def changed(self: Residency, request: Request, *rest: Any) -> Any:
        begin = admit(self, request, *rest)
        return begin and msgspec.structs.replace(begin, prompt=request.submit.tokens)

    return changed


def _keepable_up(_: Function) -> Function:
    def keepable(self: Residency, request: Request) -> int:
        return -(-request.rows // self._limits.block_tokens)

    return keepable


def _keepable_decoded(keepable: Function) -> Function:
    def changed(self: Residency, request: Request) -> int:
        if self._limits.needs_snapshot:
            return int(keepable(self, request))
        return request.rows // self._limits.block_tokens

    return changed


def _drop_snapshot(_: Function) -> Function:
    def drop(self: PrefixIndex, node: Any) -> None:
        del self._snapshots[node]
        self._free_arenas.append(node.arena)

    return drop


def _settle_early(_: Function) -> Function:
    def settle(self: Rolling, request: Request) -> None:
        if request.passing is None:
            return
        if request.rolled is not None:
            self._index.give_arena(request.rolled[1])
        request.rolled, request.passing = request.passing, None

    return settle


def _drop_request(_: Function) -> Function:
    def drop(self: Rank, request: int) -> None:
        self._compiling.remove(request)
        self._dropped.add(request)

    return drop


def _not_elsewhere(_: Function) -> Function:
    def compiled_elsewhere(self: Rank, request: int, grammar: Any) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(None)
        if self._world is not None:
            self._world.leader.compile(request, grammar, lambda: None)
        return done

    return compiled_elsewhere


def _one_compiled(_: Function) -> Function:
    def compiled(self: Leader, rank: int, request: int) -> None:
        if (waiting := self._compiling.pop(request, None)) is not None:
            waiting[1]()

    return compiled


def _unnumbered(_: Function) -> Function:
    def feed(self: Unpacker[Any], data: bytes) -> Iterator[Any]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, number, checksum = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + size:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            if frames._checksum(number, body) != checksum:
                raise EngineError("the journal is damaged")
            yield self._decode(body)

    return feed


def _without_results(close: Function) -> Function:
    def changed(self: OperationStream, plan: int) -> None:
        self._results.clear()
        close(self, plan)

    return changed


def _any_epoch(admit: Function) -> Function:
    def changed(self: Leader, hello: Any, now: float) -> str:
        return str(admit(self, msgspec.structs.replace(hello, epoch=self._hello.epoch), now))

    return changed


def _second(admit: Function) -> Function:
    def changed(self: Leader, hello: Any, now: float) -> str:
        self._joined.pop(hello.rank, None)
        return str(admit(self, hello, now))

    return changed


def _first_account(_: Function) -> Function:
    def sealed(self: Fate, now: float) -> DgppError | None:
        return None if now < self._due else self._faults[0].error

    return sealed


def _no_stops(tick: Function) -> Function:
    return lambda self, submissions, cancels, stops: tick(self, submissions, cancels, ())


def _no_cancels(step: Function) -> Function:
    def changed(self: Follower, record: Tick) -> None:
        step(self, msgspec.structs.replace(record, cancels=()))

    return changed


def _unread(_: Function) -> Function:
    def step(self: Stepper, submissions: Any = (), cancels: Any = (), stops: Any = ()) -> Any:
        late = self._pending[-1:] if self._lag else []
        ready, self._pending = self._pending[: len(self._pending) - len(late)], late
        return self._tick(TickInput(tuple(submissions), tuple(cancels), tuple(stops), _read(ready)))

    return step


def _nobody_told(_: Function) -> Function:
    def fail(self: EngineClient, reason: str) -> None:
        self.failure, self._inboxes = reason, {}

    return fail


def _all_at_work(_: Function) -> Function:
    def hung(self: Vigil, ages: Any, working: Any) -> Any:
        return self._hung([rank for rank in working if ages[rank] >= self._stalled], [])

    return hung


def _awake_for_ever(judge: Function) -> Function:
    def changed(self: Vigil, now: float) -> Any:
        self._awake = -math.inf
        return judge(self, now)

    return changed


def _terms_unseen(_: Function) -> Function:
    return lambda self, rank: None


PLANTS = (
    Plant("a row too few is reserved", Residency, "_reservation", lambda f: lambda *a: f(*a) - 1),
    Plant("blocks that are in use can be evicted", PrefixIndex, "attach", _attach),
    Plant("the last block of a table is not freed", BlockPool, "give", lambda f: lambda s, b: f(s, (*b,)[:-1] or b)),
    Plant("what others use is counted as free", PrefixIndex, "idle_in", lambda f: lambda self, chain: 0),
    Plant("tokens of a request that has ended are committed", Scheduler, "_take", _take),
    Plant("an end among drafts is overlooked", Request, "until_ending", _until_ending),
    Plant("a request that lost its slot forgets its reply", Residency, "admit", _prompt_alone),
    Plant("reservations do not grow", Scheduler, "_grow", lambda f: lambda self: None),
    Plant("a block is shared before it is full", Residency, "_keepable", _keepable_up),
    Plant("decoded rows are shared though they differ", Residency, "_keepable", _keepable_decoded),
    Plant("rows are reused without their state", PrefixIndex, "usable", lambda f: lambda self, chain: chain),
    Plant("a snapshot is found after it was given up", PrefixIndex, "_drop_snapshot", _drop_snapshot),
    Plant("a snapshot is taken for done before it is", Rolling, "_settle", _settle_early),
    Plant("the last result of a late reader is not read", Stepper, "step", _unread),
    Plant("a client that leaves before its grammar is there gets no end", Rank, "_drop", _drop_request),
    Plant("rank 0 does not wait for the others' grammars", Rank, "_compiled_elsewhere", _not_elsewhere),
    Plant("one rank's grammar is enough", Leader, "_compiled", _one_compiled),
    Plant("checksums see nothing", frames, "_checksum", lambda f: lambda number, body: 0),
    Plant("numbers of frames are not compared", Unpacker, "feed", _unnumbered),
    Plant("digests leave out what was computed", OperationStream, "close", _without_results),
    Plant("any epoch is taken in", Leader, "admit", _any_epoch),
    Plant("a second rank of one number is taken in", Leader, "admit", _second),
    Plant("votes are not compared", Leader, "_disputed", _terms_unseen),
    Plant("stops are not told to the others", Leader, "tick", _no_stops),
    Plant("followers do not hear of cancels", Follower, "_step", _no_cancels),
    Plant("the first account counts, not the nearest", Fate, "sealed", _first_account),
    Plant("silence is not noticed", Vigil, "_silent", lambda f: lambda self, now: None),
    Plant("a judge's own pause counts", vigil, "OWN_PAUSE_S", lambda f: math.inf),
    Plant("a pause of all counts as a stall", Vigil, "judge", _awake_for_ever),
    Plant("all that wait for a device are blamed", Vigil, "_hung_at_work", _all_at_work),
    Plant("open requests are forgotten when the engine fails", EngineClient, "fail", _nobody_told),
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.what.replace(" ", "-"))
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant.owner, plant.name, plant.change(getattr(plant.owner, plant.name)))
    found = next((run for run in map(play, range(MOST)) if isinstance(run, Violation)), None)
    assert found is not None
    assert found.replay == f"dgpp simulate --seed {found.seed}"
    assert isinstance(play(found.seed), Violation), "the seed shows it again"
    monkeypatch.undo()
    assert not isinstance(play(found.seed), Violation), "it is the planted bug that was found"
