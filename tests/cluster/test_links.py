"""Ranks on hosts of their own, and the cable of one pulled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dgpp_core.testing.namespaces import INTERFACE, Hosts, hosts, unavailable
from dgpp_core.testing.served_world import Crowd, served_world, started_rank

LIMIT_S = 4.0
"""The promise is 2 s; the rest is for a machine that does other things too."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there are namespaces"),
]


@pytest.mark.parametrize("fault", ["cut", "loss"])
def test_a_link_that_is_lost_is_named_on_both_sides(
    glm: Path, environ: Mapping[str, str], tmp_path: Path, fault: str
) -> None:
    with hosts(2) as net:
        if fault == "loss":
            try:
                with net.drop(1, 0):
                    pass
            except OSError as error:
                pytest.skip(f"packets cannot be lost here: {error}")
        environ = {**environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        net.inside(0, lambda: lose(net, fault, glm, environ, tmp_path))


def lose(net: Hosts, fault: str, glm: Path, environ: Mapping[str, str], folder: Path) -> None:
    """Serve from host 0 with rank 1 on host 1, and lose the link under load."""
    model = ["--plugin=glm47", f"--checkpoint={glm}", "--world=2"]
    rendezvous = f"{net.address(0)}:29971"
    given = [*model, "--rank=1", f"--rendezvous={rendezvous}"]
    with (
        started_rank(folder, given, environ=environ, prefix=net.prefix(1)) as rank,
        served_world(folder, [*model, f"--rendezvous={rendezvous}"], environ=environ) as world,
    ):
        assert world.complete("Hello", 4).status == 200
        crowd = Crowd(world, 4)
        world.until(4)
        with net.drop(1, 100) if fault == "loss" else net.cut_off(1):
            assert world.seconds_to_unhealthy() <= LIMIT_S
            answers = [answer for answer in crowd.answers() if answer is not None]
            assert len(answers) == 4, "nobody is left without an answer"
            assert all("rank 1 is silent" in answer.text for answer in answers)
            assert world.process.wait(60) == 2
            assert rank.wait(30) == 3
        assert "rank 1 is silent" in world.fault_file(0)
        assert "rank 0 is silent" in world.fault_file(1)
