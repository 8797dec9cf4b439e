"""Frames of the journal: a number and a checksum around each record, so that whatever the way does to one is noticed.

Header: three little-endian uint32, the body's length, the frame's number in its direction from 0, and the CRC-32 of
number and body.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from dgpp_core.api import EngineError

HEADER = struct.Struct("<III")
MAX_BODY = 1 << 28
"""Bytes of a body; a prompt of a million tokens takes 5 MB."""
_NUMBERS = 1 << 32

Record = TypeVar("Record")


def _checksum(number: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(number.to_bytes(4, "little")))


class Packer:
    """Numbers the frames of one direction of one connection."""

    def __init__(self) -> None:
        self._number = 0

    def pack(self, body: bytes) -> bytes:
        """The next frame."""
        number = self._number
        self._number = (number + 1) % _NUMBERS
        return HEADER.pack(len(body), number, _checksum(number, body)) + body


class Unpacker(Generic[Record]):
    """Cuts the bytes of one direction into records.

    Args:
        decode: a body to its record; raises `msgspec.DecodeError`.
        source: who sends, for errors.
    """

    def __init__(self, decode: Callable[[bytes], Record], source: str) -> None:
        self._decode, self._source = decode, source
        self._buffer, self._number = bytearray(), 0

    def feed(self, data: bytes) -> Iterator[Record]:
        """The records that are complete with ``data``.

        Raises:
            EngineError: a frame is damaged, missing, doubled or no record of this protocol.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, number, checksum = HEADER.unpack_from(self._buffer)
            if size > MAX_BODY:
                raise self._damaged(f"a length of {size} bytes", f"at most {MAX_BODY}")
            if len(self._buffer) < HEADER.size + size:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            if _checksum(number, body) != checksum:
                raise self._damaged(f"{size} bytes with another checksum than {checksum:08x}", "what was sent")
            if number != self._number:
                raise self._damaged(f"frame {number}", f"frame {self._number}")
            self._number = (number + 1) % _NUMBERS
            try:
                record = self._decode(body)
            except msgspec.DecodeError as error:
                raise self._damaged(str(error), "a record of this version of the journal") from error
            yield record

    def _damaged(self, found: str, expected: str) -> EngineError:
        return EngineError(
            "the journal is damaged",
            where=f"frame {self._number} from {self._source}",
            found=found,
            expected=expected,
            hint="start all ranks again, from one installation; if it happens again, check the network",
        )
