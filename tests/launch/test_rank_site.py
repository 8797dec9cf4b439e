"""The site file that a launcher writes for a rank: what a server reads there is what the operator wrote."""

from __future__ import annotations

from pathlib import Path

from dgpp_core.config.resolve import resolve
from dgpp_core.config.settings import Deployment
from dgpp_core.config.site import read_site
from dgpp_core.launch.world import site_of


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
