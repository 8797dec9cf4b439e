"""How decode steps are brought to the device: shape by shape as they come, or from captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dgpp_core.engine.program import DecodeProgram
from dgpp_core.engine.transfer import Download, Incoming, upload


class Step(Protocol):
    """A decode step whose rows have been run and whose tokens are not committed yet."""

    @property
    def logits(self) -> Tensor:
        """float32 ``[live segments x width, vocab]``."""
        ...

    @property
    def drafts(self) -> Tensor:
        """int64 ``[live segments, depth]``."""
        ...

    def restrict(self, masks: Tensor) -> None:
        """Hold every live row to its mask, before anything is picked; see `DecodeProgram.restrict`."""
        ...

    def sample(self) -> None:
        """Let the device pick for the slots that sample; see `DecodeProgram.sample`."""
        ...

    def commit(self, picked: Tensor | None) -> Incoming:
        """Finish the step with the host's picks of every live row, or with the device's.

        Args:
            picked: int64 ``[live segments x width]``.

        Returns:
            rows of `DecodeProgram.commit`, one a live segment.
        """
        ...


class Runner(Protocol):
    """Runs decode steps."""

    def verify(self, slots: Sequence[int], depth: int, max_length: int) -> Step:
        """The first half of a step; does not wait for the device.

        Args:
            max_length: bound on the rows' positions + 1.

        Raises:
            EngineError: steps of this depth were not prepared.
        """
        ...

    def step(self, slots: Sequence[int], depth: int, max_length: int, *, sampled: bool) -> Incoming:
        """A step that needs nothing of the host, as `verify` and `Step.commit` in one.

        Args:
            sampled: some of the slots sample, on the device.

        Raises:
            EngineError: steps of this depth were not prepared.
        """
        ...


class EagerStep:
    """See `Step`."""

    def __init__(self, program: DecodeProgram, slots: Tensor, width: int, max_length: int) -> None:
        self._program, self._step = program, program.verify(slots, width, max_length)

    @property
    def logits(self) -> Tensor:
        return self._step.logits

    @property
    def drafts(self) -> Tensor:
        return self._step.drafts

    def restrict(self, masks: Tensor) -> None:
        self._program.restrict(self._step.logits, self._step.picked, self._step.fine, masks)

    def sample(self) -> None:
        step = self._step
        self._program.sample(step.logits, step.picked, step.batch.slots, step.batch.positions)

    def commit(self, picked: Tensor | None) -> Incoming:
        if picked is not None:
            self._step.picked.copy_(picked)
        return Download(self._program.commit(self._step))


class EagerRunner:
    """Runs each step in the shape it comes in."""

    def __init__(self, program: DecodeProgram, device: torch.device) -> None:
        self._program, self._device = program, device

    def verify(self, slots: Sequence[int], depth: int, max_length: int) -> Step:
        """See `Runner`."""
        return EagerStep(self._program, upload(slots, self._device), depth + 1, max_length)

    def step(self, slots: Sequence[int], depth: int, max_length: int, *, sampled: bool) -> Incoming:
        """See `Runner`."""
        step = self.verify(slots, depth, max_length)
        if sampled:
            step.sample()
        return step.commit(None)
