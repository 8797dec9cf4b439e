"""The conformance kit for models that take images: subclass `ImageConformance` beside `ModelConformance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dgpp_core.api import Vision
from dgpp_core.checkpoint.config_json import read_config, read_processor
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.images.decode import lay_out
from dgpp_core.images.picture import Picture
from dgpp_core.testing.world import Reply, World

SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=1024, block_tokens=16, mtp=False, prefix_min_tokens=0)
MOST_TOKENS = 1024


def picture(seed: int, size: tuple[int, int], vision: Vision, most_tokens: int = MOST_TOKENS) -> Picture:
    """An image of ``size`` (width, height) that is no noise, so that its rows differ."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return lay_out(Image.fromarray(small).resize(size), vision, most_tokens)


def prompt(
    pictures: Sequence[Picture], vision: Vision, *, between: int = 9, tokens: tuple[int, int] = (5, 490)
) -> tuple[list[int], tuple[Picture, ...]]:
    """Text around pictures, ``between`` tokens in each place, drawn from ``tokens``."""
    source, placed = torch.Generator().manual_seed(7), list[Picture]()
    ids = torch.randint(*tokens, (between,), generator=source).tolist()
    for image in pictures:
        placed.append(msgspec.structs.replace(image, start=len(ids)))
        ids += [vision.placeholder] * image.tokens + torch.randint(*tokens, (between,), generator=source).tolist()
    return ids, tuple(placed)


class ImageConformance:
    """How a model runs prompts with images, on a checkpoint with an encoder.

    A subclass has a fixture ``folder``, of class scope or wider: that checkpoint, random weights will do.

    Attributes:
        model: the name of the `ModelSpec`.
        sizes: width and height of the images.
        reply_tokens: length of the replies.
        draft_depth: of the world that drafts; 0 where the model has no drafter.
    """

    model: ClassVar[str]
    sizes: ClassVar[tuple[tuple[int, int], ...]] = ((112, 112), (130, 90))
    reply_tokens: ClassVar[int] = 4
    draft_depth: ClassVar[int] = 3

    @classmethod
    def loaded(cls) -> LoadedModel:
        """The model and its hooks."""
        return load_plugins(environ={}).model(cls.model)

    @pytest.fixture(scope="class")
    @classmethod
    def vision(cls, folder: Path) -> Vision:
        """How the checkpoint's model takes images."""
        model = cls.loaded()
        found = model.vision(read_config(folder, model.read_config, model.spec.full_config), read_processor(folder))
        assert found is not None, "the checkpoint has no encoder"
        return found

    def world(self, folder: Path, **settings: Any) -> World:
        """An engine that serves the checkpoint, and its scheduler."""
        return World.from_checkpoint(self.loaded(), folder, msgspec.structs.replace(SETTINGS, **settings))

    def replied(self, world: World, ids: Sequence[int], pictures: Sequence[Picture], **fields: Any) -> Reply:
        """The reply to one prompt."""
        name = world.submit(ids, self.reply_tokens, pictures=pictures, logprobs=1, **fields)
        return world.run()[name]

    def prompts(self, vision: Vision, *seeds: int, between: int = 9) -> tuple[list[int], tuple[Picture, ...]]:
        """A prompt with an image for each seed."""
        return prompt(
            [picture(s, size, vision) for s, size in zip(seeds, self.sizes, strict=False)], vision, between=between
        )

    def test_replies_do_not_depend_on_chunks_cache_company_or_drafts(self, folder: Path, vision: Vision) -> None:
        """Prompts with two images, and text in a slot that had images before; other images give other replies."""
        asked = (self.prompts(vision, 1, 2), self.prompts(vision, 5, 2), ([5, 6, 7, *range(20, 40)], ()))
        plain = self.world(folder)
        wanted = [_said(self.replied(plain, *each, use_cache=False)) for each in asked]
        assert wanted[0] != wanted[1]
        drafting = {"mtp": True, "mtp_depth": self.draft_depth} if self.draft_depth else {}
        for settings in ({"prefill_budget_tokens": 16}, {"prefill_budget_tokens": 32} | drafting):
            served = self.world(folder, **settings)
            names = [served.submit(ids, self.reply_tokens, pictures=seen, logprobs=1) for ids, seen in asked[:2]]
            together = served.run()
            assert [_said(together[name]) for name in names] == wanted[:2]
            again = self.replied(served, *asked[0])
            assert _said(again) == wanted[0]
            assert again.cached >= len(asked[0][0]) // 2
            assert _said(self.replied(served, *asked[2])) == wanted[2]

    @pytest.mark.parametrize("between", [3, 20])
    def test_an_image_aware_hit_equals_cold(self, folder: Path, vision: Vision, between: int) -> None:
        """A second turn reuses the first one's prefix, cut inside or behind the image; not that of another image."""
        ids, pictures = self.prompts(vision, 1, between=between)
        turn = [*ids, 11, 12, 13, 14, 15]
        cold = self.replied(self.world(folder), turn, pictures, use_cache=False)
        served = self.world(folder)
        self.replied(served, ids, pictures)
        warm = self.replied(served, turn, pictures)
        assert warm.cached > between
        assert _said(warm) == _said(cold)
        other = self.replied(served, turn, self.prompts(vision, 6, between=between)[1])
        assert other.cached <= between, "the same tokens about another image are another prefix"

    def test_an_encoder_that_fails_ends_one_request(
        self, folder: Path, vision: Vision, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the next one, with the same image, is answered."""
        ids, pictures = self.prompts(vision, 1)
        wanted = self.replied(self.world(folder), ids, pictures).tokens
        served = self.world(folder)
        with monkeypatch.context() as patch:
            patch.setattr(served.engine.model, "see", _fail)
            failed = self.replied(served, ids, pictures)
        assert (failed.reason, failed.tokens) == ("error", [])
        assert "no memory" in failed.error
        assert self.replied(served, ids, pictures).tokens == wanted


def _said(reply: Reply) -> object:
    """Its tokens, and how likely they were, to the bit."""
    return reply.tokens, reply.logprobs


def _fail(*arguments: object) -> Tensor:
    raise RuntimeError("no memory")
