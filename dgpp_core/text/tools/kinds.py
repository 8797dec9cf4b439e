"""Which JSON types a schema allows: how the value of an argument is written, and how it is read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_INTEGER = re.compile(r"-?[0-9]+")
_IMPLIED = {"object": ("properties", "required", "additionalProperties"), "array": ("items", "minItems", "maxItems")}
"""Keywords that make a schema without ``type`` one of objects, or of arrays."""
_BESIDE = {"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description"}
"""What may stand beside a reference and changes nothing of what it says."""

Known = dict[str, frozenset[str] | None]
"""The types behind references that were followed before, so that none is followed twice."""


def types_of(schema: Any, root: Any, known: Known) -> frozenset[str] | None:
    """The JSON types that ``schema`` allows, or None where it does not say.

    Unions are followed through ``anyOf`` and ``oneOf``, intersections through ``allOf``, and references inside
    ``root``, the schema of all arguments.
    """
    if not isinstance(schema, Mapping):
        return None
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = None
            known[reference] = types_of(_resolve(reference, root), root, known)
        return known[reference]
    found = [_own(schema)]
    unions = [parts for key in ("anyOf", "oneOf") if isinstance(parts := schema.get(key), list)]
    found += [_union([types_of(part, root, known) for part in parts]) for parts in unions]
    if isinstance(parts := schema.get("allOf"), list):
        found += [types_of(part, root, known) for part in parts]
    said = [types for types in found if types is not None]
    return (frozenset.intersection(*said) or None) if said else None


def arguments_schema(parameters: Any) -> Mapping[str, Any]:
    """The schema that names a tool's arguments: ``parameters``, or what a reference alone at its root leads to.

    Generators of schemas write such a reference for a type that contains itself. What is no object has no arguments.
    """
    found, seen = parameters, set[str]()
    while isinstance(found, Mapping) and isinstance(reference := found.get("$ref"), str) and reference not in seen:
        if set(found) - _BESIDE:
            break
        seen.add(reference)
        found = _resolve(reference, parameters)
    return found if isinstance(found, Mapping) else {}


def type_of(value: str) -> str:
    """The type of a JSON text. A number without fraction and exponent is an integer."""
    if _INTEGER.fullmatch(value):
        return "integer"
    return {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(
        value[:1], "number"
    )


def choices_of(schema: Any) -> tuple[str, ...] | None:
    """The only values of a string property with ``enum`` or ``const``, or None."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return tuple(values)
    return None


def _own(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """What the schema says itself, by ``type`` or by its only values."""
    declared = schema.get("type")
    if isinstance(declared, str | list):
        listed = [declared] if isinstance(declared, str) else declared
        names = frozenset(name for name in listed if isinstance(name, str) and name in TYPES)
        return names | ({"integer"} if "number" in names else frozenset()) or None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(map(_type_of_value, values))
    return next((frozenset({kind}) for kind, words in _IMPLIED.items() if any(word in schema for word in words)), None)


def _union(parts: list[frozenset[str] | None]) -> frozenset[str] | None:
    said = [types for types in parts if types is not None]
    return frozenset().union(*said) if len(said) == len(parts) else None


def _type_of_value(value: Any) -> str:
    for kind, name in ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def _resolve(reference: str, root: Any) -> Any:
    """What a local reference (``#/$defs/name``, a JSON pointer) leads to, or None."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
