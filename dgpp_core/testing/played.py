"""Replies played through a front end's generation as an engine would give them: any ids, any number at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec

from dgpp_core.scheduler.messages import VERSION, Ending, Output, Ready, Reason, Update
from dgpp_core.server.engine_client import EngineClient
from dgpp_core.server.generation import Event, Generation, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.served import Served, served_model
from dgpp_core.testing.fake_worker import fake_logprobs
from dgpp_core.text.stack import TextStack
from dgpp_core.text.tools.dialect import ToolDialect


def spoken_model(text: TextStack, spoken: ToolDialect | None) -> Served:
    """A served model of ``text`` that writes its calls in ``spoken``."""
    ready = Ready(
        version=VERSION, pid=1, vocab_size=text.tokenizer.vocab_size, context_tokens=8192, position_ceiling=8192,
        pool_tokens=8192, row_exact=True, load_seconds=0, plan="",
    )  # fmt: skip
    options = ServeOptions(model="fake", served_id="fake", checkpoint="", settings=b"{}")
    return served_model(options, msgspec.structs.replace(text, tools=spoken), ready, 1)


def spell(served: Served, pieces: Sequence[str | int], longest: int, generator: random.Random) -> list[int]:
    """Ids of ``pieces``: numbers of the dialect's markers, and texts cut at random into tokens of ``longest`` bytes."""
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


async def play(
    served: Served, job: Job, ids: Sequence[int], step: int, reason: Reason
) -> tuple[list[Sequence[Event]], Usage]:
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
