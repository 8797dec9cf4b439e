"""Notices drafts that hardly ever stand: speculation then costs time, and a draft layer may have loaded garbage."""

from __future__ import annotations

from dgpp_core.scheduler.messages import Stats

WINDOW = 2000
"""First drafts that are looked at together."""

FLOOR = 0.05
"""Share of them that must stand. A layer that works reaches a half on the text it dislikes most."""


class DraftWatch:
    """Judges every `WINDOW` first drafts.

    Args:
        model: its name, for the warning.
    """

    def __init__(self, model: str) -> None:
        self._model, self._drafted, self._accepted, self._low = model, 0, 0, False

    def note(self, stats: Stats) -> str:
        """What to warn of, empty where nothing is new. A model is complained of once, and again once it was better.

        Args:
            stats: counters since the start.
        """
        if not stats.drafted_at or (drafted := stats.drafted_at[0] - self._drafted) < WINDOW:
            return ""
        accepted = stats.accepted_at[0] - self._accepted
        self._drafted, self._accepted = stats.drafted_at[0], stats.accepted_at[0]
        was_low, self._low = self._low, accepted < FLOOR * drafted
        if was_low or not self._low:
            return ""
        return (
            f"{self._model}: {accepted} of the last {drafted} first drafts stood, below {FLOOR:.0%}: the draft layer "
            "may have loaded wrong weights; replies are right, and slower than without it (--no-mtp)"
        )
