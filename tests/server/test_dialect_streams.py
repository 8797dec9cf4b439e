"""However a reply is cut into tokens and steps, the streams of `/v1/responses` and `/v1/messages` are the whole reply.

The readers below are strict: an event out of its place, a block that is not open, or a number out of order fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from dgpp_core.sampling.params import SamplingParams
from dgpp_core.server.blocks import collect
from dgpp_core.server.job import Job
from dgpp_core.server.messages.bodies import SIGNATURE, message
from dgpp_core.server.messages.stream import MessageStream
from dgpp_core.server.replies import Head, chat_completion
from dgpp_core.server.responses.bodies import Echo, ReasoningEcho, TextEcho, response
from dgpp_core.server.responses.stream import ResponseStream
from dgpp_core.server.served import Served
from dgpp_core.testing.played import play, spell, spoken_model
from dgpp_core.testing.tool_replies import RULES, ToolReply, damaged, dialect, well_formed
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.stack import load_text
from dgpp_core.text.tools.detect import DIALECTS

EOS = 1
HEAD = Head(id="resp_0123456789abcdef", created=1, model="fake")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
THOUGHTS = ("", "", "<think>Hm.\n</think>\n\n", "<think>Hm, ")
ECHO = Echo(
    instructions=None, max_output_tokens=None, tools=(), tool_choice="auto", parallel_tool_calls=True, text=TextEcho(),
    reasoning=ReasoningEcho(), top_logprobs=0, user=None, safety_identifier=None, prompt_cache_key=None,
    seals_reasoning=False,
)  # fmt: skip
OPENAI_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANTHROPIC_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module", params=[found.name for found in DIALECTS])
def served(request: pytest.FixtureRequest, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    spoken = dialect(request.param)
    markers = ("<think>", "</think>", *spoken.markers)
    text = load_text(write_checkpoint(tmp_path_factory.mktemp("tools"), markers, TEMPLATE), None, config_eos=(EOS,))
    return spoken_model(text, spoken)


def events(raw: bytes) -> Iterator[dict[str, Any]]:
    """Events of a stream, each named as its data says."""
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        body: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        yield body


def read_response(raw: bytes, *, obfuscated: bool) -> dict[str, Any]:
    """The final response, whose items have been put together from their deltas on the way."""
    found = list(events(raw))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    open_text: str | None = None
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert ("obfuscation" in event) == (obfuscated and kind.endswith(".delta"))
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert open_text is None
            items.append(event["item"])
            open_text = ""
            continue
        assert open_text is not None
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if kind.endswith(".delta"):
            open_text += event["delta"]
        elif kind == "output_item.done":
            item = event["item"]
            whole = item.get("arguments", item.get("input")) if "call_id" in item else item["content"][0]["text"]
            assert open_text == whole
            assert (item["id"], item["type"]) == (items[-1]["id"], items[-1]["type"])
            items[-1], open_text = item, None
        elif kind.endswith("part.done"):
            assert event["part"]["text"] == open_text
        elif kind.endswith(".done"):
            assert event.get("text", event.get("arguments", event.get("input"))) == open_text
    final: dict[str, Any] = found[-1]
    assert final["type"] in ("response.completed", "response.incomplete")
    assert open_text is None
    assert final["response"]["output"] == items
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in found:
        state.handle_event(OPENAI_EVENT.validate_python(event))
    result: dict[str, Any] = final["response"]
    return result


def read_message(raw: bytes) -> dict[str, Any]:
    """What a strict client puts together, and the client's own reader with it."""
    found = list(events(raw))
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in found:
        snapshot = accumulate_event(
            event=ANTHROPIC_EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
        )
    assert [event["type"] for event in (found[0], *found[-2:])] == ["message_start", "message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in found[1:-2]:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"] | {"pieces": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            else:
                kinds = {"text": "text", "thinking": "thinking", "input_json": "partial_json"}
                blocks[-1]["pieces"] += delta[kinds[delta["type"].removesuffix("_delta")]]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
    assert not is_open
    content = []
    for block in blocks:
        pieces = block.pop("pieces")
        content.append(block | {"input": whole_input(pieces)} if block["type"] == "tool_use" else
                       block | {block["type"]: pieces})  # fmt: skip
    read = [part.to_dict() for part in snapshot.content]
    if content and content[-1].get("input") == {}:  # cut off: the client shows what there is of it
        read[-1] |= {"input": {}}
    assert read == content
    start: dict[str, Any] = found[0]["message"]
    return start | found[-2]["delta"] | {"content": content, "usage": found[-2]["usage"]}


def whole_input(pieces: str) -> Any:
    """The input of a call; nothing of one that the token limit cuts off."""
    try:
        return json.loads(pieces)
    except json.JSONDecodeError:
        return {}


def cut_off(pieces: Sequence[str | int], generator: random.Random) -> tuple[list[str | int], bool]:
    """The beginning of a reply, of any length; whether that is all of it."""
    parts = [part for piece in pieces for part in (piece if isinstance(piece, str) else [piece])]
    size = generator.randint(0, len(parts) + len(parts) // 10)
    found: list[str | int] = []
    for part in parts[:size]:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found, size >= len(parts)


def check(served: Served, reply: ToolReply, seed: int, *, held: bool = False) -> None:
    generator = random.Random(seed)
    thought = generator.choice(THOUGHTS)
    job = Job(
        tokens=(5, 6), max_tokens=4000, params=SamplingParams(), seeded=True, splits_reasoning=True, stream=True,
        calls=RULES, logprobs=generator.choice([-1, 2]), stops=generator.choice([(), (), ("yellow", "世")]), echo=ECHO,
        obfuscate=generator.random() < 0.5, grammar=Grammar(source="", ends=(EOS,)) if held else None,
    )  # fmt: skip
    tokenizer = served.text.tokenizer
    pieces: Sequence[str | int] = (thought, *reply.pieces)
    ended = generator.random() < 0.7
    if held:
        pieces, ended = cut_off(pieces, generator)
    seen = []
    for longest, step in ((1, generator.randint(1, 8)), (64, 1), (64, generator.randint(2, 8))):
        ids = [*spell(served, pieces, longest, generator), *([EOS] * ended)]
        batches, usage = asyncio.run(play(served, job, ids, step, "eos" if ended else "length"))
        choices = collect((event for batch in batches for event in batch), 1)
        chat = json.loads(msgspec.json.encode(chat_completion(HEAD, job, choices, usage, tokenizer)))["choices"][0]

        ours = ResponseStream(HEAD, job, tokenizer, os.urandom)
        raw = ours.begin() + b"".join(map(ours.encode, batches)) + ours.end(usage)
        whole = json.loads(msgspec.json.encode(response(HEAD, job, choices, usage, tokenizer)))
        assert read_response(raw, obfuscated=job.obfuscate) == whole
        compare_response(whole, chat)

        theirs = MessageStream(HEAD, job, tokenizer, os.urandom)
        raw = theirs.begin() + b"".join(map(theirs.encode, batches)) + theirs.end(usage)
        turn = json.loads(msgspec.json.encode(message(HEAD, job, choices, usage, tokenizer)))
        assert read_message(raw) == turn
        compare_message(turn, chat)
        for part in whole["output"]:  # tokens are cut as the engine cuts them
            for entry in part.get("content", ()):
                entry.pop("logprobs", None)
        seen.append((whole["output"], whole["status"], turn["content"], turn["stop_reason"], turn["stop_sequence"]))
    assert all(other == seen[0] for other in seen)


def compare_response(whole: dict[str, Any], chat: dict[str, Any]) -> None:
    """The response says what the chat reply says."""
    items, told = whole["output"], chat["message"]
    texts = [part for item in items if item["type"] == "message" for part in item["content"]]
    assert "".join(part["text"] for part in texts) == (told["content"] or "")
    thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
    assert "".join(thoughts) == told.get("reasoning_content", "")
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    assert calls == [(call["id"], *call["function"].values()) for call in told.get("tool_calls", ())]
    assert (whole["status"] == "incomplete") == (chat["finish_reason"] == "length")
    if chat["logprobs"] is not None:
        assert [entry for part in texts for entry in part["logprobs"]] == chat["logprobs"]["content"]


def compare_message(turn: dict[str, Any], chat: dict[str, Any]) -> None:
    """The message says what the chat reply says."""
    blocks, told = turn["content"], chat["message"]
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == (told["content"] or "")
    thoughts = [block for block in blocks if block["type"] == "thinking"]
    assert "".join(block["thinking"] for block in thoughts) == told.get("reasoning_content", "")
    assert all(block["signature"] == SIGNATURE for block in thoughts)
    calls = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert calls == [
        (call["id"], call["function"]["name"], whole_input(call["function"]["arguments"]))
        for call in told.get("tool_calls", ())
    ]
    reasons = {"stop": ("end_turn", "stop_sequence"), "length": ("max_tokens",), "tool_calls": ("tool_use",)}
    assert turn["stop_reason"] in reasons[chat["finish_reason"]]
    assert (turn["stop_reason"] == "stop_sequence") == (turn["stop_sequence"] is not None)


@pytest.mark.parametrize("part", range(4))
def test_well_formed(served: Served, part: int) -> None:
    assert served.text.tools is not None
    for seed in range(part * 10, part * 10 + 10):
        check(served, well_formed(served.text.tools, random.Random(seed)), seed)


@pytest.mark.parametrize("part", range(4))
def test_damaged(served: Served, part: int) -> None:
    assert served.text.tools is not None
    for seed in range(part * 10, part * 10 + 10):
        check(served, damaged(served.text.tools, random.Random(seed)), seed)


@pytest.mark.parametrize("part", range(2))
def test_held_to_a_grammar_and_cut_off_anywhere(served: Served, part: int) -> None:
    """vllm#37937: a token limit inside of a call ended the stream with an exception."""
    assert served.text.tools is not None
    for seed in range(part * 10, part * 10 + 10):
        check(served, well_formed(served.text.tools, random.Random(seed)), seed, held=True)
