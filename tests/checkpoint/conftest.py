"""A small model of our own for checkpoint tests: every role, a fused target, both cut axes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api import Binding, BindingTable, ConfigError, Init, ModelConfig, ModelSpec

RAW = {
    "architectures": ["ToyForCausalLM"], "vocab_size": 300, "hidden_size": 8, "num_layers": 2, "max_position": 64,
    "eps": 1e-5, "eos_token_id": 257,
}  # fmt: skip


class ToyConfig(ModelConfig, frozen=True, kw_only=True):
    """Two more fields, as a family has them."""

    num_layers: int
    eps: float


def read_config(raw: Mapping[str, Any]) -> ToyConfig:
    for key in ("vocab_size", "hidden_size", "num_layers", "max_position", "eos_token_id"):
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise ConfigError(f"config.json: {key} is not a positive integer", where=key, found=repr(raw.get(key)))
    if type(raw.get("eps")) is not float or not 0 < raw["eps"] < 1:
        raise ConfigError("config.json: eps is no small number", where="eps", found=repr(raw.get("eps")))
    return ToyConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_layers"],
        max_positions=raw["max_position"],
        eps=raw["eps"],
        eos_ids=(raw["eos_token_id"],),
    )


def make_table(config: ToyConfig) -> BindingTable:
    h, out = config.hidden_size, []
    out.append(Binding(name="embed.weight", shape=(config.vocab_size, h), target="embed", role="embedding"))
    for i in range(config.num_layers):
        at = f"layers.{i}."
        out += [
            Binding(name=at + "norm", shape=(h,), target=at + "norm", role="vector", init=Init(std=0.1, mean=1.0)),
            Binding(name=at + "q", shape=(2 * h, h), target=at + "qk", cut=0),
            Binding(name=at + "k", shape=(h, h), target=at + "qk", cut=0),
            Binding(name=at + "o", shape=(h, 2 * h), target=at + "o", cut=1),
        ]
    return BindingTable(tuple(out), ignored=("*.inv_freq",), shared=(("embed", "head"),))


SPEC = ModelSpec(
    name="toy",
    title="a model for tests",
    architectures=("ToyForCausalLM",),
    repository="org/toy",
    read_config=read_config,
    full_config=RAW,
    tiny_config=RAW,
)

Header = dict[str, Any]


def shard_bytes(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file, by hand."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return SPEC


@pytest.fixture
def table() -> BindingTable:
    return make_table(read_config(RAW))


@pytest.fixture
def table_of() -> Callable[[ModelConfig], BindingTable]:
    def make(config: ModelConfig) -> BindingTable:
        assert isinstance(config, ToyConfig)
        return make_table(config)

    return make


@pytest.fixture
def shard(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file into the test's folder and gives that folder."""

    def write(header: Header | bytes, data: bytes, name: str = "model.safetensors", length: int | None = None) -> Path:
        (tmp_path / name).write_bytes(shard_bytes(header, data, length))
        return tmp_path

    return write
