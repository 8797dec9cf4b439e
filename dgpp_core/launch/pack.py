"""Making a release: an archive of the software that runs here, the same bytes for the same software.

It holds dgpp and its plugins and not what they depend on: torch alone is some gigabytes and differs from one kind of
host to another. `DGPP_PYTHON` names the Python that has those.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

import dgpp_core
from dgpp_core.api.errors import LaunchError
from dgpp_core.host.loading import installed
from dgpp_core.launch.agent.releases import DIGESTS, MANIFEST

CORE = "dgpp-core"
DIGITS = 12
LAUNCHER = """#!/bin/sh
# dgpp of this release, with the dependencies of DGPP_PYTHON.
here=$(dirname "$(dirname "$(readlink -f "$0")")")
PYTHONPATH="$here/lib" exec "${DGPP_PYTHON:-python3}" -P -m dgpp_core.cli "$@"
"""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive says of itself.

    Attributes:
        version: dgpp's, with a digest of all sources after it.
        packages: version by distribution.
        requires: what the Python must have installed.
    """

    name: str
    version: str
    packages: Mapping[str, str]
    requires: tuple[str, ...]


def pack(folder: Path) -> Path:
    """Write the archive of what is installed here into ``folder``; its path.

    Raises:
        LaunchError: a plugin's files cannot be found.
    """
    sources = _sources()
    digest = hashlib.sha256("".join(_line(name, body) for name, body in sorted(sources.items())).encode()).hexdigest()
    names = _distributions()
    own = {name.lower() for name in names}
    needed = [text for name in names for text in importlib.metadata.requires(name) or () if "extra ==" not in text]
    manifest = Manifest(
        name="dgpp",
        version=f"{dgpp_core.__version__}+{digest[:DIGITS]}",
        packages={name: importlib.metadata.version(name) for name in names},
        requires=tuple(sorted({text for text in needed if _name_of(text) not in own})),
    )
    files = {
        **{f"lib/{name}": body for name, body in sources.items()},
        "bin/dgpp": LAUNCHER.encode(),
        MANIFEST: msgspec.json.format(msgspec.json.encode(manifest)),
    }
    files[DIGESTS] = "".join(_line(name, body) for name, body in sorted(files.items())).encode()
    path = folder / f"dgpp-{manifest.version}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_archive(files))
    return path


def read_manifest(archive: Path) -> tuple[Manifest, str]:
    """What an archive says of itself, and the digest of its list of digests.

    Raises:
        LaunchError: it is no release.
    """
    try:
        with tarfile.open(archive) as file:
            said, listed = (file.extractfile(name) for name in (MANIFEST, DIGESTS))
            if said is None or listed is None:
                raise KeyError(MANIFEST)
            return msgspec.json.decode(said.read(), type=Manifest), hashlib.sha256(listed.read()).hexdigest()
    except (OSError, EOFError, KeyError, zlib.error, tarfile.TarError, msgspec.MsgspecError) as error:
        raise LaunchError(
            "this is no release", where=str(archive), found=str(error), hint="make one with `dgpp cluster pack`"
        ) from error


def _distributions() -> list[str]:
    plugins = {point.dist.name for point in installed() if point.dist is not None}
    return [CORE, *sorted(plugins)]


def _sources() -> dict[str, bytes]:
    """Every file of the packages, and what makes their plugins known, by path below ``lib``."""
    files: dict[str, bytes] = {}
    modules = {"dgpp_core", *(point.module.partition(".")[0] for point in installed())}
    for module in sorted(modules):
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise LaunchError("a plugin is no package", where=module, expected="a folder with __init__.py")
        root = Path(spec.submodule_search_locations[0])
        files |= {
            f"{module}/{path.relative_to(root).as_posix()}": path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
        }
    for name in _distributions():
        found = importlib.metadata.distribution(name)
        info = f"{name.replace('-', '_')}-{found.version}.dist-info"
        for part in ("METADATA", "entry_points.txt"):
            if (text := found.read_text(part)) is not None:
                files[f"{info}/{part}"] = text.encode()
    return files


def _name_of(requirement: str) -> str:
    end = next((at for at, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end].lower().replace("_", "-")


def _line(name: str, body: bytes) -> str:
    """As ``sha256sum`` writes and checks it."""
    return f"{hashlib.sha256(body).hexdigest()}  {name}\n"


def _archive(files: Mapping[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name, body in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(body), 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(entry, io.BytesIO(body))
    return raw.getvalue()
