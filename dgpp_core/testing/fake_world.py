"""Ranks without processes, network or model: the loops, the journal and the agreement of a world, in one thread.

Records go through frames as they would over a wire, one direction a byte string that a test may damage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.follower import Follower
from dgpp_core.cluster.frames import Packer, Unpacker
from dgpp_core.cluster.identity import Build, Terms
from dgpp_core.cluster.leader import Leader
from dgpp_core.cluster.rank import Rank, Served, World
from dgpp_core.cluster.records import (
    PROTOCOL,
    FromFollower,
    FromLeader,
    Heartbeat,
    Hello,
    Vote,
    encode,
    from_follower,
    from_leader,
)
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import Fault, Patience
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.operations import Operation, StepResult
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Ending, FromEngine, Output, ToEngine
from dgpp_core.scheduler.scheduler import Scheduler
from dgpp_core.scheduler.stepper import Stepper
from dgpp_core.testing.fake_engine import FakeEngine, Pick, hashed_pick

BUILD = Build(version="1", code="c", kernels="k", plugin="p", plugin_code="pc", torch="2", triton="3")
TERMS = Terms(checkpoint="x", device="cpu", dtype="float32", limits="", lag=0, grammars=False, rehearsal=True)
VOCAB = 1000


def hello(rank: int, world: int, *, epoch: int = 1, build: Build = BUILD, settings: bytes = b"") -> Hello:
    """What a rank of a fake world says."""
    return Hello(
        protocol=PROTOCOL, rank=rank, world=world, epoch=epoch, process=f"host{rank} process {rank}", build=build,
        settings=settings,
    )  # fmt: skip


class _Done:
    """A launched tick whose result is there."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class FakeExecutor:
    """Implements `Executor` around a `FakeEngine`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def launch(self, tick: int, operations: Sequence[Operation]) -> _Done:
        """Carry the operations out at once."""
        return _Done(next(iter(self.engine.execute(tick, operations)), StepResult(tick, ())))


class FakeFrontEnd:
    """Implements `FrontEnd`: what was said, by request."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.replies: dict[int, list[int]] = defaultdict(list)
        self.endings: dict[int, Ending] = {}

    def drain(self, wait: float) -> list[ToEngine]:
        """What was put; waits for nothing."""
        messages, self.inbox = self.inbox, []
        return messages

    def put(self, message: ToEngine) -> None:
        """Let `drain` find a message."""
        self.inbox.append(message)

    def send(self, message: FromEngine) -> None:
        """Keep what a reply got."""
        if isinstance(message, Output):
            for update in message.updates:
                self.replies[update.id].extend(update.tokens)
            for ending in message.endings:
                if ending.id in self.endings:
                    raise AssertionError(f"request {ending.id} ended twice")
                self.endings[ending.id] = ending


class FakeFollower:
    """One follower with the wires to and from rank 0."""

    def __init__(self, served: Served) -> None:
        self.stream = OperationStream()
        self.to_it, self.from_it = b"", b""
        self._packer = Packer()
        self._frames = Unpacker[FromLeader](from_leader, "rank 0")
        executor = self.stream.witness(served.executor)
        stepper = Stepper(Scheduler(served.limits), executor, lag=served.lag, deliver=lambda out: None)
        self.follower = Follower(stepper, self.stream, self.post, lambda grammar, done: done())
        self.left = False

    def post(self, record: FromFollower) -> None:
        """Say something to rank 0."""
        self.from_it += self._packer.pack(encode(record))

    def beat(self) -> None:
        """Say how it is."""
        step, digest = self.stream.head
        self.post(Heartbeat(step=step, digest=digest, phase="waiting", age=0.0))

    def work(self) -> None:
        """Take everything that has come; raises what the follower raises."""
        data, self.to_it = self.to_it, b""
        for record in self._frames.feed(data):
            self.left = self.follower.apply(record)


class FakeWorld:
    """A complete world that serves, unless a follower's terms differ.

    Args:
        picks: the next-token function of single ranks, to have one compute something else.
        corrupt: changes the bytes on their way to a rank.

    Attributes:
        faults: what rank 0 has against whom, in order.
        errors: what followers raised, by rank.
        paused: ranks that take nothing for now.
    """

    def __init__(
        self,
        limits: Limits,
        world: int,
        *,
        lag: int = 0,
        picks: dict[int, Pick] | None = None,
        corrupt: Callable[[int, bytes], bytes] = lambda rank, data: data,
    ) -> None:
        self.front, self.stream, self.now = FakeFrontEnd(), OperationStream(), 0.0
        self.faults: list[Fault] = []
        self.errors: dict[int, DgppError] = {}
        self.paused: set[int] = set()
        self._corrupt = corrupt
        self._served = [self.served(limits, lag=lag, pick=(picks or {}).get(rank)) for rank in range(world)]
        self._packers = [Packer() for _ in range(world)]
        self._frames = [Unpacker[FromFollower](from_follower, f"rank {rank}") for rank in range(world)]
        self.followers = {rank: FakeFollower(self._served[rank]) for rank in range(1, world)}
        self.leader = Leader(hello(0, world), self.stream, self._post, Patience(), self.now)
        self.rank = Rank(
            self._served[0], self.front, lambda: self.now, CompileCounter(), "fake",
            world=World(self.leader, self.stream),
        )  # fmt: skip
        for rank in self.followers:
            if refused := self.leader.admit(hello(rank, world), self.now):
                raise EngineError(refused)
        self.leader.propose(TERMS, 0.0)
        for rank, follower in self.followers.items():
            follower.post(Vote(TERMS))
            self._read(rank)
        self.leader.go(self.now)

    @staticmethod
    def served(limits: Limits, *, lag: int = 0, pick: Pick | None = None) -> Served:
        """What a loop drives: a `FakeEngine`, with grammars that are compiled at once."""

        def compiled(_: object) -> Future[object]:
            done: Future[object] = Future()
            done.set_result(None)
            return done

        return Served(
            executor=FakeExecutor(FakeEngine(limits, pick=pick or hashed_pick(VOCAB))), limits=limits, lag=lag,
            vocab_size=VOCAB, compile_grammar=compiled, grammar_wait=0.0,
        )  # fmt: skip

    def step(self, *messages: ToEngine) -> None:
        """One turn of rank 0's loop, and everything that follows from it."""
        self.now += 0.01
        self.rank.step([*messages, *self.front.drain(0)])
        self.pump()

    def run(self, *messages: ToEngine, steps: int = 10_000) -> None:
        """Turn until rank 0 is idle, or a fault came."""
        self.step(*messages)
        for _ in range(steps):
            if (self.rank.idle and not self.front.inbox) or self.faults:
                return
            self.step()
        raise AssertionError(f"not idle after {steps} steps")

    def pump(self) -> None:
        """Let every follower take what has come, and rank 0 what they say."""
        for rank, follower in self.followers.items():
            if rank not in self.errors and rank not in self.paused:
                try:
                    follower.work()
                except DgppError as error:
                    self.errors[rank] = error
            self._read(rank)

    def _read(self, rank: int) -> None:
        follower = self.followers[rank]
        data, follower.from_it = follower.from_it, b""
        for record in self._frames[rank].feed(data):
            if (fault := self.leader.hear(rank, record, self.now)) is not None:
                self.faults.append(fault)

    def _post(self, ranks: Sequence[int], record: FromLeader) -> None:
        for rank in ranks:
            frame = self._corrupt(rank, self._packers[rank].pack(encode(record)))
            self.followers[rank].to_it += frame
