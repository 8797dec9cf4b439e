"""How many drafts the next step verifies, by how many stood lately. From committed results alone: all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 64
"""Rounds that a measured share of standing drafts looks back on, about."""

PROBE = 64
"""Every so many steps the deepest depth is used, to learn how the drafts beyond the usual one fare."""


class DepthLadder:
    """Chooses the depth that commits most tokens a millisecond.

    A step of n requests at depth d takes ``base_ms + n (1 + d) row_ms`` and commits ``n (1 + s_1 + ... + s_d)`` tokens,
    s_i being the share of rounds in which the first i drafts stood. Times are those of the settings, not measured:
    a clock would say something else on every rank.

    Args:
        depths: to choose from, ascending.
    """

    def __init__(self, depths: Sequence[int], base_ms: float, row_ms: float) -> None:
        self._depths, self._base_ms, self._row_ms = tuple(depths), base_ms, row_ms
        self._stands = [1.0] * max(depths, default=0)
        self._steps = 0

    def note(self, drafted: int, accepted: int) -> None:
        """A request's round: of ``drafted`` drafts the first ``accepted`` stood."""
        for place in range(min(drafted, len(self._stands))):
            self._stands[place] += ((place < accepted) - self._stands[place]) / MEMORY

    def choose(self, requests: int) -> int:
        """The depth of the next step of so many requests; the shallower of equals."""
        self._steps += 1
        if self._steps % PROBE == 0:
            return self._depths[-1]
        return max(self._depths, key=lambda depth: (self._worth(depth, requests), -depth))

    def _worth(self, depth: int, requests: int) -> float:
        tokens = requests * (1 + sum(self._stands[:depth]))
        return tokens / (self._base_ms + requests * (1 + depth) * self._row_ms)
