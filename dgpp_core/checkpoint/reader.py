"""Reading parts of checkpoint tensors, a piece at a time."""

from __future__ import annotations

import math
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.headers import STAGING_BYTES, TensorEntry, unreadable

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
        self._doubts: list[tuple[TensorEntry, Tensor]] = []

    def close(self) -> None:
        """Close the files and free the buffer."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def fill(self, place: Tensor, entry: TensorEntry, axis: int = 0, start: int = 0) -> None:
        """Fill ``place`` with the stored values from index ``start`` of ``axis`` on; its shape says how many.

        Values are converted to the dtype of ``place``. `settle` says whether they are numbers.

        Raises:
            CheckpointError: the file changed since its header was read, or cannot be read.
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
            filled = place.narrow(0, done, rows).copy_(piece)
            if place.is_floating_point():
                self._doubts.append((entry, largest(filled)))

    def settle(self) -> None:
        """Wait for what was filled since the last call, and refuse what is no finite number.

        A weight that is none makes noise of every reply that meets it: of some, where it is an expert's.

        Raises:
            CheckpointError: naming the first tensor with a NaN or an infinity, or too large for the dtype it got.
        """
        doubts, self._doubts = self._doubts, []
        found = torch.stack([value for _, value in doubts]).tolist() if doubts else []
        for (entry, _), value in zip(doubts, found, strict=True):
            if not math.isfinite(value):
                raise CheckpointError(
                    f"the tensor {entry.name} has values that are no finite numbers",
                    where=str(entry.file),
                    found="NaN or infinity",
                    expected="numbers",
                    hint="fetch or copy the checkpoint again",
                )

    def _read(self, entry: TensorEntry, offset: int, count: int) -> Tensor:
        """``count`` bytes of a tensor, flat; valid until the next call."""
        if self._staging.numel() < count:
            self._staging = torch.empty(max(count, STAGING_BYTES), dtype=torch.uint8, pin_memory=self._pinned)
        got = 0
        try:
            if entry.file not in self._files:
                self._files[entry.file] = entry.file.open("rb", buffering=0)  # type: ignore[assignment]
            file = self._files[entry.file]
            file.seek(entry.start + offset)
            view = self._staging.numpy().data[:count]
            while got < count and (more := file.readinto(view[got:])):
                got += more
            entry.require_unchanged(file.fileno())
        except OSError as error:
            raise unreadable(entry.file, error) from error
        if got < count:  # nothing was written to it, and yet it gave less than it has
            raise CheckpointError(
                f"the file ends early: the tensor {entry.name} is cut off",
                where=str(entry.file),
                found=f"{entry.start + offset + got} bytes",
                expected=f"at least {entry.end} bytes",
            )
        return self._staging[:count].view(TORCH_DTYPES[entry.dtype])


_NO_NUMBER = {
    torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e5m2: (0x7F, 0x7C), torch.float8_e8m0fnu: (0xFF, 0xFF),
}  # fmt: skip
"""Of the formats of one byte, which torch cannot compare: the bits of a magnitude, and the least that is no number."""


def largest(values: Tensor) -> Tensor:
    """A float64 scalar that is finite where all ``values`` are; of wide formats without a copy of them."""
    if values.dtype in _NO_NUMBER:
        bits, least = _NO_NUMBER[values.dtype]
        worst = (values.view(torch.uint8) & bits).amax()
        return torch.where(worst >= least, torch.inf, 0.0).double()
    low, high = torch.aminmax(values)
    return high.double() - low.double()
