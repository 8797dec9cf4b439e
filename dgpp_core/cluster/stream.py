"""The operation stream: what a rank planned and committed, as a running digest and the last steps in full.

Ranks that were given the same must have the same stream. Equal digests say so; where they differ, the steps that are
kept say where it began.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from dgpp_core.cluster.records import Step
from dgpp_core.engine.operations import Operation, StepResult
from dgpp_core.scheduler.stepper import Executor, Pending

KEPT = 256
"""Steps that are kept. A follower is at most a few steps behind rank 0, since they share collectives."""
SHOWN = 200


class OperationStream:
    """One rank's stream. Written by the rank's loop; everything but `close` may be called from any thread.

    Attributes:
        head: the number of the last step and the digest of all steps, replaced together.
    """

    def __init__(self) -> None:
        self.head = (0, 0)
        self._ring: list[Step | None] = [None] * KEPT
        self._operations: list[Operation] = []
        self._results: list[StepResult] = []
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def number(self) -> int:
        """Steps so far."""
        return self.head[0]

    @property
    def digest(self) -> int:
        """64 bits over all of them."""
        return self.head[1]

    def witness(self, executor: Executor) -> Executor:
        """``executor``, with what it runs and commits noted here."""
        return _Witness(executor, self._operations, self._results)

    def close(self, plan: int) -> None:
        """A step is over.

        Args:
            plan: `Scheduler.digest` after it.
        """
        operations, results = tuple(self._operations), tuple(self._results)
        self._operations.clear()
        self._results.clear()
        said = self.digest.to_bytes(8, "little") + plan.to_bytes(8, "little") + self._encoder.encode(results)
        digest = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")
        number = self.number + 1
        step = Step(number=number, digest=digest, operations=operations, results=results)
        self._ring[number % KEPT] = step
        self.head = (number, digest)

    def at(self, number: int) -> Step | None:
        """Step ``number``, if it is kept still."""
        step = self._ring[number % KEPT]
        return step if step is not None and step.number == number else None

    def recent(self, count: int = KEPT) -> tuple[Step, ...]:
        """The last steps, oldest first."""
        last = self.number
        found = (self.at(number) for number in range(last - min(count, KEPT) + 1, last + 1))
        return tuple(step for step in found if step is not None)


class _Witness:
    """Implements `Executor` around another one."""

    def __init__(self, executor: Executor, operations: list[Operation], results: list[StepResult]) -> None:
        self._executor, self._operations, self._results = executor, operations, results

    def launch(self, tick: int, operations: Sequence[Operation]) -> Pending:
        self._operations += operations
        return _Read(self._executor.launch(tick, operations), self._results)


class _Read:
    """A launched tick whose result is noted when it is read."""

    def __init__(self, pending: Pending, results: list[StepResult]) -> None:
        self._pending, self._results = pending, results

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._results.append(result)
        return result


def first_difference(ours: OperationStream, theirs: Sequence[Step]) -> tuple[int, str, str]:
    """Where another rank's steps part from ours.

    Returns:
        the first step that differs, and what they and we have there: the first operation or result that is not the
        same. Step 0 where all steps that both have are equal or nothing older is known.
    """
    for step in theirs:
        mine = ours.at(step.number)
        if mine is None or mine.digest == step.digest:
            continue
        for kind in ("operations", "results"):
            pairs = zip_longest(getattr(step, kind), getattr(mine, kind))
            for found, expected in pairs:
                if found != expected:
                    return step.number, _shown(found), _shown(expected)
        return step.number, f"digest {step.digest:016x} of equal operations", f"digest {mine.digest:016x}"
    return 0, "a digest that no kept step explains", "rank 0's"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
