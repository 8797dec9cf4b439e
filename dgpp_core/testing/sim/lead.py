"""Rank 0's process: the real loop and `Leader`, with the timers and connections that a `Hub` has."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.leader import Leader
from dgpp_core.cluster.rank import Rank, World
from dgpp_core.cluster.records import Era, FromFollower, FromLeader, Hello, Refused, encode
from dgpp_core.cluster.vigil import BEAT_S, FAILED, JUDGE_S, Fault
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.scheduler.messages import Failed, FromEngine, Output, ToEngine
from dgpp_core.testing.fake_world import TERMS
from dgpp_core.testing.fake_world import hello as saying
from dgpp_core.testing.sim.device import Fabric, SimEngine
from dgpp_core.testing.sim.process import Process
from dgpp_core.testing.sim.promises import audit, audit_end, require
from dgpp_core.testing.sim.rank import HOST_S, PATIENCE, RankProcess
from dgpp_core.testing.sim.scenario import Scenario
from dgpp_core.testing.sim.timeline import Timeline
from dgpp_core.testing.sim.wire import Wire
from dgpp_core.text.grammar.spec import Grammar

COMPILE_S = 0.15
"""Most seconds that a grammar takes."""


class SimChannel:
    """Implements `FrontEnd`: the socket pair between rank 0 and the front end."""

    def __init__(self, lead: LeadProcess) -> None:
        self._lead, self.inbox = lead, list[ToEngine]()
        self.sent = 0

    def drain(self, wait: float) -> list[ToEngine]:
        """What has come."""
        messages, self.inbox = self.inbox, []
        return messages

    def put(self, message: ToEngine) -> None:
        """Let the loop find a message."""
        self.inbox.append(message)
        self._lead.wake()

    def send(self, message: FromEngine) -> None:
        """Say something to the front end."""
        if isinstance(message, Output):
            for ending in message.endings:
                require(ending.id not in self._lead.ended, f"request {ending.id} ends once")
                self._lead.ended.add(ending.id)
            self.sent += 1
        self._lead.say(lambda: self._lead.to_front(message))


class LeadProcess(RankProcess):
    """Rank 0.

    Args:
        front: the process that its messages go to, of which ``listen`` reads.
        deliver: takes a message there.

    Attributes:
        serving: READY has been said.
        finishing: the last request has ended, and the others are told to leave.
        settled: the world ended in order.
    """

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        source: random.Random,
        fabric: Fabric,
        engine: SimEngine,
        front: Process,
        deliver: Callable[[FromEngine], None],
    ) -> None:
        super().__init__(0, scenario, timeline, source, fabric, engine)
        self._front, self._deliver = front, deliver
        self.wires: dict[int, Wire[FromLeader]] = {}
        self._callers: list[Wire[FromLeader]] = []
        self.leader = Leader(saying(0, scenario.world), self.stream, self._post, PATIENCE, self.clock())
        self.channel = SimChannel(self)
        served = self.served(self._compile)
        world = World(self.leader, self.stream) if scenario.world > 1 else None
        self.loop = Rank(
            served, self.channel, self.clock, CompileCounter(), "simulated", pulse=self.pulse, world=world
        )  # fmt: skip
        self.serving = self.settled = False
        self.finishing = self._proposed = self._closed = False
        self._before = (False, 0, 0)
        self._arrival = 0.0

    def start(self, on_ready: Callable[[], None]) -> None:
        """Load, wait for the others and serve."""
        self._on_ready = on_ready
        self.every("judge", JUDGE_S, self._judge)
        self.at("loop", self.random.uniform(0.02, 0.3), self._propose)

    def accept(self, wire: Wire[FromLeader]) -> None:
        """A connection is made, over which ``wire`` goes out."""
        self._callers.append(wire)

    def admit(self, hello: Hello, wire: Wire[FromLeader]) -> None:
        """A rank asks to join."""
        try:
            reason = self.leader.admit(hello, self.clock())
        except EngineError as error:
            self.note(Fault(FAILED, error))
            reason = error.line()
        if reason:
            wire.send(encode(Refused(reason)))
            return wire.close()
        self.wires[hello.rank] = wire
        wire.send(encode(Era(epoch=1, world=self.scenario.world, model="simulated", settings=b"", fabric_port=1)))
        return self.every(f"pulse {hello.rank}", BEAT_S, lambda: self._beat(wire))

    def hear(self, rank: int, record: FromFollower) -> None:
        """A follower says something."""
        self.note(self.leader.hear(rank, record, self.clock()))
        self._look()

    def lost(self, rank: int, found: str) -> None:
        """A follower's connection is closed or broken."""
        if not self._closed:
            self.note(self.leader.lost(rank, found))

    def to_front(self, message: FromEngine) -> None:
        """A message on its way to the front end."""
        self._arrival = max(self._arrival, self.timeline.now + self.random.uniform(5e-5, 5e-4))
        self._front.on("listen", self._arrival, lambda: self._deliver(message))

    def due(self) -> bool:
        """As the loop's own condition."""
        return self.serving and not self.loop.over and (self.loop.busy or bool(self.channel.inbox))

    def turn(self) -> None:
        """The real loop's."""
        self._before = self.loop.busy and not self.channel.inbox, self.channel.sent, self.stream.number
        self.loop.turn()

    def turned(self) -> None:
        """Pools add up, and a turn that nothing but work called for did some."""
        audit("rank 0", self.scenario.limits, self.loop.beat().stats, self.engine, self.ended)
        alone, sent, number = self._before
        step = self.stream.at(self.stream.number)
        moved = self.channel.sent > sent or step is None or bool(step.operations or step.results)
        require(not alone or moved or self.stream.number == number, "a step with work makes progress")
        if self.loop.over and not self.finishing:
            self._finish()

    def failed(self, fault: Fault) -> None:
        """The loop raised."""
        self.note(self.leader.own(fault))

    def _propose(self) -> None:
        self.note(self.leader.propose(TERMS, 0.05))
        self._proposed = True
        self._look()

    def _look(self) -> None:
        """What the threads of a hub wait for."""
        if self._proposed and not self.serving and not self.leader.missing and not self.leader.undecided:
            self.leader.go(self.clock())
            self.serving = True
            self.pulse.turn("waiting")
            self.every("beat", BEAT_S, self._front_beat)
            self._front.at("listen", HOST_S, self._on_ready)
        if self.finishing and not self._closed and not self.leader.staying:
            self._settle()

    def _finish(self) -> None:
        self.finishing = True
        self.pulse.turn("waiting")
        self.leader.end()
        self.at("loop", PATIENCE.leave, self._settle)
        self._look()

    def _settle(self) -> None:
        if self._closed:
            return
        try:
            self.leader.settle()
        except EngineError as error:
            self.note(Fault(FAILED, error))
            return
        self._closed = self.settled = True
        audit_end("rank 0", self.loop.beat().stats, self.engine)
        self.leave()

    def leave(self) -> None:
        """Be gone; connections close."""
        for wire in self._callers:
            wire.close()
        self.exit()

    def _judge(self) -> bool:
        self.note(self.leader.judge(self.clock(), self.heartbeat()))
        fate = self.fate.sealed(self.clock())
        if fate is not None and not self._closed:
            self._fail(fate)
        return not self._closed

    def _fail(self, error: DgppError) -> None:
        """As `Lead` does: the front end first, then the others."""
        self._closed, self.failure = True, error
        self.to_front(Failed(error.line(), str(error), error.exit_code))
        body = encode(self.leader.halted(error.line()))
        for wire in self.wires.values():
            wire.send(body)
        self.leave()

    def _beat(self, wire: Wire[FromLeader]) -> bool:
        wire.send(encode(self.heartbeat()))
        return not self._closed

    def _front_beat(self) -> bool:
        self.to_front(self.loop.beat())
        return not self._closed

    def _post(self, ranks: Sequence[int], record: FromLeader) -> None:
        body = encode(record)
        for rank in ranks:
            self.wires[rank].send(body)

    def _compile(self, grammar: Grammar) -> Future[object]:
        done: Future[object] = Future()

        def compiled() -> None:
            self.engine.compiled.add(grammar.digest)
            done.set_result(None)

        self.at("compiler", self.random.uniform(0, COMPILE_S), compiled)
        return done
