"""The site file that a launcher writes for a rank: what a server reads there is what the operator wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgpp_core.config.resolve import resolve
from dgpp_core.config.settings import Deployment
from dgpp_core.config.site import read_site
from dgpp_core.launch.agent import processes
from dgpp_core.launch.world import Member, rank_line, site_of


def test_each_rank_gets_the_worlds_transport_and_its_own_nodes_devices(tmp_path: Path) -> None:
    given = (
        "DGPP_NODES='a b'\nDGPP_BUS=verbs\nDGPP_ROCE_DEVICES='x0 x1'\nDGPP_ROCE_GID_INDICES='3 5'\n"
        """DGPP_NODE_OVERRIDES='{"b": {"DGPP_ROCE_DEVICES": "y0 y1"}}'\n"""
    )
    (tmp_path / "site").write_text(given)
    site = read_site(tmp_path / "site", {})
    resolved = resolve(Deployment(model="some/model", world_size=2), site, {})
    for rank, devices in enumerate((("x0", "x1"), ("y0", "y1"))):
        (tmp_path / str(rank)).write_text(site_of(site, resolved, rank))
        found = read_site(tmp_path / str(rank), {})
        assert (found.bus, found.roce_devices, found.roce_gid_indices) == ("verbs", devices, (3, 5))


@pytest.mark.parametrize(("everywhere", "rank_0"), [("0.0.0.0", "0.0.0.0:29971"), ("::", "[::]:29971")])
@pytest.mark.parametrize(
    ("nodes", "rank_1"),
    [("a b", "a:29971"), ("10.0.0.1 10.0.0.2", "10.0.0.1:29971"), ("fd00::1 fd00::2", "[fd00::1]:29971")],
)
def test_ranks_meet_at_the_address_of_the_first_node(nodes: str, rank_1: str, everywhere: str, rank_0: str) -> None:
    site = read_site(None, {"DGPP_NODES": nodes})
    resolved = resolve(Deployment(model="some/model", world_size=2), site, {})
    for rank, wanted in enumerate((rank_0, rank_1)):
        line = rank_line(resolved, Member(rank=rank, node=resolved.nodes[rank], folder="/log"), 3, everywhere)
        assert line[line.index("--rendezvous") + 1] == wanted


@pytest.mark.skipif(not Path("/proc/net/if_inet6").is_file(), reason="this machine has no IPv6")
def test_a_node_says_by_which_interface_it_reaches_an_ipv6_address() -> None:
    said = processes.greet("::1")
    assert (said["address"], said["interface"]) == ("::1", "lo")
    assert processes.is_here("::1")
    assert not processes.is_here("2001:db8::1")
