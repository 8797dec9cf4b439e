"""Replies with tool calls, well-formed and damaged, in every dialect: for tests of parsers, grammars and servers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from dgpp_core.text.tools.detect import DIALECTS
from dgpp_core.text.tools.dialect import Call, ToolDialect
from dgpp_core.text.tools.rules import CallRules, tool_of

SCHEMAS: dict[str, dict[str, Any]] = {
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "executable": {"type": "boolean"},
        },
        "required": ["path"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {"type": "object"},
            "limit": {"$ref": "#/$defs/count"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "score": {"type": "number"},
        },
        "$defs": {"count": {"type": "integer"}},
    },
    "convert": {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "by": {"type": "number"}}},
    "get_time": {"type": "object", "properties": {}},
    "anything": {"type": "object", "additionalProperties": True},
}
"""Arguments of the tools that the replies call: every way of declaring a type, and none."""

RULES = CallRules(tools=tuple(tool_of(name, schema) for name, schema in SCHEMAS.items()))

WORDS = (
    "Red", " yellow", " and blue", "世界", " 🧑\u200d💻", "안녕 하세요", "\n", " ", "\n\n", " <", "</", "</thin", "é",
    "\t", "<tool", "</tool_call", "<arg_key", "<function=", "</parameter", "<parameter=", "\uff5cDSM", " calls>",
    "\u0301", "{}", '"',
)  # fmt: skip
STRINGS = (
    "", "5", "null", "true", '{"a": 1}', '"quoted"', 'a "b" \\ c\nd\n', " padded ", "世界 🧑\u200d💻", "</param", "</",
    "<", "\n", "\n\n", "x\n", "\nx", "\\u00e9 \x7f\u2028", "1e400", "<tool_call", "</arg_value",
    "\tif x:\n\t\treturn\n",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    0, 7, -12, 10**25, 1.5, True, False, None, [], ["a", "世界"], {}, {"k": [1, {"q": 'x"y'}], "é": None}, [1.25, "\n"],
)  # fmt: skip


class ToolReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply and what is in it.

    Attributes:
        pieces: texts, and numbers of the dialect's markers.
        content: what is shown; None where nothing is known of the reply beforehand.
        calls: the calls that are made.
    """

    dialect: ToolDialect
    pieces: tuple[str | int, ...]
    content: str | None = None
    calls: tuple[Call, ...] = ()

    @property
    def literal(self) -> str:
        """The reply with its markers written out."""
        return "".join(piece if isinstance(piece, str) else self.dialect.markers[piece] for piece in self.pieces)


def dialect(name: str) -> ToolDialect:
    """The dialect of that name."""
    return next(found for found in DIALECTS if found.name == name)


def pieces_of(text: str, dialect: ToolDialect) -> tuple[str | int, ...]:
    """``text`` with every marker as its number."""
    parts = re.split("(" + "|".join(map(re.escape, dialect.markers)) + ")", text)
    return tuple(dialect.markers.index(part) if part in dialect.markers else part for part in parts if part)


def well_formed(dialect: ToolDialect, generator: random.Random) -> ToolReply:
    """A reply with some calls, text before them and perhaps behind them."""
    text = "".join(generator.choices(WORDS, k=generator.randint(0, 8)))
    calls = tuple(_call(generator) for _ in range(generator.choice([0, 1, 1, 1, 2, 3])))
    tail = generator.choice(["", "", "\n", "Done.", "\n\nDone. "])
    rendered = dialect.render(calls, after_text=bool(text.strip()))
    shown = text + tail if not calls else text.rstrip(" \t\r\n") + (tail if tail.strip() else "")
    return ToolReply(
        dialect=dialect,
        pieces=(text, *pieces_of(rendered, dialect), tail),
        content=shown,
        calls=calls,
    )


def damaged(dialect: ToolDialect, generator: random.Random) -> ToolReply:
    """A reply with calls whose pieces were lost, repeated, exchanged, cut or taken from another place."""
    whole = well_formed(dialect, generator)
    pieces: list[str | int] = []
    for piece in whole.pieces:
        pieces += re.findall(r"\w+|\s|.", piece, re.DOTALL) if isinstance(piece, str) else [piece]
    pieces += pieces_of(dialect.render([_call(generator)]), dialect)
    for _ in range(generator.randint(1, 3)):
        at, other = generator.randrange(len(pieces)), generator.randrange(len(pieces))
        match generator.randrange(4):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, pieces[other])
            case 2:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 3:
                del pieces[max(at, len(pieces) // 2) :]
        pieces = pieces or ["x"]
    return ToolReply(dialect=dialect, pieces=tuple(pieces))


def _call(generator: random.Random) -> Call:
    name = generator.choice(list(SCHEMAS))
    properties: dict[str, Any] = SCHEMAS[name].get("properties", {})
    keys = generator.sample(list(properties), k=generator.randint(0, len(properties)))
    arguments = {key: _value(properties[key], generator) for key in keys}
    if name == "anything":
        arguments |= {f"key {n}": generator.choice([*OTHERS, "text", "a b"]) for n in range(generator.randint(0, 3))}
    return Call(name, arguments)


def _value(schema: dict[str, Any], generator: random.Random) -> Any:
    kind = schema.get("type") or ("union" if "anyOf" in schema else "integer" if "$ref" in schema else "choice")
    fitting: dict[str, Sequence[Any]] = {
        "string": STRINGS,
        "union": [*(text for text in STRINGS if text != "null"), None],
        "choice": schema.get("enum", ()),
        "integer": [0, 7, -12, 10**25],
        "number": [1.5, -2, 1e-9],
        "boolean": [True, False],
        "array": [[], ["a", "世界"], ["</", '"']],
        "object": [{}, {"k": [1, {"q": 'x"y'}], "é": None}],
    }
    return generator.choice(fitting[kind])
