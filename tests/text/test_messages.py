from typing import Any

import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.template import ChatTemplate

PLAIN = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", {})
LISTS = ChatTemplate("{% for m in messages %}{% for i in m.content %}{{ i.text or i }}{% endfor %}{% endfor %}", {})
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
USER = {"role": "user", "content": "x"}


def one(message: dict[str, Any], template: ChatTemplate = PLAIN) -> dict[str, Any]:
    return normalise_messages([message], template)[0]


def call(**changes: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"a": 1}'}
    return {"id": "c1", "type": "function", "function": function} | changes


def assistant(*calls: Any, **members: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)} | members


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (USER, USER),
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "ab"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "x", "name": "n", "z": 1}, {"role": "user", "content": "x", "name": "n"}),
        ({"role": "assistant", "content": "x", "tool_calls": [], "audio": None}, {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        ({"role": "assistant", "content": "x", "reasoning_content": None}, {"role": "assistant", "content": "x"}),
        (
            {"role": "assistant", "content": "x", "reasoning_content": ""},
            {"role": "assistant", "content": "x", "reasoning_content": ""},
        ),
        (
            {"role": "tool", "content": PARTS, "tool_call_id": "c1"},
            {"role": "tool", "content": "ab", "tool_call_id": "c1"},
        ),
        ({"role": "tool", "content": [{"output": 1}]}, {"role": "tool", "content": [{"output": 1}]}),
    ],
)
def test_what_a_template_sees(given: dict[str, Any], want: dict[str, Any]) -> None:
    assert one(given) == want


def test_a_template_that_takes_lists_gets_them() -> None:
    assert one({"role": "user", "content": PARTS}, LISTS)["content"] == PARTS
    assert one({"role": "user", "content": ["a", "b"]}, LISTS)["content"] == ["a", "b"]
    assert one({"role": "tool", "content": PARTS, "tool_call_id": "c"}, LISTS)["content"] == "ab"
    with pytest.raises(RequestError) as caught:
        one({"role": "user", "content": ["a"]}, PLAIN)
    assert caught.value.param == "messages[0].content[0]"


def test_calls_have_object_arguments_and_a_missing_content_is_empty() -> None:
    arguments = [{"a": 1}, ' {"a": "é", "n": 12345678901234567890123} ', None]
    calls = [call(function={"name": "f", "arguments": value}) for value in arguments]
    found = one(assistant(*calls, content=None))
    assert found["content"] == ""
    assert [one["function"]["arguments"] for one in found["tool_calls"]] == [
        {"a": 1},
        {"a": "é", "n": 12345678901234567890123},
        {},
    ]
    assert {one["type"] for one in found["tool_calls"]} == {"function"}


def test_a_custom_call_is_a_function_call_with_one_input() -> None:
    custom = {"id": "c1", "type": "custom", "custom": {"name": "f", "input": "raw"}}
    assert one(assistant(custom))["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"input": "raw"}}}
    ]


def test_a_number_that_no_float_holds_keeps_its_spelling() -> None:
    function = {"name": "f", "arguments": '{"a": [1e400, -1e400, 1.5]}'}
    (made,) = one(assistant(call(function=function)))["tool_calls"]
    assert made["function"]["arguments"] == {"a": ["1e400", "-1e400", 1.5]}


def test_the_request_is_left_as_it_was() -> None:
    message = assistant(call(), content=None)
    before = repr(message)
    one(message)
    assert repr(message) == before


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ("hello", ""),
        ({"content": "x"}, ".role"),
        ({"role": "bot", "content": "x"}, ".role"),
        ({"role": ["user"], "content": "x"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "assistant"}, ".content"),
        ({"role": "tool", "tool_call_id": "c", "content": None}, ".content"),
        ({"role": "user", "content": [{"text": "a"}]}, ".content[0].type"),
        ({"role": "user", "content": [*PARTS, {"type": "text"}]}, ".content[2].text"),
        ({"role": "user", "content": [7]}, ".content[0]"),
        ({"role": "user", "content": "x", "name": 7}, ".name"),
        ({"role": "user", "content": "x", "refusal": "no"}, ".refusal"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, ".tool_calls"),
        ({"role": "assistant", "refusal": 7}, ".refusal"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, ".content[0].refusal"),
        ({"role": "assistant", "content": "x", "reasoning_content": 7}, ".reasoning_content"),
        ({"role": "assistant", "content": "x", "tool_calls": "c"}, ".tool_calls"),
        ({"role": "tool", "content": "x"}, ".tool_call_id"),
        ({"role": "tool", "content": [{"output": 1}], "tool_call_id": 7}, ".tool_call_id"),
        (assistant(7), ".tool_calls[0]"),
        (assistant(call(), call(type="x")), ".tool_calls[1].type"),
        (assistant(call(id=7)), ".tool_calls[0].id"),
        (assistant(call(function=None)), ".tool_calls[0].function"),
        (assistant(call(function={})), ".tool_calls[0].function.name"),
        (assistant(call(type="custom", custom={"name": "f"})), ".tool_calls[0].custom.input"),
        (assistant(call(type="custom", custom={"name": "a b", "input": ""})), ".tool_calls[0].custom.name"),
        (assistant(call(type="custom", id="", custom={"name": "f", "input": ""})), ".tool_calls[0].id"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(message: Any, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_messages([USER, message], PLAIN)
    assert (caught.value.status, caught.value.param) == (400, f"messages[1]{path}")
    assert caught.value.what.startswith(f"messages[1]{path} ")


@pytest.mark.parametrize("value", [" ", "[1]", "1", "{", '{"a": NaN}', '{"a": 1} x', '{"a":' * 100_000])
def test_arguments_that_were_cut_off_are_kept_as_text(value: str) -> None:
    found = one(assistant(call(function={"name": "f", "arguments": value})))
    assert found["tool_calls"][0]["function"]["arguments"] == {"arguments": value}


@pytest.mark.parametrize("value", [[1], 5, True])
def test_arguments_that_are_no_object(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        one(assistant(call(function={"name": "f", "arguments": value})))
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("message", "path", "code"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0].type", "unsupported_content_type"),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": ""}]},
            ".content[0].type",
            "unsupported_content_type",
        ),
        (
            {"role": "user", "content": [PARTS[0] | {"prompt_cache_breakpoint": True}]},
            ".content[0].prompt_cache_breakpoint",
            "unsupported_parameter",
        ),
        ({"role": "assistant", "content": "x", "audio": {}}, ".audio", "unsupported_parameter"),
        ({"role": "assistant", "content": "x", "function_call": {}}, ".function_call", "unsupported_parameter"),
    ],
)
def test_codes(message: dict[str, Any], path: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        one(message)
    assert (caught.value.param, caught.value.code) == (f"messages[0]{path}", code)


@pytest.mark.parametrize("messages", [[], None, "hello", {}, 7])
def test_messages_must_be_a_non_empty_array(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_messages(messages, PLAIN)
    assert caught.value.param == "messages"
