"""Reading parts of checkpoint tensors, a piece at a time."""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.headers import STAGING_BYTES, TensorEntry

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""By safetensors name; the names are those of `dgpp_core.checkpoint.check.DTYPES`."""


class TensorReader:
    """Reads into tensors of a device through one staging buffer, pinned where that device is a GPU.

    Files are read rather than mapped: a file that shrinks under a mapping ends the process without a word.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._files: dict[Path, BufferedReader] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Close the files and free the buffer."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def fill(self, place: Tensor, entry: TensorEntry, axis: int = 0, start: int = 0) -> None:
        """Fill ``place`` with the stored values from index ``start`` of ``axis`` on; its shape says how many.

        Values are converted to the dtype of ``place``.

        Raises:
            CheckpointError: the file has become short.
        """
        if not entry.nbytes:
            return
        shape, place = entry.shape or (1,), place if entry.shape else place.view(1)
        first = 0 if axis else start
        row_bytes = entry.nbytes // shape[0]
        step = max(1, STAGING_BYTES // row_bytes)
        for done in range(0, place.shape[0], step):
            rows = min(step, place.shape[0] - done)
            piece = self._read(entry, (first + done) * row_bytes, rows * row_bytes).view(rows, *shape[1:])
            if axis:
                piece = piece.narrow(axis, start, place.shape[axis])
            place.narrow(0, done, rows).copy_(piece)

    def _read(self, entry: TensorEntry, offset: int, count: int) -> Tensor:
        """``count`` bytes of a tensor, flat; valid until the next call."""
        if self._staging.numel() < count:
            self._staging = torch.empty(max(count, STAGING_BYTES), dtype=torch.uint8, pin_memory=self._pinned)
        if entry.file not in self._files:
            self._files[entry.file] = entry.file.open("rb", buffering=0)  # type: ignore[assignment]
        file = self._files[entry.file]
        file.seek(entry.start + offset)
        view, got = self._staging.numpy().data[:count], 0
        while got < count and (more := file.readinto(view[got:])):
            got += more
        if got < count:
            raise CheckpointError(
                f"the file became short: the tensor {entry.name} is cut off",
                where=str(entry.file),
                found=f"{entry.start + offset + got} bytes",
                expected=f"at least {entry.end} bytes",
            )
        return self._staging[:count].view(TORCH_DTYPES[entry.dtype])
