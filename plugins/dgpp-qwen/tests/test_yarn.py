"""YaRN of Qwen3.8-Flash-Next against transformers, said by config.json or by the deployment."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dgpp_qwen.flash_next.config import read_config
from dgpp_qwen.flash_next.scaling import rescale
from dgpp_qwen.flash_next.specs import FULL
from msgspec import UNSET, UnsetType

from dgpp_core.api import ConfigError
from dgpp_core.config.settings import EngineSettings, RopeScaling
from dgpp_core.engine.factory import prepare
from dgpp_core.host.loading import load_plugins
from dgpp_core.ops.rope import yarn_frequencies
from dgpp_core.testing import World

Release = Callable[[str], tuple[Any, Path]]
FACTOR, TRAINED = 4.0, 64
"""So short a training that the text below goes far beyond it, and turns are stretched in part."""
TOKENS = torch.randint(3, 512, (150,), generator=torch.Generator().manual_seed(8)).tolist()
SAID = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": TRAINED}


def deployed(**changes: Any) -> RopeScaling:
    return RopeScaling(type="yarn", factor=FACTOR, original_max_position_embeddings=TRAINED, **changes)


def first_logprobs(folder: Path, scaling: RopeScaling | UnsetType = UNSET) -> dict[int, float]:
    settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=False, rope_scaling=scaling)
    world = World.from_checkpoint(load_plugins(environ={}).model("qwen38-flash-next"), folder, settings)
    return dict(world.reply(TOKENS, 1, logprobs=20).logprobs[0].top)


@pytest.fixture(scope="module")
def folder(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release with YaRN in its config.json."""
    made = tmp_path_factory.mktemp("yarn")
    shutil.copytree(release("bf16")[1], made, dirs_exist_ok=True)
    raw = json.loads((made / "config.json").read_text())
    raw["text_config"]["rope_parameters"] |= SAID
    (made / "config.json").write_text(json.dumps(raw))
    return made


def test_log_probabilities_are_those_of_transformers(release: Release, folder: Path) -> None:
    pair, plain = release("bf16")
    config, own = copy.deepcopy(pair.text.config), pair.text.rotary_emb
    config.rope_parameters = dict(config.rope_parameters) | SAID
    pair.text.rotary_emb = type(own)(config)
    try:
        _, logits = pair.run(TOKENS)
    finally:
        pair.text.rotary_emb = own
    wanted, found = logits[-1].log_softmax(-1), first_logprobs(folder)
    assert max(abs(value - wanted[token].item()) for token, value in found.items()) < 1e-4
    unlike = first_logprobs(plain)
    assert max(abs(value - unlike.get(token, -99.0)) for token, value in found.items()) > 1e-2


def test_a_deployment_says_the_same_in_place_of_the_config(release: Release, folder: Path) -> None:
    plain = release("bf16")[1]
    assert first_logprobs(plain, deployed()) == first_logprobs(folder)
    assert first_logprobs(folder, deployed()) == first_logprobs(folder)
    assert first_logprobs(plain, deployed(mrope_cache_factor=4.0)) != first_logprobs(folder)
    assert first_logprobs(plain, deployed(attn_factor=1.5)) != first_logprobs(folder)


@pytest.mark.parametrize(
    ("multiple", "recorded"),
    [(4.0, {17: "393bdab5", 20: "3804a77e", 24: "363cb0c1"}), (1.0, {14: "3a6301e2", 15: "3a009b22", 22: "37012dab"})],
)
def test_the_released_model_reaches_twice_as_far_with_the_recorded_bits(
    multiple: float, recorded: dict[int, str]
) -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 262144}
    config = read_config(rescale(FULL, scaling | {"mrope_cache_factor": multiple}))
    assert config.max_positions == 524288
    yarn = config.yarn
    assert yarn is not None
    found = yarn_frequencies(64, config.rope_theta, yarn.factor, yarn.length, yarn.fast, yarn.slow)
    assert {at: struct.pack(">f", found[at].item()).hex() for at in recorded} == recorded


def test_a_family_that_does_not_take_it_says_so(tmp_path: Path) -> None:
    pytest.importorskip("dgpp_llama")
    model = load_plugins(environ={}).model("smollm2")
    (tmp_path / "config.json").write_text(json.dumps(dict(model.spec.tiny_config)))
    with pytest.raises(ConfigError, match="rope_scaling") as refused:
        prepare(model, tmp_path, EngineSettings(rope_scaling=deployed()))
    assert "smollm2" in refused.value.found
