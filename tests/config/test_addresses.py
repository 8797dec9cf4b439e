"""Addresses as text, of both families, and sockets at them."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.config.addresses import Address, address_of, bound, everywhere, listening, reachable
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


@pytest.mark.parametrize(
    "text",
    [
        "", "a", ":1", "a:", "a:-1", "a:65536", "::1:80", "[::1]", "[a]:1", "[::1]80", "a:²", "\n:1", " :1", "a b:1",
        "1.2.3.4\n:5", "[::1%a\nb]:5", "[::1%a b]:5", "a\x00:1", "a\u2003b:1", "a..b:5", "x" * 64 + ":5",
        "é" * 70 + ":5",
    ],
)  # fmt: skip
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


def link_local() -> str:
    """An address of this machine that is of one interface alone; empty for none."""
    table = Path("/proc/net/if_inet6")
    for digits, *_, name in map(str.split, table.read_text().splitlines() if table.is_file() else ()):
        if digits.startswith("fe80"):
            return f"{ipaddress.IPv6Address(int(digits, 16))}%{name}"
    return ""


@pytest.mark.skipif(not link_local(), reason="this machine has no link-local IPv6 address")
def test_a_link_local_address_is_listened_on_and_told_with_its_interface() -> None:
    with listening(Address(link_local(), 0)) as listener:
        told = address_of(listener)
        assert told.host == link_local()
        socket.create_connection((told.host, told.port), timeout=5).close()
        assert Address.parse(str(told)) == told


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("fe80::1", "without its interface"),
        ("a..b", "neither a name"),
        ("x" * 64, "neither a name"),
        ("a b", "neither"),
    ],
)
def test_what_cannot_be_bound_is_said(host: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        bound(Address(host, 0))


@pytest.mark.skipif(bool(NO_IPV6), reason=NO_IPV6 or "there is one")
def test_an_ipv4_address_written_as_ipv6_is_listened_on() -> None:
    with listening(Address("::ffff:127.0.0.1", 0)) as listener:
        socket.create_connection(("127.0.0.1", address_of(listener).port), timeout=5).close()


@pytest.mark.skipif(bool(NO_IPV6), reason=NO_IPV6 or "there is one")
def test_a_host_whose_name_has_an_ipv6_address_alone_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = socket.getaddrinfo

    def resolver(host: str, *args: Any, **terms: Any) -> Any:
        return ask("::1" if host == "six.test" else host, *args, **terms)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert [everywhere(host) for host in ("six.test", "::1", "127.0.0.1", "localhost")] == [
        "::",
        "::",
        *["0.0.0.0"] * 2,
    ]
    for host in ("six.test", everywhere("six.test")):
        with listening(Address(host, 0)) as listener:
            socket.create_connection(("six.test", address_of(listener).port), timeout=5).close()


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
