"""The templates of deploy/: each resolves, and its plan fits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dgpp_core.cli.main import cli
from dgpp_core.host.loading import load_plugins

SCRIPT = Path(__file__).parents[2] / "docs" / "deployments.py"
MEASURED = {
    ("unsloth/GLM-5.3-Flash-FP8", 4), ("HawkBearPig/GLM-5.3-Flash-NVFP4-FP8", 2),
    ("HawkBearPig/GLM-5.3-Flash-NVFP4-FP8", 4), ("Qwen/Qwen3.8-Flash-Next-FP8", 2), ("Qwen/Qwen3.8-Flash-Next-FP8", 4),
    ("nvidia/Qwen3.8-Flash-Next-NVFP4", 1), ("nvidia/Qwen3.8-Flash-Next-NVFP4", 2), ("nvidia/GLM-4.7-NVFP4", 4),
    ("HawkBearPig/GLM-5.3-Int4-Int8Mix-RTN-g64", 4), ("deepseek-ai/DeepSeek-V4.1-Flash", 4),
    ("XiaomiMiMo/MiMo-V2.6-Flash-RL", 2), ("XiaomiMiMo/MiMo-V2.6-Flash-RL", 4),
}  # fmt: skip
"""Repositories and ranks that the predecessor has templates of."""

CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "configs"
RELEASED = [
    ("glm53_flash_fp8", "unsloth/GLM-5.3-Flash-FP8"),
    ("glm53_flash_nvfp4_fp8", "HawkBearPig/GLM-5.3-Flash-NVFP4-FP8"),
    ("glm53_int4int8", "HawkBearPig/GLM-5.3-Int4-Int8Mix-RTN-g64"),
    ("qwen38_flash_next_fp8", "Qwen/Qwen3.8-Flash-Next-FP8"),
    ("qwen38_flash_next_nvfp4", "nvidia/Qwen3.8-Flash-Next-NVFP4"),
    ("deepseek_v41_flash", "deepseek-ai/DeepSeek-V4.1-Flash"),
    ("mimo_v26_flash", "XiaomiMiMo/MiMo-V2.6-Flash-RL"),
]
"""Without GLM-4.7's, which lists the layers of its patterns one by one; its family compares the storages."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_deployments", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plans(script: ModuleType) -> Mapping[str, Any]:
    """What every template needs, by name."""
    host = load_plugins(environ={})
    return {row.name: row for row in (script.planned(file, host) for file in script.templates())}


def test_there_is_a_template_of_every_measured_deployment(script: ModuleType) -> None:
    held = [json.loads(file.read_text(encoding="utf-8")) for file in script.templates()]
    assert {(one["model"], one["world_size"]) for one in held} == MEASURED
    assert len(held) == len(MEASURED)


def test_every_template_resolves_on_a_site_of_four(script: ModuleType) -> None:
    for file in script.templates():
        done = CliRunner().invoke(cli, ["resolve", "--config", str(file)], env={"DGPP_NODES": "a b c d"})
        assert done.exit_code == 0, done.stderr
        resolved, wanted = json.loads(done.stdout), json.loads(file.read_text(encoding="utf-8"))
        assert resolved["model"] == wanted["model"]
        assert resolved["nodes"] == ["a", "b", "c", "d"][: wanted["world_size"]]
        assert wanted["engine"].items() <= resolved["engine"].items()
        assert f"_w{wanted['world_size']}." in file.name


def test_every_plan_fits(plans: Mapping[str, Any]) -> None:
    assert {name: row.verdict for name, row in plans.items() if row.verdict != "fits"} == {}


def test_the_page_shows_the_plans(script: ModuleType, plans: Mapping[str, Any]) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text, plans.values()) == text, "run: python docs/deployments.py"


def test_two_sparks_are_refused_the_flash_release_in_8_bits_by_its_experts(script: ModuleType) -> None:
    """Also that a plan wants neither nodes nor a checkpoint."""
    file = script.DEPLOY / "cluster_glm-5.3-flash_fp8_w4.example.json"
    arguments = ["plan", "--config", str(file), "--device", "cuda", "--available", str(script.SPARK_BYTES)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    refused = CliRunner().invoke(cli, [*arguments, "--world", "2"])
    assert refused.exit_code == 1
    assert "largest items: weights: linear, fp8_block" in refused.stderr
    assert "not one block of kv_capacity fits" in refused.stderr


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the releases' config.json files are not beside the checkout")
@pytest.mark.parametrize(("file", "repository"), RELEASED)
def test_what_a_model_knows_of_a_release_is_what_its_config_says(file: str, repository: str) -> None:
    model = load_plugins(environ={}).find_repository(repository)
    assert model is not None
    known = model.spec.config_of(repository)
    assert known is not None
    released = json.loads((CONFIGS / f"{file}.json").read_text(encoding="utf-8"))
    assert model.read_config(known) == model.read_config(released)
