"""What an engine is sized for, and settings that fit nobody."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dgpp_core.api import ConfigError, ModelConfig
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.factory import prepare, prepare_config
from dgpp_core.engine.geometry import GPU_STEP_ROWS, make_geometry, require_room
from dgpp_core.engine.rehearsal import rehearse
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing.world import World

CONFIG = ModelConfig(vocab_size=8, max_positions=100, hidden_size=4)


def test_context_is_the_smaller_bound() -> None:
    assert make_geometry(CONFIG, (), EngineSettings(kv_capacity=4096), 0).context == 100
    assert make_geometry(CONFIG, (), EngineSettings(kv_capacity=64), 0).context == 61
    assert make_geometry(CONFIG, (), EngineSettings(kv_capacity=64, mtp_depth=3), 3).context == 52


@pytest.mark.parametrize(
    ("changes", "positions", "named"),
    [({"kv_capacity": 1, "block_tokens": 1}, 100, "kv_capacity"), ({}, 1, "max_position_embeddings")],
)
def test_sizes_that_fit_no_request_are_refused_by_name(changes: dict[str, int], positions: int, named: str) -> None:
    config = ModelConfig(vocab_size=8, max_positions=positions, hidden_size=4)
    with pytest.raises(ConfigError) as refused:
        require_room(make_geometry(config, (), EngineSettings(**changes), 0), config)  # type: ignore[arg-type]
    assert refused.value.where == named


def test_a_decode_step_too_wide_for_a_gpu_is_refused_before_anything_is_loaded() -> None:
    from dgpp_core.ops.kernels.attention_decode import MAX_ROWS

    settings = EngineSettings(max_concurrency=65, mtp_depth=3, kv_capacity=1 << 20)
    geometry = make_geometry(CONFIG, (), settings, 3)
    require_room(geometry, CONFIG)
    with pytest.raises(ConfigError) as refused:
        require_room(geometry, CONFIG, gpu=True)
    assert refused.value.where == "max_concurrency, mtp_depth"
    assert refused.value.hint == "set max_concurrency to 64 or less"
    assert MAX_ROWS == GPU_STEP_ROWS


@pytest.mark.parametrize(("capacity", "block"), [(1, 64), (24, 8), (24, 1), (200, 64)])
def test_the_smallest_pools_rehearse_and_serve(make_world: Callable[..., World], capacity: int, block: int) -> None:
    world = make_world(EngineSettings(max_concurrency=8, kv_capacity=capacity, block_tokens=block))
    assert rehearse(world.engine, 256, 512)
    assert len(world.reply([1, 2, 3], 4).tokens) == 4


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_of_nobody_is_refused_before_a_plugin_sees_it(
    tiny: LoadedModel, checkpoint: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.read_config(json.loads((checkpoint / "config.json").read_text()))

    def asked(*arguments: object) -> None:
        raise AssertionError("the plugin was asked")

    for hook in ("bindings", "groups", "read_config"):
        monkeypatch.setattr(LoadedModel, hook, asked)
    with pytest.raises(ConfigError, match="at least one rank") as refused:
        prepare(tiny, checkpoint, EngineSettings(), world=world)
    assert (refused.value.where, refused.value.found) == ("world", str(world))
    with pytest.raises(ConfigError, match="at least one rank"):
        prepare_config(tiny, config, EngineSettings(), "cpu", world=world)


def test_an_end_token_outside_the_vocabulary_is_refused(tiny: LoadedModel, checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": 99_999}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as refused:
        prepare(tiny, tmp_path, EngineSettings())
    assert refused.value.found == "99999"
