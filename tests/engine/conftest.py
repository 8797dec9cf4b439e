"""A tiny Llama world for the engine's own tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.world import World

SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, prefix_cache_gib=0.0)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    pytest.importorskip("dgpp_llama")
    return load_plugins(environ={}).model("smollm2")


@pytest.fixture(scope="session")
def checkpoint(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, raw = tmp_path_factory.mktemp("tiny"), tiny.spec.tiny_config
    synthesise(tiny.spec, tiny.bindings(tiny.read_config(raw)), raw, folder, seed=4, dtype="F32")
    return folder


@pytest.fixture
def make_world(tiny: LoadedModel, checkpoint: Path) -> Callable[..., World]:
    return lambda settings=SETTINGS, lag=0: World.from_checkpoint(tiny, checkpoint, settings, lag=lag)
