"""Tool conversations of both official clients against a real front end: several turns, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from dgpp_core.testing.fake_service import TOOL_TEMPLATE
from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.testing.tool_replies import dialect
from dgpp_core.text.tools.dialect import Call

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
}  # fmt: skip
CALLS = (Call("weather", {"city": '5 "Köln"\n', "days": 3}), Call("get_time", {}), Call("weather", {"city": "世界"}))
INPUTS = [dict(call.arguments) for call in CALLS]
PATCH = '*** Begin\n-"5"\n+\\n é\n'
FLAT: Any = [
    {"type": "function", "name": "weather", "description": "é", "parameters": SCHEMA},
    {"type": "function", "name": "get_time"},
]
BLOCKS: Any = [
    {"name": "weather", "description": "é", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
ASK: Any = [{"role": "user", "content": "colors"}]


@pytest.fixture(scope="module", params=[False, True], ids=["free", "held"])
def running(
    request: Any, serve_fake: Any, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    glm = dialect("glm")
    folder = write_checkpoint(tmp_path_factory.mktemp("glm"), ("<think>", "</think>", *glm.markers), TOOL_TEMPLATE)
    replies = (
        FakeReply(match="22 degrees", text="<think>Now I know.</think>It is warm."),
        FakeReply(match="patch", text=glm.render([Call("patch", {"input": PATCH})])),
        FakeReply(match="", text=f"<think>First it.</think>I look.{glm.render(CALLS, after_text=True)}"),
    )
    script = FakeScript(replies=replies, constrained=request.param, tokens_per_step=3)
    with serve_fake(script, model=folder, default_max_tokens=2000) as found:
        yield found


def prompt(running: Any) -> list[int]:
    """The prompt of the last request."""
    tokens: list[int] = running.messages("submit")[-1]["tokens"]
    return tokens


def chat_prompt(running: Any, messages: Any) -> list[int]:
    """The prompt that the same conversation has in the chat API."""
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in FLAT]
    assert running.chat(messages=messages, tools=tools).status_code == 200
    return prompt(running)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(running: Any, streamed: bool) -> None:
    client = running.openai()

    def turn(items: Any) -> Any:
        fields: Any = {"model": "fake", "input": items, "tools": FLAT, "seed": 5}
        seed = fields.pop("seed")
        if not streamed:
            return client.responses.create(**fields, extra_body={"seed": seed})
        with client.responses.stream(**fields, extra_body={"seed": seed}) as stream:
            return stream.get_final_response()

    first = turn(ASK)
    assert [item.type for item in first.output] == ["reasoning", "message", *["function_call"] * 3]
    calls = first.output[2:]
    assert [json.loads(call.arguments) for call in calls] == INPUTS
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 3
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": f"{at}"} for at, call in
               enumerate(calls)]  # fmt: skip
    results[1]["output"] = "22 degrees"
    history = [*ASK, *(item.to_dict() for item in first.output), results[2], results[0], results[1]]
    second = turn(history)
    ours = prompt(running)
    assert second.output_text == "It is warm."
    chat = running.openai().chat.completions.create(
        model="fake", messages=ASK, seed=5, tools=[{"type": "function", "function": {"name": "weather"}},
                                                   {"type": "function", "function": {"name": "get_time"}}],
    ).choices[0].message  # fmt: skip
    told = [{"role": "tool", "tool_call_id": call.call_id, "content": result["output"]} for call, result in
            zip(calls, results, strict=True)]  # fmt: skip
    turns = chat.to_dict() | {"tool_calls": [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]}  # fmt: skip
    assert chat_prompt(running, [*ASK, turns, *told]) == ours


@pytest.mark.parametrize("streamed", [False, True])
def test_messages(running: Any, streamed: bool) -> None:
    """sgl-project/sglang#39782: the input of all calls ended up in the first block."""
    client = running.anthropic()

    def turn(messages: Any) -> Any:
        fields: Any = {"model": "fake", "max_tokens": 2000, "messages": messages, "tools": BLOCKS}
        if not streamed:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            return stream.get_final_message()

    first = turn(ASK)
    assert [block.type for block in first.content] == ["thinking", "text", *["tool_use"] * 3]
    assert first.stop_reason == "tool_use"
    calls = first.content[2:]
    assert [call.input for call in calls] == INPUTS
    assert len({call.id for call in calls}) == 3
    results: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"{at}"} for at, call in enumerate(calls)
    ]
    results[1]["content"] = [{"type": "text", "text": "22 degrees"}]
    history = [*ASK, {"role": "assistant", "content": [block.to_dict() for block in first.content]},
               {"role": "user", "content": [results[2], results[0], results[1]]}]  # fmt: skip
    second = turn(history)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert (second.content[1].text, second.stop_reason) == ("It is warm.", "end_turn")
    counted = client.messages.count_tokens(model="fake", messages=history, tools=BLOCKS)
    assert counted.input_tokens == second.usage.input_tokens == len(prompt(running))


def test_three_calls_stream_as_three_blocks(running: Any) -> None:
    events = list(
        running.anthropic().messages.create(model="fake", max_tokens=2000, messages=ASK, tools=BLOCKS, stream=True)
    )
    inputs: dict[int, str] = {}
    for event in events:
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            inputs[event.index] = inputs.get(event.index, "") + event.delta.partial_json
    assert {index: json.loads(text) for index, text in inputs.items()} == dict(enumerate(INPUTS, 2))
    blocks = [event for event in events if event.type in ("content_block_start", "content_block_stop")]
    opened = [event for event in blocks if event.type == "content_block_start"]
    assert [event.index for event in blocks] == [index for index in range(2 + len(INPUTS)) for _ in range(2)]
    assert [event.index for event in opened] == list(range(2 + len(INPUTS)))
    assert [event.content_block.type for event in opened[2:]] == ["tool_use"] * len(INPUTS)
    assert len({event.content_block.id for event in opened[2:]}) == len(INPUTS)


def test_events_of_calls(running: Any) -> None:
    events = list(running.openai().responses.create(model="fake", input=ASK, tools=FLAT, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == INPUTS
    deltas: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    assert list(deltas.values()) == [event.arguments for event in done]
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_custom_tool(running: Any, streamed: bool) -> None:
    fields: Any = {
        "model": "fake", "input": "patch", "tools": [{"type": "custom", "name": "patch", "description": "Patch."}],
    }  # fmt: skip
    client = running.openai()
    if streamed:
        events = list(client.responses.create(**fields, stream=True))
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == PATCH
        reply = events[-1].response
    else:
        reply = client.responses.create(**fields)
    (call,) = reply.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", PATCH)
    after = [
        {"role": "user", "content": "go"}, call.to_dict(),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "22 degrees"},
    ]  # fmt: skip
    assert client.responses.create(**fields | {"input": after}).output_text == "It is warm."


PROMISES: list[tuple[Any, Any]] = [
    ("required", {"type": "any"}),
    ({"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
]


@pytest.mark.parametrize(("ours", "theirs"), PROMISES)
def test_promises(running: Any, ours: Any, theirs: Any, request: pytest.FixtureRequest) -> None:
    def ask() -> Any:
        return running.openai().responses.create(model="fake", input=ASK, tools=FLAT, tool_choice=ours)

    def message() -> Any:
        return running.anthropic().messages.create(
            model="fake", max_tokens=2000, messages=ASK, tools=BLOCKS, tool_choice=theirs
        )

    if "free" in request.node.callspec.id:
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert (refused.value.param, refused.value.code) == ("tool_choice", "constrained_decoding_unsupported")
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            message()
        return
    assert ask().tool_choice == ours or ask().tool_choice.to_dict() == ours
    first = running.messages("submit")[-1]["grammar"]
    message()
    assert running.messages("submit")[-1]["grammar"]["source"].count("weather") == first["source"].count("weather") > 0


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools[1].name", {"tools": [*FLAT[:1], {"type": "function", "name": "a b"}]}),
    ("tools[1].name", {"tools": [*FLAT[:1], *FLAT[:1]]}),
    ("tools[0].parameters", {"tools": [{"type": "function", "name": "f", "parameters": 5}]}),
    ("tools[0].name", {"tools": [{"type": "custom", "name": "a b"}]}),
    ("tools[0].format.type", {"tools": [{"type": "custom", "name": "a", "format": {"type": "x"}}]}),
    ("tools[0].format.syntax", {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}),
    ("tool_choice.name", {"tool_choice": {"type": "function", "name": "other"}}),
    ("tool_choice.type", {"tool_choice": {"type": "file_search"}}),
    ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools", "tools": []}}),
    ("tool_choice.tools[0].name",
     {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda value: json.dumps(value)[:50])
def test_refusals_name_the_flat_form(running: Any, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        running.openai().responses.create(**{"model": "fake", "input": ASK, "tools": FLAT} | fields)
    assert refused.value.param == param
    assert param in refused.value.message


def test_a_strict_schema_that_cannot_be_kept(running: Any, request: pytest.FixtureRequest) -> None:
    if "free" in request.node.callspec.id:
        pytest.skip("only of replies that are held to grammars")
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema\.properties\.a\.uniqueItems"):
        running.anthropic().messages.create(
            model="fake", max_tokens=9, messages=ASK, tools=[{"name": "f", "input_schema": bad, "strict": True}]
        )
    with pytest.raises(openai.BadRequestError) as refused:
        running.openai().responses.create(
            model="fake", input=ASK, tools=[{"type": "function", "name": "f", "parameters": bad, "strict": True}]
        )
    assert refused.value.param == "tools[0].parameters.properties.a.uniqueItems"


@pytest.mark.parametrize("streamed", [False, True])
def test_the_clients_own_agent_loop(running: Any, streamed: bool) -> None:
    made: list[Any] = []

    @anthropic.beta_tool
    def weather(city: str, days: int = 1) -> str:
        """The weather."""
        made.append((city, days))
        return "22 degrees"

    @anthropic.beta_tool
    def get_time() -> str:
        """The time."""
        made.append("time")
        return "noon"

    runner = running.anthropic().beta.messages.tool_runner(
        model="fake", max_tokens=2000, messages=ASK, tools=[weather, get_time], stream=streamed
    )
    turns = [turn.get_final_message() if streamed else turn for turn in runner]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[-1].text == "It is warm."
    assert made == [(INPUTS[0]["city"], 3), "time", ("世界", 1)]
