"""The name that was probably meant by one that nobody has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of ``known`` that is spelt alike, else the only one that begins with ``name``; empty where none does."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return close[0]
    begun = [each for each in names if name and each.startswith(name)]
    return begun[0] if len(begun) == 1 else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the `nearest` of ``known``; empty where there is none."""
    near = nearest(name, known)
    return f"did you mean `{near}`?" if near else ""
