"""What the tests of this package share: the model's equations, and the model with rows as they are computed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.groups import groups
from dgpp_deepseek.deepseek41.specs import QUANTISED, TINY

from dgpp_core.api import ModelConfig, StateGroup
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import LoadedModel, load_plugins

NAME = "deepseek41-flash"
CONFIG: dict[str, Any] = TINY | {
    "text_config": TINY["text_config"] | {
        "num_hidden_layers": 8, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0], "kv_source_layer_ids": [1, 3, 4],
        "index_source_layer_ids": [1, 3, 4, 6], "candidate_source_layer_id": 4, "hc_sinkhorn_iters": 20,
        "engram_layer_ids": [1, 3], "dspark_target_layer_ids": [5, 6, 7], "num_nextn_predict_layers": 3,
    },
}  # fmt: skip
"""Every kind of layer with a neighbour of its kind."""


class PlainRows(LoadedModel):
    """The model with rows kept as they are computed: an error of 1e-7 cannot become one of a rounding step."""

    def groups(
        self, config: ModelConfig, world: int = 1, settings: Mapping[str, Any] | None = None
    ) -> tuple[StateGroup, ...]:
        """The same groups, of values."""
        assert isinstance(config, Deepseek41Config)
        return groups(config, world, settings or {}, "plain")


@pytest.fixture(scope="session")
def served() -> LoadedModel:
    """The model."""
    return load_plugins(environ={}).model(NAME)


@pytest.fixture(scope="session")
def plain_rows(served: LoadedModel) -> LoadedModel:
    """See `PlainRows`."""
    return PlainRows(served.spec, served.hooks)


@pytest.fixture(scope="session")
def checkpoint(served: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of `CONFIG`, dense, float32."""
    folder = tmp_path_factory.mktemp("deepseek")
    synthesise(served.spec, served.bindings(served.read_config(CONFIG)), CONFIG, folder, seed=3, dtype="F32")
    return folder


@pytest.fixture(scope="session")
def released(served: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of `CONFIG` in the release's storages."""
    folder, config = tmp_path_factory.mktemp("released"), CONFIG | {"quantization_config": QUANTISED["fp8-fp4"]}
    synthesise(served.spec, served.bindings(served.read_config(config)), config, folder, seed=4)
    return folder


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """`reference.py` beside this file."""
    spec = importlib.util.spec_from_file_location("deepseek_reference", Path(__file__).with_name("reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
