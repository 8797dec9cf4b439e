"""Replies with tool calls, written by chance through the masks, as the parser of tool calls reads them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import msgspec
import pytest

from dgpp_core.testing.grammars import random_schema, validate, write
from dgpp_core.text.decode import Utf8Decoder
from dgpp_core.text.grammar.calls import ToolError, reply_source
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.tools.detect import DIALECTS
from dgpp_core.text.tools.dialect import Call, ToolDialect
from dgpp_core.text.tools.events import ArgumentsDelta, CallClosed, CallOpened, Event, Text
from dgpp_core.text.tools.parser import CallParser
from dgpp_core.text.tools.rules import CallRules, InputGrammar, Tool, custom_tool, tool_of

END = 256
MARKERS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜",  # noqa: RUF001
)  # fmt: skip
CONTROL = ("<end>", *MARKERS)
PIECES = [
    *(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in CONTROL), b"\n</", b"</parameter>",
    b"</para", b"<parameter=", b"<function=", b'">', b'{"', b"invoke", b" parameter", b"weather", b"city",
    b"</function>\n", b"12",
]  # fmt: skip
IDS = {marker: PIECES.index(marker.encode()) for marker in MARKERS}
CLOSERS = ("</tool_call>", "</arg_value>", "</function>", "</arg_key>", "｜DSML｜", "\n", "/", "<")  # noqa: RUF001
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "code": {"type": "string", "pattern": "^[a-z]{2,3}$"},
        "when": {"type": "string", "format": "date"},
        "at": {"$ref": "#/$defs/point"},
        "tags": {"type": ["array", "null"], "items": {"enum": ["x", 1]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
OPEN = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": True}
WAY = [dialect.name for dialect in DIALECTS]


def dialect_of(name: str) -> ToolDialect:
    return next(dialect for dialect in DIALECTS if dialect.name == name)


@pytest.fixture(scope="module")
def tokens() -> Vocabulary:
    return Vocabulary(PIECES, frozenset(range(256, 256 + len(CONTROL))), frozenset(), 300, END)


def writings(
    tokens: Vocabulary, name: str, rules: CallRules, schema: Any = None, runs: int = 25
) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Complete replies: their text, and names and arguments of their calls."""
    source = reply_source(rules, dialect_of(name), IDS.get, schema).source
    found = []
    for seed in range(runs):
        matcher = Matcher(Grammar(source=source, ends=(END,)), tokens, tokens.parser(source))
        first = [closer.encode() for closer in CLOSERS]
        written = write(matcher, tokens, [END], random.Random(seed), patience=60, first=first)
        if written is not None:
            found.append(read(dialect_of(name), rules, written))
    assert len(found) > runs / 3
    return found


def read(dialect: ToolDialect, rules: CallRules, written: Sequence[int]) -> tuple[str, list[tuple[str, Any]]]:
    parser, decoder = CallParser(dialect, rules, incremental=True), Utf8Decoder()
    events: list[Event] = []
    for token in written:
        marker = PIECES[token].decode("utf-8", "replace")
        if token >= 256 and marker in dialect.markers:
            events += parser.mark(dialect.markers.index(marker))
        else:
            events += parser.push(decoder.push(PIECES[token]))
    events += parser.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallOpened):
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[event.call][1] += event.text
    assert sum(isinstance(event, CallClosed) for event in events) == len(calls)
    text = "".join(event.text for event in events if isinstance(event, Text))
    return text, [(name, raw if rules.tool(name).custom else json.loads(raw)) for name, raw in calls]


@pytest.mark.parametrize("name", WAY)
def test_required_calls_of_strict_tools_conform(tokens: Vocabulary, name: str) -> None:
    schemas = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
    tools = tuple(tool_of(called, schema, strict=True) for called, schema in schemas.items())
    seen = set()
    for text, calls in writings(tokens, name, CallRules(tools=tools, required=True), runs=40):
        assert not text.strip()
        assert calls
        for called, arguments in calls:
            seen.add(called)
            jsonschema.validate(arguments, schemas[called], format_checker=jsonschema.FormatChecker(["date"]))
    assert "weather" in seen


def random_arguments(rng: random.Random) -> dict[str, Any]:
    """A schema of arguments, often with keywords beside those of the arguments themselves."""
    names = rng.sample(["a", "b", "name", "x-y"], rng.randrange(4))
    schema: dict[str, Any] = {"properties": {name: random_schema(rng, 1) for name in names}} if names else {}
    if names and rng.random() < 0.5:
        more = rng.choice([("const", "x"), ("minLength", 1), ("maxLength", 1), ("pattern", "^x"), ("title", "t")])
        schema["properties"][names[0]] = dict([("type", "string"), ("enum", ["x", "yy", ""]), more])
    if rng.random() < 0.2:
        schema["properties"] = schema.get("properties", {}) | {"free": True, "never": False}
    schema["required"] = [name for name in (*names, "more") if rng.random() < (0.1 if name == "more" else 0.5)]
    schema |= rng.choice([{}, {"type": "object"}, {"additionalProperties": False}, {"additionalProperties": True}])
    schema |= rng.choice([{}, {}, {"minProperties": 1}, {"anyOf": [{"required": names}]}, {"const": {}}])
    return {"$ref": "#/$defs/it", "$defs": {"it": schema}} if rng.random() < 0.2 else schema


@pytest.mark.parametrize("name", WAY)
def test_a_strict_tool_is_refused_or_all_of_its_calls_conform(tokens: Vocabulary, name: str) -> None:
    """vllm#53745: what a strict tool forbids must be impossible, wherever its schema says so."""
    taken = 0
    for seed in range(150):
        rng = random.Random(seed)
        schema = random_arguments(rng)
        rules = CallRules(tools=(tool_of("t", schema, strict=True),), required=True, parallel=False)
        try:
            source = reply_source(rules, dialect_of(name), IDS.get).source
            parser = tokens.parser(source)
        except (ToolError, GrammarError):
            continue
        for _ in range(4):
            matcher = Matcher(Grammar(source=source, ends=(END,)), tokens, parser)
            written = write(matcher, tokens, [END], rng, patience=40, first=[closer.encode() for closer in CLOSERS])
            if written is not None:
                text, ((_, arguments),) = read(dialect_of(name), rules, written)
                assert not text.strip()
                validate(schema, json.dumps(arguments).encode())
                taken += 1
    assert taken > 100


@pytest.mark.parametrize("name", WAY)
def test_calls_of_the_model_s_own_accord_are_well_formed(tokens: Vocabulary, name: str) -> None:
    rules = CallRules(tools=(tool_of("weather", WEATHER), tool_of("open", OPEN), tool_of("weather2", None)))
    names = {tool.name for tool in rules.tools}
    with_calls = 0
    for text, calls in writings(tokens, name, rules, runs=40):
        with_calls += bool(calls)
        assert not any(marker in text for marker in ("<tool_call>", "</tool_call>"))
        for called, arguments in calls:
            assert called in names
            if called == "weather":
                assert set(arguments) <= set(WEATHER["properties"])
                assert isinstance(arguments.get("days", 1), int)
                assert arguments.get("unit", "c") in ("c", "f")
    assert with_calls or name == "dsml"  # whose opening takes two tokens in a row by chance


@pytest.mark.parametrize("name", WAY)
def test_one_call_where_there_may_be_no_more(tokens: Vocabulary, name: str) -> None:
    rules = CallRules(tools=(tool_of("now", {"type": "object"}),), required=True, parallel=False)
    assert all(len(calls) == 1 for _, calls in writings(tokens, name, rules))


@pytest.mark.parametrize("name", WAY)
def test_a_value_or_calls(tokens: Vocabulary, name: str) -> None:
    rules = CallRules(tools=(tool_of("now", {"type": "object"}),))
    kinds = set()
    for text, calls in writings(tokens, name, rules, {"enum": ["value"]}, runs=60):
        kinds.add(bool(calls))
        assert calls or json.loads(text) == "value"
        assert not calls or not text.strip()
    assert kinds == {True, False}


CUSTOM = {
    "regex": (InputGrammar(syntax="regex", definition="(ab|c)+-[0-9]{2}"), "(ab|c)+-[0-9]{2}"),
    "lark": (InputGrammar(syntax="lark", definition='start: "SELECT " NAME ("," NAME)*\nNAME: /[a-z]{1,5}/'),
             "SELECT [a-z]{1,5}(,[a-z]{1,5})*"),
    "free": (None, "(?s:.*)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CUSTOM)
@pytest.mark.parametrize("name", WAY)
def test_the_input_of_custom_tools(tokens: Vocabulary, name: str, kind: str) -> None:
    grammar, expected = CUSTOM[kind]
    rules = CallRules(tools=(custom_tool("tool", grammar),), required=True, parallel=False)
    for _, calls in writings(tokens, name, rules, runs=15):
        ((called, arguments),) = calls
        assert called == "tool"
        assert re.fullmatch(expected, arguments)


@pytest.mark.parametrize("name", WAY)
def test_what_a_dialect_renders_is_allowed(tokens: Vocabulary, name: str) -> None:
    dialect = dialect_of(name)
    rules = CallRules(tools=(tool_of("weather", WEATHER, strict=True), tool_of("now", None)))
    calls = [Call("weather", {"days": 3, "city": "Köln", "at": {"x": 1.5}}), Call("now", {})]
    text = dialect.render(calls, after_text=True)
    source = reply_source(rules, dialect, IDS.get).source
    parser = tokens.parser(source).deep_copy()
    parts = re.split(f"({'|'.join(map(re.escape, dialect.markers))})", "Sure." + text)
    written = [token for part in parts for token in ([IDS[part]] if part in dialect.markers else part.encode())]
    assert parser.try_consume_tokens(written) == len(written)
    assert parser.is_accepting()


def broken(schema: Any, **more: Any) -> Tool:
    properties = {"a": schema, **more}
    return tool_of("t", {"type": "object", "properties": properties, "additionalProperties": False}, strict=True)


PROMISES = [
    (broken({"type": "integer", "not": {}}), "properties.a.not"),
    (broken({"type": "string", "pattern": "(?=x)"}), "properties.a.pattern"),
    (broken({"type": "string", "pattern": "^a|b"}), "properties.a"),
    (broken({"type": ["string", "integer"], "minimum": 3}), "properties.a"),
    (broken({"type": "object", "properties": {"b": {"$ref": "#/properties/c"}}}, c={"type": "null"}), "properties.a"),
    (broken({"$ref": "#/$defs/x"}), "properties.a.$ref"),
    (tool_of("t", {"type": "object", "properties": {"a\nb": {}}}, strict=True), "properties.a\nb"),
    (broken({"type": "string", "enum": [1, 2]}), "properties.a"),
    (tool_of("t", {"type": "array"}, strict=True), "type"),
    (tool_of("t", {"type": "object", "minProperties": 1}, strict=True), "minProperties"),
    (tool_of("t", {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, strict=True), "anyOf"),
    (tool_of("t", {"patternProperties": {"^x": {"type": "integer"}}}, strict=True), "patternProperties"),
    (tool_of("t", {"properties": {"a": {}}, "required": ["b"]}, strict=True), "required"),
    (tool_of("t", {"properties": {"a": False}, "required": ["a"]}, strict=True), "required"),
    (custom_tool("t", InputGrammar(syntax="lark", definition="start: <|x|>")), ""),
]


@pytest.mark.parametrize(("tool", "path"), PROMISES)
def test_promises_that_cannot_be_kept(tool: Tool, path: str) -> None:
    with pytest.raises(ToolError) as caught:
        reply_source(CallRules(tools=(tool,)), dialect_of("glm"), IDS.get)
    assert caught.value.path == path


def test_tools_that_are_not_strict_are_weakened_and_say_so(tokens: Vocabulary) -> None:
    for tool, _ in PROMISES[:-1]:
        loose = CallRules(tools=(msgspec.structs.replace(tool, strict=False),))
        found = reply_source(loose, dialect_of("glm"), IDS.get)
        tokens.parser(found.source)
    loose = CallRules(tools=(tool_of("t", {"properties": {"a": {"type": "integer", "not": {}}}}),))
    assert reply_source(loose, dialect_of("qwen"), IDS.get).weakened
