"""The memory that a rank shares with its peers: what it sends, and where each peer's messages arrive.

A slab is one block of bytes, registered once with whoever moves them (a mapping of the other process, a network card)
and read by this rank's processor or GPU. All ranks of a world lay theirs out alike:

    control    abort word, fault word, and a *ready* word a row
    rows       messages on their way out: [channel][2][destination]
    slots      messages that came in:     [source][channel][2]

A *channel* is an independent sequence of collectives. Its n-th one has *generation* n and uses row and slot n mod 2.
Two are enough, and no credits are sent: a rank sends generation n + 1 only when it has read every peer's generation n,
so whoever holds all messages of n + 1 knows that every peer is done with n, and may overwrite what held it. A rank that
has its peers' messages of n goes on although its own has not left yet: what is ready is told for each of the two rows.

A *message* is a header of 64 bytes and a payload. The header carries the generation and a seal over both. Whoever reads
a message takes it only when the seal fits, so it does not matter in which order the bytes become visible.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dgpp_core.api.errors import EngineError

HEADER = 64
"""Bytes of a header: a cache line of its own."""
CONTROL = 4096
ABORT, FAULT, READY = 0, 64, 128
"""Offsets in the control block."""
MOST_CHANNELS = (CONTROL - READY) // 16
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFFFFFF

Bytes = NDArray[np.uint8]


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a slab; the same on every rank.

    Attributes:
        world: ranks.
        channels: independent sequences of collectives.
        slot_bytes: largest payload of a message, a multiple of 64.
    """

    world: int
    channels: int
    slot_bytes: int

    def __post_init__(self) -> None:
        sound = self.world >= 1 and 1 <= self.channels <= MOST_CHANNELS and self.slot_bytes >= HEADER
        if not sound or self.slot_bytes % HEADER:
            raise EngineError(
                "a slab cannot have this layout",
                found=f"{self.world} ranks, {self.channels} channels, slots of {self.slot_bytes} bytes",
                expected=f"1 to {MOST_CHANNELS} channels, slots of a multiple of {HEADER} bytes",
            )

    @property
    def message_bytes(self) -> int:
        """From one message to the next."""
        return HEADER + self.slot_bytes

    @property
    def slots(self) -> int:
        """Offset of the first slot."""
        return CONTROL + self.channels * 2 * self.world * self.message_bytes

    @property
    def size(self) -> int:
        """Bytes of a slab."""
        return self.slots + self.world * self.channels * 2 * self.message_bytes

    def row(self, channel: int, generation: int) -> int:
        """Offset of the first message of a row; the others follow it in order of destination."""
        return CONTROL + (channel * 2 + (generation & 1)) * self.world * self.message_bytes

    def slot(self, source: int, channel: int, generation: int) -> int:
        """Offset of where ``source``'s message arrives."""
        return self.slots + ((source * self.channels + channel) * 2 + (generation & 1)) * self.message_bytes


class Header(msgspec.Struct, frozen=True):
    """What stands before a payload.

    Attributes:
        generation: of the channel, modulo 2^32; stored last.
        size: bytes of the payload.
        tag: what kind of collective it is; ranks that issue different ones have different tags.
        seal: see `seal`.
    """

    generation: int
    size: int
    tag: int
    seal: int


def seal(payload: Bytes, source: int, generation: int, tag: int) -> int:
    """A positional hash of a message: XOR over its 32-bit words of (word + position) times a 64-bit odd constant.

    The words are generation, size and tag, then the payload, the last one filled up with zeros. Positions count from
    ``source`` * 2^32 + 1, so that two ranks' seals never cancel out where their XOR is compared.
    """
    words = np.zeros(3 + (len(payload) + 3) // 4, np.uint32)
    words[:3] = generation & _MASK, len(payload), tag
    words[3:].view(np.uint8)[: len(payload)] = payload
    first = np.uint64((source << 32) + 1)
    with np.errstate(over="ignore"):
        products = (words + np.arange(len(words), dtype=np.uint64) + first) * _FACTOR
    return int(np.bitwise_xor.reduce(products))


class Slab:
    """A slab in a writable buffer of `Geometry.size` bytes, all zeros at first.

    Loads and stores of single words are whole; that the processor may reorder them is what seals are for.
    """

    def __init__(self, geometry: Geometry, buffer: Any) -> None:
        self.geometry = geometry
        self.bytes: Bytes = np.frombuffer(buffer, np.uint8, geometry.size)
        self.ready: NDArray[np.uint64] = self.bytes[READY : READY + 16 * geometry.channels].view(np.uint64)
        self._words = self.bytes.view(np.uint32)
        self._longs = self.bytes.view(np.uint64)

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return int(self.bytes.ctypes.data)

    @property
    def abort(self) -> int:
        """What makes kernels that wait leave; 0 while all is well."""
        return int(self._words[ABORT // 4])

    @abort.setter
    def abort(self, value: int) -> None:
        self._words[ABORT // 4] = value

    @property
    def fault(self) -> int:
        """What a kernel left when it gave up; 0 if none did."""
        return int(self._longs[FAULT // 8])

    def put(self, offset: int, payload: Bytes, source: int, generation: int, tag: int) -> None:
        """Write a message. Bytes of the payload's last word that it does not fill become 0."""
        start, size = offset + HEADER, len(payload)
        self.bytes[start + size : start + (size + 3) // 4 * 4] = 0
        self.bytes[start : start + size] = payload
        word = offset // 4
        self._words[word + 1], self._words[word + 2] = size, tag
        self._longs[offset // 8 + 2] = seal(payload, source, generation, tag)
        self._words[word] = generation & _MASK

    def header(self, offset: int) -> Header:
        """The header of a message as it stands there now, which may still be on its way."""
        generation, size, tag = (int(word) for word in self._words[offset // 4 : offset // 4 + 3])
        return Header(generation, size, tag, int(self._longs[offset // 8 + 2]))

    def take(self, offset: int, source: int, generation: int) -> tuple[Header, Bytes] | None:
        """The message of ``generation`` if it is whole; its payload is a view that stands until the next row goes.

        Args:
            source: the rank that sent it.
        """
        header = self.header(offset)
        if header.generation != generation & _MASK or header.size > self.geometry.slot_bytes:
            return None
        payload = self.bytes[offset + HEADER : offset + HEADER + header.size]
        whole = seal(payload, source, generation, header.tag) == header.seal
        return (header, payload) if whole else None

    def publish(self, channel: int, generation: int, stride: int) -> None:
        """Let a channel's row go out.

        Args:
            stride: bytes from one rank's message to the next one's; 0 sends the first to all.
        """
        self.ready[2 * channel + (generation & 1)] = (stride << 32) | (generation & _MASK)
