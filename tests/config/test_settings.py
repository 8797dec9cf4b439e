"""Deployment files: every fault is named by key and file, with what was found and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.settings import (
    IDLE_KEYS,
    EngineSettings,
    FileInputs,
    HttpSettings,
    ImageInputs,
    read_deployment,
    without_effect,
)
from dgpp_core.config.strict import allowed


def write(folder: Path, content: Any) -> Path:
    path = folder / "deployment.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def refusal(folder: Path, content: Any) -> ConfigError:
    path = write(folder, content)
    with pytest.raises(ConfigError) as caught:
        read_deployment(path)
    assert str(path) in caught.value.where
    return caught.value


def with_engine(**keys: Any) -> dict[str, Any]:
    return {"model": "org/name", "world_size": 1, "engine": keys}


def test_a_minimal_deployment_has_the_documented_defaults(tmp_path: Path) -> None:
    found = read_deployment(write(tmp_path, {"model": "org/name", "world_size": 2}))
    assert (found.model, found.world_size, found.release, found.http) == ("org/name", 2, "", {})
    engine = found.engine
    assert (engine.max_concurrency, engine.kv_capacity, engine.queue_limit, engine.default_max_tokens) == (
        8,
        8192,
        64,
        256,
    )
    assert (engine.prefix_cache_gib, engine.admission, engine.admission_window) == (1.5, "full", 256)
    assert (engine.sampling_candidates, engine.rendezvous_timeout_ms, engine.bulk_inflight) == (128, 120000, -1)


def test_values_are_taken_over(tmp_path: Path) -> None:
    engine = read_deployment(write(tmp_path, with_engine(kv_capacity=1000, block_tokens=16, admission="grow"))).engine
    assert (engine.kv_capacity, engine.block_tokens, engine.pool_blocks, engine.admission) == (1000, 16, 63, "grow")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_concurrency", 0, "an integer >= 1 and <= 1048576"),
        ("max_concurrency", 2**20 + 1, "an integer >= 1 and <= 1048576"),
        ("max_concurrency", True, "an integer"),
        ("max_concurrency", "8", "an integer"),
        ("max_concurrency", 8.5, "an integer"),
        ("kv_capacity", 2**40 + 1, "<= 1099511627776"),
        ("kv_dtype", "int8", "one of bf16, fp4, fp8"),
        ("admission", None, "one of full, grow"),
        ("prefix_cache_gib", -0.1, ">= 0"),
        ("prefill_budget_tokens", -2, ">= -1"),
        ("mtp_depth", 6, ">= 1 and <= 5"),
        ("mtp_schedule_row_ms", 0, "> 0"),
        ("reasoning_in_content", 1, "true or false"),
        ("file_inputs", {"workers": 257}, "an integer >= 1 and <= 256"),
    ],
)
def test_a_value_out_of_range_names_key_found_and_allowed(tmp_path: Path, key: str, value: Any, words: str) -> None:
    error = refusal(tmp_path, with_engine(**{key: value}))
    assert f"engine.{key}" in error.what
    assert words in error.expected
    assert error.found == json.dumps(value["workers"] if isinstance(value, dict) else value)
    default = getattr(EngineSettings(), key)
    shown = json.dumps(default.workers if isinstance(value, dict) else default)
    assert error.hint == f"choose such a value, or leave it out for the default, {shown}"


def test_a_value_without_a_default_or_in_a_list_is_not_to_be_left_out(tmp_path: Path) -> None:
    assert refusal(tmp_path, with_engine() | {"world_size": 0}).hint == ""


@pytest.mark.parametrize(
    ("field", "bounds"), [("max_concurrency", (1, 2**20)), ("mtp_depth", (1, 5)), ("queue_limit", (1, 2**30))]
)
def test_both_ends_of_a_range_are_accepted(tmp_path: Path, field: str, bounds: tuple[int, int]) -> None:
    for value in bounds:
        assert getattr(read_deployment(write(tmp_path, with_engine(**{field: value}))).engine, field) == value


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mtp": False, "mtp_depth": 2}, "engine.mtp_depth"),
        ({"mtp": False, "mtp_schedule": True}, "engine.mtp_schedule"),
        ({"mtp_schedule_min_depth": 2}, "engine.mtp_schedule_min_depth"),
        ({"graph_batch_min_live": 9}, "engine.graph_batch_min_live"),
        ({"prefill_budget_tokens": 512, "prefill_idle_budget_tokens": 256}, "engine.prefill_idle_budget_tokens"),
        ({"prefill_budget_tokens": 0, "prefill_idle_budget_tokens": 256}, "engine.prefill_idle_budget_tokens"),
        ({"prefill_idle_budget_tokens": 255}, "engine.prefill_idle_budget_tokens"),
    ],
)
def test_rules_between_keys_name_the_key(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    assert f"`{named}`" in refusal(tmp_path, with_engine(**keys)).what


def test_an_unknown_key_gets_the_nearest_one_as_hint(tmp_path: Path) -> None:
    error = refusal(tmp_path, with_engine(max_concurency=8))
    assert "engine.max_concurency" in error.what
    assert "engine.max_concurrency" in error.hint
    assert "kv_capacity" in error.expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"world_size": 1}, "`model` is missing"),
        ({"model": "a/b"}, "`world_size` is missing"),
        ({"model": "", "world_size": 1}, "`model`"),
        ({"model": "a/b", "world_size": 0}, "`world_size`"),
        ({"model": "a/b", "world_size": 1, "release": "../x"}, "`release`"),
        ({"model": "a/b", "world_size": 1, "paths": {"log_dir": "x"}}, "`paths.log_dir`"),
        ({"model": "a/b", "world_size": 1, "nodes": ["h0"]}, "`nodes`"),
        ({"model": "a/b", "world_size": 1, "ssh_user": "me"}, "`ssh_user`"),
        ({"model": "a/b", "world_size": 1, "engine": []}, "`engine`"),
        ([], "the file"),
        ('{"model": "a/b", "model": "c/d", "world_size": 1}', "`model` is given twice"),
        ('{"model": "a/b", "world_size": 1,}', "not valid JSON"),
        ('{"model": "a/b", "world_size": NaN}', "not finite"),
        ('{"model": "a/b", "world_size": 1, "engine": {"prefix_cache_gib": 1e999}}', "not finite"),
        ("[" * 100_000, "not usable JSON"),
    ],
)
def test_faults_of_the_file_as_a_whole(tmp_path: Path, content: Any, words: str) -> None:
    assert words in refusal(tmp_path, content).what


@pytest.mark.parametrize(
    ("http", "words"),
    [
        ({"port": 0}, "http.port"),
        ({"port": 65536}, "http.port"),
        ({"bind_host": "localhost"}, "http.bind_host"),
        ({"bind_host": "[::1]"}, "http.bind_host"),
        ({"max_body_bytes": 0}, "http.max_body_bytes"),
        ({"sse_ping_interval": 0}, "http.sse_ping_interval"),
        ({"sse_ping_interval": None}, "http.sse_ping_interval"),
        ({"sse_ping_interval": True}, "http.sse_ping_interval"),
        ({"address": "1.2.3.4"}, "http.address"),
    ],
)
def test_http_overrides_are_checked_when_they_are_read(tmp_path: Path, http: dict[str, Any], words: str) -> None:
    assert f"`{words}`" in refusal(tmp_path, {"model": "a/b", "world_size": 1, "http": http}).what


def test_a_missing_file_and_a_binary_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the deployment file") as caught:
        read_deployment(tmp_path / "none.json")
    assert caught.value.where == str(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b'{"model": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        read_deployment(tmp_path / "binary.json")
    assert caught.value.where.endswith("byte 11")


def test_rope_scaling_takes_its_type_under_either_name(tmp_path: Path) -> None:
    ramp = {"factor": 2.0, "original_max_position_embeddings": 262144}
    for name in ("type", "rope_type"):
        found = read_deployment(write(tmp_path, with_engine(rope_scaling={**ramp, name: "yarn"}))).engine.rope_scaling
        assert found is not msgspec.UNSET
        assert found.factor == 2.0
    assert "rope_scaling.rope_type" in refusal(tmp_path, with_engine(rope_scaling=ramp)).what
    both = with_engine(rope_scaling={**ramp, "type": "yarn", "rope_type": "yarn"})
    assert "rope_scaling.rope_type" in refusal(tmp_path, both).what


def test_budgets() -> None:
    assert (EngineSettings().busy_budget, EngineSettings().idle_budget) == (256, 256)
    assert (
        EngineSettings(prefill_budget_tokens=0).busy_budget,
        EngineSettings(prefill_budget_tokens=0).idle_budget,
    ) == (0, 0)
    idle = EngineSettings(prefill_budget_tokens=64, prefill_idle_budget_tokens=512)
    assert (idle.busy_budget, idle.idle_budget) == (64, 512)


def test_automatic_budgets_are_larger_on_a_gpu_and_given_ones_stay() -> None:
    def budgets(**given: int) -> tuple[int, int]:
        settings = EngineSettings(**given).on_device(gpu=True)  # type: ignore[arg-type]
        return settings.busy_budget, settings.idle_budget

    assert budgets() == (512, 2048)
    assert budgets(prefill_idle_budget_tokens=300) == (300, 300)
    assert budgets(prefill_budget_tokens=0) == (0, 0)
    assert budgets(prefill_budget_tokens=64, prefill_idle_budget_tokens=128) == (64, 128)
    assert EngineSettings().on_device(gpu=False) == EngineSettings()


def test_keys_without_effect_are_named_only_where_given_a_value() -> None:
    assert without_effect(EngineSettings()) == {}
    assert without_effect(EngineSettings(kv_dtype="fp8", bulk_inflight=4)) == {"bulk_inflight": "in this version"}
    named = without_effect(EngineSettings(mtp_verify="block", mtp_draft_temperature=0.5))
    assert set(named) == {"mtp_verify", "mtp_draft_temperature"}
    assert len(set(named.values())) == 1
    assert set(IDLE_KEYS) <= set(EngineSettings.__struct_fields__)


def test_keys_of_a_schedule_are_named_where_there_is_none() -> None:
    keys = {
        "mtp_schedule_row_ms": 9.0,
        "mtp_schedule_base_ms": 0.0,
        "mtp_schedule_lambda": 0.045,
        "mtp_schedule_min_depth": 2,
        "mtp_schedule_adapt": False,
        "mtp_schedule_sampled_scale": 0.5,
    }
    assert set(keys) == {name for name in EngineSettings.__struct_fields__ if name.startswith("mtp_schedule_")}
    for given in (keys, {"mtp_schedule_lambda": 0.045}, {"mtp_schedule_adapt": False}):
        settings = EngineSettings(mtp_depth=4, **given)
        assert without_effect(settings) == dict.fromkeys(given, "without `mtp_schedule`")
        assert without_effect(msgspec.structs.replace(settings, mtp_schedule=True)) == {}


@pytest.mark.parametrize("struct", [EngineSettings, HttpSettings, FileInputs, ImageInputs])
def test_every_default_is_inside_its_own_range_and_every_field_is_described(struct: type[msgspec.Struct]) -> None:
    assert msgspec.convert(msgspec.to_builtins(struct()), struct) == struct()
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        assert field.name in (struct.__doc__ or "") or field.name.startswith("mtp_schedule")
        assert allowed(field.type)
