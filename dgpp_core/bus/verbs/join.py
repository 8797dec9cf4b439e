"""Ranks as processes of hosts with RDMA network cards."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dgpp_core.api import EngineError
from dgpp_core.bus.forming import Terms, form
from dgpp_core.bus.native import load
from dgpp_core.bus.slab_bus import SlabBus
from dgpp_core.bus.verbs.link import VerbsLink
from dgpp_core.bus.verbs.ports import rails

log = logging.getLogger("dgpp.bus")


def join(
    terms: Terms, *, devices: Sequence[str] = (), gid_indices: Sequence[int] = (), pace: float | None = None
) -> SlabBus:
    """Form a world with the other ranks; all call this with the same terms but ``rank`` and ``device``.

    Args:
        devices: names of the RDMA devices, in an order that is the same on every rank; none takes all active ones.
        gid_indices: one for each of ``devices``; none chooses them.
        pace: as of `VerbsLink`.

    Raises:
        EngineError: a device or address is missing, or as `bus.shm.join`.
    """
    chosen, library = rails(devices, gid_indices), None
    for rail in chosen:
        where = f"GID {rail.gid.index}, {rail.gid.address.ipv4_mapped or rail.gid.address}"
        log.info("rank %d: RDMA device %s, %s, %g Gbit/s", terms.rank, rail.device, where, rail.gbps)
    if terms.native is not False:
        try:
            library = load("verbs")
        except EngineError as error:
            if terms.native:
                raise
            log.warning("collectives will be slow: RDMA goes through pyverbs; %s", error.line())
    return form(terms, "verbs", lambda geometry: VerbsLink(terms.rank, chosen, geometry, library, pace))
