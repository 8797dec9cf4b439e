"""The conformance kit for drafters: drafts that stand, some that do not, and replies that know nothing of it.

Random weights reject nearly every draft, so what is proposed is replaced by how the undrafted replies went on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dgpp_core.api import Drafter, Model, ModelConfig, Shard, State, StepBatch
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.world import World


class KnownDrafts:
    """Runs the real drafter, then drafts how one of ``texts`` goes on.

    Args:
        wrong: at each position that is a multiple of it another token; 0 for none.
        vocab: tokens there are.
    """

    def __init__(self, real: Drafter, texts: Sequence[Sequence[int]], wrong: int, vocab: int) -> None:
        self.real, self.texts, self.wrong, self.vocab, self.depth = real, texts, wrong, vocab, real.depth

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """See `dgpp_core.api.Drafter`."""
        return self.real.observe(batch, hidden, next_tokens, state)

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        """See `dgpp_core.api.Drafter`; of a text that is not known, or behind its end, token 0."""
        self.real.propose(batch, hidden, tokens, depth, state)
        drafts = []
        for position, *newest in zip(batch.positions.tolist(), batch.tokens.tolist(), tokens.tolist(), strict=True):
            known = next((text for text in self.texts if [*text[position : position + 2]] == newest), ())
            row = [*known[position + 2 : position + 2 + depth], *[0] * depth][:depth]
            places = range(position + 2, position + 2 + depth)
            drafts.append([self._spoiled(draft, place) for draft, place in zip(row, places, strict=True)])
        return torch.tensor(drafts)

    def _spoiled(self, draft: int, place: int) -> int:
        return (draft + 1) % self.vocab if self.wrong and place % self.wrong == 0 else draft


class KnowingModel(LoadedModel):
    """``model`` with its drafter wrapped in `KnownDrafts`."""

    def __init__(self, model: LoadedModel, texts: Sequence[Sequence[int]], wrong: int = 0) -> None:
        super().__init__(model.spec, model.hooks)
        self._texts, self._wrong = texts, wrong

    def drafter(self, config: ModelConfig, shard: Shard, model: Model) -> Drafter | None:
        """The wrapped drafter."""
        real = super().drafter(config, shard, model)
        assert real is not None, "the model has no drafter"
        return KnownDrafts(real, self._texts, self._wrong, config.vocab_size)


class DraftConformance:
    """However many drafts stand, replies are those of plain decoding; on a random checkpoint of the tiny config.

    Attributes:
        model: the name of the `ModelSpec`.
        lengths: of the prompts, which run together.
        reply_tokens: of each reply; past the end of windows and blocks, where the model has any.
        cases: draft depths, and at which multiples a draft is wrong; 0 for nowhere.
    """

    model: ClassVar[str]
    lengths: ClassVar[tuple[int, ...]] = (37, 1, 18)
    reply_tokens: ClassVar[int] = 30
    cases: ClassVar[tuple[tuple[int, int], ...]] = ((1, 0), (3, 0), (1, 3), (3, 3))

    @classmethod
    def loaded(cls) -> LoadedModel:
        """The model and its hooks."""
        return load_plugins(environ={}).model(cls.model)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A random checkpoint."""
        model, made = cls.loaded(), tmp_path_factory.mktemp(cls.model)
        raw = model.spec.tiny_config
        synthesise(model.spec, model.bindings(model.read_config(raw)), raw, made, seed=12, dtype="F32")
        return made

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls) -> list[list[int]]:
        """Random ones of ``lengths``."""
        source = torch.Generator().manual_seed(6)
        return [torch.randint(512, (n,), generator=source).tolist() for n in cls.lengths]

    @pytest.fixture(scope="class")
    @classmethod
    def texts(cls, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
        """The prompts and how they go on undrafted, for longer than any draft reaches."""
        found = cls.replies(cls.loaded(), folder, prompts, 0, cls.reply_tokens + 8)[0]
        return [prompt + reply for prompt, reply in zip(prompts, found, strict=True)]

    @classmethod
    def replies(
        cls, model: LoadedModel, folder: Path, prompts: Sequence[list[int]], depth: int, count: int
    ) -> tuple[list[list[int]], World]:
        """What is said to prompts in each other's company, and the world that said it."""
        settings = EngineSettings(
            max_concurrency=4, kv_capacity=1024, block_tokens=16, mtp=depth > 0, mtp_depth=depth or 1
        )
        world = World.from_checkpoint(model, folder, settings)
        requests = [world.submit(prompt, count) for prompt in prompts]
        found = world.run()
        return [found[request].tokens for request in requests], world

    def check(self, world: World, depth: int) -> None:
        """Whatever else holds of a world that drafted; a subclass may have something to say."""

    def test_replies_are_the_same_however_many_drafts_stand(
        self, folder: Path, prompts: list[list[int]], texts: list[list[int]]
    ) -> None:
        """All of them, or those between the wrong ones."""
        wanted = [text[len(p) : len(p) + self.reply_tokens] for p, text in zip(prompts, texts, strict=True)]
        for depth, wrong in self.cases:
            model = KnowingModel(self.loaded(), texts, wrong)
            found, world = self.replies(model, folder, prompts, depth, self.reply_tokens)
            assert found == wanted, f"depth {depth}, wrong at multiples of {wrong}"
            stats = world.scheduler.stats()
            assert stats.draft_tokens == depth * stats.draft_rounds > 0
            assert stats.draft_accepted > self.reply_tokens // 2
            assert (stats.draft_accepted == stats.draft_tokens) == (not wrong)
            self.check(world, depth)
