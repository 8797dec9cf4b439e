"""Small integers on their way between host and device, without stopping either.

A copy from ordinary host memory waits for everything queued on the device, so on CUDA both directions go through
page-locked memory: torch's allocator gives such a block out again only when the copy that uses it is done. Results of
captured steps are not even copied: the kernel that commits writes them there, unless the drafter adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.ops.step import Outbox

KEPT_STEPS = 4
"""Steps whose results a family's outbox holds."""


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Integers, nested or not, as an int64 tensor on ``device``; does not wait for the device."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Incoming(Protocol):
    """Rows of integers on their way to the host."""

    def values(self) -> list[list[int]]:
        """The rows; waits until they are there."""
        ...


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


class Post:
    """Results that the device writes to an outbox; see `Posts`.

    Args:
        rows: int64 ``[live segments, W + 4]``, a view of `Outbox.rows`.
        turn: number of the step that was queued last, whose results they are.
    """

    def __init__(self, rows: Tensor, turn: int) -> None:
        self._rows, self._turn = rows, turn
        self._values: list[list[int]] | None = None
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def values(self) -> list[list[int]]:
        """The rows, one a live segment; waits until they are there.

        Raises:
            EngineError: they are those of another step.
        """
        if self._values is None:
            self._done.synchronize()
            rows: list[list[int]] = self._rows.tolist()
            found = {row[-1] for row in rows}
            if found != {self._turn}:
                raise EngineError(
                    "a step's results are not in their place", where="the outbox of decode steps",
                    found=f"step {sorted(found)}", expected=f"step {self._turn}", hint="report this",
                )  # fmt: skip
            self._values = [row[:-1] for row in rows]
        return self._values


class Posts:
    """Outbox of a decode shape on a GPU, and what is in it unread.

    Args:
        segments, width: of its steps.
    """

    def __init__(self, segments: int, width: int, device: torch.device) -> None:
        rows = torch.zeros(KEPT_STEPS, segments, width + 4, dtype=torch.int64, pin_memory=True)
        self.outbox = Outbox(rows, torch.zeros(segments, dtype=torch.int64, device=device))
        self._turn = 0
        self._unread: list[Post | None] = [None] * KEPT_STEPS

    def reset(self) -> None:
        """Count from 0 again, when nothing runs: warm steps have been counted on the device alone."""
        self.outbox.turns.zero_()
        self._turn, self._unread = 0, [None] * KEPT_STEPS

    def make_room(self) -> None:
        """Read what the next step would overwrite, if nobody has; before the step is launched.

        Raises:
            EngineError: as `Post.values`.
        """
        before = self._unread[self._turn % KEPT_STEPS]
        if before is not None:
            before.values()

    def newest(self, live: int) -> Post:
        """The step launched last, of its first ``live`` segments."""
        place = self._turn % KEPT_STEPS
        post = self._unread[place] = Post(self.outbox.rows[place, :live], self._turn)
        self._turn += 1
        return post
