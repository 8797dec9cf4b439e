"""The loop of one rank: scheduler and engine, tick by tick."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait

import msgspec

from dgpp_core.api import EngineError, RequestError
from dgpp_core.cluster.channel import Channel
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.operations import Decode, Operation, Prefill
from dgpp_core.sampling.validate import validate
from dgpp_core.scheduler.draft_watch import DraftWatch
from dgpp_core.scheduler.messages import Beat, Boot, Cancel, Ending, Output, Shutdown, Stop, Submit, ToEngine
from dgpp_core.scheduler.scheduler import Scheduler, TickOutput
from dgpp_core.scheduler.sizing import limits_from
from dgpp_core.scheduler.stepper import Stepper

IDLE_WAIT = 1.0
GRAMMAR_WAIT = 0.005
"""Seconds that a tick waits for a grammar to compile, which most do in less; for others the request comes later."""
_log = logging.getLogger(__name__)


class Rank:
    """Drives one engine.

    Args:
        clock: seconds, monotonic.
        name: the model's, for the log.
        compiles: counts kernels; what it has counted so far was before READY.
    """

    def __init__(
        self,
        engine: Engine,
        settings: EngineSettings,
        channel: Channel,
        clock: Callable[[], float],
        compiles: CompileCounter,
        name: str,
    ) -> None:
        self._drafts = DraftWatch(name)
        self._compiles, self._compiled_before = compiles, len(compiles.names)
        self._channel, self._clock = channel, clock
        limits = limits_from(
            engine.geometry,
            settings,
            engine.needs_snapshot,
            decode_rows_match_prefill=engine.decode_rows_match_prefill,
        )
        scheduler = Scheduler(limits)
        lag = int(settings.pipeline and engine.device.type == "cuda")
        self._stepper = Stepper(scheduler, engine, lag=lag, deliver=self._deliver)
        self._engine = engine
        self._progress, self._step_ms, self._prefill_ms = 0, 0.0, 0.0
        self._stats, self._busy, self._draining = scheduler.stats(), False, False
        self._compiling: set[int] = set()
        self._dropped: set[int] = set()

    def run(self) -> None:
        """Until `Shutdown` and the last request's end; raises what the engine raises."""
        while not (self._draining and self._stepper.idle and not self._compiling):
            self._busy = not self._stepper.idle
            messages = self._channel.drain(0 if self._busy else IDLE_WAIT)
            if messages or self._busy:
                self._tick(messages)

    def beat(self) -> Beat:
        """What the heartbeat thread sends."""
        return Beat(self._progress, self._busy, self._stats)

    def _tick(self, messages: Iterable[ToEngine]) -> None:
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
        operations = self._stepper.step(submissions, cancels, stops)
        self._account(operations, (self._clock() - started) * 1e3)
        self._progress += 1
        stats = self._stepper.scheduler.stats()
        if warning := self._drafts.note(stats):
            _log.warning("%s", warning)
        late = len(self._compiles.names) - self._compiled_before
        self._stats = msgspec.structs.replace(
            stats, step_ms=self._step_ms, prefill_ms=self._prefill_ms, kernels_compiled=late
        )

    def _compiled(self, submit: Submit) -> bool:
        """Whether the request's grammar is there; if not, the request comes again when it is."""
        if submit.id in self._dropped:
            self._dropped.remove(submit.id)
            return False
        if submit.grammar is None or submit.id in self._compiling:
            self._compiling.discard(submit.id)
            return True
        made = self._engine.constraints.compile(submit.grammar)
        if wait((made,), GRAMMAR_WAIT).done:
            return True  # if it failed, the engine says so of this request
        self._compiling.add(submit.id)
        made.add_done_callback(lambda _: self._channel.put(submit))
        return False

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
        vocab_size = self._engine.vocab_size
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
