"""Checkpoints on every node: copied once, compared file by file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dgpp_core.api.errors import LaunchError
from dgpp_core.launch.nodes import LocalNode, Node, SshNode
from dgpp_core.launch.weights import sync, unit_of, verify
from dgpp_core.testing.ssh_hosts import ssh_hosts, unavailable


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot as a Hugging Face cache has it: links to blobs."""
    unit = tmp_path / "hub" / "models--some--model"
    folder = unit / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (unit / "blobs").mkdir()
    for name, body in (("config.json", b"{}"), ("model.safetensors", os.urandom(5 << 20))):
        (unit / "blobs" / name[:3]).write_bytes(body)
        (folder / name).symlink_to(f"../../blobs/{name[:3]}")
    return folder


def bring(nodes: list[Node], snapshot: Path, target: Path) -> list[str]:
    said: list[str] = []
    sync(nodes, snapshot, lambda node: str(target / node.name), said.append)
    return said


def test_a_snapshot_is_copied_with_its_links_and_said_to_be_whole(snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    said = bring([LocalNode("b"), LocalNode("c")], snapshot, target)
    assert "b: 2 files as on rank 0" in said
    assert sum(line.startswith("c: ") and line.endswith("% copied") for line in said) >= 2, "there was progress"
    there = target / "b" / "snapshots" / "abc" / "model.safetensors"
    assert there.is_symlink()
    assert there.read_bytes() == (snapshot / "model.safetensors").read_bytes()
    assert bring([LocalNode("b")], snapshot, target) == ["b: 2 files as on rank 0"], "nothing is copied twice"


def test_a_copy_that_differs_is_named_and_mended(snapshot: Path, tmp_path: Path) -> None:
    node, target = LocalNode("b"), tmp_path / "there"
    bring([node], snapshot, target)
    with (target / "b" / "blobs" / "mod").open("r+b") as file:
        file.seek(1000)
        file.write(b"harm")
    (target / "b" / "snapshots" / "abc" / "config.json").unlink()
    found = verify([node], snapshot, lambda node: str(target / node.name))
    assert found == ["b: config.json is missing", "b: model.safetensors differs"]
    bring([node], snapshot, target)
    assert verify([node], snapshot, lambda node: str(target / node.name)) == []


def test_a_node_without_room_is_told(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(LaunchError, match="a node cannot prepare"):
        bring([LocalNode("b")], snapshot, tmp_path / "there")


def test_a_plain_folder_is_its_own_unit(snapshot: Path) -> None:
    assert unit_of(Path("/models/tiny")) == Path("/models/tiny")
    assert unit_of(snapshot).name == "models--some--model"


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()) or not shutil.which("rsync"), reason=unavailable() or "needs rsync")
def test_a_snapshot_goes_over_ssh_and_an_interrupted_one_goes_on(snapshot: Path, tmp_path: Path) -> None:
    with ssh_hosts(2, tmp_path / "ssh") as (net, config):
        node = SshNode(net.address(1), "", str(config))
        target = tmp_path / "there"
        part = target / node.name / "blobs" / "mod"
        part.parent.mkdir(parents=True)
        part.write_bytes((snapshot / "model.safetensors").read_bytes()[: 3 << 20])
        said = net.inside(0, lambda: bring([node], snapshot, target))
        assert said[-1] == f"{node.name}: 2 files as on rank 0"
        assert f"{node.name}: 100% copied" in said
