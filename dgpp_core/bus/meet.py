"""A rank joins its world over the transport that rank 0 has chosen."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Protocol, Self

from dgpp_core.api import Bus
from dgpp_core.bus import distributed
from dgpp_core.bus.forming import Terms
from dgpp_core.bus.shm import join as shm
from dgpp_core.bus.transports import Transport
from dgpp_core.bus.verbs import join as verbs
from dgpp_core.config.fabric import Fabric

log = logging.getLogger("dgpp.bus")
_NAMES = {
    "shm": "shared memory",
    "verbs": "RDMA",
    "nccl": "NCCL",
    "gloo": "TCP (gloo)",
}


class RankBus(Bus, Protocol):
    """A bus between processes."""

    def abort(self, reason: str) -> None:
        """The world was given up, for this ``reason``; from any thread, does not wait. See the transports."""
        ...

    def close(self, reason: str = "") -> None:
        """Leave the world; with a ``reason``, because of a fault."""
        ...

    def __enter__(self) -> Self:
        """Left with the block."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """`close`, with the error as the reason where there is one."""
        ...


def meet(transport: Transport, terms: Terms, fabric: Fabric, *, pace: float | None = None) -> RankBus:
    """Form a world with the other ranks, and say in the log how.

    Args:
        terms: with the device that the rank computes on, be it a CPU.
        fabric: this node's.
        pace: 10^9 bits a second that a peer is sent at most over RDMA; 0 for no limit, None derives it.

    Raises:
        EngineError: as the transport's ``join``.
    """
    bus = _join(transport, terms, fabric, pace)
    device = terms.device.type if terms.device else "cpu"
    log.info("rank %d of %d: collectives over %s, device %s", terms.rank, terms.world, _NAMES[transport], device)
    return bus


def _join(transport: Transport, terms: Terms, fabric: Fabric, pace: float | None) -> RankBus:
    match transport:
        case "shm":
            return shm.join(terms)
        case "verbs":
            return verbs.join(terms, devices=fabric.devices, gid_indices=fabric.gid_indices, pace=pace)
        case "nccl" | "gloo":
            return distributed.join(
                terms.rank, terms.world, terms.address, device=terms.device, timeout=terms.timeout,
                settings=terms.settings, listener=terms.listener,
            )  # fmt: skip
