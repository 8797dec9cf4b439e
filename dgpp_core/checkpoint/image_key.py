"""What a resident image was made of and for; an image with another key is not used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

import dgpp_core
from dgpp_core.api.bindings import BindingTable
from dgpp_core.checkpoint.headers import TensorEntry

SAMPLES, SAMPLE_BYTES = 16, 4096
PREPARING = ("checkpoint", "formats", "ops")
"""Packages whose code decides what resident tensors look like."""


class ImageKey(msgspec.Struct, frozen=True, kw_only=True):
    """All that resident weights depend on.

    Attributes:
        model: its name among the plugins.
        software: version and digest of the code that prepares weights (`software`).
        checkpoint: digest of its tensors (`checkpoint_digest`).
        bindings: digest of the binding table, and so of the config and of the plugin's cuts.
        world, rank: of which part.
        device: kind and compute capability (`device_name`).
        dtype: of dense parameters.
        forms: settings that change resident forms, as text.
    """

    model: str
    software: str
    checkpoint: str
    bindings: str
    world: int
    rank: int
    device: str
    dtype: str
    forms: str = ""

    def differences(self, other: ImageKey) -> list[str]:
        """Names of the fields that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def checkpoint_digest(entries: Mapping[str, TensorEntry]) -> str:
    """Digest of what tells checkpoints apart: tensors and their places; sizes, times and samples of their files.

    Two files of the same layout differ in their samples, `SAMPLES` pages spread over each; reading all of a large
    checkpoint to know that it is the same would take longer than the image saves.
    """
    digest = hashlib.sha256()
    for name in sorted(entries):
        entry = entries[name]
        digest.update(msgspec.msgpack.encode((name, entry.dtype, entry.shape, entry.file.name, entry.start, entry.end)))
    for path in sorted({entry.file for entry in entries.values()}):
        stat = path.stat()
        digest.update(msgspec.msgpack.encode((path.name, stat.st_size, stat.st_mtime_ns)))
        with path.open("rb", buffering=0) as file:
            for sample in range(SAMPLES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, sample * (stat.st_size // SAMPLES)))
    return digest.hexdigest()


def bindings_digest(table: BindingTable) -> str:
    """Digest of a binding table."""
    return hashlib.sha256(msgspec.msgpack.encode(table)).hexdigest()


def software() -> str:
    """Version of dgpp-core, torch, and a digest of the code of `PREPARING`, which changes oftener than a version."""
    root, digest = Path(dgpp_core.__file__).parent, hashlib.sha256()
    for package in PREPARING:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"dgpp-core {dgpp_core.__version__}, torch {torch.__version__}, {digest.hexdigest()[:16]}"


def device_name(device: torch.device) -> str:
    """``cpu``, or ``cuda 9.0``."""
    if device.type != "cuda":
        return device.type
    return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))
