"""Collectives of a host over slabs: the protocol, without torch and without knowing who moves the bytes.

A sum of a payload that fits a slot goes in one hop: everybody sends it to everybody and folds. A longer one is cut into
segments. Each rank gets the parts of its stretch of a segment, folds them, and sends the result to all: 2 (W - 1) / W
of the vector on the wire instead of W - 1. Every element is folded once, by the same chain, so the bits are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.posting import Poster, drain
from dgpp_core.bus.slab import HEADER, Bytes, Slab

Fold = Callable[[Sequence[Bytes]], Bytes]
"""The sum of every rank's bytes, given in ascending order of rank."""
PATIENCE = 200
"""Turns of a waiting host before it begins to nap."""
NAP = 20e-6


LAST_START = 2**32 - 3
"""The last generation that an exchange may begin after. A fresh slab's rows say that generation 0 is ready and has
gone, so the row that carries it must have carried another one before the count comes round."""


class Watch(Protocol):
    """Who knows what became of the other ranks."""

    def fault(self, source: int) -> EngineError | None:
        """Why nothing more is to be waited for from ``source``; None while all is well."""
        ...


class Exchange:
    """One channel of a rank, driven by its host.

    Args:
        timeout: seconds that a rank waits for the others in one exchange.
        first: the generation before the first one, at most `LAST_START`; the same on every rank.
        clock: seconds, monotonic.

    Raises:
        EngineError: ``first`` is beyond that.
    """

    def __init__(
        self,
        slab: Slab,
        rank: int,
        poster: Poster,
        watch: Watch,
        *,
        channel: int = 0,
        timeout: float,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world, self.slot_bytes = rank, slab.geometry.world, slab.geometry.slot_bytes
        self._slab, self._poster, self._watch = slab, poster, watch
        self._channel, self._timeout, self._clock = channel, timeout, clock
        if not 0 <= first <= LAST_START:
            what, expected = "an exchange cannot begin with this generation", f"0 to {LAST_START}"
            raise EngineError(what, where=f"rank {rank} of {self.world}", found=str(first), expected=expected)
        self._generation = first

    def all_gather(self, part: Bytes) -> list[Bytes]:
        """Every rank's bytes, all of one length, in order of rank.

        Raises:
            EngineError: as `swap`.
        """
        rows = [np.empty_like(part) for _ in range(self.world)]
        for start in range(0, max(len(part), 1), self.slot_bytes):
            piece = slice(start, start + self.slot_bytes)
            for row, arrived in zip(rows, self.swap([part[piece]]), strict=True):
                row[piece] = arrived
        return rows

    def all_reduce(self, part: Bytes, fold: Fold, *, segmented: bool | None = None) -> Bytes:
        """The fold of every rank's bytes, all of one length.

        Args:
            segmented: which way; None takes what moves fewer bytes. The result is the same.

        Raises:
            EngineError: as `swap`.
        """
        if segmented is None:
            segmented = len(part) > self.slot_bytes and self.world > 2
        return self._segmented(part, fold) if segmented else self._one_shot(part, fold)

    def _one_shot(self, part: Bytes, fold: Fold) -> Bytes:
        total = np.empty_like(part)
        for start in range(0, max(len(part), 1), self.slot_bytes):
            piece = slice(start, start + self.slot_bytes)
            total[piece] = fold(self.swap([part[piece]]))
        return total

    def _segmented(self, part: Bytes, fold: Fold) -> Bytes:
        total = np.empty_like(part)
        for start in range(0, len(part), self.world * self.slot_bytes):
            segment = part[start : start + self.world * self.slot_bytes]
            stretch = -(-len(segment) // (self.world * HEADER)) * HEADER
            mine = fold(self.swap([segment[rank * stretch : (rank + 1) * stretch] for rank in range(self.world)]))
            for rank, folded in enumerate(self.swap([mine])):
                begin = start + rank * stretch
                total[begin : begin + len(folded)] = folded
        return total

    def swap(self, messages: Sequence[Bytes], tag: int = 0) -> list[Bytes]:
        """Send a message to every peer and receive theirs.

        It returns when this rank's own messages are on their way too: nobody need turn the loop for them afterwards.

        Args:
            messages: one for all, or one for each rank; none longer than a slot.
            tag: which must be the same on every rank.

        Returns:
            what each rank sent to this one, in order of rank, its own among them. They are views, and stand until the
            next swap.

        Raises:
            EngineError: a rank is gone, has failed, is silent for the timeout, or sent another tag; or this rank's own
                messages could not be sent within it.
        """
        self._generation = (self._generation + 1) & 0xFFFFFFFF
        row = self._slab.geometry.row(self._channel, self._generation)
        stride = self._slab.geometry.message_bytes if len(messages) > 1 else 0
        for destination, message in enumerate(messages):
            if len(messages) == 1 or destination != self.rank:
                self._slab.put(row + stride * destination, message, self.rank, self._generation, tag)
        self._slab.publish(self._channel, self._generation, stride)
        end = self._clock() + self._timeout
        mine = messages[self.rank if stride else 0]
        arrived = [mine if rank == self.rank else self._receive(rank, tag, end) for rank in range(self.world)]
        self._see_off(end)
        return arrived

    def finish(self, timeout: float) -> None:
        """Wait until all that was sent has arrived; raises `EngineError` as `posting.drain`."""
        drain(self._poster, timeout, self._clock)

    def _receive(self, source: int, tag: int, end: float) -> Bytes:
        offset = self._slab.geometry.slot(source, self._channel, self._generation)
        turns = 0
        while True:
            self._poster.advance()
            fault = self._watch.fault(source)  # asked first: what a rank sent before it went counts
            if arrived := self._slab.take(offset, source, self._generation):
                header, payload = arrived
                if header.tag != tag:
                    raise self._error(f"rank {source} issued another collective", f"tag {header.tag}", f"tag {tag}")
                return payload
            if fault is not None:
                raise fault
            if self._clock() > end:
                raise self._late(source, offset)
            turns += 1
            if turns > PATIENCE:
                time.sleep(NAP)

    def _see_off(self, end: float) -> None:
        """Turn the loop until this rank's row has gone: a late rank has its peers' messages before its own are due."""
        turns = 0
        while not self._poster.posted():
            if not self._poster.advance():
                turns += 1
            if (fault := self._watch.fault(self.rank)) is not None:  # the world's: a peer that is done may have left
                raise fault
            if self._clock() > end:
                what = f"this rank's messages could not be sent within {self._timeout:g} s"
                raise self._error(what, "some of them are not due, or find no room", "all on their way")
            if turns > PATIENCE:
                time.sleep(NAP)

    def _late(self, source: int, offset: int) -> EngineError:
        header = self._slab.header(offset)
        what = f"no answer from rank {source} within {self._timeout:g} s"
        if header.generation == self._generation:
            return self._error(what, "a message that does not fit its seal", "a whole one")
        return self._error(what, f"generation {header.generation} in its slot", f"generation {self._generation}")

    def _error(self, what: str, found: str, expected: str) -> EngineError:
        where = f"rank {self.rank} of {self.world}, exchange {self._generation}"
        return EngineError(what, where=where, found=found, expected=expected)
