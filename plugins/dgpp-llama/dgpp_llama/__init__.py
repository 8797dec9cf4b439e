"""Llama-class models for dgpp: decoder-only, grouped-query attention, rotary positions, SwiGLU.

This package is also the worked example for plugin authors. This module says what the family is and must not import
torch; `dgpp_llama.model` holds the arithmetic and is imported when a model is built.
"""

from __future__ import annotations

from dgpp_core.api import BindingTable, Dialect, Model, ModelConfig, ModelSpec, PlanTerm, Shard, StateGroup, hookimpl
from dgpp_core.formats.resident import rotary_table_bytes
from dgpp_llama.config import SPECS, LlamaConfig
from dgpp_llama.tables import bindings, groups

DGPP_API = 1


@hookimpl
def dgpp_models() -> tuple[ModelSpec, ...]:
    """SmolLM2, and any other Llama checkpoint under the name ``llama``."""
    return SPECS


@hookimpl
def dgpp_bindings(spec: ModelSpec, config: ModelConfig) -> BindingTable:
    """The Hugging Face tensor names of a Llama checkpoint."""
    assert isinstance(config, LlamaConfig)
    return bindings(config)


@hookimpl
def dgpp_groups(spec: ModelSpec, config: ModelConfig, world: int) -> tuple[StateGroup, ...]:
    """Keys and values of every layer."""
    assert isinstance(config, LlamaConfig)
    return groups(config, world)


@hookimpl
def dgpp_build(spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
    """The model of one rank."""
    from dgpp_llama.model import LlamaModel

    assert isinstance(config, LlamaConfig)
    return LlamaModel(config, shard)


@hookimpl
def dgpp_memory_plan(config: ModelConfig) -> tuple[PlanTerm, ...]:
    """The rotary tables, which are no checkpoint tensors."""
    assert isinstance(config, LlamaConfig)
    return (PlanTerm("rotary tables", rotary_table_bytes(config.head_dim, config.max_positions)),)


@hookimpl
def dgpp_dialect(spec: ModelSpec) -> Dialect:
    """The checkpoint's own template; no reasoning."""
    return Dialect()
