"""One RDMA device without pyverbs, and the posting loop outside the interpreter: `dgpp_core/bus/native/verbs.c`.

Wants the headers of rdma-core (``libibverbs-dev``) and a C compiler. `NativeDevice` stands for `device.VerbsDevice`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from ipaddress import IPv6Address

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.native import Layout
from dgpp_core.bus.posting import BURST, LINGER, NAP
from dgpp_core.bus.slab import Slab
from dgpp_core.bus.verbs.device import MOST_MTU, PSN, RETRIES, TIMEOUT, Lane, locked_memory, unwritten
from dgpp_core.bus.verbs.ports import Rail

MOST = 8
_REFUSED = 1 << 49


class _Description(ctypes.Structure):
    _fields_ = (("mtu", ctypes.c_uint32), ("key", ctypes.c_uint32), ("numbers", ctypes.c_uint32 * MOST))


class _Remote(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("peer", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("key", ctypes.c_uint32),
        ("mtu", ctypes.c_uint32),
        ("psn", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("timeout", ctypes.c_uint32),
        ("retries", ctypes.c_uint32),
        ("gid", ctypes.c_uint8 * 16),
    )


class _Loop(ctypes.Structure):
    _fields_ = (
        ("layout", Layout),
        ("slab", ctypes.c_void_p),
        ("lanes", ctypes.POINTER(ctypes.c_void_p)),
        ("posted", ctypes.POINTER(ctypes.c_uint32)),
        ("served", ctypes.POINTER(ctypes.c_uint32)),
        ("free", ctypes.POINTER(ctypes.c_uint64)),
        ("linger", ctypes.c_uint64),
        ("nap", ctypes.c_uint64),
        ("burst", ctypes.c_uint64),
        ("pace", ctypes.c_double),
        ("fault", ctypes.c_uint64),
        ("lane_count", ctypes.c_uint32),
        ("failed_lane", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
    )


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions declared."""
    device, number = ctypes.c_void_p, ctypes.c_uint64
    library.dgpp_open.argtypes = [
        ctypes.POINTER(device), ctypes.POINTER(_Description), ctypes.c_char_p, device, number,
        ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32,
    ]  # fmt: skip
    library.dgpp_close.argtypes, library.dgpp_close.restype = [device], None
    library.dgpp_connect.argtypes = [device, ctypes.POINTER(_Remote)]
    library.dgpp_write.argtypes = [device, ctypes.c_uint32, number, number, ctypes.c_uint32, ctypes.c_int]
    library.dgpp_reap.argtypes, library.dgpp_reap.restype = [device], number
    library.dgpp_flying.argtypes, library.dgpp_flying.restype = [device, ctypes.c_int32], ctypes.c_uint32
    return library


class NativeDevice:
    """A device, opened.

    Args:
        depth: writes that may be on their way to one peer.
        library: from `dgpp_core.bus.native.load`, ``verbs``.

    Raises:
        EngineError: it cannot be opened, or the slab cannot be registered with it.
    """

    def __init__(self, rail: Rail, slab: Slab, world: int, rank: int, depth: int, library: ctypes.CDLL) -> None:
        self.rail, self.depth = rail, depth
        self.library, self.handle = typed(library), ctypes.c_void_p()
        told = _Description()
        size = slab.geometry.size
        failed = self.library.dgpp_open(
            ctypes.byref(self.handle), ctypes.byref(told), rail.device.encode(), slab.address, size, world, rank, depth
        )
        if failed == errno.ENOMEM:
            raise locked_memory(rail.device, size)
        if failed:
            what, found = "an RDMA device cannot be set up", os.strerror(failed)
            raise EngineError(what, where=rail.device, found=found)
        self._mtu = int(told.mtu)
        self.lane = Lane(
            device=rail.device,
            gid=str(rail.gid.address.exploded),
            family=rail.gid.family,
            mtu=self._mtu,
            key=told.key,
            address=slab.address,
            numbers=list(told.numbers[:world]),
        )

    def connect(self, rank: int, peer: int, theirs: Lane) -> None:
        """Make this rank's connection with a peer ready for both directions.

        Raises:
            EngineError: the device refuses.
        """
        remote = _Remote(
            theirs.address, peer, theirs.numbers[rank], theirs.key, min(self._mtu, theirs.mtu, MOST_MTU), PSN,
            self.rail.gid.index, TIMEOUT, RETRIES, (ctypes.c_uint8 * 16)(*IPv6Address(theirs.gid).packed),
        )  # fmt: skip
        if failed := self.library.dgpp_connect(self.handle, ctypes.byref(remote)):
            what, where = "a connection cannot be made", f"{self.rail.device} to rank {peer}, {theirs.gid}"
            raise EngineError(what, where=where, found=os.strerror(failed), hint="check addresses and routes")

    def close(self) -> None:
        """Close everything, connections first."""
        if self.handle:
            self.library.dgpp_close(self.handle)
            self.handle = ctypes.c_void_p()


class NativeVerbsPoster:
    """The loop over native devices. Implements `posting.Poster`.

    Args:
        pace: as of `posting.PythonPoster`, in seconds a byte.
    """

    def __init__(self, slab: Slab, rank: int, devices: Sequence[NativeDevice], pace: float) -> None:
        geometry = slab.geometry
        self._library, self._kept = devices[0].library, (slab, tuple(devices))
        self._devices = devices
        self._loop = _Loop(
            layout=Layout.of(geometry, rank),
            slab=slab.address,
            lanes=(ctypes.c_void_p * len(devices))(*(device.handle.value for device in devices)),
            posted=(ctypes.c_uint32 * (2 * geometry.channels))(),
            served=(ctypes.c_uint32 * (2 * geometry.channels))(),
            free=(ctypes.c_uint64 * geometry.world)(),
            linger=int(LINGER * 1e9),
            nap=int(NAP * 1e9),
            burst=BURST,
            pace=pace * 1e9,
            lane_count=len(devices),
        )

    def advance(self) -> bool:
        """Send what is ready and due; whether there was any. Raises `EngineError` where a write did not arrive."""
        sent = bool(self._library.dgpp_advance(ctypes.byref(self._loop)))
        self._require_sound()
        return sent

    def posted(self) -> bool:
        """Whether all that is ready was given to the devices."""
        return bool(self._library.dgpp_posted(ctypes.byref(self._loop)))

    def idle(self) -> bool:
        """Whether all that was ready has arrived."""
        return bool(self._library.dgpp_idle(ctypes.byref(self._loop)))

    def run(self) -> None:
        """Turn until `stop`, outside the interpreter; raises as `advance`."""
        self._library.dgpp_run(ctypes.byref(self._loop))
        self._require_sound()

    def stop(self) -> None:
        """Let `run` return."""
        self._loop.stop = 1

    def _require_sound(self) -> None:
        if not (fault := self._loop.fault):
            return
        device, peer = self._devices[self._loop.failed_lane].rail.device, fault >> 40 & 0xFF
        if fault & _REFUSED:
            found = os.strerror(fault & 0xFFFF)
            raise EngineError("a write cannot be posted", where=f"{device} to rank {peer}", found=found)
        raise unwritten(device, peer, fault & 0xFF, fault >> 8 & 0xFFFFFFFF)
