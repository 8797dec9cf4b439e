"""Small integers on their way between host and device, without stopping either.

A copy from ordinary host memory waits for everything queued on the device, so on CUDA both directions go through
page-locked memory: torch's allocator gives such a block out again only when the copy that uses it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Integers, nested or not, as an int64 tensor on ``device``; does not wait for the device."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Download:
    """A copy of a device tensor that comes to the host while both go on.

    Args:
        tensor: may be overwritten by later device work at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True, copy=True)
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def values(self) -> list[list[int]]:
        """The rows of a ``[N, M]`` tensor; waits until they are there."""
        if self._done is not None:
            self._done.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows
