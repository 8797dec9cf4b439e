"""However a reply is cut into tokens, its content and calls are the same, and those that a backtracking regular
expression over the whole reply finds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import regex

from dgpp_core.testing.tool_replies import RULES, SCHEMAS, ToolReply, damaged, dialect, well_formed
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.tools.detect import DIALECTS
from dgpp_core.text.tools.events import Event, Text
from dgpp_core.text.tools.parser import CallParser

NAMES = [found.name for found in DIALECTS]
M = [chr(0xE000 + n) for n in range(6)]
ANY = f"[^{M[0]}-{M[5]}]"
LINE = f"[^{M[0]}-{M[5]}\n"
S = "[ \t\r\n]*+"
NAME = "(?P<name>[A-Za-z0-9_-]{1,64})"
XML = (
    f"{M[0]}{S}<function={NAME}>(?P<line>\n)?{S}"
    f"(?:<parameter=(?P<key>{LINE}>]+)>(?P<value>(?:(?!</parameter>){ANY})*+)</parameter>{S})*</function>{S}{M[1]}"
)
FORMS = {
    "glm": (
        f"{M[0]}{S}{NAME}{S}(?:{M[2]}(?P<key>{ANY}*[^{M[0]}-{M[5]} \t\r\n]{ANY}*){M[3]}{S}"
        f"{M[4]}(?P<value>{ANY}*){M[5]}{S})*{M[1]}"
    ),
    "qwen": XML,
    "compact": XML,
    "dsml": (
        f"<{M[0]} calls>{S}(?:<{M[0]} invoke name=\"(?:[A-Za-z0-9_:-]*::)?{NAME}\">{S}"
        f"(?:<{M[0]} parameter name=\"(?P<key>{LINE}\"]+)\"{S}(?P<form>string=\"true\">|string=\"false\">|>)"
        f"(?P<value>(?:(?!</{M[0]} parameter>){ANY})*+)</{M[0]} parameter>{S})*"
        f"(?P<end></{M[0]} invoke>){S})+</{M[0]} calls>"
    ),
}  # fmt: skip


def reference(reply: ToolReply) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Content and calls of a whole reply, found by looking at all of it again and again."""
    text = "".join(piece if isinstance(piece, str) else M[piece] for piece in reply.pieces)
    form, opener = regex.compile(FORMS[reply.dialect.name]), reply.dialect.lead + M[0]
    content, run, calls, position = "", "", [], 0
    while (at := text.find(opener, position)) >= 0:
        run += text[position:at]
        end, found = _block(form, text, at)
        if found is None:
            run += text[at:end]
        else:
            content += run[: len(run) - min(len(run) - len(run.rstrip(" \t\r\n")), 32)]
            run = ""
            calls += _calls(found, reply.dialect.name)
        position = end
    run += text[position:]
    if not (calls and not run.strip(" \t\r\n")):
        content += run
    for number, marker in enumerate(reply.dialect.markers):
        content = content.replace(M[number], marker)
    return content, calls


def _block(form: Any, text: str, at: int) -> tuple[int, Any]:
    """Where the block that begins at ``at`` ends, with its match; without one, behind the first thing that is wrong."""
    for end in range(at + 1, len(text) + 1):
        part = form.fullmatch(text, at, end, partial=True)
        if part is None or _repeats(part):
            return end, None
        if not part.partial:
            return end, part
    return len(text), None


def _repeats(match: Any) -> bool:
    spans = [0, *match.ends("end")] if "end" in match.groupdict() else [0]
    for start, stop in zip(spans, [*spans[1:], match.endpos], strict=True):
        keys = [
            key.strip()
            for key, begin in zip(match.captures("key"), match.starts("key"), strict=True)
            if start <= begin < stop
        ]
        if len(set(keys)) < len(keys):
            return True
    return False


def _calls(match: Any, name: str) -> list[tuple[str, dict[str, Any]]]:
    ends = match.ends("end") if name == "dsml" else [match.end()]
    found, start = [], 0
    groups = {group: list(zip(match.captures(group), match.starts(group), strict=True)) for group in match.groupdict()}
    for function, stop in zip(match.captures("name"), ends, strict=True):
        keys = [key for key, begin in groups["key"] if start <= begin < stop]
        values = [value for value, begin in groups["value"] if start <= begin < stop]
        forms = [form for form, begin in groups.get("form", []) if start <= begin < stop] or [None] * len(keys)
        lines = name == "qwen" or (name == "compact" and bool(match.captures("line")))
        if lines:
            values = [value.removeprefix("\n").removesuffix("\n") if value != "\n" else "" for value in values]
        if name == "glm":
            keys = [key.strip(" \t\r\n") for key in keys]
        triples = zip(keys, values, forms, strict=True)
        found.append((function, {key: _typed(function, key, value, form) for key, value, form in triples}))
        start = stop
    return found


def _typed(function: str, key: str, text: str, form: str | None) -> Any:
    schema = SCHEMAS.get(function, {}).get("properties", {}).get(key, {})
    try:
        value = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return text
    if form is not None:
        text_only = schema.get("type") == "string" or schema.get("enum")
        return text if "true" in form or (text_only and not isinstance(value, str)) else value
    if schema.get("type") == "string" or "enum" in schema or ("anyOf" in schema and value is not None):
        return text
    return value


def check(reply: ToolReply, tokenizer: Tokenizer, cut: Any, play: Any, seed: int) -> None:
    generator = random.Random(seed)
    content, calls = reference(reply)
    if reply.content is not None:
        assert content == reply.content
        assert calls == [(call.name, dict(call.arguments)) for call in reply.calls]
    whole, at_once = [], []
    for longest in (1, 1, 3, 64, 64):
        ids = cut(reply, generator, longest)
        whole.append(play(reply, ids))
        at_once.append(play(reply, ids, incremental=True))
        assert whole[-1].content == content
        assert [(name, json.loads(arguments)) for name, arguments in whole[-1].calls] == calls
        assert whole[-1].closed == len(calls)
        assert whole[-1].calls == whole[0].calls
        if longest == 1:  # every byte of the content is in the token that is named for it
            named = b"".join(tokenizer.token_bytes(ids[token]) for token in whole[-1].tokens)
            assert named.decode() == content
        assert (at_once[-1].content, at_once[-1].calls) == (at_once[0].content, at_once[0].calls)
    if reply.content is not None:
        assert (at_once[0].content, at_once[0].calls) == (content, whole[0].calls)
    for name, arguments in whole[0].calls:
        assert name
        if reply.content is not None and "e-" not in arguments:
            assert arguments == json.dumps(json.loads(arguments), ensure_ascii=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", range(8))
def test_well_formed(name: str, part: int, tokenizer: Tokenizer, cut: Any, play: Any) -> None:
    for seed in range(part * 16, part * 16 + 16):
        check(well_formed(dialect(name), random.Random(seed)), tokenizer, cut, play, seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", range(8))
def test_damaged(name: str, part: int, tokenizer: Tokenizer, cut: Any, play: Any) -> None:
    for seed in range(part * 16, part * 16 + 16):
        check(damaged(dialect(name), random.Random(seed)), tokenizer, cut, play, seed)


def events_of(reply: ToolReply, pieces: Any, *, incremental: bool) -> list[tuple[Any, ...]]:
    """What a parser gives for ``pieces``: each character with its place in the reply, and the parts of calls."""
    parser = CallParser(reply.dialect, RULES, incremental=incremental)
    events: list[Event] = []
    for piece in pieces:
        events += parser.mark(piece) if isinstance(piece, int) else parser.push(piece)
    flat: list[tuple[Any, ...]] = []
    for event in [*events, *parser.finish()]:
        if isinstance(event, Text):
            flat += [(event.start + at, char) for at, char in enumerate(event.text)]
        else:
            text = getattr(event, "text", "-")
            flat += [(type(event).__name__, event.call, getattr(event, "name", ""), char) for char in text]
    return flat


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("make", [well_formed, damaged])
def test_a_character_at_a_time(name: str, make: Any, incremental: bool) -> None:
    """Pieces that no vocabulary would have, and every character that is shown at its place in the reply."""
    for seed in range(1000, 1060):
        reply = make(dialect(name), random.Random(seed))
        joined: list[str | int] = []
        for piece in reply.pieces:
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined[-1] += piece
            else:
                joined.append(piece)
        single = [part for piece in joined for part in (piece if isinstance(piece, str) else [piece])]
        found = events_of(reply, joined, incremental=incremental)
        assert events_of(reply, single, incremental=incremental) == found
        for at, char, *rest in found:
            assert rest or reply.literal[at] == char


def test_the_rules_cover_every_form() -> None:
    forms = {key.form for tool in RULES.tools for key in (*tool.keys, tool.other)}
    assert forms == {"text", "json", "either"}
