"""Slabs in POSIX shared memory, for processes of one host. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import socket
from pathlib import Path

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.native import NativePoster, load
from dgpp_core.bus.posting import Poster, PythonPoster
from dgpp_core.bus.slab import Geometry, Slab

FOLDER = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory."""


class Offer(msgspec.Struct, frozen=True):
    """Where a rank's slab can be mapped."""

    host: str
    path: str


class CopyPort:
    """Implements `posting.Port`: a copy into a slab that is mapped here."""

    def __init__(self, slab: Slab, peers: list[Slab]) -> None:
        self._slab, self._peers = slab, peers

    def write(self, peer: int, channel: int, source: int, target: int, size: int) -> None:
        """Done when it returns."""
        self._peers[peer].bytes[target : target + size] = self._slab.bytes[source : source + size]

    def poll(self) -> None:
        """There is nothing to wait for."""

    def idle(self) -> bool:
        """Always."""
        return True


class SharedMemoryLink:
    """Implements `link.Link`. A slab's name exists only until every rank has mapped it: a crash leaves nothing behind.

    Raises:
        EngineError: there is no room for the slab.
    """

    linger = 0.0

    def __init__(self, rank: int, geometry: Geometry, folder: Path = FOLDER) -> None:
        self._rank = rank
        self._path = folder / f"dgpp-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(
                    file, 0, geometry.size
                )  # or the first access to a page without room ends the process
                self.slab = Slab(geometry, mmap.mmap(file, geometry.size))
            finally:
                os.close(file)
        except OSError as error:
            self.settle()
            hint = f"make {folder} larger (docker: --shm-size)" if error.errno == errno.ENOSPC else ""
            what, found = "shared memory cannot be had", f"{os.strerror(error.errno or 0)} for {geometry.size} bytes"
            raise EngineError(what, where=str(folder), found=found, hint=hint) from error
        self._peers: list[Slab] = []

    def offer(self) -> bytes:
        """The slab's name."""
        return msgspec.msgpack.encode(Offer(socket.gethostname(), str(self._path)))

    def accept(self, offers: list[bytes]) -> None:
        """Map the peers' slabs.

        Raises:
            EngineError: one is not to be found here: its rank is on another host.
        """
        for rank, raw in enumerate(offers):
            offer = msgspec.msgpack.decode(raw, type=Offer)
            self._peers.append(self.slab if rank == self._rank else self._map(rank, offer))

    def settle(self) -> None:
        """Take the name away; the memory stays for those who have mapped it."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def poster(self, *, native: bool) -> Poster:
        """A loop that copies."""
        if native:
            return NativePoster(self.slab, self._rank, self._peers, load())
        return PythonPoster(self.slab, self._rank, CopyPort(self.slab, self._peers))

    def close(self) -> None:
        """The mappings go with the last view of them."""
        self.settle()
        self._peers.clear()

    def _map(self, rank: int, offer: Offer) -> Slab:
        size = self.slab.geometry.size
        try:
            file = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                return Slab(self.slab.geometry, mmap.mmap(file, size))
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise EngineError(
                "a rank's shared memory is not to be found here",
                where=f"rank {rank}, on {offer.host}",
                found=str(error),
                expected=f"all ranks on one host, {socket.gethostname()}, with one {FOLDER}",
                hint="use another transport between hosts; containers must share their IPC namespace",
            ) from error
