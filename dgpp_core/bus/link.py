"""What a transport brings: a slab, and a way to write into the peers' slabs. Needs no torch."""

from __future__ import annotations

import contextlib
from typing import Protocol

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.posting import Poster
from dgpp_core.bus.roster import Roster
from dgpp_core.bus.slab import Slab


class Link(Protocol):
    """One rank's end of a pool of connections, all of one geometry."""

    slab: Slab
    linger: float
    """Seconds that a rank waits for the others to leave too: until then they may need its end of a connection."""

    def offer(self) -> bytes:
        """What peers need to know to write into this rank's slab."""
        ...

    def accept(self, offers: list[bytes]) -> None:
        """Connect with all peers, given every rank's offer; raises `EngineError` where that cannot be."""
        ...

    def settle(self) -> None:
        """Everybody has accepted."""
        ...

    def poster(self, *, native: bool) -> Poster:
        """A posting loop.

        Args:
            native: one that does not run in the interpreter.

        Raises:
            EngineError: there is no native one here; says why.
        """
        ...

    def close(self) -> None:
        """Give everything back; nothing of it may be in use."""
        ...


def connect(roster: Roster, link: Link) -> None:
    """Bring a link up on every rank at once.

    Raises:
        EngineError: here or on another rank it could not be; every rank is told the reason.
    """
    offers = roster.gather(link.offer())
    try:
        link.accept(offers)
    except EngineError as error:
        with contextlib.suppress(EngineError):
            roster.refuse(error)
        raise
    roster.gather(b"")
    link.settle()
