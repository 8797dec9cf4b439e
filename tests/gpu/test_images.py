"""Images of tiny models on a CUDA device: rows near those of the CPU, replies the same in every way."""

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
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=2048, mtp=True, mtp_depth=2, prefix_min_tokens=0)


@pytest.fixture(scope="module", params=["glm53-flash", "qwen38-flash-next"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    pytest.importorskip({"glm53-flash": "dgpp_glm", "qwen38-flash-next": "dgpp_qwen"}[request.param])
    return load_plugins(environ={}).model(request.param)


@pytest.fixture(scope="module")
def folder(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, raw = tmp_path_factory.mktemp("tiny"), model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, target, seed=4, dtype="BF16")
    return target


def world(model: LoadedModel, folder: Path, device: str, **settings: Any) -> World:
    return World.from_checkpoint(model, folder, msgspec.structs.replace(SETTINGS, **settings), device=device)


def picture(model: LoadedModel, seed: int, start: int, size: tuple[int, int] = (288, 352)) -> Picture:
    vision = model.vision(model.read_config(model.spec.tiny_config), {})
    assert vision is not None
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return msgspec.structs.replace(lay_out(Image.fromarray(small).resize(size), vision, 1024), start=start)


def prompt(model: LoadedModel) -> tuple[list[int], Picture]:
    image = picture(model, 1, 9)
    return [*range(20, 29), *[model.spec.tiny_config["image_token_id"]] * image.tokens, *range(40, 60)], image


def test_rows_are_near_those_of_the_cpu(model: LoadedModel, folder: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        sight = world(model, folder, device).engine.sight
        assert sight is not None
        found.append(sight.rows(picture(model, 1, 0)).float().cpu())
    assert ((found[0] - found[1]).norm() / found[0].norm()).item() < 0.03


def test_replies_do_not_depend_on_graphs_chunks_or_cache(model: LoadedModel, folder: Path) -> None:
    ids, image = prompt(model)
    replies = []
    for settings in ({}, {"decode_graph": False}, {"prefill_budget_tokens": 64, "prefill_idle_budget_tokens": 64}):
        served = world(model, folder, "cuda", **settings)
        for _ in range(2):
            name = served.submit(ids, 12, pictures=(image,))
            replies.append(served.run()[name])
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert replies[1].cached >= 64, "of the image, which begins at 9, a part"


def test_encoding_takes_no_more_than_the_plan_says(model: LoadedModel, folder: Path) -> None:
    """The largest image that the service lets through; most of it would be a table of scores, if there were one."""
    sight, image = world(model, folder, "cuda").engine.sight, picture(model, 2, 0, (2000, 2000))
    assert sight is not None
    assert image.tokens > 900
    sight.rows(picture(model, 1, 0))  # a BLAS takes its workspace once
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        rows = sight.rows(image)
    terms = {term.name: term.bytes for term in model.plan_terms(model.read_config(model.spec.tiny_config), 1, {})}
    taken = torch.cuda.max_memory_allocated() - before - rows.nbytes
    assert 0 < taken <= terms["an image being encoded"]


def test_ranks_take_what_the_first_one_saw(tmp_path: Path) -> None:
    """Two ranks that share the device go on together though the second one's encoder is off."""
    pytest.importorskip("dgpp_glm")
    model = load_plugins(environ={}).model("glm53-flash")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4, dtype="BF16")
    ids, image = prompt(model)
    replies = []
    for factor in (1.0, 1.5):
        ranks = TensorParallelWorld.load(model, tmp_path, SETTINGS, 2, device="cuda")
        second: Any = ranks.ranks[1].engine.model
        encoder = second.encoder
        second.encoder = lambda *given, made=encoder, by=factor: made(*given) * by
        name = ranks.submit(ids, 8, pictures=(image,))
        replies.append(ranks.run()[name].tokens)
    assert replies[0] == replies[1]
