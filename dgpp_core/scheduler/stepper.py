"""Scheduler and engine, step by step: what the engine process, the tests and the benchmarks all drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dgpp_core.engine.operations import Decode, Operation, Prefill, StepResult
from dgpp_core.images.picture import Picture
from dgpp_core.scheduler.messages import Ending, Submit
from dgpp_core.scheduler.scheduler import Scheduler, TickInput, TickOutput


class Pending(Protocol):
    """A tick that was launched."""

    def wait(self) -> StepResult:
        """What it committed."""
        ...


class Executor(Protocol):
    """What runs a tick's operations: an engine."""

    def launch(self, tick: int, operations: Sequence[Operation]) -> Pending:
        """Begin to run them, in order and after those of earlier ticks."""
        ...


class Stepper:
    """Feeds each step's result back to the scheduler, at once or one tick late.

    Args:
        lag: 0 gives a result to the next tick; 1 plans and launches one tick more before it is waited for, so that the
            device has work while the host reads.
        deliver: called with each tick's output before its operations are launched.
        look: says why a request with such images cannot be served, if it cannot: an encoder that fails then fails one
            request, before anything of it is in the engine's state.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        lag: int,
        deliver: Callable[[TickOutput], None],
        look: Callable[[Sequence[Picture]], str] = lambda pictures: "",
    ) -> None:
        self._look = look
        self.scheduler, self._executor, self._lag, self._deliver = scheduler, executor, lag, deliver
        self._pending: list[Pending] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight."""
        return self.scheduler.idle and not self._pending

    def step(
        self, submissions: Sequence[Submit] = (), cancels: Sequence[int] = (), stops: Sequence[int] = ()
    ) -> tuple[Operation, ...]:
        """One tick; the operations that were launched."""
        late = self._pending[-1:] if self._lag else []
        ready = self._pending[: len(self._pending) - len(late)]
        self._pending = late
        submissions = self._seen(submissions)
        operations = self._tick(TickInput(tuple(submissions), tuple(cancels), tuple(stops), _read(ready)))
        if late and self._pending == late:
            # Nothing was launched that the last result could overlap with: hand it over now.
            self._pending = []
            operations += self._tick(TickInput(results=_read(late)))
        return operations

    def _seen(self, submissions: Sequence[Submit]) -> Sequence[Submit]:
        """Those whose images can be encoded; the others end."""
        faults = {submit.id: self._look(submit.pictures) for submit in submissions if submit.pictures}
        endings = tuple(Ending(number, "error", error=fault) for number, fault in faults.items() if fault)
        if endings:
            self._deliver(TickOutput(0, (), (), endings))
        return [submit for submit in submissions if not faults.get(submit.id)]

    def _tick(self, inputs: TickInput) -> tuple[Operation, ...]:
        out = self.scheduler.tick(inputs)
        self._deliver(out)
        if out.operations:
            pending = self._executor.launch(out.tick, out.operations)
            if any(isinstance(op, Prefill | Decode) for op in out.operations):
                self._pending = [*self._pending, pending]
        return out.operations


def _read(pending: Sequence[Pending]) -> tuple[StepResult, ...]:
    return tuple(each.wait() for each in pending)
