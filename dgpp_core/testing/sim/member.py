"""The process of a rank other than 0: the real `Follower`, with the timers and the connection that a `Member` has."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.follower import Follower
from dgpp_core.cluster.identity import Terms
from dgpp_core.cluster.member import RELEASED
from dgpp_core.cluster.records import (
    Era,
    FromFollower,
    FromLeader,
    Go,
    Gone,
    Halt,
    Heartbeat,
    Hello,
    Refused,
    Vote,
    encode,
)
from dgpp_core.cluster.vigil import BEAT_S, ENDED, FAILED, JUDGE_S, MISSED, Fault, Vigil, while_loading
from dgpp_core.scheduler.scheduler import Scheduler, TickOutput
from dgpp_core.scheduler.stepper import Stepper
from dgpp_core.testing.fake_world import TERMS
from dgpp_core.testing.sim.device import Fabric, SimEngine
from dgpp_core.testing.sim.lead import COMPILE_S
from dgpp_core.testing.sim.promises import audit, audit_end
from dgpp_core.testing.sim.rank import PATIENCE, RankProcess
from dgpp_core.testing.sim.scenario import Scenario
from dgpp_core.testing.sim.timeline import Timeline
from dgpp_core.testing.sim.wire import Wire
from dgpp_core.text.grammar.spec import Grammar

_LEADER = {0: "its journal"}


class MemberProcess(RankProcess):
    """One follower.

    Args:
        hello: what it says of itself.
        terms: what it would serve.

    Attributes:
        refused: rank 0 did not take it in.
        joined: it did.
        left: it has left in order.
    """

    def __init__(
        self,
        hello: Hello,
        scenario: Scenario,
        timeline: Timeline,
        source: random.Random,
        fabric: Fabric,
        engine: SimEngine,
        terms: Terms = TERMS,
    ) -> None:
        super().__init__(hello.rank, scenario, timeline, source, fabric, engine)
        self.hello, self._terms = hello, terms
        self.wire: Wire[FromFollower] | None = None
        served = self.served(self._compile_here)
        self._stepper = Stepper(
            Scheduler(served.limits), self.stream.witness(served.executor), lag=served.lag, deliver=self._deliver
        )
        self._follower = Follower(self._stepper, self.stream, self._from_loop, self._compile)
        self._arrived: deque[FromLeader] = deque()
        self._vigil = Vigil(_LEADER, while_loading(PATIENCE), self.clock())
        self.refused = self.joined = self.left = self._built = False

    def join(self, wire: Wire[FromFollower]) -> None:
        """The connection is made."""
        self.wire = wire
        self.post(self.hello)

    def post(self, record: FromFollower) -> None:
        """Say something to rank 0."""
        assert self.wire is not None
        self.wire.send(encode(record))

    def hear(self, record: FromLeader) -> None:
        """Rank 0 says something."""
        now = self.clock()
        self._vigil.hear(0, now)
        match record:
            case Era():
                self.joined = True
                self._vigil = Vigil(_LEADER, while_loading(PATIENCE), now)
                self.every("pulse", BEAT_S, self._beat)
                self.every("judge", JUDGE_S, self._judge)
                self.at("loop", self.random.uniform(0.02, 0.3), self._vote)
            case Refused(reason=reason):
                self.refused = True
                self._fail(EngineError("rank 0 refuses this rank", found=reason))
            case Halt(reason=reason):
                self.note(Fault(ENDED, _released(EngineError("rank 0 ends the world", found=reason))))
            case Heartbeat():
                pass
            case _:
                if isinstance(record, Go):
                    self._vigil = Vigil(_LEADER, PATIENCE, now)
                self._arrived.append(record)
                self.wake()

    def lost(self, found: str) -> None:
        """The connection is closed or broken."""
        error = EngineError("rank 0 is gone", found=found or "its connection is closed", hint="see rank 0's log")
        if not self.joined:
            return self._fail(error)
        return self.note(Fault(FAILED, _released(error)))

    def due(self) -> bool:
        """Whether rank 0 has said something."""
        return self._built and bool(self._arrived)

    def turn(self) -> None:
        """The real loop's."""
        self.pulse.turn("waiting")
        self.pulse.turn("working")
        self.left = self._follower.apply(self._arrived.popleft())

    def turned(self) -> None:
        """Pools add up."""
        stats, who = self._stepper.scheduler.stats(), f"rank {self.rank}"
        audit(who, self.scenario.limits, stats, self.engine, self.ended)
        if self.left:
            audit_end(who, stats, self.engine)
            self.leave()

    def failed(self, fault: Fault) -> None:
        """The loop raised: tell rank 0."""
        told = fault.error
        self.post(Gone(told.line(), str(told), told.exit_code, collective=fault.weight == MISSED))
        self.note(fault)

    def leave(self) -> None:
        """Be gone; the connection closes."""
        if self.wire is not None:
            self.wire.close()
        self.exit()

    def _vote(self) -> None:
        self._built = True
        self.pulse.turn("waiting")
        self.post(Vote(self._terms, 0.05))
        self.wake()

    def _from_loop(self, record: FromFollower) -> None:
        self.say(lambda: self.post(record))

    def _deliver(self, out: TickOutput) -> None:
        self.ended.update(ending.id for ending in out.endings)

    def _beat(self) -> bool:
        self.post(self.heartbeat())
        return True

    def _judge(self) -> bool:
        now = self.clock()
        if (fault := self._vigil.judge(now)) is not None:
            self.fate.note(Fault(fault.weight, _released(fault.error)), now)
        fate = self.fate.sealed(now)
        if fate is not None:
            self._fail(fate)
        return self.alive

    def _fail(self, error: DgppError) -> None:
        self.failure = error
        self.leave()

    def _compile(self, grammar: Grammar, done: Callable[[], None]) -> None:
        def compiled() -> None:
            self.engine.compiled.add(grammar.digest)
            done()

        self.at("compiler", self.random.uniform(0, COMPILE_S), compiled)

    def _compile_here(self, grammar: Grammar) -> None:
        raise AssertionError(f"a follower compiles {grammar} when rank 0 says so")


def other_terms() -> Terms:
    """Those of a rank with another checkpoint."""
    return msgspec.structs.replace(TERMS, checkpoint="another")


def _released(error: DgppError) -> DgppError:
    error.exit_code = RELEASED
    return error
