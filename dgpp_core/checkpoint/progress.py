"""How long work on a checkpoint reports where it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, what is done and what there is in all (bytes)."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that tells nobody."""
