"""A cluster to launch on: hosts with SSH servers, a site file, a random model that several ranks can divide."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import CliRunner

from dgpp_core.cli.main import cli
from dgpp_core.testing.ssh_cluster import Cluster
from dgpp_core.testing.ssh_hosts import ssh_hosts


class MakeCluster(Protocol):
    """Makes a cluster of so many hosts."""

    def __call__(self, count: int, *, ipv6: bool = False) -> Cluster:
        """Ends with the test."""
        ...


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one, two and four ranks can divide."""
    folder = tmp_path_factory.mktemp("glm") / "tiny"
    done = CliRunner().invoke(cli, ["synth", "glm47", "--tiny", str(folder)])
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture
def unsettled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, and an environment that says nothing of a site."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DGPP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Makes a cluster of so many hosts."""
    with contextlib.ExitStack() as stack:

        def make(count: int, *, ipv6: bool = False) -> Cluster:
            net, config = stack.enter_context(ssh_hosts(count, tmp_path / "ssh", ipv6=ipv6))
            site = tmp_path / "site.env"
            site.write_text(
                f'DGPP_NODES="{" ".join(net.address(host) for host in range(count))}"\nDGPP_SSH_CONFIG={config}\n'
                f"DGPP_LOG_DIR={tmp_path}/log\nDGPP_STAGE_DIR={tmp_path}/stage\nDGPP_RELEASE_DIR={tmp_path}/releases\n"
            )
            kept = {name: value for name, value in os.environ.items() if not name.startswith("DGPP_")}
            return Cluster(net, tmp_path, {**kept, "DGPP_ENV_FILE": str(site), "OMP_NUM_THREADS": "1"})

        yield make
