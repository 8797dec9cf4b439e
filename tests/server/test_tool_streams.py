"""However a reply with tool calls is cut into tokens and steps, its stream is the whole reply."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import msgspec
import pytest

from dgpp_core.sampling.params import SamplingParams
from dgpp_core.server.blocks import collect
from dgpp_core.server.job import Job
from dgpp_core.server.replies import Head, chat_completion
from dgpp_core.server.served import Served
from dgpp_core.server.sse import ChatStream
from dgpp_core.testing.played import play, spell, spoken_model
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
    return spoken_model(text, spoken)


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
        batches, usage = asyncio.run(play(served, job, [*ids, *([EOS] * ended)], step, "eos" if ended else "length"))
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
