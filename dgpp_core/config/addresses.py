"""``host:port``, and ``[host]:port`` where the host is an IPv6 address (RFC 3986, 3.2.2); and listening there."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from typing import Any

import msgspec

EXPECTED = "host:port, or [address]:port for an IPv6 address; the port at most 65535"
EVERYWHERE, EVERYWHERE_6 = "0.0.0.0", "::"


class Address(msgspec.Struct, frozen=True):
    """Where something listens: a name or an address without brackets, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of a text.

        Raises:
            ValueError: with what is expected.
        """
        found = re.fullmatch(r"(?:\[([^\[\]]*:[^\[\]]*)\]|([^\[\]:]+)):([0-9]{1,5})", text)
        if found is None or int(found[3]) > 65535 or not _fit(host := found[1] or found[2]):
            raise ValueError(EXPECTED)
        if found[1] and not is_ipv6(host):
            raise ValueError(EXPECTED)
        return cls(host, int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address, with or without a scope such as ``%eth0``."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _fit(host: str) -> bool:
    """Whether a resolver can be asked for it: no blanks, no control characters, no label of no or of 64 letters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable() and " " not in host


def everywhere(host: str) -> str:
    """What to listen at, at ``host``, for callers who know it by this name or address: ``::`` if it has no IPv4 one."""
    try:
        family, _ = _place(Address(host, 0))
    except OSError:
        return EVERYWHERE
    return EVERYWHERE_6 if family == socket.AF_INET6 else EVERYWHERE


def reachable(host: str) -> str:
    """A host to connect to on this machine, of one that is listened on: anywhere is the loopback too."""
    return {EVERYWHERE: "127.0.0.1", EVERYWHERE_6: "::1"}.get(host, host)


def next_step(error: OSError, otherwise: str) -> str:
    """What to do about an address that cannot be bound; ``otherwise`` names the options that choose another."""
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface here has it (see `ip address`); choose another with {otherwise}"
    return f"stop what listens there, or choose another with {otherwise}"


def bound(address: Address) -> socket.socket:
    """A TCP socket at an address, its port 0 for any; ``::`` takes IPv4 as well. A name is its IPv4 address, if any.

    Raises:
        OSError: the address cannot be used.
    """
    family, place = _place(address)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            either = address.host == EVERYWHERE_6 or ipaddress.IPv6Address(place[0]).ipv4_mapped is not None
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not either)
        made.bind(place)
    except BaseException:
        made.close()
        raise
    return made


def _place(address: Address) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family and what `socket.bind` takes: of an IPv6 address also the interface that it belongs to."""
    host, literal = address.host, is_ipv6(address.host)
    if literal and "%" not in host and ipaddress.IPv6Address(host).is_link_local:
        raise OSError(errno.EINVAL, f"a link-local address without its interface, as in {host}%eth0")
    if not _fit(host):
        raise OSError(errno.EINVAL, f"neither a name of a host nor an address: {host!r}")
    found = socket.getaddrinfo(
        host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST if literal else socket.AI_PASSIVE
    )
    family, _, _, _, place = min(found, key=lambda each: each[0])
    return family, place


def listening(address: Address) -> socket.socket:
    """As `bound`, and connections are taken."""
    made = bound(address)
    try:
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


def address_of(listener: socket.socket) -> Address:
    """Where a socket is bound; a link-local address with its interface, without which nobody reaches it."""
    host, port, *more = listener.getsockname()
    scope = f"%{socket.if_indextoname(more[1])}" if more and more[1] else ""
    return Address(host + scope, port)
