"""Work that was handed to the device and whose results the host has not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from dgpp_core.engine.operations import StepResult
from dgpp_core.engine.transfer import Incoming
from dgpp_core.images.picture import Picture
from dgpp_core.sampling.logprobs import TokenLogprobs

Mode = Literal["greedy", "device", "host"]


class SlotInfo(msgspec.Struct, eq=False):
    """Host-side facts of an occupied slot; the rest is on the device.

    Attributes:
        mode: who picks: the likeliest token counts, the device samples, or the host has to.
        bound: upper bound of the device's length: exact once every launched step was read.
        floor: of `StepBatch.floors`; 0 where all of its rows go through every layer.
    """

    slot: int
    request: int
    prompt: tuple[int, ...]
    logprobs: bool
    blocks: int
    bound: int
    mode: Mode = "host"
    pictures: tuple[Picture, ...] = ()
    floor: int = 0


class Part(msgspec.Struct, frozen=True, eq=False):
    """The picks of one forward.

    Attributes:
        requests: as they were at the launch, a segment each.
        download: what `dgpp_core.engine.program.DecodeProgram.commit` gives, ``[segments, width + 3]`` or more.
        width: rows a segment.
        drafted: drafts that each segment verified.
        logprobs: a row each, where the host sampler picked; else empty.
    """

    requests: tuple[SlotInfo, ...]
    download: Incoming
    width: int
    drafted: int
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class Pending:
    """A tick on its way.

    Args:
        settle: reads this tick and all before it.
    """

    def __init__(self, tick: int, parts: tuple[Part, ...], settle: Callable[[Pending], None]) -> None:
        self.tick, self.parts, self._settle = tick, parts, settle
        self.result: StepResult | None = None

    def wait(self) -> StepResult:
        """What the tick committed; waits for the device.

        Raises:
            EngineError: a row of this tick or of one before it has no finite logit, or a collective has failed.
        """
        if self.result is None:
            self._settle(self)
        assert self.result is not None, "settling reads every tick up to this one"
        return self.result
