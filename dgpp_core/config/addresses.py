"""``host:port``, and ``[host]:port`` where the host is an IPv6 address (RFC 3986, 3.2.2); and listening there."""

from __future__ import annotations

import ipaddress
import re
import socket

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
        if found is None or int(found[3]) > 65535 or (found[1] and not is_ipv6(found[1])):
            raise ValueError(EXPECTED)
        return cls(found[1] or found[2], int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address, with or without a scope such as ``%eth0``."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def reachable(host: str) -> str:
    """A host to connect to on this machine, of one that is listened on: anywhere is the loopback too."""
    return {EVERYWHERE: "127.0.0.1", EVERYWHERE_6: "::1"}.get(host, host)


def bound(address: Address) -> socket.socket:
    """A TCP socket at an address, its port 0 for any; ``::`` takes IPv4 as well.

    Raises:
        OSError: the address cannot be used.
    """
    made = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address.host != EVERYWHERE_6)
        made.bind((address.host, address.port))
    except BaseException:
        made.close()
        raise
    return made


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
    """Where a socket is bound."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)
