"""Drafts near the end of the context, and the log probabilities of what they bring."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import Reply, World

SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=64, block_tokens=16, prefix_cache_gib=0.01)
PROMPT = tuple(range(7, 30))
SEEDED = SamplingParams(temperature=0.9, seed=3)


def replies(toy: LoadedModel, folder: Path, params: SamplingParams, tokens: int, **changes: int) -> tuple[Reply, int]:
    """A reply alone in its world, and how many of its drafts stood."""
    world = World.from_checkpoint(toy, folder, msgspec.structs.replace(SETTINGS, **changes))
    reply = world.reply(PROMPT, tokens, params=params, logprobs=2)
    return reply, world.scheduler.stats().draft_accepted


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_drafted_reply_that_fills_the_context_is_the_plain_one_with_its_logprobs(
    toy: LoadedModel, toy_checkpoint: Path, params: SamplingParams, depth: int
) -> None:
    """vllm PR 38711: drafts that no longer fitted were stale, and the recurrent state and logprobs with them.

    llama.cpp#27972: with drafts every logprob was 0.
    """
    context = World.from_checkpoint(
        toy, toy_checkpoint, msgspec.structs.replace(SETTINGS, mtp=True, mtp_depth=depth)
    ).engine.geometry.context
    room = context - len(PROMPT)
    plain, none = replies(toy, toy_checkpoint, params, room, mtp=False)
    assert (len(plain.tokens), plain.reason, none) == (room, "length", 0)
    for short in range(2):
        drafted, stood = replies(toy, toy_checkpoint, params, room - short, mtp=True, mtp_depth=depth)
        assert drafted.tokens == plain.tokens[: room - short]
        assert drafted.logprobs == plain.logprobs[: room - short]
        assert drafted.reason == "length"
        assert stood, "drafts stood"
    assert all(entry.logprob < 0 for entry in plain.logprobs)
