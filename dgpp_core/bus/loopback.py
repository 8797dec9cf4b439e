"""Ranks as threads of one process: the reference transport, for tests and for worlds without a network.

Every thread runs the same program with a `LoopbackBus` of its own. A collective waits until all ranks have issued it,
checks that they mean the same one, and folds or concatenates copies of the parts. The first fault gives up the world:
whoever waits, and whoever comes later, raises at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from dgpp_core.api import DgppError, EngineError
from dgpp_core.bus.call import Call, another, disagreement
from dgpp_core.bus.fold import fold, require_payload

T = TypeVar("T")
DEADLINE = 60.0
"""Seconds that a rank waits for the others; a test's prefill of thousands of tokens fits."""


class _Meeting:
    """One collective: who came with what."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.parts: dict[int, Tensor] = {}
        self.complete = False


class LoopbackWorld:
    """``world`` ranks and where they meet.

    Args:
        world: ranks, at least 1.
        deadline: seconds that a rank waits in one collective before it gives up the world.
    """

    def __init__(self, world: int, *, deadline: float = DEADLINE) -> None:
        if world < 1:
            raise EngineError("a world needs a rank", found=str(world), expected=">= 1")
        self.world, self._deadline = world, deadline
        self.buses = tuple(LoopbackBus(self, rank) for rank in range(world))
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._gone: set[int] = set()
        self._fault: EngineError | None = None
        self._cause: BaseException | None = None
        self._threads = ThreadPoolExecutor(world, thread_name_prefix="rank")

    def run(self, work: Callable[[LoopbackBus], T]) -> list[T]:
        """What ``work`` returns on each rank, run on all of them at once, in order of rank.

        Raises:
            BaseException: what the first rank to fail raised, with a note that names the rank. The others have
                stopped by then, and every later call raises.
        """
        with self._changed:
            self._require_intact()
            self._gone.clear()
        futures = [self._threads.submit(self._work, work, bus) for bus in self.buses]
        errors = [future.exception() for future in futures]
        if self._cause is not None:
            raise self._cause
        assert not any(errors), "a rank that raises gives up the world"
        return [future.result() for future in futures]

    def meet(self, rank: int, call: Call, part: Tensor) -> list[Tensor]:
        """Every rank's part of one collective, in order of rank.

        The parts are copies made when they were handed in, so a rank may overwrite its own as soon as it is back.
        They are contiguous, as those are that came over a network: what follows may add in the order of a layout.

        Raises:
            EngineError: the ranks issued different collectives, one failed, left or did not come in time.
        """
        with self._changed:
            self._require_intact()
            meeting = self._meetings.setdefault(call.number, _Meeting())
            meeting.calls[rank], meeting.parts[rank] = call, part.clone(memory_format=torch.contiguous_format)
            if len(meeting.calls) == self.world:
                del self._meetings[call.number]
                self._close(meeting)
            elif self._gone:
                self._give_up(self._left(meeting))
            elif not self._changed.wait_for(lambda: meeting.complete or self._fault is not None, self._deadline):
                self._give_up(self._late(meeting))
            if not meeting.complete:
                self._require_intact()
        return [meeting.parts[rank] for rank in range(self.world)]

    def check(self) -> None:
        """Raise `EngineError` if a rank has failed, or the ranks did not agree."""
        with self._changed:
            self._require_intact()

    def _work(self, work: Callable[[LoopbackBus], T], bus: LoopbackBus) -> T:
        try:
            result = work(bus)
        except BaseException as error:
            error.add_note(f"on rank {bus.rank} of {self.world}")
            reason = error.line() if isinstance(error, DgppError) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._give_up(EngineError(f"rank {bus.rank} failed", where=f"rank {bus.rank}", found=reason), error)
            raise
        with self._changed:
            self._gone.add(bus.rank)
            for meeting in self._meetings.values():
                self._give_up(self._left(meeting))
        return result

    def _close(self, meeting: _Meeting) -> None:
        if fault := disagreement(meeting.calls):
            self._give_up(fault)
        meeting.complete = self._fault is None
        self._changed.notify_all()

    def _left(self, meeting: _Meeting) -> EngineError:
        return EngineError(
            "a rank has left while others wait for it",
            where=f"rank {min(self._gone)}",
            found="; ".join(f"rank {rank} waits in {call}" for rank, call in sorted(meeting.calls.items())),
            expected="the same collectives on every rank",
        )

    def _late(self, meeting: _Meeting) -> EngineError:
        missing = sorted(set(range(self.world)) - set(meeting.calls))
        return EngineError(
            f"a collective was not joined within {self._deadline:g} s",
            where=", ".join(f"rank {rank}" for rank in missing),
            found="; ".join(f"rank {rank} waits in {call}" for rank, call in sorted(meeting.calls.items())),
            expected=f"all of {self.world} ranks",
        )

    def _give_up(self, fault: EngineError, cause: BaseException | None = None) -> None:
        """Keep the first fault and wake everybody; the lock is held."""
        if self._fault is None:
            self._fault, self._cause = fault, cause or fault
        self._changed.notify_all()

    def _require_intact(self) -> None:
        """Raise the fault, as an exception of this thread's own: a traceback belongs to one thread."""
        if self._fault is not None:
            raise another(self._fault)


class LoopbackBus:
    """Implements `dgpp_core.api.Bus` for one rank of a `LoopbackWorld`; made by it.

    Not capturable: a CUDA graph has no room for another thread's part.
    """

    capturable = False

    def __init__(self, meeting_place: LoopbackWorld, rank: int) -> None:
        self.rank, self.world = rank, meeting_place.world
        self._place, self._issued = meeting_place, 0

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The `fold` of every rank's ``partial``.

        Raises:
            EngineError: as `LoopbackWorld.meet`, or the dtype cannot be summed.
        """
        require_payload(partial)
        return fold(self._meet("all_reduce", partial))

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's ``part``, all of one shape, concatenated along ``dim`` in order of rank.

        Raises:
            EngineError: as `LoopbackWorld.meet`, or there is no axis ``dim``.
        """
        return torch.cat(self._meet("all_gather", part, dim), dim)

    def barrier(self) -> None:
        """Wait for every rank; raises as `LoopbackWorld.meet`."""
        self._meet("barrier", torch.empty(0, dtype=torch.uint8))

    def check(self) -> None:
        """Raise `EngineError` if the world was given up."""
        self._place.check()

    def _meet(self, operation: str, part: Tensor, dim: int = 0) -> list[Tensor]:
        call = Call.of(self._issued, operation, part, dim)
        self._issued += 1
        return self._place.meet(self.rank, call, part)
