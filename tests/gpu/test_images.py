"""Images of a tiny Qwen3.8-Flash-Next on a CUDA device: rows near those of the CPU, replies the same in every way."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.images.decode import lay_out
from dgpp_core.images.picture import Picture
from dgpp_core.testing.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    pytest.importorskip("dgpp_qwen")
    return load_plugins(environ={}).model("qwen38-flash-next")


@pytest.fixture(scope="module")
def folder(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, raw = tmp_path_factory.mktemp("tiny"), model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, target, seed=4, dtype="BF16")
    return target


def world(model: LoadedModel, folder: Path, device: str, **settings: Any) -> World:
    values = {"max_concurrency": 4, "kv_capacity": 2048, "mtp": True, "mtp_depth": 2, "prefix_min_tokens": 0} | settings
    return World.from_checkpoint(model, folder, EngineSettings(**values), device=device)


def picture(model: LoadedModel, seed: int, start: int) -> Picture:
    vision = model.vision(model.read_config(model.spec.tiny_config), {})
    assert vision is not None
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return msgspec.structs.replace(lay_out(Image.fromarray(small).resize((288, 352)), vision, 1024), start=start)


def test_rows_are_near_those_of_the_cpu(model: LoadedModel, folder: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        sight = world(model, folder, device).engine.sight
        assert sight is not None
        found.append(sight.rows(picture(model, 1, 0)).float().cpu())
    assert ((found[0] - found[1]).norm() / found[0].norm()).item() < 0.03


def test_replies_do_not_depend_on_graphs_chunks_or_cache(model: LoadedModel, folder: Path) -> None:
    image = picture(model, 1, 9)
    pad = model.spec.tiny_config["image_token_id"]
    ids = [*range(20, 29), *[pad] * image.tokens, *range(40, 60)]
    replies = []
    for settings in ({}, {"decode_graph": False}, {"prefill_budget_tokens": 64, "prefill_idle_budget_tokens": 64}):
        served = world(model, folder, "cuda", **settings)
        for _ in range(2):
            name = served.submit(ids, 12, pictures=(image,))
            replies.append(served.run()[name])
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert replies[1].cached > 64
