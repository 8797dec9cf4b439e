"""config.json: reading it, and the family's reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api import CheckpointError, ConfigError, DgppError, ModelConfig, ModelSpec, PluginError
from dgpp_core.checkpoint.config_json import read_config, read_model_config, read_processor


def config(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_what_is_written_is_read(tmp_path: Path, spec: ModelSpec) -> None:
    folder = config(tmp_path, dict(spec.tiny_config))
    assert read_model_config(folder) == spec.tiny_config
    assert read_config(folder, spec.read_config, spec.full_config) == spec.read_config(spec.tiny_config)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul", '{"a": 1, "a": 2}', "[" * 100_000])
def test_text_that_is_no_object_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(config(tmp_path, text))
    assert caught.value.where == str(tmp_path / "config.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no readable config\.json") as caught:
        read_model_config(tmp_path)
    assert caught.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts"])
@pytest.mark.parametrize("count", [10**9, 65_537, -1])
def test_counts_that_would_never_end_are_refused(tmp_path: Path, key: str, count: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} is no sensible count") as caught:
        read_model_config(config(tmp_path, {key: count}))
    assert (caught.value.found, caught.value.where) == (str(count), str(tmp_path / "config.json"))


@pytest.mark.parametrize("kind", [ConfigError, PluginError])
@pytest.mark.parametrize(("place", "shown"), [("hidden_size", ", hidden_size"), ("", ""), ("config.json", "")])
def test_the_readers_refusal_gets_the_file_and_keeps_its_parts(
    tmp_path: Path, spec: ModelSpec, kind: type[DgppError], place: str, shown: str
) -> None:
    def refuse(raw: Mapping[str, Any]) -> ModelConfig:
        raise kind("no good", where=place, found="a", expected="b", hint="c")

    with pytest.raises(kind, match="no good") as caught:
        read_config(config(tmp_path, dict(spec.tiny_config)), refuse, spec.full_config)
    where = str(tmp_path / "config.json") + shown
    assert caught.value.parts() == {"what": "no good", "where": where, "found": "a", "expected": "b", "hint": "c"}


@pytest.mark.parametrize("wrong", ["epz", "ep", "epss", "xeps", "num_layer", "nun_layers"])
def test_a_key_one_character_off_is_misspelt(tmp_path: Path, spec: ModelSpec, wrong: str) -> None:
    right = "eps" if "ep" in wrong else "num_layers"
    raw = {wrong if key == right else key: value for key, value in spec.tiny_config.items()}
    with pytest.raises(DgppError, match=f"the key '{right}' is misspelt") as caught:
        read_config(config(tmp_path, raw), spec.read_config, spec.full_config)
    assert (caught.value.found, caught.value.where) == (repr(wrong), str(tmp_path / "config.json"))


def test_other_keys_are_no_misspellings(tmp_path: Path, spec: ModelSpec) -> None:
    raw = dict(spec.tiny_config) | {"epsi": 1, "num_layer": 3, "transformers_version": "5"}
    found = read_config(config(tmp_path, raw), spec.read_config, spec.full_config)
    assert found == spec.read_config(spec.tiny_config)


@pytest.mark.parametrize("found", ["preprocessor_config.json", "processor_config.json", "both", "none"])
def test_a_checkpoint_says_how_images_are_prepared(tmp_path: Path, found: str) -> None:
    if found in ("preprocessor_config.json", "both"):
        (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14}')
    if found in ("processor_config.json", "both"):
        (tmp_path / "processor_config.json").write_text('{"image_processor": {"patch_size": 16}}')
    wanted = {"processor_config.json": {"patch_size": 16}, "none": {}}.get(found, {"patch_size": 14})
    assert read_processor(tmp_path) == wanted


@pytest.mark.parametrize("raw", ["[]", "{", '"x"'])
def test_what_says_how_images_are_prepared_is_an_object(tmp_path: Path, raw: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(raw)
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        read_processor(tmp_path)
