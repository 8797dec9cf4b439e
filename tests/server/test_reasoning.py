"""What a request may set in the chat template, for each kind of template."""

from __future__ import annotations

from typing import Any

import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.server.reasoning import EFFORTS, effort_mapping, template_variables, without_effect
from dgpp_core.testing.fake_worker import FakeScript
from dgpp_core.text.switches import Switches

LEVELS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""What a template may call the efforts."""
KINDS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "none": (set(), ()),
    "switch": ({"enable_thinking", "clear_thinking"}, ("enable_thinking",)),
    "effort": ({"reasoning_effort"}, ()),
    "both": ({"reasoning_effort", "thinking"}, ("thinking",)),
}


def resolve(kind: str, effort: str | None = None, **kwargs: Any) -> dict[str, Any]:
    variables, switches = KINDS[kind]
    mapping = effort_mapping(LEVELS if "reasoning_effort" in variables else {}, switches)
    return template_variables(effort, kwargs, efforts=mapping, variables=variables, switches=switches)


def test_what_each_kind_offers() -> None:
    assert effort_mapping({}, ()) == {}
    assert list(effort_mapping({}, ("thinking",))) == list(EFFORTS)
    assert list(effort_mapping(LEVELS, ())) == list(EFFORTS[1:])
    assert list(effort_mapping(LEVELS, ("thinking",))) == list(EFFORTS)


@pytest.mark.parametrize(
    ("kind", "effort", "kwargs", "expected"),
    [
        ("none", None, {}, {}),
        ("none", None, {"enable_thinking": None}, {}),
        ("switch", "none", {}, {"enable_thinking": False}),
        ("switch", "low", {}, {"enable_thinking": True}),
        ("switch", None, {"thinking": False}, {"enable_thinking": False}),
        ("switch", None, {"thinking": True, "enable_thinking": True}, {"enable_thinking": True}),
        ("switch", None, {"clear_thinking": False}, {"clear_thinking": False}),
        ("effort", "max", {}, {"reasoning_effort": "high"}),
        ("effort", None, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("effort", "low", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("both", "none", {"enable_thinking": False}, {"thinking": False}),
        ("both", "medium", {"thinking": True}, {"thinking": True, "reasoning_effort": "medium"}),
    ],
)
def test_settings(kind: str, effort: str | None, kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    assert resolve(kind, effort, **kwargs) == expected


@pytest.mark.parametrize(
    ("kind", "effort", "kwargs", "param", "code"),
    [
        ("none", "low", {}, "reasoning_effort", "unsupported_reasoning_effort"),
        ("none", "none", {}, "reasoning_effort", "unsupported_reasoning_effort"),
        ("none", None, {"enable_thinking": False}, "chat_template_kwargs.enable_thinking", "unsupported_parameter"),
        ("effort", "none", {}, "reasoning_effort", "unsupported_reasoning_effort"),
        ("effort", None, {"thinking": True}, "chat_template_kwargs.thinking", "unsupported_parameter"),
        ("effort", "low", {"reasoning_effort": "high"}, "chat_template_kwargs.reasoning_effort", None),
        ("effort", None, {"reasoning_effort": 3}, "chat_template_kwargs.reasoning_effort",
         "unsupported_reasoning_effort"),
        ("switch", "none", {"thinking": True}, "chat_template_kwargs", None),
        ("switch", "high", {"enable_thinking": False}, "chat_template_kwargs", None),
        ("switch", None, {"enable_thinking": True, "thinking": False}, "chat_template_kwargs.thinking", None),
        ("switch", None, {"enable_thinking": 1}, "chat_template_kwargs.enable_thinking", None),
        ("switch", None, {"preserve_thinking": True}, "chat_template_kwargs.preserve_thinking",
         "unsupported_parameter"),
        ("switch", None, {"mood": "good"}, "chat_template_kwargs.mood", "unsupported_parameter"),
    ],
)  # fmt: skip
def test_refusals(kind: str, effort: str | None, kwargs: dict[str, Any], param: str, code: str | None) -> None:
    """A switch that changes nothing is refused, never a silent no-op; so is a contradiction."""
    with pytest.raises(RequestError) as raised:
        resolve(kind, effort, **kwargs)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


@pytest.mark.parametrize(
    ("effort", "kwargs", "cause"),
    [
        (None, {"enable_thinking": True}, "the chat template of the checkpoint has no thinking switch"),
        (None, {"clear_thinking": True}, "the chat template of the checkpoint does not read it"),
        ("low", {}, "available: none at all"),
    ],
)
def test_a_refusal_of_the_template_says_why_and_what_to_do(effort: str, kwargs: dict[str, Any], cause: str) -> None:
    with pytest.raises(RequestError) as raised:
        resolve("none", effort, **kwargs)
    assert cause in raised.value.what
    assert raised.value.hint.startswith("leave it out")


@pytest.mark.parametrize(
    ("switches", "follows"),
    [
        (Switches(ignored=("enable_thinking",)), "a request that turns thinking on or off gets a 400; where"),
        (Switches(ignored=("reasoning_effort", "clear_thinking")),
         "an effort gets a 400; clear_thinking may be sent and changes nothing; where"),
        (Switches(("thinking",), ignored=("deep", "reasoning_effort")),
         "requests turn thinking on and off through thinking alone; "
         "reasoning_effort only turns thinking on or off, through thinking; where"),
    ],
)  # fmt: skip
def test_what_the_log_says_of_idle_variables(switches: Switches, follows: str) -> None:
    assert without_effect(switches).startswith(follows)


def test_thinking_off_starts_in_the_answer(fake: Any) -> None:
    """ai-dynamo/dynamo#8636: with thinking off the prompt closes it, and the reply is no reasoning."""
    reply = fake.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert reply["choices"][0]["message"] == {
        "role": "assistant", "content": "Red, yellow and blue.", "refusal": None,
    }  # fmt: skip
    models = fake.openai().models.retrieve("fake")
    assert models.reasoning["effort_mapping"]["none"] == {"enable_thinking": False}


def test_a_budget_goes_with_the_request_and_holds_nothing_else(serve_fake: Any) -> None:
    with serve_fake(FakeScript(constrained=True)) as running:
        assert running.chat(thinking_budget=7, max_tokens=9).status_code == 200
        grammar = running.messages("submit")[-1]["grammar"]
        assert (grammar.get("source"), grammar["budget"], grammar["closer"]) == ("", 7, "</think>")
        off = running.chat(thinking_budget=7, chat_template_kwargs={"enable_thinking": False})
        assert off.status_code == 200
        assert not running.messages("submit")[-1].get("grammar")
        wrong = running.chat(thinking_budget=-1)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "thinking_budget")


def test_a_budget_that_cannot_be_kept_is_refused(fake: Any) -> None:
    refused = fake.chat(thinking_budget=7)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "constrained_decoding_unsupported"
