"""Whether every schema has a finite value: a reply that starts on one without would never end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dgpp_core.text.grammar.keywords import TYPES
from dgpp_core.text.grammar.references import Failure, Location, target_of

ROUNDS = 64
"""References that may follow one after the other."""


def check_productive(places: Mapping[Location, Any], failure: Failure) -> None:
    """Every schema but ``false`` has a finite value, as far as recursion decides that.

    Raises:
        Exception: ``failure`` of the first that has none.
    """
    known: set[Location] = set()
    waiting = list(places)[::-1]  # inner ones first, so that nesting alone takes one round
    for _ in range(ROUNDS):
        left = [at for at in waiting if not _settle(at, places, known)]
        if len(left) == len(waiting):
            break
        waiting = left
    for at in reversed(waiting):
        if places[at] is not False:
            raise failure(at, "no finite value conforms to it, or references lead on too often")


def _settle(at: Location, places: Mapping[Location, Any], known: set[Location]) -> bool:
    if _has_value(places[at], at, places, known.__contains__):
        known.add(at)
        return True
    return False


def _has_value(node: Any, at: Location, places: Mapping[Location, Any], known: Callable[[Location], bool]) -> bool:
    if isinstance(node, bool):
        return node
    if (reference := node.get("$ref")) is not None:
        target = target_of(reference, places)
        if target is None or not known(target):
            return False
    for name in ("anyOf", "oneOf"):
        if name in node and not any(known((*at, name, index)) for index in range(len(node[name]))):
            return False
    if not all(known((*at, "allOf", index)) for index in range(len(node.get("allOf", ())))):
        return False
    if "enum" in node or "const" in node:
        return True
    declared = node.get("type", TYPES)
    types = {declared} if isinstance(declared, str) else set(declared)
    if types - {"object", "array"}:
        return True
    return ("object" in types and _has_object(node, at, places, known)) or (
        "array" in types and _has_array(node, at, places, known)
    )


def _has_object(node: Any, at: Location, places: Mapping[Location, Any], known: Callable[[Location], bool]) -> bool:
    declared = node.get("properties", {})
    return all(
        known((*at, "properties", name) if name in declared else (*at, "additionalProperties"))
        for name in node.get("required", ())
        if name in declared or (*at, "additionalProperties") in places
    )


def _has_array(node: Any, at: Location, places: Mapping[Location, Any], known: Callable[[Location], bool]) -> bool:
    least = int(node.get("minItems", 0))
    first = len(node.get("prefixItems", ()))
    if not all(known((*at, "prefixItems", index)) for index in range(min(first, least))):
        return False
    return least <= first or (*at, "items") not in places or known((*at, "items"))
