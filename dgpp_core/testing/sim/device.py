"""What a rank computes with: an engine without a model, whose steps take time and meet those of the other ranks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from dgpp_core.api import EngineError
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, SlotResult, Snapshot, StepResult
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.stepper import Pending
from dgpp_core.testing.fake_engine import Accept, FakeEngine, Pick, ViolationError
from dgpp_core.testing.sim.process import Process
from dgpp_core.testing.sim.timeline import Timeline

FOLD_S = 0.0002
NOTICE_S = 0.1
"""Seconds within which ranks in a collective notice that another one's end of the bus is gone, where they do."""


class Countdown:
    """Is true once, after ``left`` times; never where that is negative."""

    def __init__(self, left: int = -1) -> None:
        self._left = left

    def over(self) -> bool:
        """Count one."""
        if self._left < 0:
            return False
        self._left -= 1
        return self._left < 0


class SimEngine(FakeEngine):
    """A fake engine that can go wrong, and that insists on grammars being compiled before their requests begin.

    Args:
        struck: called when a fault has changed something.

    Attributes:
        flips: counts picks, the last of which is another token.
        tears: counts snapshots, the last of which is torn: replies that begin with it are wrong.
        raises: counts operations, the last of which raises.
        compiled: the grammars that are.
    """

    def __init__(self, limits: Limits, *, pick: Pick, vocab: int, accept: Accept, struck: Callable[[], None]) -> None:
        self._right, self._vocab, self._struck = pick, vocab, struck
        super().__init__(limits, pick=self._chosen, accept=accept)
        self.flips, self.tears, self.raises = Countdown(), Countdown(), Countdown()
        self.compiled: set[str] = set()
        self._torn: set[int] = set()
        self._spoilt: set[int] = set()
        self._wrong = False

    def _chosen(self, ids: Sequence[int]) -> int:
        token = self._right(ids)
        if self.flips.over() or self._wrong:
            self._struck()
            return (token + 1) % self._vocab
        return token

    def _run(self, operation: Operation) -> list[SlotResult]:
        if self.raises.over():
            self._struck()
            raise EngineError("the logits have no finite largest value", where="a row of the simulated engine")
        return super()._run(operation)

    def _begin(self, begin: Begin) -> None:
        if begin.grammar is not None and begin.grammar.digest not in self.compiled:
            raise ViolationError(f"broken promise: the grammar of request {begin.request} was compiled before it began")
        self._spoilt.discard(begin.slot)
        super()._begin(begin)
        if begin.arena in self._torn:
            self._spoilt.add(begin.slot)

    def _snapshot(self, snapshot: Snapshot) -> None:
        super()._snapshot(snapshot)
        self._torn.discard(snapshot.arena)
        if self.tears.over():
            self._torn.add(snapshot.arena)

    def _prefill(self, prefill: Prefill) -> list[SlotResult]:
        self._wrong = prefill.slot in self._spoilt
        return super()._prefill(prefill)

    def _step(self, number: int, depth: int) -> SlotResult:
        self._wrong = number in self._spoilt
        return super()._step(number, depth)


class Job:
    """One tick on one rank's device.

    Attributes:
        error: why it failed.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.done = rows, False
        self.error: EngineError | None = None
        self._waiting: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` made at the end."""
        if self.done:
            call()
        else:
            self._waiting.append(call)

    def finish(self, error: EngineError | None = None) -> None:
        """It is over."""
        if not self.done:
            self.done, self.error = True, error
            for call in self._waiting:
                call()


class Fabric:
    """The bus: the n-th jobs of all ranks end together, if they mean the same.

    Args:
        notices: ranks in a collective notice that one has gone; otherwise they wait for ever.
    """

    def __init__(self, timeline: Timeline, source: random.Random, world: int, *, notices: bool) -> None:
        self._timeline, self._random, self._world, self._notices = timeline, source, world, notices
        self._meetings: dict[int, dict[int, Job]] = {}
        self._broken = False

    def arrive(self, rank: int, number: int, job: Job) -> None:
        """A rank is in collective ``number``."""
        meeting = self._meetings.setdefault(number, {})
        meeting[rank] = job
        if self._broken:
            self._fail(meeting, "the connection of the bus to another rank is closed")
        elif len({each.rows for each in meeting.values()}) > 1:
            self._fail(meeting, "ranks issued different collectives")
        elif len(meeting) == self._world:
            for each in self._meetings.pop(number).values():
                self._timeline.after(FOLD_S, each.finish)

    def lose(self) -> None:
        """A rank has gone."""
        if self._notices:
            self._broken = True
            for meeting in self._meetings.values():
                self._fail(meeting, "the connection of the bus to another rank is closed")

    def _fail(self, meeting: dict[int, Job], what: str) -> None:
        for job in meeting.values():
            delay = self._random.uniform(0, NOTICE_S)
            self._timeline.after(delay, partial(job.finish, EngineError(what, where="bus")))


class Device:
    """Implements `Executor`: results are computed at once and given out when the step's time is over.

    Args:
        waits: called with the job that the host waits for.
        compute: seconds that a step of so many rows takes before its collective.
    """

    def __init__(
        self,
        rank: int,
        engine: SimEngine,
        fabric: Fabric,
        process: Process,
        *,
        waits: Callable[[Job], None],
        compute: Callable[[int], float],
    ) -> None:
        self.engine = engine
        self._rank, self._fabric, self._process, self._waits, self._compute = rank, fabric, process, waits, compute
        self._jobs: deque[Job] = deque()
        self._number = 0

    def launch(self, tick: int, operations: Sequence[Operation]) -> Pending:
        """Compute a tick; its job begins when those before it are over."""
        result = next(iter(self.engine.execute(tick, operations)), StepResult(tick, ()))
        rows = sum(map(_rows, operations))
        job = Job(rows)
        if not rows:
            job.finish()
            return _Launched(job, result, self._waits)
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin()
        return _Launched(job, result, self._waits)

    def _begin(self) -> None:
        job = self._jobs[0]
        self._number += 1
        number = self._number
        self._process.at("device", self._compute(job.rows), lambda: self._fabric.arrive(self._rank, number, job))
        job.then(self._next)

    def _next(self) -> None:
        self._jobs.popleft()
        if self._jobs:
            self._begin()


class _Launched:
    def __init__(self, job: Job, result: StepResult, waits: Callable[[Job], None]) -> None:
        self._job, self._result, self._waits = job, result, waits

    def wait(self) -> StepResult:
        self._waits(self._job)
        return self._result


def _rows(operation: Operation) -> int:
    match operation:
        case Prefill(count=count):
            return count
        case Decode(slots=slots, depth=depth):
            return len(slots) * (depth + 1)
    return 0
