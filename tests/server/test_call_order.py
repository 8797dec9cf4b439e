"""Whose result is whose: templates tell by the order, clients by ids."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dgpp_core.server.call_order import in_call_order

USER = {"role": "user", "content": "colors"}


def turn(*ids: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call: str, content: Any = None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content or f"of {call}"}


def tokens(running: Any, messages: list[Any]) -> Any:
    """The prompt that the engine gets."""
    before = len(running.messages("submit"))
    assert running.chat(messages=messages).status_code == 200
    return running.messages("submit")[before]["tokens"]


def test_results_reach_the_template_in_the_order_of_their_calls(fake: Any) -> None:
    """sglang PR 18630: ids of results were ignored, so that one call got what belonged to another."""
    turns = [("a", "b", "c"), ("d",), ("a", "e")]  # ids count within their turn
    straight = [part for ids in turns for part in (USER, turn(*ids), *map(result, ids))]
    expected = tokens(fake, [*straight, USER])
    for seed in range(5):
        generator = random.Random(seed)
        mixed = [part for ids in turns for part in (USER, turn(*ids), *map(result, generator.sample(ids, len(ids))))]
        assert tokens(fake, [*mixed, USER]) == expected
    assert tokens(fake, [USER, turn("a", "b"), result("b"), result("a")]) != tokens(
        fake, [USER, turn("b", "a"), result("b"), result("a")]
    )


def test_an_error_names_the_place_that_the_client_wrote(fake: Any) -> None:
    wrong = [USER, turn("a", "b"), result("b", [{"type": "audio"}]), result("a")]
    error = fake.chat(messages=wrong).json()["error"]
    assert error["param"] == "messages[2].content[0].type"
    assert error["param"] in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [result("a"), result("b")],
        [turn("a"), result("b"), result("a")],
        [turn("a", "b"), {"role": "tool", "tool_call_id": ["b"]}, result("a")],
        [turn("a", "b"), result("b"), USER, result("a")],
        [turn("a", "a"), result("a"), result("a")],
        [{"role": "assistant", "tool_calls": 5}, result("b"), 7, {"role": "assistant", "tool_calls": [1, {"id": []}]}],
        [],
    ],
)
def test_what_says_nothing_of_an_order_stays_as_it_is(messages: list[Any]) -> None:
    assert in_call_order(messages)[0] == messages


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([USER, result("a")], 1),
        ([USER, turn("a"), result("b")], 2),
        ([USER, turn("a", "b"), result("b"), result("c")], 3),
        ([USER, result("a"), turn("a"), result("a")], 1),
        ([USER, turn("a"), result("")], 2),
    ],
)
def test_a_result_of_no_call_is_refused(fake: Any, messages: list[Any], place: int) -> None:
    """As in the other dialects, and as OpenAI does: the template would show it as another call's."""
    error = fake.chat(messages=[*messages, USER]).json()["error"]
    assert error["param"] == f"messages[{place}].tool_call_id"
    assert error["param"] in error["message"]


def test_a_result_may_be_of_any_call_before_it(fake: Any) -> None:
    late = [USER, turn("a"), USER, result("a"), USER]
    assert fake.chat(messages=late).status_code == 200


def test_every_dialect_takes_a_turn_that_only_thinks_and_calls_without_arguments(fake: Any) -> None:
    """What the other dialects' histories become may also come as chat."""
    thinks = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    assert fake.chat(messages=[USER, thinks, USER]).status_code == 200
    empty = turn("a")
    empty["tool_calls"][0]["function"]["arguments"] = ""
    assert tokens(fake, [USER, empty, result("a")]) == tokens(fake, [USER, turn("a"), result("a")])
