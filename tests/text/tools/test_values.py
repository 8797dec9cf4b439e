"""Values by their declared type."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dgpp_core.text.tools.kinds import choices_of, type_of, types_of
from dgpp_core.text.tools.rules import tool_of
from dgpp_core.text.tools.values import escape, normalised, typed

STRING: Any = {"type": "string"}


def value(schema: Any, text: str) -> str:
    return typed(text, tool_of("f", {"properties": {"a": schema}}).key("a"))


@pytest.mark.parametrize("text", ["5", "null", "true", "[]", '{"a": 1}', '"x"', "", " ", "x", "5.0", "1e5", "-0"])
@pytest.mark.parametrize(
    "schema",
    [STRING, {"enum": ["5", "x"]}, {"const": "5"}, {"type": ["string"]}, {"allOf": [STRING, {"minLength": 1}]},
     {"anyOf": [STRING, {"enum": ["a"]}]}],
)  # fmt: skip
def test_a_declared_string_is_the_text(schema: Any, text: str) -> None:
    assert json.loads(value(schema, text)) == text


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "10", "10"),
        ({"type": "array"}, "[]", "[]"),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "integer"}, "ten", '"ten"'),
        ({"type": "integer"}, '"5"', '"5"'),
        ({"type": "boolean"}, "True", '"True"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "object"}, '{"b":[1,2.0,"é\\u00e9\\n"],"a":{}}', '{"b": [1, 2.0, "éé\\n"], "a": {}}'),
        ({"type": "object"}, '{"a": "\\ud83d\\ude42 \\ud83d"}', '{"a": "🙂 \ufffd"}'),
        ({"type": "array"}, "[" * 100_000, json.dumps("[" * 100_000)),
        ({}, "5", "5"),
        ({}, "x", '"x"'),
        (None, '"x"', '"x"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["null", "string"]}, '"x"', '"\\"x\\""'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5.5", '"5.5"'),
        ({"type": ["string", "number"]}, "5", "5"),
        ({"anyOf": [STRING, {"type": "array"}]}, "[1]", "[1]"),
        ({"oneOf": [STRING, {"type": "null"}]}, "nul", '"nul"'),
        ({"anyOf": [STRING, {}]}, '"x"', '"x"'),
    ],
)
def test_other_values(schema: Any, text: str, expected: str) -> None:
    assert value(schema, text) == expected


def test_undeclared_arguments() -> None:
    closed = tool_of("f", {"properties": {"a": STRING}, "required": ["a"]})
    assert (closed.open, closed.required, typed("5", closed.key("b"))) == (False, ("a",), "5")
    of_strings = tool_of("f", {"additionalProperties": STRING})
    assert (of_strings.open, typed("5", of_strings.key("b"))) == (True, '"5"')
    assert tool_of("f", None).open
    assert not tool_of("f", {"properties": {"a": {}}, "additionalProperties": STRING}).open


def test_references() -> None:
    pair = {"anyOf": [STRING, {"$ref": "#/$defs/a~1b"}]}
    root = {
        "$defs": {"a/b": STRING, "loop": {"$ref": "#/$defs/loop"}, "pair": pair},
        "list": [{"type": "null"}],
    }

    def types(reference: str) -> Any:
        return types_of({"$ref": reference}, root, {})

    assert types("#/$defs/a~1b") == types("#/$defs/pair") == {"string"}
    assert types("#/list/0") == {"null"}
    for unknown in ("#/$defs/loop", "#/list/7", "#/list/x", "http://x/y", "#/$defs/a~1b/type/x", "#"):
        assert types(unknown) is None


def test_a_schema_that_doubles_is_read_once() -> None:
    defs: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    root = {"$defs": defs | {"d60": STRING}}
    assert types_of({"$ref": "#/$defs/d0"}, root, {}) == {"string"}


@pytest.mark.parametrize(
    "schema", [{"type": "objekt"}, {"type": []}, {"type": [{}]}, {"type": 5}, {"anyOf": 5}, {"enum": []}, [], "x", True]
)
def test_what_says_nothing(schema: Any) -> None:
    assert types_of(schema, {}, {}) is None
    assert choices_of(schema) is None


def test_types_without_type() -> None:
    assert types_of({"properties": {}}, {}, {}) == {"object"}
    assert types_of({"items": STRING}, {}, {}) == {"array"}
    assert types_of({"enum": ["a", 1, None, True, [], {}, 0.5]}, {}, {}) == {
        "string", "integer", "null", "boolean", "array", "object", "number",
    }  # fmt: skip
    assert choices_of({"enum": ["a", "b"]}) == ("a", "b")
    assert choices_of({"enum": ["a", 1]}) is None
    assert [type_of(text) for text in ("1", "-0", "1.0", "1e5", '"1"', "[]", "{}", "true", "null")] == [
        "integer", "integer", "number", "number", "string", "array", "object", "boolean", "null",
    ]  # fmt: skip


def test_normalised_is_the_same_value() -> None:
    generator = random.Random(5)

    def any_value(depth: int) -> Any:
        kind = generator.randrange(6 if depth else 4)
        if kind == 4:
            return [any_value(depth - 1) for _ in range(generator.randint(0, 3))]
        if kind == 5:
            return {any_text(): any_value(depth - 1) for _ in range(generator.randint(0, 3))}
        return [None, True, generator.randint(-99, 99), any_text()][kind]

    def any_text() -> str:
        return "".join(generator.choices(["a", '"', "\\", "\n", "é", "🙂", ":", ",", " ", "{", "]", "\u2028"], k=5))

    for _ in range(300):
        found = any_value(4)
        for text in (
            json.dumps(found),
            json.dumps(found, indent=2, ensure_ascii=False),
            json.dumps(found, separators=(",", ":")),
        ):
            assert normalised(text) == json.dumps(found, ensure_ascii=False)


def test_pieces_of_a_string_escape_like_the_whole() -> None:
    text = 'a"b\\c\n\t\x00\x1f\x7f\u2028é世🙂'
    assert "".join(map(escape, text)) == escape(text)
    assert json.loads(f'"{escape(text)}"') == text
