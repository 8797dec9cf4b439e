"""The official client against a real front end over loopback."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dgpp_core.testing.fake_worker import FakeScript

USER: Any = [{"role": "user", "content": "colors"}]
ANSWER = "Red, yellow and blue."


def test_whole_reply(fake: Any) -> None:
    reply = fake.openai().chat.completions.create(model="fake", messages=USER)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.id.startswith("chatcmpl-")
    assert len(reply.id) == len("chatcmpl-") + 16


def test_streamed_reply_in_the_exact_order(fake: Any) -> None:
    stream = fake.openai().chat.completions.create(
        model="fake", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[1:-2]) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].choices[0].delta.content is None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_reasoning_is_a_member_of_its_own(fake: Any) -> None:
    messages: Any = [{"role": "user", "content": "ponder"}]
    reply = fake.openai().chat.completions.create(model="fake", messages=messages)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].message.reasoning_content == "I think about it first."
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens


def test_several_choices(fake: Any) -> None:
    whole = fake.openai().chat.completions.create(model="fake", messages=USER, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {ANSWER}
    texts = ["", "", ""]
    for chunk in fake.openai().chat.completions.create(model="fake", messages=USER, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [ANSWER] * 3


def test_choices_have_seeds_of_their_own(fake: Any) -> None:
    fake.openai().chat.completions.create(model="fake", messages=USER, n=3, seed=-1)
    seeds = [message["params"]["seed"] for message in fake.messages("submit")[-3:]]
    assert seeds == [2**64 - 1, 0, 1]


def test_requests_without_a_seed_differ(fake: Any) -> None:
    """Blaizzy/mlx-vlm#1818: no seed given, yet every reply is the same."""
    for _ in range(5):
        fake.openai().chat.completions.create(model="fake", messages=USER)
    seeds = {message["params"].get("seed", 0) for message in fake.messages("submit")[-5:]}
    assert len(seeds) == 5


def test_logprobs_of_visible_tokens(fake: Any, text: Any) -> None:
    reply = fake.openai().chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == ANSWER
    ids = text.tokenizer.encode(ANSWER)
    assert [entry.logprob for entry in entries] == [-(token % 7 + 1) / 8 for token in ids]
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries)


def test_streamed_logprobs_equal_whole_ones(fake: Any) -> None:
    def ask(**fields: Any) -> Any:
        return fake.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "emoji"}], logprobs=True, top_logprobs=2, **fields
        )

    whole = ask().choices[0].logprobs.content
    streamed = [
        entry
        for chunk in ask(stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == whole


def test_stop_string(fake: Any) -> None:
    reply = fake.openai().chat.completions.create(model="fake", messages=USER, stop=["low an", "zzz"])
    assert reply.choices[0].message.content == "Red, yel"
    assert reply.choices[0].finish_reason == "stop"


def test_stop_string_ends_the_request_in_the_engine(serve_fake: Any) -> None:
    with serve_fake(FakeScript(step_ms=20)) as running:
        reply = running.chat(stop="low an", logprobs=True).json()
        (stop,) = running.await_messages("stop", 1)
        running.await_idle()
        assert running.messages("cancel") == []
        assert stop["id"] == running.messages("submit")[0]["id"]
    assert reply["choices"][0]["message"]["content"] == "Red, yel"
    entries = reply["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert spelled.startswith("Red, yel")  # the token across the cut is shown as it was sampled
    assert reply["usage"]["completion_tokens"] >= len(entries)


def test_legacy_completions(fake: Any) -> None:
    reply = fake.openai().completions.create(model="fake", prompt="colors", logprobs=2)
    assert reply.choices[0].text == ANSWER
    assert reply.object == "text_completion"
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == ANSWER
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:count])) for count in range(len(logprobs.tokens))]
    chunks = list(fake.openai().completions.create(model="fake", prompt="colors", stream=True))
    assert chunks[0].choices[0].text == ""
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_length(fake: Any) -> None:
    reply = fake.openai().chat.completions.create(model="fake", messages=USER, max_completion_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 2


def test_models(fake: Any) -> None:
    listed = fake.openai().models.list()
    assert [model.id for model in listed] == ["fake"]
    assert fake.openai().models.retrieve("fake").sampling["defaults"]["temperature"] == 0.6
    with pytest.raises(openai.NotFoundError) as raised:
        fake.openai().models.retrieve("other")
    assert raised.value.code == "model_not_found"
