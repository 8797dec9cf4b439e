"""Drafts that the target accepts: random weights reject every one, so the drafter is handed the target's own picks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from dgpp_core.api import Drafter, Model, State, StepBatch
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.matrix import Axes, exactness_matrix
from dgpp_core.testing.world import World


class Copying:
    """Runs the real draft layer, then drafts what the target will pick; at each ``wrong``-th position another token."""

    def __init__(self, real: Drafter, model: Model, wrong: int) -> None:
        self.real, self.model, self.depth, self.wrong = real, model, real.depth, wrong

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        return self.real.observe(batch, hidden, next_tokens, state)

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        self.real.propose(batch, hidden, tokens, depth, state)
        drafts = []
        for _ in range(depth):
            batch = msgspec.structs.replace(
                batch, tokens=tokens, positions=batch.positions + 1, lengths=batch.lengths + 1,
                max_length=batch.max_length + 1,
            )  # fmt: skip
            tokens = self.model.logits(self.model.forward(batch, state)).argmax(-1)
            if self.wrong:
                tokens = torch.where(batch.positions % self.wrong == 0, (tokens + 1) % 512, tokens)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)


def copying(wrong: int) -> LoadedModel:
    """GLM-4.7 whose drafter is wrapped."""
    model = load_plugins(environ={}).model("glm47")
    built = model.drafter

    def drafter(config: Any, shard: Any, target: Model) -> Copying:
        real = built(config, shard, target)
        assert real is not None
        return Copying(real, target, wrong)

    model.drafter = drafter  # type: ignore[method-assign]
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    model, folder = load_plugins(environ={}).model("glm47"), tmp_path_factory.mktemp("glm47")
    raw = dict(model.spec.tiny_config)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=12, dtype="F32")
    source = torch.Generator().manual_seed(6)
    prompts = [torch.randint(512, (n,), generator=source).tolist() for n in (37, 5, 18, 33)]
    return SimpleNamespace(folder=folder, prompts=prompts)


def world(folder: Path, wrong: int, depth: int) -> World:
    settings = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, mtp=True, mtp_depth=depth)
    return World.from_checkpoint(copying(wrong), folder, settings)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_draft_that_is_the_targets_pick_is_accepted(made: SimpleNamespace, depth: int) -> None:
    drafted = world(made.folder, 0, depth)
    requests = [drafted.submit(prompt, 24) for prompt in made.prompts]
    replies = drafted.run()
    stats = drafted.scheduler.stats()
    assert stats.draft_tokens == depth * stats.draft_rounds > 0
    assert stats.draft_accepted == stats.draft_tokens
    assert max(max(replies[request].updates) for request in requests) == depth + 1


def test_replies_are_the_same_however_many_drafts_are_accepted(made: SimpleNamespace) -> None:
    axes = Axes(depths=(2, 5), chunks=(16,), company=(3,), max_tokens=12)
    model = copying(wrong=3)

    def make(settings: EngineSettings, lag: int, ranks: int) -> World:
        return World.from_checkpoint(model, made.folder, settings, lag=lag)

    report = exactness_matrix(make, made.prompts, axes)
    assert not report.differences
    assert report.accepted > report.compared
    assert report.hits
    assert report.evictions
