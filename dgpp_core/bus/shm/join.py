"""Ranks as processes of one host, over shared memory."""

from __future__ import annotations

import functools

from dgpp_core.bus.forming import Terms, form
from dgpp_core.bus.shm.link import SharedMemoryLink
from dgpp_core.bus.slab_bus import SlabBus


def join(terms: Terms) -> SlabBus:
    """Form a world with the other ranks; all call this with the same terms but ``rank`` and ``device``.

    Raises:
        EngineError: names the rank that is missing, doubled or of another kind, or what the system said.
    """
    return form(terms, "shared memory", functools.partial(SharedMemoryLink, terms.rank))
