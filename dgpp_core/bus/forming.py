"""How a world with slabs is formed, the same for every transport."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

import msgspec
import torch

from dgpp_core.api import EngineError
from dgpp_core.bus.link import Link, connect
from dgpp_core.bus.posting import PostingThread
from dgpp_core.bus.roster import Roster, enter, hello
from dgpp_core.bus.slab import Geometry
from dgpp_core.bus.slab_bus import DeviceCollectives, SlabBus

log = logging.getLogger("dgpp.bus")
HOST_SLOT = 256 * 1024
DEVICE_SLOT = 16 * 1024
"""Bytes of what one block of a kernel sends: one load of each of its threads has all of it on the way at once."""
DEVICE_CHANNELS = 16
"""Blocks of a kernel: 256 KB a launch. Longer vectors take several launches."""
TIMEOUT = 120.0
"""Seconds for each step of forming a world and for each collective of host tensors; peers may still be loading."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the slabs; the same on every rank, which is checked.

    Attributes:
        host_slot: bytes of a message between hosts.
        device_slot: bytes that one block of a kernel sends, a power of two.
        device_channels: blocks of a kernel.
    """

    host_slot: int = HOST_SLOT
    device_slot: int = DEVICE_SLOT
    device_channels: int = DEVICE_CHANNELS


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank joins with.

    Attributes:
        rank: this one.
        world: how many there are.
        address: ``host:port`` where rank 0 listens.
        device: whose tensors will be sent; those of the CPU always are.
        timeout: seconds for each step of forming the world, and for each collective later.
        settings: what ranks must have in common beside the version of dgpp; a digest, say.
        layout: of the slabs.
        native: the posting loop; None takes the native one if it is to be had, and says so in the log if not.
        listener: at rank 0, a socket that listens at ``address`` already, so that its port can be any free one; it is
            closed when the world stands.
    """

    rank: int
    world: int
    address: str
    device: torch.device | None = None
    timeout: float = TIMEOUT
    settings: str = ""
    layout: Layout = Layout()
    native: bool | None = None
    listener: socket.socket | None = None

    @property
    def gpu(self) -> torch.device | None:
        """The device, where it is a GPU."""
        return self.device if self.device is not None and self.device.type == "cuda" else None


def form(terms: Terms, transport: str, make: Callable[[Geometry], Link]) -> SlabBus:
    """Meet the other ranks and connect with them.

    Args:
        transport: its name.
        make: this rank's end of a pool of connections.

    Raises:
        EngineError: names the rank that is missing, doubled or of another kind, or what the system said.
    """
    kind = f"{transport} {terms.gpu.type if terms.gpu else 'cpu'} {msgspec.json.encode(terms.layout).decode()}"
    with contextlib.ExitStack() as undo:
        host = make(Geometry(world=terms.world, channels=1, slot_bytes=terms.layout.host_slot))
        undo.callback(host.close)
        me = hello(terms.rank, terms.world, kind, terms.settings)
        roster = enter(me, terms.address, terms.timeout, terms.listener)
        undo.callback(roster.close)
        connect(roster, host)
        device = _device(terms, terms.gpu, roster, make, undo) if terms.gpu else None
        undo.pop_all()
    return SlabBus(roster, host, timeout=terms.timeout, device=device)


def _device(
    terms: Terms, gpu: torch.device, roster: Roster, make: Callable[[Geometry], Link], undo: contextlib.ExitStack
) -> DeviceCollectives:
    from dgpp_core.bus.device.collectives import KernelCollectives  # Triton is there on Linux only

    layout = terms.layout
    geometry = Geometry(world=terms.world, channels=layout.device_channels, slot_bytes=layout.device_slot)
    link = make(geometry)
    undo.callback(link.close)
    connect(roster, link)
    device = KernelCollectives(terms.rank, link, gpu, timeout=terms.timeout, failed=roster.publish)
    device.start(posting(link, terms.native, device.failed))
    return device


def posting(link: Link, native: bool | None, failed: Callable[[EngineError], None]) -> PostingThread:
    """A thread with the link's posting loop.

    Args:
        native: as in `Terms`.
        failed: told of the error that ended the loop.

    Raises:
        EngineError: a native one was asked for and cannot be had.
    """
    if native is not False:
        try:
            return PostingThread(link.poster(native=True), failed)
        except EngineError as error:
            if native:
                raise
            log.warning("collectives will be slow: the posting loop runs in the interpreter; %s", error.line())
    return PostingThread(link.poster(native=False), failed)
