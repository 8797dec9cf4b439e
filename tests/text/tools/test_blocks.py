"""What is a call and what is not, form by form."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dgpp_core.testing.tool_replies import RULES, ToolReply, dialect, pieces_of
from dgpp_core.text.reply import ReplyParser
from dgpp_core.text.tools.events import ArgumentsDelta, CallClosed, CallOpened
from dgpp_core.text.tools.parser import CallParser
from dgpp_core.text.tools.rules import CallRules, custom_tool

GLM = (
    "<tool_call>f<tool_call>g</tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>g</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call> \n</tool_call>",
    "<tool_call>get time</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "<tool_call>" + "f" * 65 + "</tool_call>",
    "<tool_call>f<arg_value>1</arg_value></tool_call>",
    "<tool_call>f<arg_key>a</arg_key></tool_call>",
    "<tool_call>f<arg_key>a</arg_key>1</tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_key>b</arg_key><arg_value>1</arg_value></tool_call>",
    "<tool_call>f<arg_key> </arg_key><arg_value>1</arg_value></tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_value>2</arg_value></tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key> a</arg_key><arg_value>1</arg_value></tool_call>",
    "<tool_call>f</arg_key></tool_call>",
    "<tool_call>f<arg_key>a",
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",
    "<tool_call>f",
    "<tool_call>",
    "a</tool_call>b",
    "</arg_value> <arg_key>k</arg_key>",
    "Write <tool_call> before and </tool_call> after it. ",
)
XML = (
    "<tool_call><function=f><tool_call></function></tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>f</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<tool_call><function=></function></tool_call>",
    "<tool_call><function=a b></function></tool_call>",
    "<tool_call><function=f>\n<parameter=a>\n1\n</function></tool_call>",
    "<tool_call><function=f><parameter=>1</parameter></function></tool_call>",
    "<tool_call><function=f><parameter=a>1</parameter>x</function></tool_call>",
    "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter></function></tool_call>",
    "<tool_call><function=f><parameter=a>1</parameter></tool_call>",
    "<tool_call><function=f></function><function=g></function></tool_call>",
    "<tool_call><function=f></function>",
    "<tool_call><function=f",
    "</tool_call>",
)
T = "\uff5cDSML\uff5c"
DSML = (
    f"<{T} calls>\n</{T} calls>",
    f'<{T} calls>\n<{T} invoke name="f">\n</{T} invoke>\n',
    f'<{T} calls>\n<{T} invoke name="a b">\n</{T} invoke>\n</{T} calls>',
    f'<{T} calls>\n<{T} invoke name="f" x>\n</{T} invoke>\n</{T} calls>',
    f'<{T} calls>\n<{T} invoke name="f">\n<{T} parameter name="a" string="yes">1</{T} parameter>\n</{T} invoke>\n',
    f'<{T} calls>\n<{T} invoke name="f">\n<{T} parameter name="a">1</{T} invoke>\n</{T} calls>',
    f'<{T} calls>\n<{T} invoke name="f">\n</{T} invoke>\nand <{T} invoke name="g">\n</{T} invoke>\n</{T} calls>',
    f'<{T} calls>\n<{T} invoke name="f">\n<{T} calls>\n',
    f"<{T} tools>",
    f"{T} calls>",
    f"</{T} calls>",
    f"a < b <{T}",
    "<",
)
CASES = [
    (name, text) for name, texts in (("glm", GLM), ("qwen", XML), ("compact", XML), ("dsml", DSML)) for text in texts
]


def reply(name: str, text: str) -> ToolReply:
    return ToolReply(dialect=dialect(name), pieces=pieces_of(text, dialect(name)))


def read(name: str, text: str, cut: Any, play: Any, **options: Any) -> Any:
    """What is found in ``text``, which must be the same from single bytes and from long tokens."""
    found = [
        play(reply(name, text), cut(reply(name, text), random.Random(1), longest), **options) for longest in (1, 64)
    ]
    assert (found[0].content, found[0].reasoning, found[0].calls) == (
        found[1].content, found[1].reasoning, found[1].calls,
    )  # fmt: skip
    return found[1]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_what_is_no_call_is_text(name: str, text: str, cut: Any, play: Any) -> None:
    for before, after in (("", ""), ("A \n", " \nB\n")):
        found = read(name, before + text + after, cut, play)
        assert (found.content, found.calls) == (before + text + after, [])


@pytest.mark.parametrize(("name", "text"), CASES)
def test_what_is_no_call_does_not_hide_the_next_one(name: str, text: str, cut: Any, play: Any) -> None:
    spoken = dialect(name)
    call = {
        "glm": "<tool_call>g</tool_call>",
        "dsml": f'\n\n<{T} calls>\n<{T} invoke name="g">\n</{T} invoke>\n</{T} calls>',
    }.get(name, "<tool_call><function=g></function></tool_call>")
    found = read(name, f"{text} y {spoken.markers[-1]}. {call}", cut, play)
    assert found.calls == [["g", "{}"]]
    assert found.content == f"{text} y {spoken.markers[-1]}."


@pytest.mark.parametrize("name", ["glm", "qwen", "compact", "dsml"])
def test_a_spelled_marker_is_text(name: str, cut: Any, play: Any) -> None:
    spoken = dialect(name)
    call = {
        "glm": "<tool_call>g</tool_call>",
        "dsml": f'<{T} calls><{T} invoke name="g"></{T} invoke></{T} calls>',
    }.get(name, "<tool_call><function=g></function></tool_call>")
    assert read(name, call, cut, play).calls == [["g", "{}"]]
    spelled = ToolReply(dialect=spoken, pieces=(call,))
    found = play(spelled, cut(spelled, random.Random(1), 3))
    assert (found.content, found.calls) == (call, [])


def test_white_space_around_calls(cut: Any, play: Any) -> None:
    call = "<tool_call> f\n<arg_key> a </arg_key>\n<arg_value> 1 </arg_value>\n</tool_call>"
    found = read("glm", f"A \n\n{call}\n{call}\n B", cut, play)
    assert found.content == "A\n B"
    assert found.calls == [["f", '{"a": 1}']] * 2
    assert read("glm", f"\n{call} \n", cut, play).content == ""
    assert read("glm", "A \n", cut, play).content == "A \n"
    assert read("glm", f"A{' ' * 40}{call}", cut, play).content == "A" + " " * 8


def test_forms_of_one_model_in_another(cut: Any, play: Any) -> None:
    lines = "<tool_call>\n<function=f>\n<parameter=a>\n x\n\n</parameter>\n</function>\n</tool_call>"
    one = "<tool_call><function=f><parameter=a>\nx\n</parameter></function></tool_call>"
    assert read("qwen", lines, cut, play).calls == [["f", '{"a": " x\\n"}']]
    assert read("compact", lines, cut, play).calls == [["f", '{"a": " x\\n"}']]
    assert read("qwen", one, cut, play).calls == [["f", '{"a": "x"}']]
    assert read("compact", one, cut, play).calls == [["f", '{"a": "\\nx\\n"}']]


def test_marked_values(cut: Any, play: Any) -> None:
    def value(mark: str, text: str, key: str = "z") -> str:
        block = (
            f'<{T} calls>\n<{T} invoke name="space::write_file">\n<{T} parameter name="{key}"{mark}>{text}'
            f"</{T} parameter>\n</{T} invoke>\n</{T} calls>"
        )
        ((name, arguments),) = read("dsml", block, cut, play).calls
        assert name == "write_file"
        return str(arguments)

    assert value(' string="true"', "5") == '{"z": "5"}'
    assert value(' string="false"', "5") == '{"z": 5}'
    assert value("", "[1,2]") == '{"z": [1, 2]}'
    assert value(' string="false"', "five") == '{"z": "five"}'
    assert value(' string="true"', "5", "mode") == '{"mode": "5"}'
    assert value(' string="false"', "5", "path") == '{"path": "5"}'
    assert value(' string="false"', '"a"', "path") == '{"path": "a"}'


def test_special_tokens_of_an_argument_stay(tokenizer: Any, play: Any) -> None:
    """Elsewhere they are hidden; a file that an agent writes may be about them."""
    ids = [tokenizer.id_of("<|user|>"), *tokenizer.encode("<tool_call>f<arg_key>a</arg_key><arg_value>x<|user|>y")]
    ids += tokenizer.encode("</arg_value></tool_call>")
    assert play(reply("glm", ""), ids).calls == [["f", '{"a": "x<|user|>y"}']]


def test_an_argument_streams_as_it_comes(tokenizer: Any) -> None:
    parser = CallParser(dialect("glm"), RULES, incremental=True)
    parser.mark(0)
    assert parser.push("write_file") == []
    assert parser.mark(2) == [CallOpened(0, "write_file")]
    assert parser.push("path") == []
    assert parser.mark(3) == [ArgumentsDelta(0, '{"path": "')]
    assert parser.mark(4) == []
    assert parser.push('a"') == [ArgumentsDelta(0, 'a\\"')]
    assert parser.mark(5) == [ArgumentsDelta(0, '"')]
    parser.mark(2)
    parser.push("mode")
    assert parser.mark(3) == [ArgumentsDelta(0, ', "mode": ')]
    parser.mark(4)
    assert parser.push("4") + parser.push("20") == [], "a number is held until it is known to be one"
    assert parser.mark(5) == [ArgumentsDelta(0, "420")]
    assert parser.mark(1) == [ArgumentsDelta(0, "}"), CallClosed(0)]


def test_a_call_that_is_out_keeps_what_it_has(cut: Any, play: Any) -> None:
    text = "A <tool_call>write_file<arg_key>path</arg_key><arg_value>ab"
    found = read("glm", text, cut, play, incremental=True)
    assert (found.content, found.calls, found.closed) == ("A", [["write_file", '{"path": "ab']], 0)
    assert read("glm", text, cut, play).content == text


@pytest.mark.parametrize("incremental", [False, True])
def test_calls_and_reasoning(cut: Any, play: Any, incremental: bool) -> None:
    call = "<tool_call>f</tool_call>"
    found = read("glm", f"plan\n{call}</think>", cut, play, in_reasoning=True, incremental=incremental)
    assert (found.reasoning, found.content, found.calls) == ("plan", "</think>", [["f", "{}"]])
    found = read("glm", f"<think>plan</think>\n\n{call}", cut, play, incremental=incremental)
    assert (found.reasoning, found.content, found.calls) == ("plan", "", [["f", "{}"]])
    found = read("glm", f" \n{call}", cut, play, incremental=incremental)
    assert (found.reasoning, found.content, found.calls) == ("", "", [["f", "{}"]])
    text = "write <tool_call> f, or <tool_call>f<arg_value> or <tool_call>"
    found = read("glm", f"{text}</think>A {call}", cut, play, in_reasoning=True)
    assert (found.reasoning, found.content, found.calls) == (text, "A", [["f", "{}"]])
    found = read("glm", "x</thi<tool_call>f</tool_call>", cut, play, in_reasoning=True)
    assert (found.reasoning, found.calls) == ("x</thi", [["f", "{}"]])


@pytest.mark.parametrize(("block", "ends"), [("<tool_call>f</tool_call>", True), ("<tool_call>f f</tool_call>", False)])
def test_reasoning_tokens_end_before_a_call(tokenizer: Any, block: str, ends: bool) -> None:
    parser = ReplyParser(
        tokenizer, reasoning=("<think>", "</think>"), in_reasoning=True, calls=CallParser(dialect("glm"), RULES)
    )
    ids = [tokenizer.id_of("Q")] * 3 + tokenizer.encode(block)
    for number in ids:
        parser.push(number)
    parser.finish()
    assert parser.reasoning_tokens == (3 if ends else len(ids))


def test_a_stop_string_does_not_span_a_call(cut: Any, play: Any) -> None:
    text = "xA<tool_call>f</tool_call>By AB<tool_call>g</tool_call>"
    found = read("glm", text, cut, play, stops=("AB",))
    assert (found.content, found.calls) == ("xABy ", [["f", "{}"]])


@pytest.mark.parametrize("incremental", [False, True])
def test_custom_calls(cut: Any, play: Any, incremental: bool) -> None:
    rules = CallRules(tools=(custom_tool("g"),))
    text = 'a "b"\n\\ {'

    def found(*pairs: tuple[str, str], mark: str = "true") -> Any:
        body = "".join(f'<{T} parameter name="{key}" string="{mark}">{value}</{T} parameter>' for key, value in pairs)
        block = f'<{T} calls><{T} invoke name="g">{body}</{T} invoke></{T} calls>'
        reply = ToolReply(dialect=dialect("dsml"), pieces=pieces_of(block, dialect("dsml")))
        parser = CallParser(reply.dialect, rules, incremental=incremental)
        parts = (parser.mark(piece) if isinstance(piece, int) else parser.push(piece) for piece in reply.pieces)
        return [event for part in parts for event in part]

    assert found(("input", text))[0] == CallOpened(0, "g", True)
    assert "".join(event.text for event in found(("input", text)) if isinstance(event, ArgumentsDelta)) == text
    marked = found(("input", '"x\\n"'), mark="false")
    assert "".join(event.text for event in marked if isinstance(event, ArgumentsDelta)) == "x\n"
    if not incremental:
        assert not any(isinstance(event, CallOpened) for event in found())
        assert not any(isinstance(event, CallOpened) for event in found(("other", "x")))


@pytest.mark.parametrize("shown", [True, False])
def test_markers_without_tools_are_shown_even_if_they_are_special(tokenizer: Any, shown: bool) -> None:
    parser = ReplyParser(tokenizer, reasoning=None, in_reasoning=False, shown=("<|user|>",) if shown else ())
    ids = [*tokenizer.encode("a<"), tokenizer.id_of("<|user|>"), *tokenizer.encode(" calls>")]
    text = "".join(delta.text for number in ids for delta in parser.push(number))
    assert text == ("a<<|user|> calls>" if shown else "a< calls>")
