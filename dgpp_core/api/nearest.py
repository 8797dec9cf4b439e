"""The name that was probably meant by one that nobody has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The only one of ``known`` that begins with ``name``, else one that is spelt alike; empty where there is none."""
    names = list(known)
    begun = [each for each in names if name and each.startswith(name)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(name, names, 1)
    return found[0] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the `nearest` of ``known``; empty where there is none."""
    near = nearest(name, known)
    return f"did you mean `{near}`?" if near else ""
