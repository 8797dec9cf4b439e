"""Releases: archives that are checked file by file, side by side on every node, with a way back."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import dgpp_core
from dgpp_core.api.errors import LaunchError
from dgpp_core.launch.agent.releases import DIGESTS, MANIFEST
from dgpp_core.launch.install import activate, install, installed_on, verify
from dgpp_core.launch.nodes import LocalNode
from dgpp_core.launch.pack import pack, read_manifest

FOLDER = "~/releases"


class HomeNode(LocalNode):
    """A node of its own, as far as its home folder goes."""

    def __init__(self, home: Path) -> None:
        super().__init__(home.name)
        self.home = home
        home.mkdir()

    def command(self, line: Sequence[str]) -> list[str]:
        """The line, at home."""
        return ["env", f"HOME={self.home}", *line]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of what is tested."""
    return pack(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def nodes(tmp_path: Path) -> list[HomeNode]:
    """Two."""
    return [HomeNode(tmp_path / name) for name in ("a", "b")]


def quiet(line: str) -> None:
    """Says nothing."""


def small(folder: Path, version: str, body: bytes = b"x = 1\n", **entries: bytes) -> Path:
    """An archive with one module, and further entries as they are given."""
    files = {
        "lib/module.py": body,
        MANIFEST: json.dumps({"name": "dgpp", "version": version, "packages": {}, "requires": []}).encode(),
    }
    files[DIGESTS] = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)).encode()
    path = folder / f"{version}-{hashlib.sha256(body).hexdigest()[:8]}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in (files | entries).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_a_release_has_the_same_bytes_each_time_and_the_system_agrees_with_its_digests(
    archive: Path, tmp_path: Path
) -> None:
    assert pack(tmp_path / "again").read_bytes() == archive.read_bytes()
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-C", str(tmp_path / "out"), "-xf", str(archive)], check=True)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", DIGESTS], cwd=tmp_path / "out", check=True)
    listed = {line.split("  ")[1] for line in (tmp_path / "out" / DIGESTS).read_text().splitlines()}
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there == listed | {DIGESTS}
    manifest, _ = read_manifest(archive)
    assert manifest.version.startswith(f"{dgpp_core.__version__}+")
    assert any(text.startswith("torch") for text in manifest.requires)


def test_an_installed_release_runs_from_its_own_files(archive: Path, nodes: list[HomeNode]) -> None:
    version = install(archive, nodes, FOLDER, quiet)
    folder = nodes[0].home / "releases" / version
    environ = {**os.environ, "DGPP_PYTHON": sys.executable, "DGPP_PLUGINS": "none"}
    done = subprocess.run(
        [folder / "bin" / "dgpp", "version", "--json"], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["dgpp_core"] == dgpp_core.__version__
    line = [sys.executable, "-P", "-c", "import dgpp_core, dgpp_glm; print(dgpp_core.__file__, dgpp_glm.__file__)"]
    found = subprocess.run(
        line, env={**environ, "PYTHONPATH": f"{folder}/lib"}, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(folder)) for path in found.stdout.split())
    assert verify(nodes, FOLDER) == [], "running it leaves nothing that counts as a change"


def test_versions_lie_side_by_side_and_the_older_one_can_be_taken_again(nodes: list[HomeNode], tmp_path: Path) -> None:
    for version in ("1.0", "1.1"):
        install(small(tmp_path, version, version.encode()), nodes, FOLDER, quiet)
        activate(version, nodes, FOLDER)
    assert [there.current for there in installed_on(nodes, FOLDER)] == ["1.1", "1.1"]
    activate("1.0", nodes, FOLDER)
    assert [(sorted(there.versions), there.current) for there in installed_on(nodes, FOLDER)] == [
        (["1.0", "1.1"], "1.0")
    ] * 2
    assert (nodes[1].home / "releases" / "current" / "lib" / "module.py").read_bytes() == b"1.0"
    with pytest.raises(LaunchError, match="not on every node") as refused:
        activate("2.0", nodes, FOLDER)
    assert "1.0, 1.1" in refused.value.expected


def test_an_install_that_was_interrupted_is_finished(nodes: list[HomeNode], tmp_path: Path) -> None:
    release, said = small(tmp_path, "1.0"), list[str]()
    install(release, nodes[:1], FOLDER, quiet)
    with pytest.raises(LaunchError, match="not on every node"):
        activate("1.0", nodes, FOLDER)
    install(release, nodes, FOLDER, said.append)
    assert sorted(said) == ["a: has 1.0 already", "b: installed 1.0"]
    left = [path.name for path in (nodes[1].home / "releases").iterdir()]
    assert left == ["1.0"], "the archive is gone"


def test_nodes_may_share_the_folder(nodes: list[HomeNode], tmp_path: Path) -> None:
    nodes[1].home = nodes[0].home
    install(small(tmp_path, "1.0"), nodes, FOLDER, quiet)
    activate("1.0", nodes, FOLDER)
    assert sorted(path.name for path in (nodes[0].home / "releases").iterdir()) == ["1.0", "current"]
    assert verify(nodes, FOLDER) == []


def test_another_release_of_the_same_version_is_refused(nodes: list[HomeNode], tmp_path: Path) -> None:
    install(small(tmp_path, "1.0"), nodes[:1], FOLDER, quiet)
    with pytest.raises(LaunchError, match="another release of this version"):
        install(small(tmp_path, "1.0", b"other"), nodes, FOLDER, quiet)
    assert not (nodes[1].home / "releases").exists()


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"lib/module.py": b"x = 2\n"}, "lib/module.py has changed"),
        ({"lib/more.py": b""}, "lib/more.py is not in the manifest"),
        ({"../away": b""}, "no plain file below it"),
        ({"/away": b""}, "no plain file below it"),
    ],
)
def test_an_archive_that_is_not_as_it_says_leaves_nothing(
    nodes: list[HomeNode], tmp_path: Path, entries: dict[str, bytes], told: str
) -> None:
    with pytest.raises(LaunchError) as refused:
        install(small(tmp_path, "1.0", **entries), nodes, FOLDER, quiet)
    assert told in refused.value.found
    assert [list((node.home / "releases").iterdir()) for node in nodes] == [[], []]
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize("harm", ["cut", "noise", "empty"])
def test_a_file_that_is_no_release_is_refused(nodes: list[HomeNode], tmp_path: Path, harm: str) -> None:
    path = small(tmp_path, "1.0")
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[: len(raw) // 2], "noise": gzip.compress(b"noise" * 200), "empty": b""}[harm])
    with pytest.raises(LaunchError, match="this is no release"):
        install(path, nodes, FOLDER, quiet)


def test_a_file_that_was_changed_later_is_named(nodes: list[HomeNode], tmp_path: Path) -> None:
    install(small(tmp_path, "1.0"), nodes, FOLDER, quiet)
    place = nodes[1].home / "releases" / "1.0" / "lib" / "module.py"
    place.write_bytes(b"x = 2\n")
    assert verify(nodes, FOLDER) == ["b: 1.0: lib/module.py has changed"]
    place.unlink()
    assert verify(nodes, FOLDER) == ["b: 1.0: lib/module.py is missing"]
