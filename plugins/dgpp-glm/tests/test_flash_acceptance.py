"""Drafts of GLM-5.3-Flash that stand, and some that do not: delta states, rings and index blocks follow them.

Random weights reject every draft, so what is proposed is replaced by what the undrafted replies were.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.api import Drafter, Model, State, StepBatch
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing import World

LENGTHS, REPLY = (22, 1, 13), 30


class Knowing:
    """Runs the real layer, then drafts how one of ``texts`` goes on; at each ``wrong``-th position another token."""

    def __init__(self, real: Drafter, texts: Sequence[list[int]], wrong: int) -> None:
        self.real, self.texts, self.depth, self.wrong = real, texts, real.depth, wrong

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        return self.real.observe(batch, hidden, next_tokens, state)

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        self.real.propose(batch, hidden, tokens, depth, state)
        drafts = []
        for position, token in zip(batch.positions.tolist(), tokens.tolist(), strict=True):
            known = next((text for text in self.texts if text[position + 1 : position + 2] == [token]), [])
            row = [*known[position + 2 : position + 2 + depth], *[0] * depth][:depth]
            drafts.append([(t + ((position + 2 + i) % self.wrong == 0)) % 512 for i, t in enumerate(row)])
        return torch.tensor(drafts)


def knowing(texts: Sequence[list[int]], wrong: int) -> LoadedModel:
    """The model with its drafter wrapped."""
    model = load_plugins(environ={}).model("glm53-flash")
    built = model.drafter

    def drafter(config: Any, shard: Any, target: Model) -> Knowing:
        real = built(config, shard, target)
        assert real is not None
        return Knowing(real, texts, wrong)

    model.drafter = drafter  # type: ignore[method-assign, assignment]
    return model


def texts_of(model: LoadedModel, folder: Path, depth: int) -> tuple[list[list[int]], World]:
    """Prompts with their replies."""
    speculation: dict[str, Any] = {"mtp": depth > 0, "mtp_depth": max(depth, 1)}
    settings = EngineSettings(max_concurrency=4, kv_capacity=512, block_tokens=16, **speculation)
    world, source = World.from_checkpoint(model, folder, settings), torch.Generator().manual_seed(6)
    prompts = [torch.randint(512, (n,), generator=source).tolist() for n in LENGTHS]
    requests = [world.submit(prompt, REPLY) for prompt in prompts]
    found = world.run()
    return [prompt + found[request].tokens for prompt, request in zip(prompts, requests, strict=True)], world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, made = load_plugins(environ={}).model("glm53-flash"), tmp_path_factory.mktemp("flash")
    raw = dict(model.spec.tiny_config)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, made, seed=12, dtype="F32")
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return texts_of(load_plugins(environ={}).model("glm53-flash"), folder, 0)[0]


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("wrong", [4096, 3, 4])
def test_replies_are_the_same_however_many_drafts_stand(
    folder: Path, plain: list[list[int]], depth: int, wrong: int
) -> None:
    """Verified rows cross the ends of index blocks, of four tokens, and are rejected before, at and behind them."""
    drafted, world = texts_of(knowing(plain, wrong), folder, depth)
    assert drafted == plain
    stats = world.scheduler.stats()
    assert stats.draft_accepted > 20
    assert wrong == 4096 or stats.draft_accepted < stats.draft_tokens
