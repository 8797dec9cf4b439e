"""Addresses as text, of both families, and sockets at them."""

from __future__ import annotations

import socket

import pytest

from dgpp_core.config.addresses import Address, address_of, bound, listening, reachable
from dgpp_core.config.rules import RULES

try:
    with bound(Address("::1", 0)):
        NO_IPV6 = ""
except OSError as error:
    NO_IPV6 = f"this machine has no IPv6 loopback: {error}"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("spark-1:29971", "spark-1", 29971),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1", 1),
    ],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address(host, port)) == text


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:-1", "a:65536", "::1:80", "[::1]", "[a]:1", "[::1]80", "a:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\[address\]:port for an IPv6 address"):
        Address.parse(text)


def test_the_loopback_reaches_what_listens_everywhere() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "::1", "10.0.0.1")] == ["127.0.0.1", "::1", "::1", "10.0.0.1"]


@pytest.mark.skipif(bool(NO_IPV6), reason=NO_IPV6 or "there is one")
@pytest.mark.parametrize(
    ("host", "callers"),
    [("::1", {"::1"}), ("::", {"::1", "127.0.0.1"}), ("0.0.0.0", {"127.0.0.1"})],
)
def test_who_reaches_what_listens(host: str, callers: set[str]) -> None:
    with listening(Address(host, 0)) as listener:
        port = address_of(listener).port
        assert address_of(listener) == Address(host, port)
        reached = set()
        for caller in ("::1", "127.0.0.1"):
            try:
                socket.create_connection((caller, port), timeout=5).close()
            except ConnectionRefusedError:
                continue
            reached.add(caller)
        assert reached == callers
        with pytest.raises(OSError, match="in use"):
            listening(Address(host, port))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("a b-1.lan", ("a", "b-1.lan")),
        ("10.0.0.1 ::1", ("10.0.0.1", "::1")),
        ("fd00::2 fe80::1%eth0", ("fd00::2", "fe80::1%eth0")),
    ],
)
def test_nodes_are_names_or_addresses(value: str, read: tuple[str, ...]) -> None:
    assert RULES["DGPP_NODES"](value) == read


@pytest.mark.parametrize("value", ["a:1", "[::1]", "-a", "::x", "a a", "a;b"])
def test_nodes_of_another_form_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"different host names or addresses|each entry once"):
        RULES["DGPP_NODES"](value)
