"""Worlds on hosts of their own, started and stopped over SSH."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.testing.ssh_cluster import Cluster
from dgpp_core.testing.ssh_hosts import unavailable

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are hosts")]


def status(cluster: Cluster, deployment: Path) -> tuple[int, Any]:
    done = cluster.dgpp("cluster", "status", "--config", str(deployment), "--json")
    return done.returncode, json.loads(done.stdout)[0]


def test_two_hosts_from_up_to_down_with_a_rank_lost_between(cluster: Callable[[int], Cluster], glm: Path) -> None:
    two = cluster(2)
    deployment = two.deployment(glm, 2)
    named = ("--config", str(deployment))
    up = two.dgpp("cluster", "up", *named)
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("READY http://127.0.0.1:18080/v1 (epoch 1, 2 ranks)")
    assert "rank 1 (10.77.0.2): started" in up.stderr
    first = two.complete()
    code, seen = status(two, deployment)
    assert (code, seen["health"], [rank["state"] for rank in seen["ranks"]]) == (0, "ok", ["running", "running"])
    assert two.dgpp("cluster", "status").returncode == 0

    again = two.dgpp("cluster", "up", *named)
    assert again.returncode == 1
    assert "ranks of this deployment run already" in again.stderr
    assert two.complete() == first

    os.kill(seen["ranks"][1]["pid"], signal.SIGKILL)
    end = time.monotonic() + 30
    while (lost := status(two, deployment)[1])["ranks"][0]["state"] != "gone":
        assert time.monotonic() < end, lost
    assert "rank 1 is gone" in two.dgpp("cluster", "logs", *named).stdout

    up = two.dgpp("cluster", "up", *named)
    assert up.returncode == 0, up.stderr
    assert "(epoch 2, 2 ranks)" in up.stdout
    assert two.complete() == first
    for _ in range(2):
        down = two.dgpp("cluster", "down", *named)
        assert down.returncode == 0, down.stderr
        assert [two.processes(host) for host in range(2)] == [[], []]
    log = next((two.folder / "log").rglob("rank-0.epoch-2.log")).read_text()
    assert "2 ranks took the same" in log, "it ended in order"
    assert two.dgpp("cluster", "status").stdout.startswith("nothing runs; ")


def test_four_hosts_serve_and_are_stopped_although_a_rank_hangs(cluster: Callable[[int], Cluster], glm: Path) -> None:
    four = cluster(4)
    deployment = four.deployment(glm, 4)
    packed = four.dgpp("cluster", "pack", str(four.folder / "dist"))
    installed = four.dgpp("cluster", "install", packed.stdout.strip())
    assert installed.returncode == 0, installed.stderr
    up = four.dgpp("cluster", "up", "--config", str(deployment), "--release", "current")
    assert up.returncode == 0, up.stderr
    assert four.complete()
    seen = status(four, deployment)[1]
    release = four.folder / "releases" / "current"
    environ = Path(f"/proc/{seen['ranks'][3]['pid']}/environ").read_text()
    assert f"PYTHONPATH={release}/lib" in environ
    os.kill(seen["ranks"][2]["pid"], signal.SIGSTOP)
    down = four.dgpp("cluster", "down", "--config", str(deployment))
    assert down.returncode == 0, down.stderr
    assert [four.processes(host) for host in range(4)] == [[]] * 4


def test_a_start_that_fails_says_why_and_leaves_nothing_behind(cluster: Callable[[int], Cluster], glm: Path) -> None:
    two = cluster(2)
    deployment = two.deployment(glm, 2)
    (glm / "config.json").rename(glm / "config.away")
    try:
        up = two.dgpp("cluster", "up", "--config", str(deployment))
    finally:
        (glm / "config.away").rename(glm / "config.json")
    assert up.returncode == 1
    assert "has ended before the world was ready" in up.stderr
    assert "config.json" in up.stderr
    assert [two.processes(host) for host in range(2)] == [[], []]
    two.net.cut(1)
    up = two.dgpp("cluster", "up", "--config", str(deployment))
    assert up.returncode == 1
    assert "a node cannot be reached" in up.stderr
    assert "10.77.0.2" in up.stderr
