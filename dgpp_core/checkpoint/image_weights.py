"""Weights on their way into a resident image, and out of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dgpp_core.api.model import Weights
from dgpp_core.checkpoint.image_file import Entry, ImageError, ImageReader, ImageWriter
from dgpp_core.checkpoint.image_key import ImageKey
from dgpp_core.formats.described import Description
from dgpp_core.formats.matrix import Matrix

log = logging.getLogger("dgpp.image")

TENSOR, STORED, PREPARED = "tensor", "stored", "prepared: "
WINDOW = 4
"""Stored matrices that wait at once for an operation to prepare them. Each is alive until it is written or prepared."""

Progress = Callable[[int, int], None]


class LoadableWeights(Weights, Protocol):
    """Weights that know when all of them were taken."""

    def finish(self) -> None:
        """Close what they come from; raises `CheckpointError` where a parameter was never taken."""
        ...


class RecordingWeights:
    """Weights of a checkpoint, each written to an image as it is taken. A write that fails ends the image alone."""

    def __init__(self, source: LoadableWeights, writer: ImageWriter, key: ImageKey) -> None:
        self._source, self._key = source, key
        self._writer: ImageWriter | None = writer
        self._waiting: dict[str, Matrix] = {}
        self._matrices: dict[str, Description] = {}

    def take(self, target: str) -> Tensor:
        """See `Weights`."""
        tensor = self._source.take(target)
        self._write(target, TENSOR, {TENSOR: tensor})
        return tensor

    def matrix(self, target: str) -> Matrix:
        """See `Weights`; it is written once it is clear that nothing is prepared of it."""
        matrix = self._source.matrix(target)
        self._matrices[target] = Description.of(matrix)
        self._waiting[target] = matrix
        self._settle(WINDOW)
        return matrix

    def prepared(
        self, target: str | tuple[str, ...], form: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """See `Weights`."""
        made = self._source.prepared(target, form, make)
        first, *others = _names(target)
        for name in (first, *others):
            self._waiting.pop(name, None)
        self._write(first, PREPARED + form, made)
        for name in others:
            self._write(name, PREPARED + form, {})
        return made

    def finish(self) -> None:
        """Close the checkpoint and complete the image."""
        self._source.finish()
        self._settle(0)
        if self._writer is not None:
            try:
                self._writer.commit(self._key, self._matrices)
                log.info("resident image written: %.2f GiB", self._writer.written / 2**30)
            except OSError as error:
                self._give_up(error)
        self.close()

    def close(self) -> None:
        """Give the image up, unless it is complete."""
        self._waiting.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _settle(self, keep: int) -> None:
        """Write the stored matrices that have waited longest."""
        while len(self._waiting) > keep:
            target = next(iter(self._waiting))
            self._write(target, STORED, self._waiting.pop(target).tensors())

    def _write(self, target: str, form: str, tensors: Mapping[str, Tensor]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add(target, form, tensors)
        except (OSError, ImageError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ImageError) -> None:
        log.warning("no resident image is written: %s", error)
        self.close()


class ImageWeights:
    """The weights of an image, read as the model takes them.

    Raises:
        ImageError: from every method: the image is not the one that is wanted, or not what the model asks for.
        OSError: there is no image, or it cannot be read.
    """

    def __init__(self, path: Path, key: ImageKey, device: torch.device, progress: Progress) -> None:
        self._reader = ImageReader(path, device)
        self._progress, self._done = progress, 0
        directory = self._reader.directory
        if different := key.differences(directory.key):
            self._reader.close()
            found = ", ".join(f"{name} {getattr(directory.key, name)}" for name in different)
            wanted = ", ".join(f"{name} {getattr(key, name)}" for name in different)
            raise self._reader.fault(f"it is of another {' and '.join(different)}", found=found, expected=wanted)
        self._entries = {(entry.target, entry.form): entry for entry in directory.entries}
        self._matrices = directory.matrices
        self._has_prepared = {target for target, form in self._entries if form.startswith(PREPARED)}
        self._untaken = {entry.target for entry in directory.entries}
        self._total = sum(tensor.nbytes for entry in directory.entries for tensor in entry.tensors)

    def take(self, target: str) -> Tensor:
        """See `Weights`."""
        self._claim(target)
        return self._load(target, TENSOR)[TENSOR]

    def matrix(self, target: str) -> Matrix:
        """See `Weights`; without values where the image has what an operation prepared of it."""
        self._claim(target)
        if target not in self._matrices:
            raise self._reader.fault(f"the parameter {target} is no matrix in it")
        description = self._matrices[target]
        return description.matrix(None if target in self._has_prepared else self._load(target, STORED))

    def prepared(
        self, target: str | tuple[str, ...], form: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """See `Weights`."""
        names = _names(target)
        if not self._has_prepared.isdisjoint(names):
            return self._load(names[0], PREPARED + form)
        return make()

    def finish(self) -> None:
        """Check that all was taken."""
        if self._untaken:
            raise self._reader.fault(f"it has a parameter that the model does not take: {min(self._untaken)}")

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _claim(self, target: str) -> None:
        if target not in self._untaken:
            raise self._reader.fault(f"the parameter {target} is not in it, or taken twice")
        self._untaken.remove(target)

    def _load(self, target: str, form: str) -> dict[str, Tensor]:
        entry = self._entries.get((target, form))
        if entry is None:
            raise self._reader.fault(f"it has no form {form!r} of the parameter {target}")
        tensors = self._reader.load(entry)
        self._done += _size(entry)
        self._progress(self._done, self._total)
        return tensors


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for tensor in entry.tensors)


def _names(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target
