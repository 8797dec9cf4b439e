"""Ranks as threads over slabs of one process, with ports that deliver as badly as a network may."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgpp_core.api import EngineError
from dgpp_core.bus.exchange import Exchange
from dgpp_core.bus.native import NativePoster, load
from dgpp_core.bus.posting import Poster, PythonPoster
from dgpp_core.bus.shm.link import CopyPort
from dgpp_core.bus.slab import Bytes, Geometry, Slab

Floats = NDArray[np.float32]


class Calm:
    """A watch that knows of nothing."""

    def fault(self, source: int) -> EngineError | None:
        return None


class UnrulyPort(CopyPort):
    """Delivers late, the words of each write in any order, and a write's words among those of other writes."""

    def __init__(self, slab: Slab, peers: list[Slab], seed: int) -> None:
        super().__init__(slab, peers)
        self._random = random.Random(seed)
        self._flying: list[tuple[int, int, Bytes]] = []

    def write(self, peer: int, channel: int, source: int, target: int, size: int) -> None:
        content = self._slab.bytes[source : source + size].copy()
        for start in range(0, size, 4):
            self._flying.append((peer, target + start, content[start : start + 4]))

    def poll(self) -> None:
        self._random.shuffle(self._flying)
        for _ in range(self._random.randint(0, len(self._flying))):
            peer, target, word = self._flying.pop()
            self._peers[peer].bytes[target : target + 4].view(np.uint32)[0] = word.view(np.uint32)[0]

    def idle(self) -> bool:
        return not self._flying


def posters(slabs: list[Slab], kind: str) -> list[Poster]:
    """One a rank: ``python``, ``native``, ``unruly`` or ``paced``."""
    if kind == "native":
        library = load()
        return [NativePoster(slab, rank, slabs, library) for rank, slab in enumerate(slabs)]
    if kind == "unruly":
        return [PythonPoster(slab, rank, UnrulyPort(slab, slabs, rank)) for rank, slab in enumerate(slabs)]
    pace = 1e-5 if kind == "paced" else 0.0
    return [PythonPoster(slab, rank, CopyPort(slab, slabs), pace=pace, burst=0) for rank, slab in enumerate(slabs)]


def slabs_of(geometry: Geometry) -> list[Slab]:
    return [Slab(geometry, mmap.mmap(-1, geometry.size)) for _ in range(geometry.world)]


def exchanges(geometry: Geometry, kind: str = "python", **options: Any) -> list[Exchange]:
    slabs = slabs_of(geometry)
    return [
        Exchange(slab, rank, poster, Calm(), **{"timeout": 10.0, **options})
        for rank, (slab, poster) in enumerate(zip(slabs, posters(slabs, kind), strict=True))
    ]


def on_all(exchanges: Sequence[Exchange], work: Callable[[Exchange], Any]) -> list[Any]:
    """What ``work`` returns on each rank, on all at once."""

    def whole(exchange: Exchange) -> Any:
        result = work(exchange)
        exchange.finish(10.0)
        return result

    with ThreadPoolExecutor(len(exchanges)) as threads:
        return list(threads.map(whole, exchanges))


EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x3F81, 0x7E00, 0xFE00, 0x4B80, 0xCB80, 0x3D80]
"""bfloat16: zeros, denormals, the smallest normal, ones, large ones that cancel, and what they swallow."""


def part(rank: int, count: int, seed: int = 0) -> Bytes:
    """bfloat16 numbers of a rank: half of them edges, the others of many magnitudes."""
    source = np.random.default_rng([rank, seed])
    spread = rounded((source.standard_normal(count) * 10.0 ** source.integers(-9, 9, count)).astype(np.float32))
    return np.where(source.random(count) < 0.5, source.choice(EDGES, count), spread).astype(np.uint16).view(np.uint8)


def rounded(values: Floats) -> NDArray[np.uint16]:
    """To bfloat16, ties to the even one, as bits."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def chain(parts: Sequence[Bytes]) -> Bytes:
    """The sum of bfloat16 numbers in order of rank, in float32, rounded once; infinities and NaNs left out."""
    wide = [(part.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for part in parts]
    total = wide[0].copy()
    for part in wide[1:]:
        total += part
    return rounded(total).view(np.uint8)
