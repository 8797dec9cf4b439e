"""The loop of rank 0: the front end's messages in, one step of scheduler and engine each turn, replies out.

`Rank.step` touches nothing but its arguments; `Rank.turn` waits for what to give it, and `Rank.run` goes on with that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Protocol

import msgspec

from dgpp_core.api import EngineError, RequestError
from dgpp_core.cluster.leader import Leader
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.operations import Decode, Operation, Prefill
from dgpp_core.images.picture import Picture
from dgpp_core.sampling.validate import validate
from dgpp_core.scheduler.draft_watch import DraftWatch
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import (
    Beat,
    Boot,
    Cancel,
    Ending,
    FromEngine,
    Output,
    Shutdown,
    Stop,
    Submit,
    ToEngine,
)
from dgpp_core.scheduler.scheduler import Scheduler, TickOutput
from dgpp_core.scheduler.stepper import Executor, Stepper
from dgpp_core.text.grammar.spec import Grammar

IDLE_WAIT = 1.0
_log = logging.getLogger(__name__)


class FrontEnd(Protocol):
    """The other end of a rank's loop: a `Channel`."""

    def drain(self, wait: float) -> list[ToEngine]:
        """Every message that has come; waits up to ``wait`` seconds for a first one."""
        ...

    def put(self, message: ToEngine) -> None:
        """Let `drain` find a message as if it had just come; any thread."""
        ...

    def send(self, message: FromEngine) -> None:
        """Say something to the front end."""
        ...


class Served(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a loop drives.

    Attributes:
        executor: runs what the scheduler plans.
        lag: steps by which a result is read late, 0 or 1.
        vocab_size: ids a prompt may have.
        compile_grammar: begins to compile a grammar whose request will come.
        gather: seconds that the first request at an idle engine waits for company.
        look: says why a request with such images cannot be served, if it cannot.
    """

    executor: Executor
    limits: Limits
    lag: int
    vocab_size: int
    compile_grammar: Callable[[Grammar], Future[object]]
    grammar_wait: float = 0.005
    gather: float = 0.0
    look: Callable[[Sequence[Picture]], str] = lambda pictures: ""


class World(msgspec.Struct, frozen=True, eq=False):
    """What rank 0 needs of the other ranks.

    Attributes:
        leader: tells them what a step is given.
        stream: rank 0's operations.
    """

    leader: Leader
    stream: OperationStream


class Rank:
    """Drives one engine.

    Args:
        channel: the way to the front end.
        clock: seconds, monotonic.
        name: the model's, for the log.
        compiles: counts kernels; what it has counted so far was before READY.
        pulse: where the loop's signs of life go.
        world: the other ranks, if there are any.
    """

    def __init__(
        self,
        served: Served,
        channel: FrontEnd,
        clock: Callable[[], float],
        compiles: CompileCounter,
        name: str,
        *,
        pulse: Pulse | None = None,
        world: World | None = None,
    ) -> None:
        self._drafts = DraftWatch(name)
        self._compiles, self._compiled_before = compiles, len(compiles.names)
        self._channel, self._clock, self._pulse, self._world = channel, clock, pulse or Pulse(clock), world
        scheduler = Scheduler(served.limits)
        executor = served.executor if world is None else world.stream.witness(served.executor)
        self._stepper = Stepper(scheduler, executor, lag=served.lag, deliver=self._deliver, look=served.look)
        self._served = served
        self._progress, self._step_ms, self._prefill_ms = 0, 0.0, 0.0
        self._stats, self._busy, self._draining = scheduler.stats(), False, False
        self._compiling: set[int] = set()
        self._dropped: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight, and no grammar is waited for."""
        return self._stepper.idle and not self._compiling

    @property
    def busy(self) -> bool:
        """Whether a step has something to do though no message comes."""
        return not self._stepper.idle

    @property
    def over(self) -> bool:
        """Whether `Shutdown` came, and the last request has ended."""
        return self._draining and self.idle

    def run(self) -> None:
        """Until it is over; raises what the engine raises."""
        while not self.over:
            self.turn()

    def turn(self) -> None:
        """Take what has come, waiting for it where there is nothing else to do, and a step if there is one to take."""
        self._busy = self.busy
        self._pulse.turn("waiting")
        messages = self._channel.drain(0 if self._busy else IDLE_WAIT)
        if not self._busy:
            messages += self._company(messages)
        self._pulse.turn("working")
        if messages or self._busy:
            self.step(messages)

    def _company(self, messages: Sequence[ToEngine]) -> list[ToEngine]:
        """What else comes soon after the first requests at an idle engine, so that their steps are shared at once.

        Only rank 0 waits: the other ranks are told what came, and when, by the steps that it gives them.
        """
        found: list[ToEngine] = []
        coming = sum(isinstance(message, Submit) for message in messages)
        end = self._clock() + self._served.gather
        while 0 < coming < self._served.limits.slots and (left := end - self._clock()) > 0:
            more = self._channel.drain(left)
            found += more
            coming += sum(isinstance(message, Submit) for message in more)
        return found

    def beat(self) -> Beat:
        """What the heartbeat thread sends."""
        return Beat(self._progress, self._busy, self._stats)

    def step(self, messages: Iterable[ToEngine]) -> None:
        """One turn: what came in, one step on every rank, and what it has for the clients."""
        submissions: list[Submit] = []
        cancels: list[int] = []
        stops: list[int] = []
        for message in messages:
            match message:
                case Submit():
                    if fault := self._fault(message):
                        self._channel.send(Output((), (Ending(message.id, "error", error=fault),)))
                    elif self._compiled(message):
                        submissions.append(message)
                case Cancel(id=request) if request in self._compiling:
                    self._drop(request)
                case Cancel(id=request):
                    cancels.append(request)
                case Stop(id=request):
                    stops.append(request)
                case Shutdown():
                    self._draining = True
                case Boot():
                    raise EngineError("a second boot message", expected="one, before everything else")
        started = self._clock()
        operations = self._together(submissions, cancels, stops)
        self._account(operations, (self._clock() - started) * 1e3)
        self._progress += 1
        stats = self._stepper.scheduler.stats()
        if warning := self._drafts.note(stats):
            _log.warning("%s", warning)
        late = len(self._compiles.names) - self._compiled_before
        self._stats = msgspec.structs.replace(
            stats, step_ms=self._step_ms, prefill_ms=self._prefill_ms, kernels_compiled=late
        )

    def _together(
        self, submissions: Sequence[Submit], cancels: Sequence[int], stops: Sequence[int]
    ) -> tuple[Operation, ...]:
        """The step itself. The others are told before rank 0 begins, so that they begin at the same time."""
        if self._world is None:
            return self._stepper.step(submissions, cancels, stops)
        self._world.leader.tick(submissions, cancels, stops)
        operations = self._stepper.step(submissions, cancels, stops)
        self._world.stream.close(self._stepper.scheduler.digest)
        return operations

    def _compiled(self, submit: Submit) -> bool:
        """Whether the request's grammar is there; if not, the request comes again when it is."""
        if submit.id in self._dropped:
            self._dropped.remove(submit.id)
            return False
        if submit.grammar is None or submit.id in self._compiling:
            self._compiling.discard(submit.id)
            return True
        made = self._served.compile_grammar(submit.grammar)
        theirs = self._compiled_elsewhere(submit.id, submit.grammar)
        both: tuple[Future[object], Future[object]] = made, theirs
        if not wait(both, self._served.grammar_wait).not_done:
            return True  # if it failed, the engine says so of this request
        self._compiling.add(submit.id)
        made.add_done_callback(lambda _: theirs.add_done_callback(lambda _: self._channel.put(submit)))
        return False

    def _compiled_elsewhere(self, request: int, grammar: Grammar) -> Future[object]:
        """Done when every other rank has compiled the grammar."""
        done: Future[object] = Future()
        if self._world is None:
            done.set_result(None)
        else:
            self._world.leader.compile(request, grammar, lambda: done.set_result(None))
        return done

    def _drop(self, request: int) -> None:
        """End a request that waits for its grammar."""
        self._compiling.remove(request)
        self._dropped.add(request)
        self._channel.send(Output((), (Ending(request, "cancelled"),)))

    def _account(self, operations: Sequence[Operation], ms: float) -> None:
        """A tick's time is decoding's where it decoded, and prefill's where it only read prompts."""
        kinds = {type(operation) for operation in operations}
        if Decode in kinds:
            self._step_ms += ms
        elif Prefill in kinds:
            self._prefill_ms += ms

    def _fault(self, submit: Submit) -> str:
        """What the engine could not take; the front end has checked before, so this names a broken front end."""
        vocab_size = self._served.vocab_size
        if wrong := [token for token in submit.tokens if not 0 <= token < vocab_size]:
            return f"prompt id {wrong[0]} is not below the vocabulary size {vocab_size}"
        try:
            validate(submit.params, vocab_size)
        except RequestError as error:
            return error.line()
        return ""

    def _deliver(self, out: TickOutput) -> None:
        if out.updates or out.endings:
            self._channel.send(Output(out.updates, out.endings))
