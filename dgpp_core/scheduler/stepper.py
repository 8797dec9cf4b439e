"""Scheduler and engine, step by step: what the engine process, the tests and the benchmarks all drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dgpp_core.engine.operations import Decode, Operation, Prefill, StepResult
from dgpp_core.scheduler.messages import Submit
from dgpp_core.scheduler.scheduler import Scheduler, TickInput, TickOutput


class Executor(Protocol):
    """What runs a tick's operations: an engine."""

    def execute(self, tick: int, operations: Sequence[Operation]) -> StepResult:
        """Run them in order; what they committed."""
        ...


class Stepper:
    """Feeds each step's result back to the scheduler, at once or one tick late.

    Args:
        lag: 0 gives a result to the next tick; 1 plans and launches one tick more before, as a pipelined engine does.
        deliver: called with each tick's output before its operations are executed.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, lag: int, deliver: Callable[[TickOutput], None]
    ) -> None:
        self.scheduler, self._executor, self._lag, self._deliver = scheduler, executor, lag, deliver
        self._results: list[StepResult] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight."""
        return self.scheduler.idle and not self._results

    def step(
        self, submissions: Sequence[Submit] = (), cancels: Sequence[int] = (), stops: Sequence[int] = ()
    ) -> tuple[Operation, ...]:
        """One tick; the operations that were executed."""
        late = self._results[-1:] if self._lag else []
        ready = self._results[: len(self._results) - len(late)]
        self._results = late
        operations = self._tick(TickInput(tuple(submissions), tuple(cancels), tuple(stops), tuple(ready)))
        if late and self._results == late:
            # Nothing was launched that the last result could overlap with: hand it over now.
            self._results = []
            operations += self._tick(TickInput(results=tuple(late)))
        return operations

    def _tick(self, inputs: TickInput) -> tuple[Operation, ...]:
        out = self.scheduler.tick(inputs)
        self._deliver(out)
        if out.operations:
            result = self._executor.execute(out.tick, out.operations)
            if any(isinstance(op, Prefill | Decode) for op in out.operations):
                self._results = [*self._results, result]
        return out.operations
