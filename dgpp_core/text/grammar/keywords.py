"""The keywords of JSON Schema (2020-12) by what happens to them."""

from __future__ import annotations

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly", "$id"}
)
"""Keywords that constrain nothing; they are left out of what is compiled."""

ONE = frozenset({"items", "additionalProperties"})
"""Keywords with a schema."""

SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
"""Keywords with a list of schemas."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords with an object of schemas."""

COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})

ENFORCED = ONE | SEVERAL | NAMED | COUNTS | BOUNDS | {"type", "required", "enum", "const", "pattern", "format", "$ref"}

MAX_COUNT = 2**31 - 1
MAX_BOUND = 2**53
"""Larger bounds are not exact in a double, which is what the library computes with."""

MAX_SCHEMAS = 20_000
"""Schemas inside a schema."""
