"""Precedence of defaults, deployment, site and flags; the digest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgpp_core.api import ConfigError, ModelConfig, ModelSpec
from dgpp_core.config.resolve import Resolved, canonical, default_deployment, digest, resolve
from dgpp_core.config.settings import Deployment, EngineSettings, parse_deployment
from dgpp_core.config.site import Site

PLAIN = Deployment(model="org/name", world_size=1)


def resolved(
    flags: dict[str, object] | None = None, deployment: Deployment = PLAIN, site: Site | None = None
) -> Resolved:
    return resolve(deployment, site or Site(), flags or {})


def test_precedence_is_defaults_then_files_then_flags() -> None:
    deployment = parse_deployment(
        {"model": "org/name", "world_size": 1, "engine": {"kv_capacity": 100}, "http": {"port": 8000}}, "file"
    )
    site = Site(http_port=7000, http_bind="0.0.0.0")
    found = resolved({"kv_capacity": None}, deployment, site)
    assert (found.engine.kv_capacity, found.engine.max_concurrency) == (100, 8)
    assert (found.http.port, found.http.bind_host, found.ports.http) == (8000, "0.0.0.0", 8000)
    found = resolved({"kv_capacity": 50, "port": 9000, "host": "127.0.0.2", "max_body_bytes": 5}, deployment, site)
    assert found.engine.kv_capacity == 50
    assert (found.http.port, found.http.bind_host, found.http.max_body_bytes) == (9000, "127.0.0.2", 5)


def test_a_model_alone_serves_its_repository() -> None:
    def read_config(raw: Any) -> ModelConfig:
        raise NotImplementedError

    spec = ModelSpec(
        name="n",
        title="t",
        architectures=("A",),
        repository="org/n",
        read_config=read_config,
        full_config={},
        tiny_config={},
    )
    found = resolved({"plugin": "n", "checkpoint": "/folder", "device": "cpu"}, default_deployment(spec))
    assert (found.model, found.plugin, found.checkpoint, found.device) == ("org/n", "n", "/folder", "cpu")
    assert (found.world, found.served_name) == (1, "org/n")
    assert resolved({"device": "auto"}, default_deployment(spec)).device == "auto"
    assert resolved({"model_alias": "mine"}, default_deployment(spec)).served_name == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_capacity": 0}, "kv_capacity"),
        ({"port": 70000}, "port"),
        ({"host": "example"}, "bind_host"),
        ({"max_concurency": 3}, "max_concurency"),
        ({"device": "tpu"}, "--device"),
        ({"world": 0}, "--world"),
        ({"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 8}}, "rope_scaling"),
        ({"fp8_head": "mma"}, "fp8_head"),
    ],
)
def test_flags_are_held_to_the_same_rules(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(flags)


def test_no_mtp_drops_depth_and_schedule_of_the_file_but_not_of_the_command_line() -> None:
    drafting = EngineSettings(mtp_depth=4, mtp_schedule=True, mtp_schedule_min_depth=2, mtp_schedule_lambda=0.045)
    deployment = Deployment(model="a", world_size=1, engine=drafting)
    found = resolved({"no_mtp": True}, deployment).engine
    assert found == EngineSettings(mtp=False)
    with pytest.raises(ConfigError, match="mtp_depth"):
        resolved({"no_mtp": True, "mtp_depth": 3}, deployment)


def test_no_prefix_cache() -> None:
    assert resolved({"no_prefix_cache": True}).engine.prefix_cache_gib == 0


def test_a_world_takes_the_first_nodes_and_never_shrinks() -> None:
    site = Site(
        nodes=("h0", "h1", "h2"), node_settings={"DGPP_MLOCK": "off"}, node_overrides={"h1": {"DGPP_MLOCK": "on"}}
    )
    two = Deployment(model="a", world_size=2)
    found = resolved({}, two, site)
    assert found.nodes == ("h0", "h1")
    assert found.node_env == ({"DGPP_MLOCK": "off"}, {"DGPP_MLOCK": "on"})
    with pytest.raises(ConfigError, match="needs 4 nodes") as caught:
        resolved({}, Deployment(model="a", world_size=4), site)
    assert caught.value.where == "DGPP_NODES"
    with pytest.raises(ConfigError, match="same port"):
        resolved({"port": 29970}, two, site)
    assert resolved({"port": 29970}, PLAIN, site).ports.http == 29970


def test_the_resolved_configuration_survives_json() -> None:
    found = resolved({"kv_capacity": 77}, site=Site(ssh_user="me"))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Resolved) == found


def fnv1a(data: bytes) -> int:
    value = 14695981039346656037
    for byte in data:
        value = ((value ^ byte) * 1099511628211) % 2**64
    return value


def test_digest_is_fnv1a_of_the_canonical_string() -> None:
    assert f"{fnv1a(b'foobar'):016x}" == "85944171f73967e8"  # published test vector
    found = resolved()
    assert digest(found) == f"{fnv1a(canonical(found).encode()):016x}"
    assert canonical(found).startswith("model=org/name plugin= world=1 fabric_port=29970 journal_port=29971 eos=1 ")


SHAPING = {
    "kv_capacity": 64, "max_concurrency": 3, "no_eos": True, "queue_limit": 2, "default_max_tokens": 9, "mtp_depth": 2,
    "prefill_budget_tokens": 16, "admission": "grow", "checkpoint": "/x", "block_tokens": 32, "pipeline": False,
}  # fmt: skip
SERVICE = {
    "port": 1,
    "max_connections": 3,
    "stats_interval_s": 1,
    "model_alias": "x",
    "device": "cpu",
    "host": "0.0.0.0",
}


@given(st.sets(st.sampled_from(sorted(SHAPING))), st.sets(st.sampled_from(sorted(SERVICE))))
def test_the_digest_changes_with_what_shapes_execution_and_with_nothing_else(
    shaping: set[str], service: set[str]
) -> None:
    flags: dict[str, object] = {key: SHAPING[key] for key in shaping}
    base = digest(resolved(flags))
    assert digest(resolved(flags | {key: SERVICE[key] for key in service})) == base
    assert (base != digest(resolved())) == bool(shaping)
