"""Hosts that have IPv6 addresses alone, started, used and stopped over SSH."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dgpp_core.testing.ssh_cluster import Cluster
from dgpp_core.testing.ssh_hosts import unavailable

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are hosts")]


def test_two_hosts_by_their_ipv6_addresses(cluster: Callable[..., Cluster], glm: Path) -> None:
    two = cluster(2, ipv6=True)
    named = ("--config", str(two.deployment(glm, 2, http={"bind_host": "::"})))
    up = two.dgpp("cluster", "up", *named)
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("READY http://[::1]:18080/v1 (epoch 1, 2 ranks)")
    assert "rank 1 (fd77::2): started" in up.stderr
    assert two.complete()
    assert two.dgpp("cluster", "status", *named).returncode == 0
    down = two.dgpp("cluster", "down", *named)
    assert down.returncode == 0, down.stderr
    assert two.processes(0) == two.processes(1) == []
