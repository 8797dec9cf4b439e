"""The official client's responses API against a real front end over loopback."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from dgpp_core.testing.fake_worker import FakeFault, FakeReply, FakeScript

ANSWER = "Red, yellow and blue."
THOUGHT = "I think about it first."
LIFE = ["response.created", "response.in_progress"]
TEXT = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING = [name.replace("output_text", "reasoning_text") for name in TEXT]


def create(running: Any, **fields: Any) -> Any:
    return running.openai().responses.create(**{"model": "fake", "input": "colors"} | fields)


def kinds(events: Any) -> list[str]:
    """Types of events, those that repeat once."""
    found: list[str] = []
    for event in events:
        if not found or event.type != found[-1]:
            found.append(event.type)
    return found


def test_whole_response(fake: Any) -> None:
    reply = create(fake, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, max_output_tokens=50)
    assert reply.output_text == ANSWER
    assert reply.status == "completed"
    assert reply.id.startswith("resp_")
    (item,) = reply.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert (reply.instructions, reply.temperature, reply.top_p) == ("Be brief.", 0.5, 0.9)
    assert (reply.metadata, reply.max_output_tokens) == ({"a": "b"}, 50)
    assert (reply.tools, reply.tool_choice, reply.parallel_tool_calls) == ([], "auto", True)
    assert reply.error is reply.incomplete_details is reply.previous_response_id is None


def test_every_event_in_order(fake: Any) -> None:
    events = list(create(fake, input="ponder", stream=True))
    assert kinds(events) == [*LIFE, *REASONING, *TEXT, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert all(len(event.model_extra["obfuscation"]) >= 16 for event in deltas)
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert [event.item.id for event in events if event.type == "response.output_item.added"] == [
        item.id for item in final.output
    ]
    assert {event.output_index for event in events if hasattr(event, "output_index")} == {0, 1}
    assert final.output[0].content[0].text == THOUGHT
    assert final.output_text == ANSWER
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens


@pytest.mark.parametrize("about", ["colors", "ponder", "emoji"])
def test_the_clients_own_stream_reader(fake: Any, about: str) -> None:
    with fake.openai().responses.stream(model="fake", input=about) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    whole = create(fake, input=about)
    assert "".join(texts) == final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert [item.content[0].text for item in final.output] == [item.content[0].text for item in whole.output]
    assert final.usage == whole.usage


def test_the_token_limit_makes_it_incomplete(fake: Any) -> None:
    reply = create(fake, max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    events = list(create(fake, max_output_tokens=2, stream=True))
    assert kinds(events) == [*LIFE, *TEXT, "response.incomplete"]
    assert events[-1].response.output_text == reply.output_text
    assert events[-2].item.status == "incomplete"


def test_logprobs(fake: Any) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = create(fake, **fields).output
    entries = item.content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = list(create(fake, stream=True, **fields))
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in entries]


def test_a_conversation_with_its_reasoning(fake: Any) -> None:
    first = create(fake, input="ponder", include=["reasoning.encrypted_content"])
    assert first.output[0].encrypted_content
    turn = [{"role": "user", "content": "ponder"}, *first.output, {"role": "user", "content": "colors"}]
    assert create(fake, input=turn).output_text == ANSWER
    sent = fake.messages("submit")[-1]["tokens"]
    chat = [{"role": "user", "content": "ponder"}, {"role": "assistant", "content": ANSWER}, *SAID]
    fake.chat(messages=chat)
    assert fake.messages("submit")[-1]["tokens"] == sent


def test_input_tokens(fake: Any) -> None:
    fields: Any = {"model": "fake", "input": [{"role": "user", "content": [{"type": "input_text", "text": "colors"}]}]}
    counted = fake.openai().responses.input_tokens.count(**fields)
    assert counted.input_tokens == fake.openai().responses.create(**fields).usage.input_tokens


def test_errors_are_the_clients_exceptions(fake: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        create(fake, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(fake, previous_response_id="resp_1")
    assert (wrong.value.param, wrong.value.code) == ("previous_response_id", "unsupported_parameter")
    assert "input" in wrong.value.message


def test_an_error_behind_the_headers(serve_fake: Any) -> None:
    with serve_fake(FakeScript(fault=FakeFault(kind="error", after_tokens=1), step_ms=5)) as running:
        events = list(create(running, stream=True))
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2].code == "engine_failure"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.code == "engine_failure"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        running.await_idle()


def test_a_silence_is_filled(serve_fake: Any) -> None:
    with serve_fake(FakeScript(prefill_ms=1300)) as running:
        body = {"model": "fake", "input": "colors", "stream": True, "sse_ping_interval": 1}
        raw = httpx.post(running.url + "/v1/responses", json=body, timeout=30).text
        assert raw.startswith("event: response.created\ndata: {")
        assert ": keep-alive\n\n" in raw
        assert raw.index("response.in_progress") < raw.index(": keep-alive")


SAID: Any = [{"role": "user", "content": "colors"}]
CALL: Any = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "input", None),
    ({"input": []}, "input", None),
    ({"input": ""}, "body", "ok"),
    ({"input": [5]}, "input[0]", None),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"type": []}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", None),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", None),
    ({"input": [*SAID, {"role": "user", "content": [{"type": "video"}]}]}, "input[1].content[0].type", None),
    ({"input": [*SAID, {"role": "user", "content": [{"type": "input_text", "text": ""},
      {"type": "input_image", "image_url": "data:image/png;base64,AA"}]}]}, "input[1].content[1].type",
     "unsupported_content_type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]},
     "input[0].content[0].file_url", "unsupported_parameter"),
    ({"input": [{"role": "assistant", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type",
     "unsupported_content_type"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id", None),
    ({"input": [CALL | {"arguments": "x"}]}, "input[0].arguments", "ok"),
    ({"input": [CALL | {"name": 5}]}, "input[0].name", None),
    ({"input": [*SAID, {"type": "custom_tool_call", "call_id": "a", "name": "a b", "input": ""}]}, "input[1].name",
     None),
    ({"instructions": 5}, "instructions", None),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"max_output_tokens": 10**9}, "max_output_tokens", "context_length_exceeded"),
    ({"temperature": 3}, "temperature", None),
    ({"store": True}, "store", "invalid_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"conversation": "c"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"top_logprobs": 3}, "top_logprobs", None),
    ({"include": ["everything"]}, "include[0]", None),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage",
     "unsupported_parameter"),
    ({"stream_options": {}}, "stream_options", None),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", None),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", None),
    ({"text": {"format": {"type": "json_object"}}}, "text.format", "constrained_decoding_unsupported"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", None),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools", "tools_unsupported"),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"user": 5}, "user", "invalid_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_bad_field(fake: Any, fields: dict[str, Any], param: str, code: str | None) -> None:
    response = httpx.post(fake.url + "/v1/responses", json={"model": "fake", "input": "colors"} | fields, timeout=30)
    if code == "ok":
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param.split("[")[0].split(".")[0] in error["message"]


def test_what_has_no_effect_is_taken(fake: Any) -> None:
    fields: Any = {
        "store": False, "background": False, "truncation": "disabled", "previous_response_id": None,
        "prompt_cache_key": "a", "user": "u", "safety_identifier": "s", "service_tier": "auto",
        "reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}},
    }  # fmt: skip
    reply = create(fake, **fields)
    assert reply.output_text == ANSWER
    assert (reply.prompt_cache_key, reply.user, reply.reasoning.summary) == ("a", "u", "auto")


def test_text_format_holds_the_reply(serve_fake: Any) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    with serve_fake(FakeScript(constrained=True, replies=(FakeReply(text='{"name": "x"}'),))) as running:
        reply = create(running, text={"format": form})
        assert json.loads(reply.output_text) == {"name": "x"}
        assert reply.text.format.to_dict() == form
        chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        running.chat(response_format=chat)
        ours, theirs = running.messages("submit")
        assert ours["grammar"] == theirs["grammar"] is not None
        with pytest.raises(openai.BadRequestError) as wrong:
            create(running, text={"format": form | {"schema": {"properties": {"a": {"uniqueItems": True}}}}})
        assert wrong.value.param == "text.format.schema.properties.a.uniqueItems"
        assert wrong.value.param in wrong.value.message
