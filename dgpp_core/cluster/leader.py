"""Rank 0's side of a world: who is in, what they voted, what they are told, and whether they agree.

Pure: the clock is an argument, records go out through ``post``, and what comes in is handed to `hear` and `lost`. It is
not thread-safe; of its methods, those that the loop calls (`tick`, `compile`, `end`) may run beside the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dgpp_core.api import EngineError
from dgpp_core.cluster.identity import Terms, require_same, require_same_settings
from dgpp_core.cluster.records import (
    PROTOCOL,
    Account,
    Bye,
    Compile,
    Compiled,
    Diverged,
    End,
    FromFollower,
    FromLeader,
    Go,
    Gone,
    Halt,
    Heartbeat,
    Hello,
    Step,
    Tick,
    Vote,
)
from dgpp_core.cluster.stream import OperationStream, first_difference
from dgpp_core.cluster.vigil import DIFFERS, ENDED, FAILED, MISSED, Fault, Patience, Vigil, while_loading
from dgpp_core.scheduler.messages import Submit
from dgpp_core.text.grammar.spec import Grammar

Post = Callable[[Sequence[int], FromLeader], None]
"""Sends a record to ranks, in order with all before it."""


class Leader:
    """The state of rank 0's side.

    Args:
        hello: what rank 0 says of itself; ``settings`` are those that are served.
        stream: rank 0's own, written by its loop.
        post: sends a record to followers.
        now: the current time in seconds, as in every method that takes it.
    """

    def __init__(self, hello: Hello, stream: OperationStream, post: Post, patience: Patience, now: float) -> None:
        self._hello, self._stream, self._post, self._patience = hello, stream, post, patience
        self._joined: dict[int, Hello] = {}
        self._votes: dict[int, Vote] = {}
        self._byes: dict[int, Bye] = {}
        self._gone: set[int] = set()
        self._compiling: dict[int, tuple[set[int], Callable[[], None]]] = {}
        self._vigil = Vigil({}, while_loading(patience), now)
        self._serving = self._ending = False
        self._terms: Terms | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The followers of a complete world."""
        return tuple(range(1, self._hello.world))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not joined."""
        return tuple(rank for rank in self.ranks if rank not in self._joined)

    @property
    def undecided(self) -> tuple[int, ...]:
        """Ranks that have not voted for what rank 0 proposed: with one that votes otherwise, nothing is served."""
        votes, terms = self._votes, self._terms
        return tuple(rank for rank in self.ranks if rank not in votes or votes[rank].terms != terms)

    @property
    def staying(self) -> tuple[int, ...]:
        """After `end`: ranks that have not left."""
        return tuple(rank for rank in self.ranks if rank not in self._byes)

    def name(self, rank: int) -> str:
        """Who a rank is, for a message."""
        return f"rank {rank} ({self._joined[rank].process})" if rank in self._joined else f"rank {rank}"

    def admit(self, hello: Hello, now: float) -> str:
        """A rank asks to join: why it cannot, which does not concern the others; empty where it is in.

        Raises:
            EngineError: it belongs to this world and differs from rank 0, so the world cannot form.
        """
        own, who = self._hello, f"rank {hello.rank} ({hello.process})"
        if hello.epoch != own.epoch:
            return f"{who} was started for epoch {hello.epoch}; this is epoch {own.epoch} of the world"
        if not 1 <= hello.rank < own.world or hello.world != own.world:
            return f"{who} of a world of {hello.world} has no place in a world of {own.world}"
        if hello.rank in self._joined:
            return f"{who} comes second: that rank is {self._joined[hello.rank].process}"
        if hello.protocol != PROTOCOL:
            raise EngineError(
                "ranks speak different versions of the journal", where=who, found=str(hello.protocol),
                expected=f"{PROTOCOL}, as rank 0 does", hint="install the same release on every node",
            )  # fmt: skip
        require_same("builds", who, hello.build, own.build)
        if hello.settings:
            require_same_settings(who, hello.settings, own.settings)
        self._joined[hello.rank] = hello
        self._vigil.watch(hello.rank, self.name(hello.rank), now)
        return ""

    def hear(self, rank: int, record: FromFollower, now: float) -> Fault | None:
        """A follower's record; the fault that it tells of, if any."""
        self._vigil.hear(rank, now)
        match record:
            case Heartbeat():
                return self._beat(rank, record, now)
            case Vote():
                self._votes[rank] = record
                return self._disputed(rank)
            case Compiled(id=request):
                self._compiled(rank, request)
            case Diverged(steps=steps):
                return self._diverged(rank, steps)
            case Gone():
                self._gone.add(rank)
                what = f"rank {rank} failed: {record.what}"
                error = EngineError(what, where=self.name(rank), hint="its log and its fault file have the details")
                error.exit_code = record.exit_code
                return Fault(MISSED if record.collective else FAILED, error)
            case Bye():
                self._byes[rank] = record
            case Hello():
                return Fault(FAILED, EngineError("a second hello", where=self.name(rank)))
        return None

    def lost(self, rank: int, found: str) -> Fault | None:
        """A follower's connection is closed, or broken as ``found`` says; nothing new where it has said why it goes."""
        if rank in self._gone or (self._ending and rank in self._byes):
            return None
        error = EngineError(
            f"rank {rank} is gone",
            where=self.name(rank),
            found=found or "its connection is closed",
            hint="see its log: a signal, the kernel's memory killer and a crash leave no message here",
        )
        return Fault(ENDED, error)

    def own(self, fault: Fault) -> Fault:
        """Rank 0's own account; of a loop that serves it is told like another rank's, by its name."""
        if not self._serving or self._ending:
            return fault
        error = EngineError(f"rank 0 failed: {fault.error.line()}", where=f"rank 0 ({self._hello.process})")
        error.exit_code = fault.error.exit_code
        return Fault(fault.weight, error)

    def judge(self, now: float, own: Heartbeat) -> Fault | None:
        """Whom the world has lost, rank 0's own loop included once it serves; call it every `JUDGE_S`."""
        if self._ending:
            return None
        if self._serving:
            self._vigil.beat(0, own, now)
        return self._vigil.judge(now)

    def propose(self, terms: Terms, longest: float) -> Fault | None:
        """Rank 0 is built; the first vote against, if there is one already."""
        self._terms = terms
        self._votes[0] = Vote(terms, longest)
        faults = (self._disputed(rank) for rank in self.ranks)
        return next((fault for fault in faults if fault is not None), None)

    def go(self, now: float) -> None:
        """All have voted alike: serve, and watch each other from now on."""
        self._vigil = Vigil({0: "rank 0"} | {rank: self.name(rank) for rank in self.ranks}, self._patience, now)
        self._serving = True
        self._vigil.allow(max(vote.longest for vote in self._votes.values()))
        self._post(self.ranks, Go())

    def tick(self, submissions: Sequence[Submit], cancels: Sequence[int], stops: Sequence[int]) -> None:
        """Tell the followers what the step that begins now is given."""
        stream = self._stream
        record = Tick(
            number=stream.number + 1, digest=stream.digest,
            submissions=tuple(submissions), cancels=tuple(cancels), stops=tuple(stops),
        )  # fmt: skip
        self._post(self.ranks, record)
        self._vigil.tell(record.number)

    def compile(self, request: int, grammar: Grammar, done: Callable[[], None]) -> None:
        """Have every follower compile a grammar; ``done`` is called when all have."""
        self._compiling[request] = (set(self.ranks), done)
        self._post(self.ranks, Compile(request, grammar))

    def end(self) -> None:
        """Tell the followers to leave in order."""
        self._ending = True
        self._post(self.ranks, End(self._stream.number, self._stream.digest))

    def halted(self, reason: str) -> Halt:
        """The world has failed: what followers are told, whoever of them still listens."""
        self._ending = True
        return Halt(reason)

    def settle(self) -> None:
        """Compare the accounts of ranks that have left.

        Raises:
            EngineError: one did not leave, or its complete stream is not rank 0's.
        """
        own = End(self._stream.number, self._stream.digest)
        for rank in self.ranks:
            bye = self._byes.get(rank)
            if bye is None or (bye.step, bye.digest) != (own.step, own.digest):
                raise EngineError(
                    f"the operation stream of rank {rank} differs at the end" if bye else f"rank {rank} did not leave",
                    where=self.name(rank),
                    found=f"{bye.step} steps, digest {bye.digest:016x}" if bye else "no account of its stream",
                    expected=f"{own.step} steps, digest {own.digest:016x}, as rank 0 has it",
                )

    def _disputed(self, rank: int) -> Fault | None:
        if self._terms is None or rank not in self._votes:
            return None
        hint = "every rank needs the same checkpoint and the same kind of device"
        try:
            require_same("terms", self.name(rank), self._votes[rank].terms, self._terms, hint)
        except EngineError as error:
            return Fault(FAILED, error)
        return None

    def _beat(self, rank: int, beat: Heartbeat, now: float) -> Fault | None:
        if not self._serving:
            return None
        self._vigil.beat(rank, beat, now)
        step = self._stream.at(beat.step)
        if step is None or step.digest == beat.digest:
            return None
        self._post((rank,), Account())
        error = EngineError(
            f"rank {rank} has diverged", where=f"{self.name(rank)}, step {beat.step} or before it",
            found=f"digest {beat.digest:016x}", expected=f"digest {step.digest:016x}, as rank 0 has it",
        )  # fmt: skip
        return Fault(DIFFERS, error)  # the steps that were asked for tell more

    def _diverged(self, rank: int, steps: Sequence[Step]) -> Fault:
        number, found, expected = first_difference(self._stream, steps)
        error = EngineError(
            f"rank {rank} has diverged",
            where=f"{self.name(rank)}, " + (f"step {number}" if number else f"before step {self._stream.number}"),
            found=found,
            expected=f"{expected}, as rank 0 has it",
            hint="this is a fault of a kernel, of memory or of dgpp: keep the fault files of all ranks",
        )
        return Fault(FAILED, error)

    def _compiled(self, rank: int, request: int) -> None:
        waiting, done = self._compiling.get(request, (set[int](), lambda: None))
        waiting.discard(rank)
        if not waiting and self._compiling.pop(request, None) is not None:
            done()
