"""Every installed family can be written with fewer layers, and what was written is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dgpp_core.api import Binding, ConfigError
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format, shortened
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing import World

HOST = load_plugins(environ={})
NAMES = sorted(HOST.models())
LEAST = {"qwen38-flash-next": 2, "deepseek41-flash": 3}
"""The second layer of these has n-grams, and DeepSeek's last source comes behind it; of the others one will do."""


def layers(raw: Mapping[str, Any]) -> int:
    return int(raw.get("text_config", raw)["num_hidden_layers"])


def bound(model: LoadedModel, raw: Mapping[str, Any]) -> tuple[Binding, ...]:
    return model.bindings(model.read_config(raw)).tensors


@pytest.mark.parametrize("name", NAMES)
def test_the_released_model_with_fewer_layers(name: str) -> None:
    """As few as there can be, and a few more; half of them and all are read; four in every weight format."""
    model = HOST.model(name)
    spec, least, count = model.spec, LEAST.get(name, 1), layers(model.spec.full_config)
    few, more = (len(bound(model, shortened(spec, wanted))) for wanted in (least, least + 1))
    assert few < more
    for wanted in (least, least + 1, count // 2, count):
        assert layers(shortened(spec, wanted)) == wanted
        model.read_config(shortened(spec, wanted))
    for form in spec.quantised:
        assert len(bound(model, in_format(spec, shortened(spec, 4), form)[0])) > few
    assert shortened(spec, count) == spec.full_config
    for wrong in (*range(least), count + 1):
        with pytest.raises(ConfigError):
            model.read_config(shortened(spec, wrong))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_a_layer_less_is_written_and_served(name: str, tmp_path: Path) -> None:
    """The tiny one, so that it can be."""
    model = HOST.model(name)
    raw = shortened(
        msgspec.structs.replace(model.spec, full_config=model.spec.tiny_config), layers(model.spec.tiny_config) - 1
    )
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=1, dtype="F32")
    found = []
    for depth in (0, 1):
        settings = EngineSettings(max_concurrency=2, kv_capacity=256, block_tokens=16, mtp=depth > 0)
        found.append(World.from_checkpoint(model, tmp_path, settings).reply(range(5, 25), 4).tokens)
    assert found[0] == found[1]
    assert len(found[0]) == 4
