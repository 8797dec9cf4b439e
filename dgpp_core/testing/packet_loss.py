"""Packets that an interface loses by chance: a filter of four instructions that the kernel runs (XDP).

It does what netem's ``loss`` does to what arrives, in kernels without that module as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator

_SYSCALL = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _LINK_CREATE = 5, 28
_TYPE_XDP, _ATTACH_XDP, _GENERIC = 6, 37, 2
_DROP, _PASS = 1, 2
_ONE = 1 << 24
_RANDOM = 7
"""Number of the kernel's ``get_prandom_u32``."""


@contextlib.contextmanager
def lossy(interface: str, percent: float) -> Iterator[None]:
    """Lose so many in a hundred of the packets that come in at an interface, while the block runs.

    Args:
        interface: of the network namespace that the calling thread is in.

    Raises:
        OSError: the kernel or the user's rights do not allow it.
    """
    program = _load(percent)
    try:
        link = _bpf(_LINK_CREATE, struct.pack("<4I", program, socket.if_nametoindex(interface), _ATTACH_XDP, _GENERIC))
    finally:
        os.close(program)
    try:
        yield
    finally:
        os.close(link)


def _load(percent: float) -> int:
    """``return random() % 2**24 < limit ? DROP : PASS``, as a file descriptor."""
    code = b"".join((
        _instruction(0x85, _RANDOM),  # r0 = random()
        _instruction(0x57, _ONE - 1),  # r0 &= 2**24 - 1
        _instruction(0xA5, round(percent / 100 * _ONE), skip=2),  # if r0 < limit: over the next two
        _instruction(0xB7, _PASS), _instruction(0x95, 0),  # return PASS
        _instruction(0xB7, _DROP), _instruction(0x95, 0),
    ))  # fmt: skip
    held, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    addresses = ctypes.addressof(held), ctypes.addressof(licence)
    return _bpf(_PROG_LOAD, struct.pack("<IIQQIIQII", _TYPE_XDP, len(code) // 8, *addresses, 0, 0, 0, 0, 0))


def _instruction(code: int, value: int, skip: int = 0) -> bytes:
    return struct.pack("<BBhI", code, 0, skip, value)


def _bpf(command: int, attributes: bytes) -> int:
    if platform.machine() not in _SYSCALL:
        raise OSError(f"no number of the bpf call is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    given = ctypes.create_string_buffer(attributes, len(attributes))
    fd: int = libc.syscall(_SYSCALL[platform.machine()], command, given, len(attributes))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
    return fd
