"""Drafts that stand: random weights reject every one, so what is proposed is replaced by the target's own picks."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from dgpp_core.api import Drafter, Model, State, StepBatch
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing import World

NAME = "deepseek41-flash"
LENGTHS = (21, 1, 18)


class Knowing:
    """Runs the real drafter, then drafts what the target will pick; at each ``wrong``-th position another token."""

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
            tokens = torch.where(batch.positions % self.wrong == 0, (tokens + 1) % 512, tokens)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, made = load_plugins(environ={}).model(NAME), tmp_path_factory.mktemp("deepseek")
    raw = dict(model.spec.tiny_config)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, made, seed=12, dtype="F32")
    return made


def knowing(wrong: int) -> LoadedModel:
    """The model with its drafter wrapped."""
    model = load_plugins(environ={}).model(NAME)
    built = model.drafter

    def drafter(config: Any, shard: Any, target: Model) -> Knowing:
        real = built(config, shard, target)
        assert real is not None
        return Knowing(real, target, wrong)

    model.drafter = drafter  # type: ignore[method-assign, assignment]
    return model


def replies(model: LoadedModel, folder: Path, depth: int) -> tuple[list[list[int]], World]:
    speculation: dict[str, Any] = {"mtp": depth > 0, "mtp_depth": max(depth, 1)}
    settings = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, **speculation)
    world, source = World.from_checkpoint(model, folder, settings), torch.Generator().manual_seed(6)
    requests = [world.submit(torch.randint(512, (n,), generator=source).tolist(), 17) for n in LENGTHS]
    found = world.run()
    return [found[request].tokens for request in requests], world


@pytest.mark.parametrize(("depth", "wrong"), [(5, 4096), (5, 4), (2, 3)])
def test_replies_are_the_same_however_many_drafts_stand(folder: Path, depth: int, wrong: int) -> None:
    """Past the end of the window of 16 rows, with rings and halves of entries that rejected rows were written into."""
    plain, _ = replies(knowing(4096), folder, 0)
    drafted, world = replies(knowing(wrong), folder, depth)
    assert drafted == plain
    stats = world.scheduler.stats()
    assert stats.draft_accepted > 10
    assert (stats.draft_accepted == stats.draft_tokens) == (wrong == 4096)
