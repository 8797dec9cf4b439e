"""What the processes of all ranks have in common: a loop that takes turns and waits for its device, and an end."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.rank import Served
from dgpp_core.cluster.records import Heartbeat
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import FAILED, MISSED, Fate, Fault, Patience
from dgpp_core.testing.sim.device import Device, Fabric, Job, SimEngine
from dgpp_core.testing.sim.process import Process
from dgpp_core.testing.sim.promises import BrokenPromiseError
from dgpp_core.testing.sim.scenario import Scenario
from dgpp_core.testing.sim.timeline import Timeline

HOST_S = 0.002
"""Most seconds that the host's part of a turn takes."""
PATIENCE = Patience()


class RankProcess(Process, ABC):
    """One rank.

    A turn of the real loop is one call, in which it may wait for a result that virtual time does not have yet. What it
    says after that is kept back until the job is over, and heartbeats say what they said before.

    Args:
        engine: what its device runs.

    Attributes:
        hung: its loop does not come back from the next turn.
        on_hang: called when it does not.
        slow: seconds that the next step takes longer.
        failure: why it ended.
    """

    def __init__(
        self,
        rank: int,
        scenario: Scenario,
        timeline: Timeline,
        source: random.Random,
        fabric: Fabric,
        engine: SimEngine,
    ) -> None:
        super().__init__(f"host{rank} process {rank}", timeline, source)
        self.rank, self.scenario, self.engine = rank, scenario, engine
        self.pulse, self.stream, self.fate = Pulse(self.clock), OperationStream(), Fate(PATIENCE)
        self.device = Device(rank, engine, fabric, self, waits=self._wait, compute=self._compute)
        self.hung = False
        self.on_hang: Callable[[], None] = lambda: None
        self._fabric = fabric
        self.slow = 0.0
        self.failure: DgppError | None = None
        self.ended: set[int] = set()
        self._turning = self._dead = False
        self._said: tuple[int, int] | None = None
        self._job: Job | None = None
        self._held: list[Callable[[], None]] = []

    def served(self, compile_grammar: Callable[..., object]) -> Served:
        """What its loop drives."""
        return Served(
            executor=self.device, limits=self.scenario.limits, lag=self.scenario.lag, vocab_size=10_000,
            compile_grammar=compile_grammar, grammar_wait=0.0,  # type: ignore[arg-type]
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat:
        """How the rank is now."""
        sign, (step, digest) = self.pulse.sign, self._said or self.stream.head
        return Heartbeat(step=step, digest=digest, phase=sign.phase, age=self.pulse.age(), call=sign.call)

    def wake(self) -> None:
        """The loop's thread looks whether there is something to do."""
        self.at("loop", 0.0, self._begin)

    def say(self, call: Callable[[], None]) -> None:
        """Say something from within a turn: now, or when the result is there that the turn waits for."""
        if self._job is None:
            call()
        else:
            self._held.append(call)

    def note(self, fault: Fault | None) -> None:
        """An account of why the world ends."""
        if fault is not None:
            self.fate.note(fault, self.clock())

    def exit(self) -> None:
        """Be gone, its end of the bus too."""
        super().exit()
        self._fabric.lose()

    @abstractmethod
    def leave(self) -> None:
        """Exit; connections close."""

    @abstractmethod
    def due(self) -> bool:
        """Whether the loop has something to do."""

    @abstractmethod
    def turn(self) -> None:
        """One turn of the real loop."""

    @abstractmethod
    def turned(self) -> None:
        """A turn is over: look at what it left behind."""

    @abstractmethod
    def failed(self, fault: Fault) -> None:
        """The loop raised."""

    def _begin(self) -> None:
        if self._turning or self._dead or not self.due():
            return None
        self._turning = True
        if self.hung:
            self.on_hang()
            return self.pulse.turn("working")
        self._said, error = self.stream.head, None
        try:
            self.turn()
        except BrokenPromiseError:
            raise
        except Exception as raised:
            error = raised
        if self._job is None:
            return self.at("loop", self._host(), lambda: self._end(error))
        if self.scenario.seen:
            self.pulse.turn("collective", f"step {self.stream.number}")
        return self._job.then(lambda: self.at("loop", 0.0, lambda: self._came(error)))

    def _came(self, error: Exception | None) -> None:
        """The result is there that the turn waited for, or will never be."""
        assert self._job is not None
        if self._job.error is not None:
            self.pulse.broken, error = True, self._job.error
            self._held.clear()
        self._job = None
        self.pulse.turn("working")
        held, self._held = self._held, []
        for call in held:
            call()
        self.at("loop", self._host(), lambda: self._end(error))

    def _end(self, error: Exception | None) -> None:
        self._turning, self._said = False, None
        if error is not None:
            self._dead = True
            return self.failed(self._account(error))
        self.turned()
        if self.due():
            return self._begin()
        return self.pulse.turn("waiting")

    def _account(self, error: Exception) -> Fault:
        if not isinstance(error, DgppError):
            error = EngineError("an error that dgpp did not foresee", found=f"{type(error).__name__}: {error}")
        return Fault(MISSED if self.pulse.broken else FAILED, error)

    def _wait(self, job: Job) -> None:
        if not job.done:
            self._job = job

    def _host(self) -> float:
        return self.random.uniform(HOST_S / 20, HOST_S)

    def _compute(self, rows: int) -> float:
        seconds = self.scenario.compute_ms / 1e3 * self.random.uniform(0.8, 1.2) + rows * 2e-5 + self.slow
        self.slow = 0.0
        return seconds
