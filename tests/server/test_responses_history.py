"""Input items to chat messages: turns are put together again, and results stand in the order of their calls."""

from __future__ import annotations

from typing import Any

import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.server.responses.history import chat_messages, sealed
from dgpp_core.server.translate import Paths

USER = {"role": "user", "content": "x"}


def messages(items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return chat_messages(items, instructions, Paths({}))


def call(number: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": number, "name": "f", "arguments": '{"a": 1}'} | fields


def result(number: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": number, "output": output}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_text_and_instructions() -> None:
    assert messages("x", "Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    assert messages("x", "") == messages("x") == [USER]


def test_a_turn_of_the_model_is_one_message() -> None:
    found = messages([USER, thought("Hm."), said("I look."), call("a"), call("b"), said("So.")])
    assert found[0] == USER
    assert found[1:] == [
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.So.",
            "tool_calls": [
                {"id": number, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                for number in ("a", "b")
            ],
        }
    ]


def test_what_follows_a_turn_begins_another() -> None:
    assert [message["content"] for message in messages([said("a"), said("b")])] == ["a", "b"]
    again = messages([thought("1"), said("a"), thought("2"), said("b")])
    assert [(turn["reasoning_content"], turn["content"]) for turn in again] == [("1", "a"), ("2", "b")]
    after = messages([call("a"), result("a", "x"), call("b")])
    assert [message["role"] for message in after] == ["assistant", "tool", "assistant"]


def test_results_stand_in_the_order_of_their_calls() -> None:
    """sgl-project/sglang#9963 and the like: templates do not show ids, so a swapped result answers another call."""
    found = messages([USER, call("a"), call("b"), result("b", "2"), result("a", [{"type": "input_text", "text": "1"}])])
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]


def test_custom_calls() -> None:
    items = [{"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+x"},
             {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"}]  # fmt: skip
    calls = [{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "+x"}}]
    assert messages(items) == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]


@pytest.mark.parametrize("text", ["Hm.", "世界 🧑\u200d💻\n"])
def test_sealed_reasoning_comes_back(text: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed(text)}
    assert messages([item])[0]["reasoning_content"] == text


@pytest.mark.parametrize("foreign", ["gAAAA", "dgpp1.?", "dgpp1./w==", "dgpp1.é", ""])
def test_reasoning_that_another_service_sealed_is_left_out(foreign: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": foreign}
    assert messages([item, said("a")]) == [{"role": "assistant", "content": "a"}]


def test_images_are_those_of_chat() -> None:
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}]
    (found,) = messages([{"role": "user", "content": content}])
    assert found["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
    ]


def test_errors_of_chat_name_the_item() -> None:
    paths = Paths({"messages": "input"})
    chat_messages([USER, thought("x"), call("a"), call("b"), result("b", [])], "Be brief.", paths)
    assert paths.own("messages[0].content") == "instructions"
    assert paths.own("messages[1].content[3].type") == "input[0].content[3].type"
    assert paths.own("messages[2].tool_calls[1].function.arguments") == "input[3].arguments"
    assert paths.own("messages[3].content[0].type") == "input[4].output[0].type"
    assert paths.own("messages[30]") == "input[30]"
    assert paths.own("seed") == "seed"
    with pytest.raises(RequestError) as raised, paths.renamed():
        raise RequestError("messages[2].tool_calls[0] is bad", param="messages[2].tool_calls[0]", code="x")
    assert (raised.value.what, raised.value.param, raised.value.code) == ("input[2] is bad", "input[2]", "x")
