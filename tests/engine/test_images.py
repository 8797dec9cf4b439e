"""An engine that starts from a resident image is the one that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dgpp_core.api import CheckpointError
from dgpp_core.checkpoint.image import ImageCache
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.scheduler.sizing import limits_from
from dgpp_core.testing.world import Reply, World

SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=256, block_tokens=16, prefix_cache_gib=0.0)


def engine(model: LoadedModel, folder: Path, images: ImageCache | None, stages: list[str]) -> Engine:
    prepared = prepare(model, folder, SETTINGS)
    return build_engine(prepared, torch.device("cpu"), lambda stage, *_: stages.append(stage), images=images)


def reply(built: Engine) -> Reply:
    world = World(built, limits_from(built.geometry, SETTINGS, built.needs_snapshot))
    return world.reply(range(40), 12, params=SamplingParams(seed=3), logprobs=5)


@pytest.mark.parametrize("name", ["tiny", "toy"])
def test_cold_and_warm_engines_give_the_same_reply(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model: LoadedModel = request.getfixturevalue(name)
    folder: Path = request.getfixturevalue("checkpoint" if name == "tiny" else "toy_checkpoint")
    images, stages = ImageCache(tmp_path), list[str]()
    want = reply(engine(model, folder, None, stages))
    assert not list(tmp_path.iterdir())
    assert reply(engine(model, folder, images, stages)) == want
    assert set(stages) == {"weights"}
    stages.clear()

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("the checkpoint is read")

    monkeypatch.setattr("dgpp_core.engine.factory.CheckpointWeights", refuse)
    assert reply(engine(model, folder, images, stages)) == want
    assert set(stages) == {"resident image"}
    with pytest.raises(CheckpointError, match="the checkpoint is read"):
        engine(model, folder, ImageCache(tmp_path, "bf16_weights bf12"), stages)
    monkeypatch.setattr("dgpp_core.engine.factory.CheckpointWeights", CheckpointWeights)
    assert reply(engine(model, folder, images, stages)) == want
