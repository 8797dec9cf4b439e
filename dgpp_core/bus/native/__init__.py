"""Posting loops in C."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dgpp_core.bus.posting import LINGER, NAP
from dgpp_core.bus.slab import Geometry, Slab
from dgpp_core.native import compiled

FOLDER = Path(__file__).parent
LIBRARIES = {"posting": (), "verbs": ("-libverbs",)}
"""What each source is linked with."""


class Layout(ctypes.Structure):
    """``struct layout`` of layout.h."""

    _fields_ = (
        ("slot_bytes", ctypes.c_uint64),
        ("world", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, geometry: Geometry, rank: int) -> Layout:
        """A rank's."""
        return cls(geometry.slot_bytes, geometry.world, rank, geometry.channels, 0)


class _Loop(ctypes.Structure):
    """``struct loop`` of posting.c."""

    _fields_ = (
        ("layout", Layout),
        ("slab", ctypes.c_void_p),
        ("peers", ctypes.POINTER(ctypes.c_void_p)),
        ("posted", ctypes.POINTER(ctypes.c_uint32)),
        ("linger", ctypes.c_uint64),
        ("nap", ctypes.c_uint64),
        ("stop", ctypes.c_uint32),
    )


def load(name: str = "posting", environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """A compiled source: ``posting`` or ``verbs``; raises as `dgpp_core.native.compiled`."""
    return compiled(FOLDER / f"{name}.c", [FOLDER / "layout.h"], LIBRARIES[name], environ)


class NativePoster:
    """The loop for a rank whose peers' slabs are mapped here. Implements `posting.Poster`.

    Args:
        peers: every rank's slab, in order of rank.
        library: from `load`.
    """

    def __init__(self, slab: Slab, rank: int, peers: Sequence[Slab], library: ctypes.CDLL) -> None:
        self._library, self._kept = library, (slab, tuple(peers))
        self._loop = _Loop(
            layout=Layout.of(slab.geometry, rank),
            slab=slab.address,
            peers=(ctypes.c_void_p * slab.geometry.world)(*(peer.address for peer in peers)),
            posted=(ctypes.c_uint32 * (2 * slab.geometry.channels))(),
            linger=int(LINGER * 1e9),
            nap=int(NAP * 1e9),
        )

    def advance(self) -> bool:
        """Send what is ready; whether there was any."""
        return bool(self._library.dgpp_advance(ctypes.byref(self._loop)))

    def posted(self) -> bool:
        """Whether all that is ready has been copied."""
        return bool(self._library.dgpp_posted(ctypes.byref(self._loop)))

    def idle(self) -> bool:
        """The same: a copy has arrived when it is made."""
        return self.posted()

    def run(self) -> None:
        """Turn until `stop`, outside the interpreter."""
        self._library.dgpp_run(ctypes.byref(self._loop))

    def stop(self) -> None:
        """Let `run` return."""
        self._loop.stop = 1
