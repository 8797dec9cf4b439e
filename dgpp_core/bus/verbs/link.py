"""Slabs that network cards write into: reliable connections between all ranks, on one or two devices each."""

from __future__ import annotations

import collections
import ctypes
import logging
import mmap
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.posting import Poster, PythonPoster
from dgpp_core.bus.slab import Geometry, Slab
from dgpp_core.bus.verbs.device import MTUS, Lane, VerbsDevice
from dgpp_core.bus.verbs.native import NativeDevice, NativeVerbsPoster
from dgpp_core.bus.verbs.ports import Rail

log = logging.getLogger("dgpp.bus")
STUCK = 10.0
"""Seconds for room in a queue of writes; the device gives up on a peer sooner."""
UNDER_THE_KNEE = 0.85
"""Share of a port's rate that its senders may use together; above it packets are lost."""


class Offer(msgspec.Struct, frozen=True):
    """What a rank's peers need to know."""

    host: str
    lanes: list[Lane]


class VerbsPort:
    """Implements `posting.Port`: RDMA writes. A channel keeps to one lane, so its writes arrive in order.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, devices: Sequence[VerbsDevice], clock: Callable[[], float] = time.monotonic) -> None:
        self._devices, self._clock = devices, clock
        self._flying: list[collections.Counter[int]] = [collections.Counter() for _ in devices]

    def write(self, peer: int, channel: int, source: int, target: int, size: int) -> None:
        """Begin one write; waits while the queue is full."""
        lane = channel % len(self._devices)
        device, flying = self._devices[lane], self._flying[lane]
        end = self._clock() + STUCK
        while flying[peer] >= device.depth:
            self.poll()
            if self._clock() > end:
                where = f"{device.rail.device} to rank {peer}"
                raise EngineError(f"writes do not arrive for {STUCK:g} s", where=where, found=f"{device.depth} of them")
        device.write(peer, source, target, size)
        flying[peer] += 1

    def poll(self) -> None:
        """Count what has arrived; raises `EngineError` where something did not."""
        for device, flying in zip(self._devices, self._flying, strict=True):
            if flying.total():
                flying.subtract(device.finished())

    def idle(self) -> bool:
        """Whether every write has arrived."""
        self.poll()
        return not any(flying.total() for flying in self._flying)


class VerbsLink:
    """Implements `link.Link` over RDMA devices.

    Args:
        rails: the devices, in the same order on every rank.
        library: natively through this one, ``verbs`` of `dgpp_core.bus.native.load`; None through pyverbs.
        pace: 10^9 bits a second that each peer is sent at most, over all lanes; 0 for no limit, None for the share of
            a peer's port that W - 1 senders may use.

    Raises:
        EngineError: a device cannot be opened, or the slab cannot be registered.
    """

    linger = 2.0

    def __init__(
        self,
        rank: int,
        rails: Sequence[Rail],
        geometry: Geometry,
        library: ctypes.CDLL | None,
        pace: float | None = None,
    ) -> None:
        self._rank, self._world = rank, geometry.world
        self.slab = Slab(geometry, mmap.mmap(-1, geometry.size))
        peers = [peer for peer in range(geometry.world) if peer != rank]
        depth = 4 * geometry.channels + 4  # two rows a channel, two writes a row
        self._native: list[NativeDevice] = []
        self._interpreted: list[VerbsDevice] = []
        try:
            for rail in rails:
                if library is not None:
                    self._native.append(NativeDevice(rail, self.slab, geometry.world, rank, depth, library))
                else:
                    self._interpreted.append(VerbsDevice(rail, self.slab, geometry.world, peers, depth))
        except EngineError:
            self.close()
            raise
        rate = sum(rail.gbps for rail in rails) if pace is None else pace
        shared = rate / max(1, geometry.world - 1) * UNDER_THE_KNEE if pace is None else rate
        self._pace = 8 / (shared * 1e9) if shared and geometry.world > 2 else 0.0

    def offer(self) -> bytes:
        """Keys, addresses and numbers of the connections' ends."""
        return msgspec.msgpack.encode(Offer(socket.gethostname(), [device.lane for device in self._devices]))

    def accept(self, offers: list[bytes]) -> None:
        """Make every connection ready.

        Raises:
            EngineError: a rank has another number of lanes or another kind of address, or a device refuses.
        """
        all_ranks = [msgspec.msgpack.decode(raw, type=Offer) for raw in offers]
        for peer, offer in enumerate(all_ranks):
            if peer != self._rank:
                self._require_alike(peer, offer, all_ranks[self._rank])
                for device, theirs in zip(self._devices, offer.lanes, strict=True):
                    device.connect(self._rank, peer, theirs)

    def settle(self) -> None:
        """Nothing more is to be done."""

    def poster(self, *, native: bool) -> Poster:
        """A loop that posts writes: the native one wherever the devices are.

        Raises:
            EngineError: a native one was asked for, and they are not.
        """
        if self._native:
            return NativeVerbsPoster(self.slab, self._rank, self._native, self._pace)
        if native:
            raise EngineError("the devices are opened through pyverbs", where="verbs transport")
        return PythonPoster(self.slab, self._rank, VerbsPort(self._interpreted), pace=self._pace)

    @property
    def _devices(self) -> Sequence[NativeDevice | VerbsDevice]:
        return self._native or self._interpreted

    def close(self) -> None:
        """Close the devices."""
        for device in self._devices:
            device.close()
        self._native.clear()
        self._interpreted.clear()

    def _require_alike(self, peer: int, offer: Offer, mine: Offer) -> None:
        where = f"rank {peer}, on {offer.host}"
        if len(offer.lanes) != len(mine.lanes):
            found, expected = (", ".join(lane.device for lane in o.lanes) for o in (offer, mine))
            hint = "name the devices, in the same order on every rank: DGPP_ROCE_DEVICES"
            raise EngineError(
                "ranks with another number of RDMA devices cannot form a world",
                where=where, found=found, expected=f"as many as rank {self._rank} has: {expected}", hint=hint,
            )  # fmt: skip
        for theirs, own in zip(offer.lanes, mine.lanes, strict=True):
            if theirs.family != own.family:
                raise EngineError(
                    "ranks with addresses of another family cannot form a world",
                    where=f"{where}, {theirs.device}",
                    found=f"{theirs.family}, {theirs.gid}",
                    expected=f"{own.family}, as rank {self._rank} has on {own.device}",
                    hint="give every card an IPv4 address, or choose with DGPP_ROCE_GID_INDICES",
                )
            if theirs.mtu != own.mtu:
                log.warning(
                    "rank %d has an MTU of %d on %s, this rank %d on %s: the smaller one is used",
                    peer, MTUS[theirs.mtu], theirs.device, MTUS[own.mtu], own.device,
                )  # fmt: skip
