"""Registers and stack of a compiled kernel, read from its ELF file.

The layout of the ``.nv.info`` attributes is that of the public CUDA binary utilities: a byte for the form, a byte for
the attribute, two bytes for the size, then the value; 32-bit values are a symbol index followed by the number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SIZED = 4
_REGISTERS, _FRAME = 0x2F, 0x11


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    name_start = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        start = name_start + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        yield text, b"" if kind == 8 else cubin[offset : offset + length]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attribute number and value of each record of a ``.nv.info`` section."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        value = info[at : at + length] if form == _SIZED else b""
        at += len(value)
        yield attribute, value


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack (spills and local arrays) a thread of the only kernel in ``cubin`` uses."""
    found: dict[int, int] = {}
    for name, data in _sections(cubin):
        if name == ".nv.info":
            found |= {key: struct.unpack("<II", value)[1] for key, value in _attributes(data) if len(value) == 8}
    return found[_REGISTERS], found.get(_FRAME, 0)
