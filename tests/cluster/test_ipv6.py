"""A world that meets and serves at IPv6 addresses alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from dgpp_core.config.addresses import Address, address_of, bound
from dgpp_core.testing.served_world import served_world, started_rank

pytestmark = pytest.mark.slow


def free_port() -> int:
    with bound(Address("::1", 0)) as probe:
        return address_of(probe).port


def test_two_ranks_meet_and_serve_at_ipv6_addresses(glm: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    try:
        rendezvous = Address("::1", free_port())
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    port = free_port()
    model = ["--plugin=glm47", f"--checkpoint={glm}", "--world=2", f"--rendezvous={rendezvous}"]
    leading = {**environ, "DGPP_FABRIC_PORT": str(free_port())}
    with (
        started_rank(tmp_path, [*model, "--rank=1"], environ=environ) as rank,
        served_world(tmp_path, [*model, "--host=::1", f"--port={port}", "--bus=gloo"], environ=leading) as world,
    ):
        assert world.url == f"http://[::1]:{port}"
        assert world.complete("Hello", 4).status == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        world.process.terminate()
        assert world.process.wait(60) == 0, world.log
        assert rank.wait(30) == 0
    assert "2 ranks took the same" in world.log


def test_an_address_without_brackets_is_refused_by_name(glm: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    given = ["--plugin=glm47", f"--checkpoint={glm}", "--world=2", "--rendezvous=::1:29971", "--rank=1"]
    with started_rank(tmp_path, given, environ=environ) as rank:
        said = rank.communicate(timeout=60)[1]
    assert rank.returncode == 2
    assert "found: ::1:29971" in said
    assert "[address]:port for an IPv6 address" in said
