"""A follower's side of a world: it takes rank 0's steps, compares digests before each, and says how it is.

Pure, as `leader`: records go out through ``post``.
"""

from __future__ import annotations

from collections.abc import Callable

from dgpp_core.api import EngineError
from dgpp_core.cluster.records import (
    Account,
    Bye,
    Compile,
    Compiled,
    Diverged,
    End,
    FromFollower,
    FromLeader,
    Go,
    Halt,
    Heartbeat,
    Refused,
    Tick,
)
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.scheduler.stepper import Stepper
from dgpp_core.text.grammar.spec import Grammar

CompileGrammar = Callable[[Grammar, Callable[[], None]], None]
"""Compiles a grammar in the background and calls back from any thread."""


class Follower:
    """The loop of a rank other than 0, one record at a time.

    Args:
        stepper: its scheduler and engine; its executor is a `OperationStream.witness` of ``stream``.
        post: sends a record to rank 0; may be called from any thread.
        compile_grammar: has the engine compile one ahead of its request.
    """

    def __init__(
        self,
        stepper: Stepper,
        stream: OperationStream,
        post: Callable[[FromFollower], None],
        compile_grammar: CompileGrammar,
    ) -> None:
        self._stepper, self.stream, self._post, self._compile = stepper, stream, post, compile_grammar

    def apply(self, record: FromLeader) -> bool:
        """Take one of rank 0's records; whether this was the last.

        Raises:
            EngineError: the ranks have diverged, the journal makes no sense, rank 0 ends the world, or what the engine
                raises.
        """
        match record:
            case Tick():
                self._step(record)
            case Compile(id=request, grammar=grammar):
                self._compile(grammar, lambda: self._post(Compiled(request)))
            case Account():
                self._post(Diverged(self.stream.recent()))
            case End(step=step, digest=digest):
                self._require_same(step, digest)
                self._post(Bye(self.stream.number, self.stream.digest))
                return True
            case Halt(reason=reason) | Refused(reason=reason):
                raise EngineError("rank 0 ends the world", found=reason)
            case Go() | Heartbeat():
                pass
            case _:
                raise EngineError("a record out of turn", found=type(record).__name__, expected="Tick")
        return False

    def _step(self, tick: Tick) -> None:
        stream = self.stream
        if tick.number != stream.number + 1:
            raise EngineError(
                "the journal has a gap", found=f"step {tick.number}", expected=f"step {stream.number + 1}"
            )
        self._require_same(stream.number, tick.digest)
        self._stepper.step(tick.submissions, tick.cancels, tick.stops)
        stream.close(self._stepper.scheduler.digest)

    def _require_same(self, number: int, digest: int) -> None:
        """Rank 0 has ``digest`` after step ``number``, which is the last one here too."""
        stream = self.stream
        if (number, digest) == (stream.number, stream.digest):
            return
        self._post(Diverged(stream.recent()))
        raise EngineError(
            "this rank has diverged from rank 0",
            where=f"after step {stream.number}",
            found=f"digest {stream.digest:016x}",
            expected=f"digest {digest:016x} after step {number}, as rank 0 has it",
            hint="rank 0 names the first operation that differs",
        )
