"""Greedy replies of the real model against transformers.

The engine generates; transformers then reads prompt and reply in one forward. If at every step its own best token is
the engine's, greedy decoding with transformers gives that reply, token for token.
"""

import os
from pathlib import Path

import pytest
import torch

from dgpp_core.api import CheckpointError
from dgpp_core.checkpoint.locate import locate
from dgpp_core.checkpoint.progress import silent
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.matrix import SEEDED
from dgpp_core.testing.world import World
from dgpp_core.text.stack import TextStack, load_text

REPLY = 128
QUESTIONS = (
    "Name three primary colors.", "Write a short story about a lighthouse.", "What is 17 plus 25?",
    "Explain photosynthesis to a child.", "List the planets of the solar system.", "Who wrote Hamlet?",
    "Translate 'good morning' into French.", "How do I boil an egg?", "Give me a haiku about rain.",
    "What is the capital of Australia?", "Write a Python function that reverses a string.",
    "Why is the sky blue?", "Suggest a name for a grey cat.", "Summarise the water cycle in two sentences.",
    "What rhymes with orange?", "Describe a friendly robot.",
)  # fmt: skip
RAW = ("The sea was calm that morning and", "def fibonacci(n):\n", "1, 1, 2, 3, 5, 8,", "Once upon a time, in a")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_plugins(environ={}).model("smollm2")


@pytest.fixture(scope="module")
def folder(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = os.environ.get("DGPP_TEST_CACHE")
    where = Path(cache) if cache else tmp_path_factory.mktemp("converted")
    try:
        return locate(model.spec, None, cache=where, offline=True, report=silent)
    except CheckpointError as error:
        pytest.skip(f"the demo model's package is not installed: {error.line()}")


@pytest.fixture(scope="module")
def text(model: LoadedModel, folder: Path) -> TextStack:
    return load_text(folder, model.dialect(), config_eos=(2,))


@pytest.fixture(scope="module")
def world(model: LoadedModel, folder: Path) -> World:
    return World.from_checkpoint(model, folder, EngineSettings(kv_capacity=8192, max_concurrency=8))


@pytest.fixture(scope="module")
def prompts(text: TextStack) -> list[list[int]]:
    assert text.template is not None
    chats = [text.template.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [text.tokenizer.encode(prompt) for prompt in [*chats, *RAW]]


def test_twenty_greedy_replies_equal_transformers(world: World, folder: Path, prompts: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    requests = [world.submit(prompt, REPLY) for prompt in prompts]
    replies = [world.run()[request].tokens for request in requests]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(prompts) == 20
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply) == REPLY
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *reply[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == reply


def test_company_cache_and_chunks_change_nothing(model: LoadedModel, folder: Path, prompts: list[list[int]]) -> None:
    long = [token for prompt in prompts[:5] for token in prompt]
    plain = World.from_checkpoint(model, folder, EngineSettings(kv_capacity=4096, prefill_budget_tokens=0))
    greedy, seeded = plain.reply(long, 24).tokens, plain.reply(long, 24, params=SEEDED).tokens
    for chunk in (16, 64):
        settings = EngineSettings(kv_capacity=4096, prefill_budget_tokens=chunk, max_concurrency=8)
        busy = World.from_checkpoint(model, folder, settings)
        for _ in range(2):
            others = [busy.submit(prompt, 24) for prompt in prompts[:3]]
            first, second = busy.submit(long, 24), busy.submit(long, 24, params=SEEDED)
            replies = busy.run()
            assert replies[first].tokens == greedy
            assert replies[second].tokens == seeded
            assert all(len(replies[other].tokens) == 24 for other in others)
        assert busy.scheduler.stats().cache_hits
