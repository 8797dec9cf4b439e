"""What ranks must have in common: the software before a world forms, and the terms of service before it serves.

Torch-free.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import msgspec

import dgpp_core
from dgpp_core.api import EngineError
from dgpp_core.config.resolve import SERVICE_KEYS
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.problems import Plugin

_HINT = "install the same release on every node, then start all ranks again"


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """The software of a rank.

    Attributes:
        version: of dgpp.
        code, kernels: digests of its sources, and of those of its kernels alone.
        plugin, plugin_code: the served model's plugin, and the digest of its sources.
        torch, triton: versions; empty where it is not installed.
    """

    version: str
    code: str
    kernels: str
    plugin: str
    plugin_code: str
    torch: str
    triton: str

    @classmethod
    def here(cls, plugin: Plugin) -> Build:
        """This installation's."""
        core = Path(dgpp_core.__file__).parent
        return cls(
            version=dgpp_core.__version__,
            code=source_digest(core),
            kernels=source_digest(core / "ops" / "kernels"),
            plugin=plugin.identity(),
            plugin_code=source_digest(Path(plugin.file).parent) if plugin.file else "",
            torch=_installed("torch"),
            triton=_installed("triton"),
        )


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank would serve, once it is built.

    Attributes:
        checkpoint: digest of config.json and of the name, shape, dtype and place of every tensor.
        device, dtype: the kind of device, and what is computed in.
        limits: everything that the scheduler plans within.
        lag: steps by which a result is read late.
        grammars: whether replies can be held to grammars.
        rehearsal: whether the rehearsal found rows independent of each other.
    """

    checkpoint: str
    device: str
    dtype: str
    limits: str
    lag: int
    grammars: bool
    rehearsal: bool


def source_digest(folder: Path) -> str:
    """16 hex digits over names and contents of the Python files below ``folder``."""
    state = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        body = path.read_bytes()
        state.update(f"{path.relative_to(folder).as_posix()}\0{len(body)}\0".encode() + body)
    return state.hexdigest()


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def require_same(what: str, rank: str, found: msgspec.Struct, expected: msgspec.Struct, hint: str = _HINT) -> None:
    """Refuse a rank that differs from rank 0; each difference is named with both values.

    Args:
        what: whose difference it is, as in ``builds``.
        rank: the other rank, with its process.

    Raises:
        EngineError: a field differs.
    """
    names = [name for name in found.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    if names:
        raise EngineError(
            f"ranks with different {what} cannot form a world: {', '.join(names)}",
            where=rank,
            found=_shown(found, names),
            expected=f"{_shown(expected, names)}, as rank 0 has it",
            hint=hint,
        )


def require_same_settings(rank: str, found: bytes, expected: bytes) -> None:
    """Likewise for the engine settings that shape execution; ``found`` and ``expected`` are their JSON.

    Raises:
        EngineError: a setting differs.
    """
    theirs, ours = (msgspec.json.decode(raw, type=EngineSettings) for raw in (found, expected))
    plain = {name: getattr(EngineSettings(), name) for name in SERVICE_KEYS}
    require_same(
        "settings",
        rank,
        msgspec.structs.replace(theirs, **plain),
        msgspec.structs.replace(ours, **plain),
        hint="start every rank with rank 0's deployment, or without one of its own",
    )


def _shown(values: msgspec.Struct, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {getattr(values, name)!r}" for name in names)
