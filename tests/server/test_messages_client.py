"""The official client's messages API against a real front end over loopback."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from dgpp_core.testing.fake_worker import FakeFault, FakeReply, FakeScript

ANSWER = "Red, yellow and blue."
THOUGHT = "I think about it first."
USER: Any = [{"role": "user", "content": "colors"}]


def create(running: Any, **fields: Any) -> Any:
    return running.anthropic().messages.create(**{"model": "fake", "max_tokens": 50, "messages": USER} | fields)


def asking(text: str) -> Any:
    return [{"role": "user", "content": text}]


def kinds(events: Any) -> list[str]:
    """Types of events and what they are of, those that repeat once."""
    found: list[str] = []
    for event in events:
        inner = getattr(event, "content_block", None) or getattr(event, "delta", None)
        name = f"{event.type} {getattr(inner, 'type', None)}"
        if not found or name != found[-1]:
            found.append(name)
    return found


def test_whole_message(fake: Any) -> None:
    reply = create(fake, system="Be brief.", extra_body={"temperature": 0.5}, metadata={"user_id": "u"})
    assert [block.to_dict() for block in reply.content] == [{"type": "text", "text": ANSWER}]
    assert (reply.type, reply.role, reply.stop_reason, reply.stop_sequence) == (
        "message",
        "assistant",
        "end_turn",
        None,
    )
    assert reply.id.startswith("msg_")
    assert reply._request_id == reply.id
    assert reply.usage.cache_read_input_tokens == 3
    chat = fake.chat(messages=[{"role": "system", "content": "Be brief."}, *USER]).json()["usage"]
    assert reply.usage.input_tokens + 3 == chat["prompt_tokens"]
    assert reply.usage.output_tokens == chat["completion_tokens"]
    ours, theirs = fake.messages("submit")[-2:]
    assert ours["tokens"] == theirs["tokens"]
    assert (ours["params"]["temperature"], theirs["params"]["temperature"]) == (0.5, 0.6)


def test_every_event_in_order(fake: Any) -> None:
    events = list(create(fake, messages=asking("ponder"), stream=True))
    assert kinds(events) == [
        "message_start None",
        "content_block_start thinking", "content_block_delta thinking_delta", "content_block_delta signature_delta",
        "content_block_stop None",
        "content_block_start text", "content_block_delta text_delta", "content_block_stop None",
        "message_delta None", "message_stop None",
    ]  # fmt: skip
    assert {event.index for event in events if hasattr(event, "index")} == {0, 1}
    assert events[0].message.content == []
    assert events[-2].usage.cache_read_input_tokens == 3
    assert 0 < events[-2].usage.output_tokens_details.thinking_tokens < events[-2].usage.output_tokens


@pytest.mark.parametrize("about", ["colors", "ponder", "emoji"])
def test_the_clients_own_stream_reader(fake: Any, about: str) -> None:
    with fake.anthropic().messages.stream(model="fake", max_tokens=50, messages=asking(about)) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    whole = create(fake, messages=asking(about))
    assert "".join(texts) == next(block.text for block in whole.content if block.type == "text")
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_stop_reasons(fake: Any) -> None:
    assert create(fake, max_tokens=2).stop_reason == "max_tokens"
    stopped = create(fake, stop_sequences=["zzz", "low an"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "low an")
    assert stopped.content[0].text == "Red, yel"
    with fake.anthropic().messages.stream(
        model="fake", max_tokens=50, messages=USER, stop_sequences=["low an"]
    ) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "low an")


def test_thinking(fake: Any) -> None:
    def tail(**fields: Any) -> str:
        create(fake, max_tokens=2000, **fields)
        tokens: list[int] = fake.messages("submit")[-1]["tokens"]
        fake.chat(chat_template_kwargs={"enable_thinking": False})
        without = fake.messages("submit")[-1]["tokens"]
        return "off" if tokens == without else "on"

    assert tail() == "on"
    assert tail(thinking={"type": "enabled", "budget_tokens": 1024}) == "on"
    assert tail(thinking={"type": "adaptive"}, output_config={"effort": "high"}) == "on"
    assert tail(thinking={"type": "disabled"}) == "off"
    assert tail(thinking={"type": "disabled"}, output_config={"effort": "high"}) == "off"


def test_a_conversation_with_its_thinking(fake: Any) -> None:
    first = create(fake, messages=asking("ponder"))
    turns = [*asking("ponder"), {"role": "assistant", "content": first.content}, *USER]
    assert create(fake, messages=turns).content[-1].text == ANSWER
    sent = fake.messages("submit")[-1]["tokens"]
    fake.chat(messages=[*asking("ponder"), {"role": "assistant", "content": ANSWER}, *USER])
    assert fake.messages("submit")[-1]["tokens"] == sent


def test_count_tokens(fake: Any) -> None:
    counted = fake.anthropic().messages.count_tokens(model="fake", messages=USER, system="Be brief.")
    usage = create(fake, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_clients_exceptions(fake: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(fake, model="other")
    assert missing.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": 'the model "other" is not served here; "fake" is',
            "details": {"error_code": "model_not_found"},
        },
    }
    with pytest.raises(anthropic.BadRequestError) as wrong:
        create(fake, extra_body={"top_p": 3})
    assert wrong.value.type == "invalid_request_error"
    assert "`top_p`" in str(wrong.value)


def test_overload_and_wrong_routes(serve_fake: Any, fake: Any) -> None:
    with serve_fake(FakeScript(slots=1, prefill_ms=60_000), queue_limit=0) as running:
        with running.anthropic().messages.create(model="fake", max_tokens=5, messages=USER, stream=True):
            with pytest.raises(anthropic.APIStatusError) as raised:
                create(running)
            assert (raised.value.status_code, raised.value.type) == (503, "overloaded_error")
            assert raised.value.response.headers["retry-after"] == "1"
        running.await_idle()
    for method, path, status, kind in (("GET", "/v1/messages", 405, "invalid_request_error"),
                                       ("POST", "/v1/messages/batches", 404, "not_found_error")):  # fmt: skip
        response = httpx.request(method, fake.url + path)
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind


def test_an_error_behind_the_headers(serve_fake: Any) -> None:
    with serve_fake(FakeScript(fault=FakeFault(kind="error", after_tokens=1), step_ms=5)) as running:
        with pytest.raises(anthropic.APIStatusError) as raised:
            list(create(running, stream=True))
        assert raised.value.type == "api_error"
        assert "the engine gave up" in str(raised.value)
        running.await_idle()


def test_a_silence_is_filled_with_pings(serve_fake: Any) -> None:
    with serve_fake(FakeScript(prefill_ms=1300)) as running:
        body = {"model": "fake", "max_tokens": 9, "messages": USER, "stream": True, "sse_ping_interval": 1}
        raw = httpx.post(running.url + "/v1/messages", json=body, timeout=30).text
    assert raw.index("event: message_start") < raw.index('event: ping\ndata: {"type":"ping"}\n\n')
    assert raw.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize("version", [None, "2023-06-01", "2026-10-21", "2023-01-01", "latest", ""])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_version_header(fake: Any, version: str | None, path: str) -> None:
    headers = {} if version is None else {"anthropic-version": version}
    body = {"model": "fake", "max_tokens": 9, "messages": USER}
    response = httpx.post(fake.url + path, json=body, headers=headers, timeout=30)
    assert response.status_code == (200 if version in (None, "2023-06-01", "2026-10-21") else 400)
    assert response.status_code == 200 or "anthropic-version" in response.json()["error"]["message"]


def block(kind: str, **fields: Any) -> Any:
    return {"type": kind, **fields}


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "assistant", "content": "So"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [block("video")]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [block("text", text="x"), block("image", source={
        "type": "base64", "media_type": "image/png", "data": "AA"})]}]}, "messages[0].content[1].type"),
    ({"messages": [{"role": "user", "content": [block("image", source={"type": "url", "url": "http://127.0.0.1/"})]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [block("image", source={"type": "elsewhere"})]}]},
     "messages[0].content[0].source.type"),
    ({"messages": [{"role": "user", "content": [block("image", source={"type": "file"})]}]},
     "messages[0].content[0].source"),
    ({"messages": [{"role": "user", "content": [block("thinking", thinking="x")]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [block("tool_result", tool_use_id="a")]}, *USER]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [block("tool_result", tool_use_id="a", content="x")]}]},
     "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [block("tool_use", id="a", name="f", input=[])]}, *USER]},
     "messages[0].content[0].input"),
    ({"system": 5}, "system"),
    ({"system": [block("image")]}, "system[0].type"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, "thinking"),
    ({"chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs.mood"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"context_management": {"edits": 5}}, "context_management"),
    ({"context_management": "all"}, "context_management"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_bad_field(fake: Any, fields: dict[str, Any], named: str) -> None:
    body = {"model": "fake", "max_tokens": 50, "messages": USER} | fields
    response = httpx.post(fake.url + "/v1/messages", json=body, timeout=30)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]


def test_what_has_no_effect_is_taken(fake: Any) -> None:
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    cached = [block("text", text="colors", cache_control={"type": "ephemeral"})]
    reply = create(
        fake, messages=[{"role": "user", "content": cached}], service_tier="auto", metadata={"user_id": "u"},
        extra_body={"context_management": kept}, extra_headers={"anthropic-beta": "context-management-2025-06-27"},
    )  # fmt: skip
    assert reply.content[0].text == ANSWER


def test_a_model_that_does_not_think(serve_fake: Any, write_checkpoint: Any, tmp_path: Any) -> None:
    plain = write_checkpoint(tmp_path, (), "{% for m in messages %}{{ m.content }}{% endfor %}")
    with serve_fake(model=plain) as running:
        assert create(running, thinking={"type": "disabled"}).content[0].text == ANSWER
        with pytest.raises(anthropic.BadRequestError, match="does not think"):
            create(running, thinking={"type": "adaptive"})


def test_output_format_holds_the_reply(serve_fake: Any) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    with serve_fake(FakeScript(constrained=True, replies=(FakeReply(text='{"name": "x"}'),))) as running:
        form = {"type": "json_schema", "schema": schema}
        assert json.loads(create(running, output_config={"format": form}).content[0].text) == {"name": "x"}
        running.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        ours, theirs = running.messages("submit")
        assert ours["grammar"] == theirs["grammar"] is not None
        bad = {"type": "json_schema", "schema": {"properties": {"a": {"uniqueItems": True}}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema\.properties\.a\.uniqueIt"):
            create(running, output_config={"format": bad})
