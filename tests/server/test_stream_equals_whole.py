"""For any reply and any way of cutting it into tokens and steps, the stream equals the whole reply.

The same ids go through `Generation` in random steps; one copy is encoded as events and read back, the other collected.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from dgpp_core.engine.operations import TokenLogprobs
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.scheduler.messages import VERSION, Ending, Output, Ready, Stop, Update
from dgpp_core.server.blocks import collect
from dgpp_core.server.engine_client import EngineClient
from dgpp_core.server.generation import Event, Generation, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.replies import Head, chat_completion, completion
from dgpp_core.server.served import Served, served_model
from dgpp_core.server.sse import ChatStream, CompletionStream
from dgpp_core.testing.fake_worker import fake_logprobs
from dgpp_core.text.stack import TextStack

WORDS = [
    "Red", " yellow", " and blue", "世界", " 🧑\u200d💻", "안녕 하세요", "\n\nUser:", " <", "</thin", "é", "\n",
    " STOP", "ß ", "\u0301",
]  # fmt: skip
HEAD = Head(id="chatcmpl-0123456789abcdef", created=1, model="fake")
EOS = 1


def golden(generator: random.Random) -> str:
    """A reply, often with reasoning, full of what is hard to cut."""
    body = "".join(generator.choices(WORDS, k=generator.randint(0, 20)))
    thought = "".join(generator.choices(WORDS, k=generator.randint(0, 8)))
    return generator.choice([body, f"<think>{thought}</think>{body}", f"<think>{thought}"])


def cut(raw: bytes, vocabulary: dict[bytes, int], longest: int, generator: random.Random) -> list[int]:
    """Ids that spell ``raw``, each chosen at random among those that fit."""
    ids = []
    while raw:
        fitting = [raw[:size] for size in range(1, min(longest, len(raw)) + 1) if raw[:size] in vocabulary]
        piece = generator.choice(fitting)
        ids.append(vocabulary[piece])
        raw = raw[len(piece) :]
    return ids


@pytest.fixture(scope="module")
def served(text: TextStack, checkpoint: Any) -> Served:
    ready = Ready(
        version=VERSION, pid=1, vocab_size=text.tokenizer.vocab_size, context_tokens=4096, position_ceiling=4096,
        pool_tokens=4096, row_exact=True, load_seconds=0, plan="",
    )  # fmt: skip
    options = ServeOptions(model="fake", served_id="fake", checkpoint=str(checkpoint), settings=b"{}")
    return served_model(options, text, ready, 1)


@pytest.fixture(scope="module")
def vocabulary(text: TextStack) -> dict[bytes, int]:
    tokenizer = text.tokenizer
    ids = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)]
    return {tokenizer.token_bytes(token): token for token in ids}


async def play(
    served: Served, job: Job, replies: Sequence[Sequence[int]], reason: Any, generator: random.Random
) -> tuple[list[Sequence[Event]], Usage, list[Any]]:
    """Run ``replies`` (one a choice) through a generation in random steps; its batches, usage and what was sent."""
    sent: list[Any] = []
    client = EngineClient(sent.extend, served.ready, capacity=64)
    generation = Generation(job, served, client, lambda: 7)
    left = {choice.id: list(reply) for choice, reply in zip(generation.choices, replies, strict=True)}
    batches: list[Sequence[Event]] = []

    async def read() -> None:
        batches.extend([batch async for batch in generation.batches()])

    reading = asyncio.create_task(read())
    while left:
        updates, endings = [], []
        for request in list(left):
            size = generator.choice([0, 1, 1, 1, 2, 4])
            tokens, left[request] = tuple(left[request][:size]), left[request][size:]
            logprobs = tuple(fake_logprobs(token, 2, 400) for token in tokens) if job.logprobs >= 0 else None
            if tokens:
                updates.append(Update(request, tokens, logprobs))
            if not left[request]:
                del left[request]
                stopped = Stop(request) in sent
                endings.append(Ending(request, "stop" if stopped and generator.random() < 0.5 else reason, 5))
        client.receive(Output(tuple(updates), tuple(endings)))
        if generator.random() < 0.7:
            await asyncio.sleep(0)
    await reading
    assert generation.close() == 0
    return batches, generation.usage, sent


def read_back(raw: bytes, key: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The chunks of a stream, and its choices put together by a strict client."""
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "reasoning": "", "logprobs": [], "finish": None})
            assert choice["finish"] is None, "a chunk after the last one"
            delta = {"content": part["text"]} if key == "text" else part["delta"]
            choice["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                assert not choice["content"], "reasoning after content"
                choice["reasoning"] += delta["reasoning_content"]
            choice["logprobs"].append(part["logprobs"])
            choice["finish"] = part["finish_reason"]
    return chunks, [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("seed", range(240))
def test_chat(served: Served, vocabulary: dict[bytes, int], seed: int) -> None:
    generator = random.Random(seed)
    n = generator.choice([1, 1, 3])
    job = Job(
        tokens=(5, 6), max_tokens=4000, params=SamplingParams(), seeded=True, n=n, splits_reasoning=True,
        logprobs=generator.choice([-1, 2]), stops=generator.choice([(), (), ("\nUser:", " STOP"), ("世",)]),
        stream=True, include_usage=generator.random() < 0.5, obfuscate=generator.random() < 0.5,
        tier=generator.random() < 0.5,
    )  # fmt: skip
    longest = max(map(len, vocabulary))
    reply = golden(generator).encode()
    if generator.random() < 0.3:
        reply = reply[: generator.randint(0, len(reply))]  # the token limit may fall inside a character
    replies = [[*cut(reply, vocabulary, longest, generator), *([EOS] * (n - n // 2))] for _ in range(n)]
    reason = "eos" if replies[0] and replies[0][-1] == EOS else "length"
    batches, usage, _ = asyncio.run(play(served, job, replies, reason, generator))

    stream = ChatStream(HEAD, job, served.text.tokenizer, os.urandom)
    raw = b"".join(stream.encode(batch) for batch in batches)
    choices = collect((event for batch in batches for event in batch), n)
    whole = json.loads(msgspec.json.encode(chat_completion(HEAD, job, choices, usage, served.text.tokenizer)))
    chunks, streamed = read_back(raw, "delta")

    assert len(streamed) == n
    for ours, theirs in zip(streamed, whole["choices"], strict=True):
        assert ours["content"] == theirs["message"]["content"]
        assert ours["reasoning"] == theirs["message"].get("reasoning_content", "")
        assert ours["finish"] == theirs["finish_reason"]
        entries = [entry for part in ours["logprobs"] if part for entry in part["content"]]
        assert entries == (theirs["logprobs"]["content"] if job.logprobs >= 0 else [])
    for choice in whole["choices"]:  # however it was cut, every choice says the same
        assert choice["message"] == whole["choices"][0]["message"]
        assert choice["finish_reason"] == whole["choices"][0]["finish_reason"]
    _check_shape(chunks, job)
    expected = _plain(reply, job.stops)
    assert (streamed[0]["reasoning"], streamed[0]["content"]) == expected


def _plain(reply: bytes, stops: tuple[str, ...]) -> tuple[str, str]:
    """Reasoning and content of a whole reply, by looking at all of it at once."""
    text = reply.decode("utf-8", "replace")
    thought, content = "", text
    if text.lstrip().startswith("<think>"):
        thought, _, content = text.lstrip().removeprefix("<think>").partition("</think>")
    cuts = [content.find(stop) for stop in stops if stop in content]
    return thought, content[: min(cuts)] if cuts else content


def _check_shape(chunks: list[dict[str, Any]], job: Job) -> None:
    first: set[int] = set()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if choice["index"] not in first:
            first.add(choice["index"])
            assert choice["delta"] == {"role": "assistant", "content": ""}
        else:
            assert "role" not in choice["delta"]
        assert chunk["id"] == HEAD.id
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["system_fingerprint"] is None
        assert ("usage" in chunk) == job.include_usage
        assert chunk.get("usage") is None
        assert chunk.get("service_tier") == ("default" if job.tier else None)
        assert ("obfuscation" in chunk) == job.obfuscate
        if choice["finish_reason"] is not None:
            assert choice["delta"] == {}


@pytest.mark.parametrize("seed", range(60))
def test_completion(served: Served, vocabulary: dict[bytes, int], seed: int) -> None:
    generator = random.Random(1000 + seed)
    job = Job(
        tokens=(5, 6), max_tokens=4000, params=SamplingParams(), seeded=True, stream=True,
        logprobs=generator.choice([-1, 2]), stops=generator.choice([(), ("\nUser:", " STOP")]),
    )  # fmt: skip
    reply = golden(generator)
    ids = cut(reply.encode(), vocabulary, max(map(len, vocabulary)), generator)
    batches, usage, _ = asyncio.run(play(served, job, [[*ids, EOS]], "eos", generator))
    stream = CompletionStream(HEAD, job, served.text.tokenizer, os.urandom)
    raw = b"".join(stream.encode(batch) for batch in batches)
    choices = collect((event for batch in batches for event in batch), 1)
    whole = json.loads(msgspec.json.encode(completion(HEAD, job, choices, usage, served.text.tokenizer)))["choices"][0]
    chunks, (streamed,) = read_back(raw, "text")
    assert chunks[0]["choices"][0]["text"] == ""
    assert streamed["content"] == whole["text"]
    assert streamed["finish"] == whole["finish_reason"] == "stop"
    cuts = [reply.find(stop) for stop in job.stops if stop in reply]
    assert whole["text"] == (reply[: min(cuts)] if cuts else reply)  # a legacy reply shows its markers
    if job.logprobs >= 0:
        parts = [part for part in streamed["logprobs"] if part]
        for member, values in whole["logprobs"].items():
            assert [value for part in parts for value in part[member]] == values


def test_padding_hides_the_length(served: Served) -> None:
    job = Job(tokens=(5,), max_tokens=9, params=SamplingParams(), seeded=True, obfuscate=True)
    stream = ChatStream(HEAD, job, served.text.tokenizer, os.urandom)
    seen = set()
    for text in ["", "a", "word", "x" * 50, "世界" * 40]:
        for event in stream.encode([_piece(text)]).split(b"\n\n")[:-1]:
            assert (len(event) + 2) % 128 == 0
            padding = json.loads(event.removeprefix(b"data: "))["obfuscation"]
            assert len(padding) >= 16
            assert padding.isascii()
            assert padding.isalnum()
            seen.add(padding)
    assert len(seen) == 6


def _piece(text: str) -> Any:
    from dgpp_core.server.generation import Piece

    return Piece(0, False, text)


def test_tokens_after_a_stop_do_not_count(served: Served, vocabulary: dict[bytes, int]) -> None:
    job = Job(tokens=(5,), max_tokens=99, params=SamplingParams(), seeded=True, stops=("c",))
    ids = [vocabulary[letter.encode()] for letter in "abcdefgh"]
    batches, usage, sent = asyncio.run(play(served, job, [ids], "length", random.Random(1)))
    (choice,) = collect((event for batch in batches for event in batch), 1)
    assert choice.content == "ab"
    assert choice.finish_reason == "stop"
    assert usage.completion == 3
    assert sent.count(Stop(0)) == 1


def test_logprobs_carry_the_exact_bytes(served: Served, vocabulary: dict[bytes, int]) -> None:
    job = Job(tokens=(5,), max_tokens=99, params=SamplingParams(), seeded=True, logprobs=2)
    raw = "🧑".encode()
    ids = [vocabulary[bytes([byte])] for byte in raw]
    batches, usage, _ = asyncio.run(play(served, job, [ids], "length", random.Random(1)))
    choices = collect((event for batch in batches for event in batch), 1)
    body = chat_completion(HEAD, job, choices, usage, served.text.tokenizer)
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes) == raw
    assert logprobs.content[0].token == "\ufffd"
    assert [entry.logprob for entry in logprobs.content] == [fake_logprobs(token, 2, 400).logprob for token in ids]
    assert isinstance(fake_logprobs(1, 2, 400), TokenLogprobs)
