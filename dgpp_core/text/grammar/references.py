"""Local references of a schema: JSON pointers (RFC 6901) to other schemas in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

Location = tuple[str | int, ...]
"""Where a schema or a keyword is: object keys and array indices from the root."""
Failure = Callable[[Location, str], Exception]


def check_references(references: Mapping[Location, str], places: Mapping[Location, Any], failure: Failure) -> None:
    """Every reference leads to a schema.

    Raises:
        Exception: ``failure`` of the reference that does not.
    """
    for at, reference in references.items():
        if not reference.startswith("#"):
            raise failure(at, f"{reference!r} is not in this schema; only references that start with '#' are followed")
        target = target_of(reference, places)
        if target is None:
            raise failure(at, f"{reference!r} leads to no schema")
        if "patternProperties" in target:
            raise failure(at, f"{reference!r} leads through patternProperties, which is not supported")


def target_of(reference: str, places: Mapping[Location, Any]) -> Location | None:
    """The location that ``reference`` names, or None where no schema is."""
    pointer = unquote(reference.removeprefix("#"))
    if pointer and not pointer.startswith("/"):
        return None
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    found: Location = ()
    for step in steps:
        # Whether a step is an index depends on where it is taken.
        by_index = step.isdigit() and found[-1:] and found[-1] in ("anyOf", "oneOf", "allOf", "prefixItems")
        found = (*found, int(step) if by_index else step)
    return found if found in places else None
