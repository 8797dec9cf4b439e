"""What is refused, by which path; what is kept is what is compiled."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from dgpp_core.text.grammar.patterns import PatternError, translate
from dgpp_core.text.grammar.schema import SchemaError, check_schema
from dgpp_core.text.grammar.sources import json_schema
from dgpp_core.text.grammar.vocabulary import Vocabulary

NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}

REFUSED: list[tuple[Any, str, str]] = [
    (3, "", "expected an object"),
    ({"uniqueItems": True}, "uniqueItems", "not supported"),
    ({"properties": {"a": {"items": {"not": {}}}}}, "properties.a.items.not", "not supported"),
    ({"anyOf": [{}, {"if": {}}]}, "anyOf.1.if", "not supported"),
    *(({word: {}}, word, "not supported") for word in (
        "$anchor", "not", "if", "then", "else", "contains", "propertyNames", "dependentRequired",
        "dependentSchemas", "unevaluatedItems",
        "unevaluatedProperties", "$dynamicRef", "contentEncoding", "contentMediaType", "minContains",
        "additionalItems", "dependencies", "nullable", "x-guidance",
    )),
    ({"type": "objekt"}, "type", "expected one of"),
    ({"type": []}, "type", "not empty"),
    ({"type": ["string", 5]}, "type", "expected one of"),
    ({"items": [{}]}, "items", "expected a schema"),
    ({"items": 3}, "items", "expected a schema"),
    ({"properties": []}, "properties", "expected an object"),
    ({"properties": {"a": None}}, "properties.a", "expected a schema"),
    ({"properties": {"a\nb": {}}}, "properties.a\nb", "control characters"),
    ({"required": "a"}, "required", "expected an array"),
    ({"required": [1]}, "required.0", "expected a string"),
    ({"enum": []}, "enum", "not empty"),
    ({"enum": [2**63]}, "enum", "too large"),
    ({"const": {"a": [2**64]}}, "const", "too large"),
    ({"anyOf": []}, "anyOf", "not empty"),
    ({"allOf": {}}, "allOf", "not empty"),
    ({"minLength": -1}, "minLength", "expected an integer"),
    ({"maxItems": 1.5}, "maxItems", "expected an integer"),
    ({"maxItems": True}, "maxItems", "expected an integer"),
    ({"minItems": 2**31}, "minItems", "expected an integer"),
    ({"minProperties": 2}, "minProperties", "up to 1"),
    ({"minProperties": 3, "required": ["a", "b"]}, "minProperties", "up to 1"),
    ({"minimum": "3"}, "minimum", "expected a number"),
    ({"exclusiveMinimum": True}, "exclusiveMinimum", "expected a number"),
    ({"maximum": 2**53 + 1}, "maximum", "not exact"),
    ({"minimum": -1e300}, "minimum", "not exact"),
    ({"multipleOf": 0}, "multipleOf", "from 1e-9"),
    ({"multipleOf": -2}, "multipleOf", "from 1e-9"),
    ({"pattern": 3}, "pattern", "expected a string"),
    ({"pattern": "(?=a)"}, "pattern", "look-around"),
    ({"patternProperties": {r"\ba": {}}}, r"patternProperties.\ba", "cannot be enforced"),
    ({"format": "iri"}, "format", "supported: date"),
    ({"items": {"$id": "x"}}, "items.$id", "at the root"),
    ({"$ref": "other.json"}, "$ref", "not in this schema"),
    ({"$ref": "#/$defs/x"}, "$ref", "leads to no schema"),
    ({"$ref": "#/properties", "properties": {}}, "$ref", "leads to no schema"),
    ({"$ref": "#name"}, "$ref", "leads to no schema"),
    ({"$ref": "#/patternProperties/a", "patternProperties": {"a": {}}}, "$ref", "patternProperties"),
    ({"$ref": "#"}, "", "no finite value"),
    ({"allOf": [{"$ref": "#"}]}, "", "no finite value"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "", "no finite value"),
    ({"$defs": {"n": NODE}}, "$defs.n", "no finite value"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "", "no finite value"),
    ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "", "no finite value"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "why"), REFUSED)
def test_refused_by_path(schema: Any, path: str, why: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(why)) as caught:
        check_schema(schema)
    assert caught.value.path == path


def test_values_are_no_schemas() -> None:
    values = {"not": 1, "if": {"$ref": "nowhere"}, "pattern": "(?=", "type": "objekt"}
    schema = {"enum": [values], "const": values, "default": values, "examples": [values]}
    assert check_schema(schema) == {"enum": [values], "const": values}


def test_recursion_with_an_end() -> None:
    optional = {"type": "object", "properties": {"n": {"$ref": "#"}}}
    assert check_schema(optional) == optional
    either = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    assert check_schema(either) == either
    other = {"type": ["object", "null"], "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    assert check_schema(other) == other


def test_a_long_chain_of_references_is_refused_in_time() -> None:
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(4000)} | {"a4000": {"type": "null"}}
    started = time.monotonic()
    with pytest.raises(SchemaError, match="too often"):
        check_schema({"$defs": dict(reversed(chain.items())), "$ref": "#/$defs/a0"})
    assert time.monotonic() - started < 5


def test_size_is_bounded() -> None:
    with pytest.raises(SchemaError, match="more than"):
        check_schema({"anyOf": [{}] * 20_001})


MEANT = [
    (r"^a{2}b{1,}c{,3}d*?$", "aabc{,3}dd", "abc"),
    (r"^[\w.-]+$", "a-b._", "é"),
    (r"^[^\d]$", "x", "7"),
    (r"^[\W]$", "é", "x"),
    (r"^\u{1F600}\x41\cJ$", "\U0001f600A\n", "A"),
    (r"^(?<year>\d{4})$|x", "2024", "20"),
    (r"^[a&&b~~[]$", "[", "c"),
    (r"^[a&&b~~[]$", "&", "c"),
    (r"^\s$", "\ufeff", "\x85"),
    (r"^.$", "x", "\u2028"),
    (r"^[^]$", "\n", ""),
    (r"^\ud83d\ude00[\b]$", "\U0001f600\b", "\U0001f600"),
    ("a/b", "xa/by", "a"),
]


@pytest.mark.parametrize(("pattern", "yes", "no"), MEANT)
def test_patterns_mean_what_they_mean_in_javascript(vocabulary: Vocabulary, pattern: str, yes: str, no: str) -> None:
    start = vocabulary.parser(json_schema({"type": "string", "pattern": pattern}))
    for text, expected in ((yes, True), (no, False)):
        parser, written = start.deep_copy(), json.dumps(text, ensure_ascii=False).encode()
        assert (parser.try_consume_tokens(list(written)) == len(written)) == expected


BAD_PATTERNS = [
    r"\bx", r"\Bx", "(?!x)", "(?<=x)y", r"(a)\1", r"\k<a>", "(?i)x", "a**", "a{2}{3}", "*", "^*", "(", ")", "[", "[]",
    r"a\\"[:2], r"\q", r"\u12", r"\ud800", r"[a-\d]", r"\u{110000}", "(?P<a>x)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", BAD_PATTERNS)
def test_patterns_that_cannot_be_enforced(pattern: str) -> None:
    with pytest.raises(PatternError):
        translate(pattern)
