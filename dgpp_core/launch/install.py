"""Installing releases on every node, side by side, and choosing among them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dgpp_core.api.errors import LaunchError
from dgpp_core.launch.agent import releases
from dgpp_core.launch.nodes import Node, call, call_for, each, run
from dgpp_core.launch.pack import read_manifest

STEP_S = 120.0


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has: the digest of each version's manifest, and the current version, empty for none."""

    versions: dict[str, str]
    current: str


def installed_on(nodes: Sequence[Node], folder: str) -> list[Installed]:
    """What each node has.

    Raises:
        LaunchError: one cannot be reached.
    """
    return [msgspec.convert(found, Installed) for found in each(nodes, lambda n: call(n, releases.releases, folder))]


def install(archive: Path, nodes: Sequence[Node], folder: str, say: Callable[[str], None]) -> str:
    """Install an archive on every node that does not have it; the version's name.

    Nothing is activated. An install that was interrupted is finished by another one.

    Raises:
        LaunchError: it is no release, a node has other files under this version, or a file arrived damaged.
    """
    manifest, listed = read_manifest(archive)
    body, version = archive.read_bytes(), manifest.version
    digest = hashlib.sha256(body).hexdigest()
    found = installed_on(nodes, folder)
    for node, there in zip(nodes, found, strict=True):
        if there.versions.get(version, listed) != listed:
            raise LaunchError(
                "a node has another release of this version", where=f"{node.name}:{folder}/{version}",
                found=f"manifest {there.versions[version]}", expected=listed,
                hint="remove it there, or make a release with a version of its own",
            )  # fmt: skip

    def put(pair: tuple[Node, Installed]) -> None:
        node, there = pair
        if version in there.versions:
            say(f"{node.name}: has {version} already")
            return
        place, name = call(node, releases.prepare, folder), f".{digest[:16]}.{node.name}.tar.gz"
        run(node, ["sh", "-c", 'cat > "$1"', "sh", f"{place}/{name}"], body, STEP_S)
        call_for(STEP_S, node, releases.unpack, folder, name, digest, version)
        say(f"{node.name}: installed {version}")

    each(list(zip(nodes, found, strict=True)), put)
    return version


def activate(version: str, nodes: Sequence[Node], folder: str) -> None:
    """Make a version every node's current one.

    Raises:
        LaunchError: a node does not have it; then none is changed.
    """
    found = installed_on(nodes, folder)
    if missing := [node.name for node, there in zip(nodes, found, strict=True) if version not in there.versions]:
        known = sorted(set.intersection(*(set(there.versions) for there in found)))
        raise LaunchError(
            "a release is not on every node", where=", ".join(missing), found=f"no {version}",
            expected=f"one of {', '.join(known) or 'none'}", hint="dgpp cluster install ARCHIVE",
        )  # fmt: skip
    each(nodes, lambda node: call(node, releases.activate, folder, version))


def verify(nodes: Sequence[Node], folder: str) -> list[str]:
    """What is not as its manifest says, of every version on every node."""
    found = installed_on(nodes, folder)
    pairs = [(node, version) for node, there in zip(nodes, found, strict=True) for version in there.versions]
    problems = each(pairs, lambda pair: call_for(STEP_S, pair[0], releases.verify, folder, pair[1]))
    return [
        f"{node.name}: {version}: {one}" for (node, version), many in zip(pairs, problems, strict=True) for one in many
    ]
