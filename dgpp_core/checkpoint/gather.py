"""Reading rows of a table in files as a piece of a GPU stream's work: `dgpp_core/checkpoint/gather.c`.

The numbers of the rows go to pinned memory, a host function reads the rows beside them, and they go back: three pieces
of work on the stream, in that order, so that a captured graph holds them like any others and no host waits. Work on one
stream is done one piece after the other, so one buffer serves every step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.native import compiled

SHORT, NO_ROW = -1, -2
"""Faults that are no errno."""


class Run(msgspec.Struct, frozen=True):
    """Rows of a table that lie one after the other in a file: from row ``first`` on at byte ``offset``."""

    first: int
    offset: int
    file: int


class _Run(ctypes.Structure):
    """``struct run`` of gather.c."""

    _fields_ = (
        ("first", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("file", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


class _Gather(ctypes.Structure):
    """``struct gather``."""

    _fields_ = (
        ("runs", ctypes.POINTER(_Run)),
        ("count", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("wanted", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("fault", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class _Buffer:
    """Room for so many rows, pinned where a GPU takes part, and what the host function is told of it."""

    def __init__(self, runs: ctypes.Array[_Run], rows: int, width: int, room: int, *, pinned: bool) -> None:
        with torch.inference_mode(False):  # used by threads of either mode
            self.wanted = torch.zeros(1 + room, dtype=torch.int64, pin_memory=pinned)
            self.out = torch.zeros(room, width, dtype=torch.uint8, pin_memory=pinned)
        self.room = room
        self.told = _Gather(
            runs=runs, count=len(runs), rows=rows, width=width,
            wanted=self.wanted.data_ptr(), out=self.out.data_ptr(),
        )  # fmt: skip


class StreamGather:
    """Gathers rows of one table.

    Args:
        runs: all rows of the table, in order.
        rows: how many there are.
        width: bytes of a row.
        device: whose streams; on a CPU the rows are read at once.

    Raises:
        EngineError: there is no C compiler, or no driver.
    """

    def __init__(self, runs: Sequence[Run], rows: int, width: int, device: torch.device) -> None:
        self._device, self._rows, self._width = device, rows, width
        self._runs = (_Run * len(runs))(*(_Run(run.first, run.offset, run.file) for run in runs))
        self._function = compiled(Path(__file__).with_name("gather.c")).dgpp_gather
        self._function.argtypes, self._function.restype = (ctypes.c_void_p,), None
        self._driver = _driver() if device.type == "cuda" else None
        self._buffers: list[_Buffer] = []

    def __call__(self, numbers: Tensor) -> Tensor:
        """uint8 ``[N, width]`` on the device, of int64 ``[N]``; what could not be read is zero, see `fault`."""
        count = len(numbers)
        buffer = self._buffer(count)
        wanted = torch.cat([numbers.new_full((1,), count), numbers])
        buffer.wanted[: 1 + count].copy_(wanted, non_blocking=True)
        self._read(buffer)
        return buffer.out[:count].to(self._device, non_blocking=True, copy=True)

    def fault(self) -> tuple[int, str] | None:
        """The first row that could not be read, and why; for whoever has waited for a result."""
        for buffer in self._buffers:
            if code := buffer.told.fault:
                why = {SHORT: "the file has become short", NO_ROW: "the table has no such row"}
                return buffer.told.row, why.get(code) or os.strerror(code)
        return None

    def _buffer(self, count: int) -> _Buffer:
        """The largest so far where it has room. Smaller ones are kept: captured graphs go on to use them."""
        if not self._buffers or self._buffers[-1].room < count:
            pinned = self._device.type == "cuda"
            self._buffers.append(_Buffer(self._runs, self._rows, self._width, max(1, count), pinned=pinned))
        return self._buffers[-1]

    def _read(self, buffer: _Buffer) -> None:
        if self._driver is None:
            self._function(ctypes.byref(buffer.told))
            return
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        function = ctypes.cast(self._function, ctypes.c_void_p)
        if status := self._driver.cuLaunchHostFunc(stream, function, ctypes.byref(buffer.told)):
            raise EngineError(
                "the driver takes no host function", where="cuLaunchHostFunc", found=f"CUDA error {status}"
            )


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError("the CUDA driver cannot be loaded", where="libcuda.so.1", found=str(error)) from error
