"""However a reply with tool calls is cut into tokens and steps, its stream is the whole reply."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from dgpp_core.sampling.params import SamplingParams
from dgpp_core.scheduler.messages import VERSION, Ending, Output, Ready, Update
from dgpp_core.server.blocks import collect
from dgpp_core.server.engine_client import EngineClient
from dgpp_core.server.generation import Event, Generation
from dgpp_core.server.job import Job
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.replies import Head, chat_completion
from dgpp_core.server.served import Served, served_model
from dgpp_core.server.sse import ChatStream
from dgpp_core.testing.fake_worker import fake_logprobs
from dgpp_core.testing.tool_replies import RULES, ToolReply, damaged, dialect, well_formed
from dgpp_core.text.stack import load_text
from dgpp_core.text.tools.detect import DIALECTS

EOS = 1
HEAD = Head(id="chatcmpl-0123456789abcdef", created=1, model="fake")
NAMES = [found.name for found in DIALECTS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
THOUGHTS = ("", "", "<think>Hm.\n</think>\n\n", "<think>Hm, ")


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    spoken = dialect(request.param)
    markers = ("<think>", "</think>", *spoken.markers)
    text = load_text(write_checkpoint(tmp_path_factory.mktemp("tools"), markers, TEMPLATE), None, config_eos=(EOS,))
    ready = Ready(
        version=VERSION, pid=1, vocab_size=text.tokenizer.vocab_size, context_tokens=8192, position_ceiling=8192,
        pool_tokens=8192, row_exact=True, load_seconds=0, plan="",
    )  # fmt: skip
    options = ServeOptions(model="fake", served_id="fake", checkpoint="", settings=b"{}")
    return served_model(options, msgspec.structs.replace(text, tools=spoken), ready, 1)


def spell(served: Served, pieces: Sequence[str | int], longest: int, generator: random.Random) -> list[int]:
    """Ids of ``pieces``, texts cut at random into tokens of at most ``longest`` bytes."""
    tokenizer, spoken = served.text.tokenizer, served.text.tools
    assert spoken is not None
    own = {tokenizer.id_of(marker) for marker in spoken.markers}
    plain = {
        tokenizer.token_bytes(number): number
        for number in range(tokenizer.vocab_size)
        if number not in own and not tokenizer.is_special(number)
    }
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(tokenizer.id_of(spoken.markers[piece]) or 0)
            continue
        raw = piece.encode()
        while raw:
            size = generator.choice([size for size in range(1, min(longest, len(raw)) + 1) if raw[:size] in plain])
            ids.append(plain[raw[:size]])
            raw = raw[size:]
    return ids


async def generate(served: Served, job: Job, ids: Sequence[int], step: int, reason: Any) -> tuple[Any, Any]:
    """The batches of a generation whose engine gives ``step`` ids at a time, and its usage."""
    client = EngineClient(lambda messages: None, served.ready, capacity=8)
    generation = Generation(job, served, client, lambda: 7)
    batches: list[Sequence[Event]] = []

    async def read() -> None:
        batches.extend([batch async for batch in generation.batches()])

    reading = asyncio.create_task(read())
    for at in range(0, len(ids), step):
        taken = tuple(ids[at : at + step])
        logprobs = tuple(fake_logprobs(token, 2, 400) for token in taken) if job.logprobs >= 0 else None
        client.receive(Output((Update(0, taken, logprobs),), ()))
        await asyncio.sleep(0)
    client.receive(Output((), (Ending(0, reason, 0),)))
    await reading
    generation.close()
    return batches, generation.usage


def streamed(raw: bytes) -> dict[str, Any]:
    """What a strict client puts together."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "finish": []}
    for event in raw.decode().split("\n\n")[:-1]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        assert not message["finish"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append(call | {"function": dict(call["function"])})
            else:
                assert call["index"] == len(message["calls"]) - 1
                message["calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
        message["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        message["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message


def check(served: Served, reply: ToolReply, seed: int) -> None:
    generator = random.Random(seed)
    thought = generator.choice(THOUGHTS)
    job = Job(
        tokens=(5, 6), max_tokens=4000, params=SamplingParams(), seeded=True, splits_reasoning=True, stream=True,
        calls=RULES, logprobs=generator.choice([-1, 2]), stops=generator.choice([(), (), ("yellow", "世")]),
    )  # fmt: skip
    ended = generator.random() < 0.7
    messages = []
    for longest, step in ((1, 1), (1, generator.randint(2, 8)), (64, 1), (64, generator.randint(2, 8))):
        ids = spell(served, (thought, *reply.pieces), longest, generator)
        batches, usage = asyncio.run(
            generate(served, job, [*ids, *([EOS] * ended)], step, "eos" if ended else "length")
        )
        encoder = ChatStream(HEAD, job, served.text.tokenizer, os.urandom)
        stream = streamed(b"".join(encoder.encode(batch) for batch in batches))
        choices = collect((event for batch in batches for event in batch), 1)
        body = chat_completion(HEAD, job, choices, usage, served.text.tokenizer)
        whole = json.loads(msgspec.json.encode(body))["choices"][0]
        message = whole["message"]
        calls = [{key: value for key, value in call.items() if key != "index"} for call in stream["calls"]]
        assert calls == message.get("tool_calls", [])
        assert stream["content"] == (message["content"] or "")
        assert stream["reasoning"] == message.get("reasoning_content", "")
        assert (message["content"] is None) == (not stream["content"] and bool(calls))
        assert stream["finish"] == [whole["finish_reason"]]
        if job.logprobs >= 0:
            shown = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
            assert stream["logprobs"] == whole["logprobs"]["content"]
            assert job.stops or longest > 1 or shown.decode("utf-8", "replace") == stream["content"]
        messages.append((message, whole["finish_reason"]))
    assert all(other == messages[0] for other in messages)
    message, reason = messages[0]
    if reply.content is not None and not job.stops and thought != THOUGHTS[-1]:
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        ]
        assert calls == [(call.name, dict(call.arguments)) for call in reply.calls]
        assert reason == ("length" if not ended else "tool_calls" if calls else "stop")


@pytest.mark.parametrize("part", range(8))
def test_well_formed(served: Served, part: int) -> None:
    assert served.text.tools is not None
    for seed in range(part * 10, part * 10 + 10):
        check(served, well_formed(served.text.tools, random.Random(seed)), seed)


@pytest.mark.parametrize("part", range(8))
def test_damaged(served: Served, part: int) -> None:
    assert served.text.tools is not None
    for seed in range(part * 10, part * 10 + 10):
        check(served, damaged(served.text.tools, random.Random(seed)), seed)
