"""What the operator is told about addresses: which cannot be had and why, and which to connect to."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from dgpp_core.api import ConfigError
from dgpp_core.server.http import listen
from dgpp_core.server.supervisor import print_ready


def test_what_to_do_about_an_address_says_whose_it_is() -> None:
    """192.0.2.1 is of a network that is for examples only; a port that is taken is another's."""
    with pytest.raises(ConfigError) as refused:
        listen("192.0.2.1", 0)
    assert "no interface here has it" in refused.value.hint
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError) as taken:
        listen("127.0.0.1", other.getsockname()[1])
    assert taken.value.hint.startswith("stop what listens there")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://[::]:18080", ["curl -s 'http://[::1]:18080/v1/", "open http://[::1]:18080/ in"]),
        ("http://0.0.0.0:18080", ["curl -s http://127.0.0.1:18080/v1/", "open http://127.0.0.1:18080/ in"]),
        ("http://[fd00::7]:18080", ["curl -s 'http://[fd00::7]:18080/v1/", "dgpp chat --url http://[fd00::7]:18080"]),
    ],
)
def test_ready_names_addresses_to_connect_to(url: str, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = SimpleNamespace(served_id="m")
    ready: Any = SimpleNamespace(row_exact=True, context_tokens=8)
    print_ready(options, url, ready)
    said = capsys.readouterr().out
    assert all(part in said for part in told), said
