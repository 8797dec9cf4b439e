"""The depth of a scheduler's steps: the one there is, or what drafts and drafter say would pay."""

from __future__ import annotations

from collections.abc import Sequence

from dgpp_core.engine.operations import SlotResult
from dgpp_core.scheduler.confidence import ConfidentDepth, survivals
from dgpp_core.scheduler.depth import DepthLadder
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.request import Request


class Depths:
    """Chooses by confidence where the drafter tells it, else by how many drafts stood lately."""

    def __init__(self, limits: Limits) -> None:
        self._depth, self._choice = limits.depth, None if not limits.ladder else _choice(limits)
        self._sampled_scale = limits.sampled_scale

    def read(self, answers: Sequence[SlotResult]) -> None:
        """What one step committed."""
        drafted = [answer for answer in answers if answer.drafted]
        if isinstance(self._choice, ConfidentDepth):
            if drafted:
                committed = sum(len(answer.tokens) for answer in drafted)
                self._choice.note(committed, sum(answer.drafted + 1 for answer in drafted))
        elif self._choice is not None:
            for answer in drafted:
                self._choice.note(answer.drafted, len(answer.tokens) - 1)

    def choose(self, requests: Sequence[Request]) -> int:
        """The depth of the next step of ``requests``."""
        match self._choice:
            case ConfidentDepth():
                return self._choice.choose([self._standing(request) for request in requests])
            case DepthLadder():
                return self._choice.choose(len(requests))
            case None:
                return self._depth

    def _standing(self, request: Request) -> Sequence[float]:
        """How the drafts that the request's next step verifies will fare, where that is known.

        It is not while a step is under way, which drafts anew.
        """
        if request.outstanding:
            return ()
        return survivals(request.confidence, self._sampled_scale if request.submit.params.temperature > 0 else 1.0)


def _choice(limits: Limits) -> DepthLadder | ConfidentDepth:
    if limits.confident:
        return ConfidentDepth(limits.ladder, limits.base_ms, limits.row_ms, limits.worth, adapt=limits.adapt)
    return DepthLadder(limits.ladder, limits.base_ms, limits.row_ms)
