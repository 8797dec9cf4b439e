"""Traffic of many kinds for a long time: every dialect, tools, schemas, long prompts, and clients that leave.

The clients are the official ones, so that each stream is read by the reader that its users have. A reply that is whole
is judged: JSON by its schema, calls by theirs, a repeated request by its first reply.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anthropic
import httpx
import jsonschema
import msgspec
import openai

from dgpp_core.testing.services import RunningService

Clock = Callable[[], float]

CANCELLED = 0.3
"""Share of requests whose client leaves before the end."""
IDLE_S = 60.0
"""How long the service may take to be idle once nobody asks any more."""
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "thinks",
    "of",
    "red",
    "yellow",
    "blue",
    "paint",
]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak found.

    Attributes:
        requests: by kind; those whose client left are under ``left`` too.
        errors: what went wrong, at most 50 of them.
        judged: replies that were checked by a schema or by an earlier reply.
        counters: gauges that must be zero once all have left, and what they were.
        memory_mib: (seconds, MiB of all processes of the service) through the run.
        growth_mib_per_minute: slope of a line through the memory of the second half.
    """

    seconds: float
    requests: dict[str, int]
    errors: tuple[str, ...]
    judged: int
    counters: dict[str, int]
    memory_mib: tuple[tuple[float, float], ...]
    growth_mib_per_minute: float


class Soak:
    """One run.

    Args:
        service: what is asked.
        model: its model's id.
        tools: whether the model can call tools.
        prompt_words: words of the longest prompts.
        rng: which requests are made, and who leaves when.
    """

    def __init__(
        self, service: RunningService, model: str, clock: Clock, rng: random.Random, *, tools: bool, prompt_words: int
    ) -> None:
        self._service, self._model, self._clock, self._rng = service, model, clock, rng
        self._prompt_words = prompt_words
        limits: Any = {"api_key": "none", "max_retries": 0, "timeout": 300}
        self._openai = openai.AsyncOpenAI(base_url=service.url + "/v1", **limits)
        self._anthropic = anthropic.AsyncAnthropic(base_url=service.url, **limits)
        self._requests: Counter[str] = Counter()
        self._errors: list[str] = []
        self._known: dict[str, str] = {}
        self._judged = 0
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "chat": self._chat, "stream": self._stream, "completion": self._completion, "schema": self._schema,
            "responses": self._responses, "messages": self._messages, "choices": self._choices, "same": self._same,
        }  # fmt: skip
        if tools:
            self._kinds |= {"tools": self._tools, "tool stream": self._tool_stream, "tool use": self._tool_use}

    async def run(self, seconds: float, clients: int) -> Report:
        """Ask with ``clients`` at once for ``seconds``, then see what is left."""
        start, memory = self._clock(), []

        async def client() -> None:
            while self._clock() - start < seconds:
                await self._one()

        async def watch() -> None:
            while True:
                memory.append((self._clock() - start, self._service.resident_mib()))
                await asyncio.sleep(min(5.0, seconds / 40))

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(clients)))
        counters = await self._idle()
        watching.cancel()
        await self._openai.close()
        await self._anthropic.close()
        return Report(
            seconds=self._clock() - start,
            requests=dict(self._requests),
            errors=tuple(self._errors[:50]),
            judged=self._judged,
            counters=counters,
            memory_mib=tuple(memory),
            growth_mib_per_minute=slope(memory[len(memory) // 2 :]) * 60,
        )

    async def _one(self) -> None:
        """A request of some kind, whose client may leave at any moment."""
        kind = self._rng.choice(list(self._kinds))
        self._requests[kind] += 1
        asking = asyncio.ensure_future(self._kinds[kind]())
        leaves = self._rng.random() < CANCELLED
        try:
            await asyncio.wait_for(asking, self._rng.choice((0.01, 0.1, 0.5, 2.0)) if leaves else None)
        except TimeoutError:
            self._requests["left"] += 1
        except Exception as error:  # whatever a client makes of it, it is a finding
            self._errors.append(f"{kind}: {type(error).__name__}: {str(error)[:300]}")

    def _prompt(self) -> str:
        """A short one, or a long one that begins as others do."""
        words = self._rng.choice((3, 12, 12, self._prompt_words))
        shared = random.Random(words).choices(_WORDS, k=words)
        return " ".join([*shared, *self._rng.choices(_WORDS, k=4)])

    def _ask(self, **more: Any) -> dict[str, Any]:
        user = {"role": "user", "content": self._prompt()}
        return {"model": self._model, "messages": [user], "max_tokens": self._rng.choice((1, 8, 40, 80)), **more}

    async def _chat(self) -> None:
        reply = await self._openai.chat.completions.create(**self._ask(stop=["fox", "\n\n"]))
        assert reply.choices[0].finish_reason in ("stop", "length"), reply

    async def _stream(self) -> None:
        usage = {"include_usage": True}
        chunks = [chunk async for chunk in await self._openai.chat.completions.create(
            **self._ask(stream=True, stream_options=usage, logprobs=self._rng.random() < 0.3)
        )]  # fmt: skip
        assert sum(bool(choice.finish_reason) for chunk in chunks for choice in chunk.choices) == 1
        assert chunks[-1].usage is not None

    async def _choices(self) -> None:
        reply = await self._openai.chat.completions.create(**self._ask(n=3, max_tokens=8))
        assert [choice.index for choice in reply.choices] == [0, 1, 2]

    async def _completion(self) -> None:
        reply = await self._openai.completions.create(model=self._model, prompt=self._prompt(), max_tokens=12)
        assert reply.choices[0].finish_reason in ("stop", "length"), reply

    async def _same(self) -> None:
        """A reply never depends on what else runs: a request that was made before has the reply it had then."""
        number = self._rng.randrange(4)
        ask: Any = {"role": "user", "content": " ".join(random.Random(number).choices(_WORDS, k=10 + 60 * number))}
        reply = await self._openai.chat.completions.create(
            model=self._model, messages=[ask], max_tokens=24, temperature=0.8, seed=number
        )
        text = str(reply.choices[0].message.content)
        assert self._known.setdefault(f"same {number}", text) == text, f"seed {number}: {text!r}"
        self._judged += 1

    async def _schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
        reply = await self._openai.chat.completions.create(**self._ask(response_format=form, max_tokens=120))
        self._judge(reply.choices[0].finish_reason, reply.choices[0].message.content, PERSON)

    def _judge(self, reason: str, text: str | None, schema: Mapping[str, Any]) -> None:
        if reason not in ("length", "max_tokens"):
            jsonschema.validate(json.loads(text or ""), schema)
            self._judged += 1

    async def _responses(self) -> None:
        items: Any = [{"role": "user", "content": self._prompt()}]
        async with self._openai.responses.stream(model=self._model, input=items, max_output_tokens=30) as stream:
            events = [event async for event in stream]
        assert events[-1].type in ("response.completed", "response.incomplete"), events[-1]
        assert [event.sequence_number for event in events] == list(range(len(events)))

    async def _messages(self) -> None:
        ask = self._ask()
        async with self._anthropic.messages.stream(**ask) as stream:
            reply = await stream.get_final_message()
        assert reply.stop_reason in ("end_turn", "max_tokens"), reply

    def _ask_for_calls(self, **more: Any) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
        return self._ask(tools=[tool], tool_choice="required", max_tokens=150, **more)

    async def _tools(self) -> None:
        reply = await self._openai.chat.completions.create(**self._ask_for_calls())
        choice = reply.choices[0]
        for call in choice.message.tool_calls or ():
            self._judge(choice.finish_reason, call.function.arguments, CITY)
        assert choice.finish_reason in ("tool_calls", "length"), reply

    async def _tool_stream(self) -> None:
        reader = self._openai.chat.completions.stream(**self._ask_for_calls())
        try:
            async with reader as stream:
                reply = await stream.get_final_completion()
        except openai.LengthFinishReasonError:  # the reader's word for a call that the limit cut
            return
        for call in reply.choices[0].message.tool_calls or ():
            self._judge(reply.choices[0].finish_reason, call.function.arguments, CITY)

    async def _tool_use(self) -> None:
        tool = {"name": "weather", "input_schema": CITY, "strict": True}
        ask = self._ask(tools=[tool], tool_choice={"type": "any"}, max_tokens=150)
        async with self._anthropic.messages.stream(**ask) as stream:
            reply = await stream.get_final_message()
        for block in reply.content:
            if block.type == "tool_use":
                self._judge(str(reply.stop_reason), json.dumps(block.input), CITY)

    async def _idle(self) -> dict[str, int]:
        """What is still held once everybody has left, after `IDLE_S` at most."""
        end = self._clock() + IDLE_S
        async with httpx.AsyncClient() as client:
            while True:
                found = (await client.get(self._service.url + "/metrics")).json()
                held = _held(found)
                if not any(held.values()) or self._clock() > end:
                    return held
                await asyncio.sleep(0.2)


def _held(metrics: Mapping[str, Any]) -> dict[str, int]:
    """Gauges that are zero in a service that does nothing; blocks of the prefix cache belong to nobody."""
    scheduler, service = metrics["scheduler"], metrics["service"]
    return {
        "active": scheduler["active"],
        "queued": scheduler["queued"],
        "prefilling": scheduler["prefilling"],
        "blocks_held": scheduler["pool_blocks_in_use"] - metrics["prefix_cache"]["blocks_cached"],
        "requests_open": service["requests_open"],
        "pending_cancellations": service["pending_cancellations"],
        "requests_failed": service["requests_failed"],
        "requests_shed": service["requests_shed"],
    }


def slope(points: list[tuple[float, float]]) -> float:
    """The slope of the least-squares line through ``points``; 0 for fewer than two."""
    count = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / max(count, 1) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
