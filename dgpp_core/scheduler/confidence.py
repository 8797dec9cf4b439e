"""How many drafts the next step verifies, by how sure the drafter is of them.

From committed results and settings alone, in doubles and in one order: all ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARE = 1 / 64
"""Of what a millisecond is taken to be worth, what the newest step says."""


def survivals(confidence: Sequence[float], scale: float = 1.0) -> list[float]:
    """Of each draft, the probability that it and all before it stand, from the logits of `SlotResult.confidence`.

    Args:
        scale: of each probability: drawn tokens are less often the likeliest ones, which the drafter speaks of.
    """
    out, so_far = [], 1.0
    for logit in confidence:
        so_far *= scale * _sigmoid(logit)
        out.append(so_far)
    return out


def _sigmoid(logit: float) -> float:
    power = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else power) / (1.0 + power)


class ConfidentDepth:
    """Verifies drafts as long as the tokens they promise are worth the time of their rows.

    The drafts at place i of n requests cost ``n row_ms`` and promise ``S_i`` tokens each, on the average over the
    requests: they are verified where that is above ``worth * row_ms``, up to the first place where it is not. The
    worth of a millisecond, in tokens, is ``worth``, or where that is 0 what a step of one request without drafts
    commits in one, ``1 / (base_ms + row_ms)``. Where it adapts, it follows what steps commit, and never falls below
    that. Times are those of the settings, not measured: a clock would say something else on every rank.

    Args:
        depths: to choose from, ascending; between two of them the deeper one is taken.
        worth: tokens a millisecond; 0 derives it.
    """

    def __init__(self, depths: Sequence[int], base_ms: float, row_ms: float, worth: float, *, adapt: bool) -> None:
        self._depths, self._base_ms, self._row_ms, self._adapt = tuple(depths), base_ms, row_ms, adapt
        self._least = self.worth = worth or 1.0 / (base_ms + row_ms)

    def note(self, committed: int, rows: int) -> None:
        """A step of so many rows committed so many tokens."""
        if self._adapt:
            achieved = committed / (self._base_ms + rows * self._row_ms)
            self.worth = max(self._least, self.worth + SHARE * (achieved - self.worth))

    def choose(self, standing: Sequence[Sequence[float]]) -> int:
        """The depth of the next step; of each request the `survivals` of its drafts.

        A request of which nothing is known takes all of them along.
        """
        deepest = self._depths[-1]
        if any(len(each) < deepest for each in standing):
            return deepest
        place = 0
        while place < deepest and sum(each[place] for each in standing) > len(standing) * self.worth * self._row_ms:
            place += 1
        return next(depth for depth in self._depths if depth >= place)
