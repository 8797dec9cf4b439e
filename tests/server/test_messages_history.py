"""Turns of blocks to chat messages: results stand in the order of their calls, and nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.server.messages.history import chat_messages
from dgpp_core.server.messages.requests import InputTurn, TextBlock
from dgpp_core.server.translate import Paths

ASK = {"role": "user", "content": "x"}


def messages(turns: Any, system: Any = None, paths: Paths | None = None) -> list[dict[str, Any]]:
    return chat_messages(
        msgspec.convert(turns, list[InputTurn]),
        msgspec.convert(system, str | list[TextBlock] | None),
        paths or Paths({}),
    )


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def use(number: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": number, "name": "f", "input": given}


def result(number: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": number, "content": content} | fields


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def model(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_text_and_system() -> None:
    assert messages([ASK], "Be brief.") == [{"role": "system", "content": "Be brief."}, ASK]
    assert messages([ASK], [text("a"), text("b")])[0] == {"role": "system", "content": [text("a"), text("b")]}
    assert messages([{"role": "system", "content": "Be brief."}, user(text("a"), text("b"))]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("a"), text("b")]},
    ]


def test_what_is_not_for_the_model_is_left_out() -> None:
    """A line about billing changes with every request: in the prompt it would keep the prefix from being reused."""
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;")
    assert messages([ASK], [billing, text("a")]) == messages([ASK], [text("a")])
    assert messages([ASK], [billing]) == [ASK]


def test_a_turn_of_the_model() -> None:
    turn = model(
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, {"type": "redacted_thinking", "data": "x"},
        text("I look."), use("a", city="Köln"), use("b"),
    )  # fmt: skip
    assert messages([ASK, turn, user(result("a", "1"), result("b", "2"))])[1] == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "I look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": {}}},
        ],
    }


def test_results_stand_in_the_order_of_their_calls_before_the_rest() -> None:
    """sgl-project/sglang#9963 and the like: a template shows no ids, so a swapped result answers another call."""
    found = messages([ASK, model(use("a"), use("b")), user(text("So?"), result("b", [text("2")]), result("a", "1"))])
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [text("2")]},
        {"role": "user", "content": [text("So?")]},
    ]


@pytest.mark.parametrize(
    ("content", "failed", "shown"),
    [(None, False, ""), ("", False, ""), ("x", True, "Error: x"), ([text("x")], True, [text("Error: "), text("x")])],
)
def test_results(content: Any, failed: bool, shown: Any) -> None:
    found = messages([ASK, model(use("a")), user(result("a", content, is_error=failed))])
    assert found[2:] == [{"role": "tool", "tool_call_id": "a", "content": shown}]


def test_images_are_data_uris() -> None:
    """sgl-project/sglang PR #18630: base64 was passed on without a data URI."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert messages([user(image)])[0]["content"] == [part]
    assert messages([ASK, model(use("a")), user(result("a", [image]))])[2]["content"] == [part]


def test_errors_of_chat_name_the_block() -> None:
    paths = Paths({"tool_choice.function": "tool_choice"})
    messages([ASK, model(text("x"), use("a"), use("b")), user(text("y"), result("b", []), text("z"))], "s", paths)
    assert paths.own("messages[0].content[0].type") == "system[0].type"
    assert paths.own("messages[1].content[0].type") == "messages[0].content[0].type"
    assert paths.own("messages[2].tool_calls[1].function.name") == "messages[1].content[2].name"
    assert paths.own("messages[3].content[0].type") == "messages[2].content[1].content[0].type"
    assert paths.own("messages[4].content[1].type") == "messages[2].content[2].type"
    assert paths.own("tool_choice.function.name") == "tool_choice.name"


def test_a_reply_cannot_be_begun_for_the_model() -> None:
    with pytest.raises(RequestError) as raised:
        messages([ASK, model(text("Sure,"))])
    assert (raised.value.param, raised.value.code) == ("messages[1].role", "unsupported_parameter")
