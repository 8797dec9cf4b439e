"""Resident images: a rank's weights as they lie on its device, kept in a file, so that the next start only reads it.

What a model takes is recorded as it is taken, in stored form, or in the form that an operation prepared of it. The
image is an optimisation and nothing else: whatever is wrong with it is logged, and the checkpoint is loaded.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from filelock import FileLock, Timeout

from dgpp_core.api.bindings import BindingTable
from dgpp_core.api.errors import DgppError, PlanError
from dgpp_core.checkpoint.headers import TensorEntry
from dgpp_core.checkpoint.image_file import ImageError, ImageWriter
from dgpp_core.checkpoint.image_key import ImageKey, bindings_digest, checkpoint_digest, device_name, software
from dgpp_core.checkpoint.image_weights import ImageWeights, LoadableWeights, Progress, RecordingWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.formats.resident import DeviceKind

log = logging.getLogger("dgpp.image")

DISK_RESERVE = 1 << 30
"""Bytes that an image leaves free on its disk."""

Built = TypeVar("Built")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image is kept and what it must be of.

    Attributes:
        path: of the file; another checkpoint, rank or device should have another (`image_path`).
        nbytes: about how large it will be.
    """

    path: Path
    key: ImageKey
    device: torch.device
    nbytes: int


class ImageShape(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the weights, for which device, with dense parameters in which dtype."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype


class ImageCache(msgspec.Struct, frozen=True):
    """Where images are kept, and the settings that change what is in them, as text."""

    folder: Path
    forms: str = ""

    def place(
        self,
        model: str,
        plugin: str,
        table: BindingTable,
        entries: Mapping[str, TensorEntry],
        shape: ImageShape,
    ) -> Place:
        """The place of a rank's image; ``plugin`` is the name and version of the model's."""
        key = ImageKey(
            model=model,
            software=f"{software()}, {plugin}",
            checkpoint=checkpoint_digest(entries),
            bindings=bindings_digest(table),
            world=shape.world,
            rank=shape.rank,
            device=device_name(shape.device),
            dtype=str(shape.dtype),
            forms=self.forms,
        )
        home = next(iter(entries.values())).file.parent
        size = image_bytes(table, shape.world, shape.device)
        return Place(path=image_path(self.folder, key, home), key=key, device=shape.device, nbytes=size)


def image_path(cache: Path, key: ImageKey, folder: Path) -> Path:
    """``cache/MODEL-w2r0-HASH.img``; the hash is of the checkpoint's folder and the device.

    A changed checkpoint or setting replaces the image, instead of leaving one of tens of gigabytes behind.
    """
    known = hashlib.sha256(f"{folder.resolve()}\0{key.device}".encode()).hexdigest()[:12]
    return cache / f"{key.model}-w{key.world}r{key.rank}-{known}.img"


def image_bytes(table: BindingTable, world: int, device: torch.device) -> int:
    """Bytes of the weights that an image will hold."""
    kind: DeviceKind = "cpu" if device.type == "cpu" else "cuda"
    return sum(parameter.bytes(kind) for parameter in parameters(table, world).values())


def build_with_image(
    place: Place, load: Callable[[], LoadableWeights], build: Callable[[LoadableWeights], Built], progress: Progress
) -> Built:
    """Build from the image, or from the checkpoint, writing the image on the way.

    Args:
        load: opens the checkpoint.
        build: builds the model and calls ``finish`` on its weights; may be called a second time from the start.
        progress: called with (bytes read, bytes in all) while an image is read.

    Raises:
        DgppError: what ``load`` and ``build`` raise. Nothing about the image is an error.
    """
    built = _build_from_image(place, build, progress)
    if built is not None:
        return built
    gc.collect()  # a model that was half built holds device memory
    weights = load()
    writer = _start_image(place)
    if writer is None:
        return build(weights)
    recording = RecordingWeights(weights, writer, place.key)
    try:
        return build(recording)
    finally:
        recording.close()


def _build_from_image(place: Place, build: Callable[[LoadableWeights], Built], progress: Progress) -> Built | None:
    if not place.path.exists():
        log.info("no resident image yet: %s", place.path)
        return None
    try:
        weights = ImageWeights(place.path, place.key, place.device, progress)
    except (ImageError, OSError) as error:
        _discard(place.path, error)
        return None
    try:
        built = build(weights)
        log.info("weights restored from the resident image %s", place.path)
        return built
    except PlanError:
        raise
    except Exception as error:  # whatever it is, the checkpoint says whether the image was to blame
        _discard(place.path, error)
        return None
    finally:
        weights.close()


def _discard(path: Path, error: Exception) -> None:
    reason = error.line() if isinstance(error, DgppError) else f"{type(error).__name__}: {error}"
    log.warning("the resident image %s is built anew: %s", path, reason)
    try:
        path.unlink(missing_ok=True)
    except OSError as fault:  # it is no file, or its folder is not ours: it stays, and the checkpoint is loaded
        log.warning("the resident image cannot be removed: %s", fault)


def _start_image(place: Place) -> _LockedWriter | None:
    """A writer, unless the disk has no room or another process writes the image already."""
    folder = place.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < place.nbytes + DISK_RESERVE:
            sizes = f"{place.nbytes / 2**30:.1f} GiB and a reserve of 1 GiB are needed, {free / 2**30:.1f} GiB are free"
            log.warning("no resident image is written, the disk has no room: %s: %s", folder, sizes)
            return None
        return _LockedWriter(place)
    except Timeout:
        log.info("another process is writing the resident image %s", place.path)
    except OSError as error:
        log.warning("no resident image is written: %s: %s", place.path, error)
    return None


class _LockedWriter(ImageWriter):
    """The only writer of an image; the lock goes with the process."""

    def __init__(self, place: Place) -> None:
        self._lock = FileLock(place.path.with_suffix(".lock"), timeout=0)
        self._lock.acquire()
        try:
            super().__init__(place.path, place.device)
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        super().close()
        self._lock.release()
