"""Faults in the tool calls of other servers, reported by the people who ran them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dgpp_core.testing.tool_replies import RULES, ToolReply, dialect, pieces_of
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tools.detect import DIALECTS
from dgpp_core.text.tools.dialect import Call
from dgpp_core.text.tools.parser import CallParser
from dgpp_core.text.tools.rules import CallRules, tool_of

NAMES = [found.name for found in DIALECTS]
every_dialect = pytest.mark.parametrize("name", NAMES)
TOOL = {"n": {"type": "integer"}, "s": {"type": "string"}, "x": {"type": "integer"}, "l": {"type": "array"}}
FEW = CallRules(tools=tuple(tool_of(name, {"properties": TOOL}) for name in ("f", "a", "b", "get_time")))


def stream(name: str, steps: Any, *, incremental: bool = False) -> tuple[str, list[list[str]]]:
    """Content and calls of a reply that comes in ``steps``, each one piece or the number of a marker."""
    return play_pieces(CallParser(dialect(name), FEW, incremental=incremental), steps)


def play_pieces(parser: CallParser, steps: Any) -> tuple[str, list[list[str]]]:
    """The same of any parser."""
    events = [event for step in steps for event in (parser.mark(step) if isinstance(step, int) else parser.push(step))]
    content, calls = "", []
    for event in [*events, *parser.finish()]:
        match type(event).__name__:
            case "Text":
                content += event.text
            case "CallOpened":
                calls.append([event.name, ""])
            case "ArgumentsDelta":
                calls[event.call][1] += event.text
    return content, calls


def cuts(name: str, calls: list[Call], generator: random.Random) -> Any:
    """The pieces of ``calls``: whole, by the character, and cut at random."""
    pieces = pieces_of(dialect(name).render(calls), dialect(name))
    yield pieces
    yield [part for piece in pieces for part in (piece if isinstance(piece, str) else [piece])]
    for _ in range(20):
        cut: list[Any] = []
        for piece in pieces:
            while isinstance(piece, str) and len(piece) > 1 and generator.random() < 0.7:
                at = generator.randrange(1, len(piece))
                cut.append(piece[:at])
                piece = piece[at:]
            cut.append(piece)
        yield cut


CALLS: list[Any] = [
    pytest.param([Call("get_time", {})], id="vllm#44326: a call without arguments vanished"),
    pytest.param([Call("f", {"s": "x"})], id="vllm#34449: arguments were lost when a step brought several tokens"),
    pytest.param([Call("f", {"s": "x", "n": 12})], id="vllm#48702: arguments were cut off at a number that came last"),
    pytest.param([Call("a", {}), Call("b", {"x": 1})], id="vllm#47901: a call after an empty one lost its arguments"),
    pytest.param([Call("f", {"n": 10, "l": []})], id="antirez/ds4#569: every argument was a string"),
]


@every_dialect
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("incremental", [False, True])
def test_calls_in_any_pieces(name: str, calls: list[Call], incremental: bool) -> None:
    expected = [[call.name, json.dumps(call.arguments)] for call in calls]
    for cut in cuts(name, calls, random.Random(3)):
        assert stream(name, cut, incremental=incremental) == ("", expected)


@every_dialect
def test_the_end_of_a_reply_inside_a_call(name: str) -> None:
    """vllm#47137: what was cut off differed between a stream and a whole reply. It is content in both."""
    whole = dialect(name).render([Call("f", {"s": "x", "n": 1})])
    pieces = [
        part for piece in pieces_of(whole, dialect(name)) for part in (piece if isinstance(piece, str) else [piece])
    ]
    literal = [part if isinstance(part, str) else dialect(name).markers[part] for part in pieces]
    for end in range(len(pieces)):
        assert stream(name, ["Sure. ", *pieces[:end]]) == ("Sure. " + "".join(literal[:end]), [])
    assert stream("glm", ["Sure. ", "<tool_call"]) == ("Sure. <tool_call", [])


@every_dialect
@pytest.mark.parametrize("start", ["</think>", "", "<think></think>\n\n"])
def test_calls_behind_closed_reasoning(name: str, start: str, cut: Any, play: Any) -> None:
    """ai-dynamo/dynamo#8636, vllm#50512: calls of a turn without reasoning went to reasoning or to content."""
    made = [Call("get_time", {}), Call("write_file", {"path": "a", "mode": 4})]
    pieces = (start, *pieces_of(dialect(name).render(made), dialect(name)))
    reply = ToolReply(dialect=dialect(name), pieces=pieces)
    for longest in (1, 64):
        found = play(reply, cut(reply, random.Random(1), longest), in_reasoning=start == "</think>")
        assert [call[1] for call in found.calls] == ["{}", '{"path": "a", "mode": 4}']
        assert (found.reasoning, found.content) == ("", "")


@every_dialect
def test_a_call_behind_a_marker_in_two_pieces(name: str, tokenizer: Any, play: Any) -> None:
    """ai-dynamo/dynamo PR 10569: ``<`` was let go, ``</think>`` never came together and the call was swallowed."""
    spoken = dialect(name)
    for at in range(1, len("</think>")):
        ids = [token for part in ("plan", "</think>"[:at], "</think>"[at:]) for token in tokenizer.encode(part)]
        ids += tokenizer.encode("\n" + spoken.render([Call("get_time", {})]))
        found = play(ToolReply(dialect=spoken, pieces=()), ids, in_reasoning=True)
        assert (found.reasoning, found.content, found.calls) == ("plan", "", [["get_time", "{}"]])


@every_dialect
def test_a_call_after_half_a_character(name: str, tokenizer: Any, play: Any) -> None:
    """tenstorrent/vllm PR 471: what ids decide must not overtake text that is still held back."""
    spoken = dialect(name)
    raw = "é".encode()[:1]
    half = next(number for number in range(tokenizer.vocab_size) if tokenizer.token_bytes(number) == raw)
    call = tokenizer.encode(spoken.render([Call("get_time", {})]))
    found = play(ToolReply(dialect=spoken, pieces=()), [*tokenizer.encode("x"), half, *call, *tokenizer.encode("y")])
    assert (found.content, found.calls) == ("x\ufffdy", [["get_time", "{}"]])


@every_dialect
def test_a_complete_call_in_reasoning_that_never_ends(name: str, cut: Any, play: Any) -> None:
    """jayleaton/glm53-tensorfold-spark patch 0620: it was dropped."""
    spoken = dialect(name)
    reply = ToolReply(
        dialect=spoken, pieces=("<think>plan ", *pieces_of(spoken.render([Call("get_time", {})]), spoken))
    )
    for longest in (1, 64):
        found = play(reply, cut(reply, random.Random(1), longest))
        assert (found.reasoning, found.content, found.calls) == ("plan", "", [["get_time", "{}"]])


def test_every_type_of_a_type_list_counts() -> None:
    """jayleaton/glm53-tensorfold-spark patch 0620: only the first did."""
    key = tool_of("f", {"properties": {"a": {"type": ["null", "integer", "string"]}}}).key("a")
    assert key.types == {"null", "integer", "string"}


def test_history_without_content_or_with_arguments_as_text() -> None:
    """The same patch: the text ``None`` stood in the prompt."""
    source = (
        "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a ~ c.id }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": part} for part in "rs"], "tool_call_id": "c"},
        ]
        assert template.render(normalise_messages(history, template)) == "user:x;assistant:;1ctool:rs;"


def test_a_long_argument_takes_linear_time() -> None:
    """Twice the text, twice the steps: nothing reads what it has read before."""
    for name in NAMES:
        call = [Call("write_file", {"path": "x" * 60_000, "content": "<" * 60_000})]
        pieces = [
            part
            for piece in pieces_of(dialect(name).render(call), dialect(name))
            for part in (piece if isinstance(piece, str) else [piece])
        ]
        parser = CallParser(dialect(name), RULES)
        longest = 0
        for piece in pieces:
            _ = parser.mark(piece) if isinstance(piece, int) else parser.push(piece)
            machine = parser._machine
            longest = max(longest, len(machine.rest) if machine else 0)
        assert parser.calls == 1
        assert longest < 600


@pytest.mark.parametrize("name", ["qwen", "compact"])
def test_json_of_a_reply_held_to_a_grammar_may_have_the_end_of_a_value_in_a_string(name: str) -> None:
    """The grammar takes every JSON text, and so a value ends where its JSON does: not at a tag inside of a string."""
    made = [
        Call("f", {"l": ["</parameter>", 'a"\\', {"b": "\\\n</parameter>\n</function>"}, *["</parameter>"] * 2000]})
    ]
    expected = [["f", json.dumps(made[0].arguments)]]
    for cut in cuts(name, made, random.Random(5)):
        assert stream(name, cut, incremental=True) == ("", expected)
    assert stream(name, pieces_of(dialect(name).render(made), dialect(name)))[1] == []


@every_dialect
def test_a_free_argument_that_comes_twice_counts_once_where_a_grammar_cannot_forbid_it(name: str) -> None:
    """A grammar has no memory for free names: the call was cut off at the second one, its arguments no JSON."""
    free = CallRules(tools=(tool_of("f", {"properties": {"n": {"type": "integer"}}, "additionalProperties": True}),))
    twice = dialect(name).render([Call("f", {"n": 1, "s": "x", "t": 2, "Zz": "y"})]).replace("Zz", "s")
    once = ("", [["f", '{"n": 1, "s": "x", "t": 2}']])
    for incremental in (True, False):
        parser = CallParser(dialect(name), free, incremental=incremental)
        content, calls = play_pieces(parser, pieces_of(twice, dialect(name)))
        assert ((content, calls) == once) == incremental
        assert incremental or (content, calls) == (twice, [])
