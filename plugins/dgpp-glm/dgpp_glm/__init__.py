"""GLM models for dgpp.

This module says what the family is and must not import torch; the arithmetic of each model lies in a package of its
own (`dgpp_glm.glm47`) and is imported when a model is built.
"""

from __future__ import annotations

from dgpp_core.api import (
    BindingTable,
    Dialect,
    Drafter,
    Model,
    ModelConfig,
    ModelSpec,
    PlanTerm,
    Shard,
    StateGroup,
    hookimpl,
)
from dgpp_core.formats.resident import rotary_table_bytes
from dgpp_glm.glm47.config import Glm47Config
from dgpp_glm.glm47.specs import SPECS
from dgpp_glm.glm47.tables import bindings, groups

DGPP_API = 1


@hookimpl
def dgpp_models() -> tuple[ModelSpec, ...]:
    """GLM-4.7."""
    return SPECS


@hookimpl
def dgpp_bindings(spec: ModelSpec, config: ModelConfig) -> BindingTable:
    """Every tensor of the checkpoint, the draft layer's included."""
    assert isinstance(config, Glm47Config)
    return bindings(config)


@hookimpl
def dgpp_groups(spec: ModelSpec, config: ModelConfig, world: int) -> tuple[StateGroup, ...]:
    """Keys and values of every layer, the draft layer's last."""
    assert isinstance(config, Glm47Config)
    return groups(config, world)


@hookimpl
def dgpp_build(spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
    """The target model of one rank."""
    from dgpp_glm.glm47.model import Glm47Model

    assert isinstance(config, Glm47Config)
    return Glm47Model(config, shard)


@hookimpl
def dgpp_drafter(spec: ModelSpec, config: ModelConfig, shard: Shard, model: Model) -> Drafter:
    """The multi-token-prediction layer."""
    from dgpp_glm.glm47.drafter import Glm47Drafter
    from dgpp_glm.glm47.model import Glm47Model

    assert isinstance(config, Glm47Config)
    assert isinstance(model, Glm47Model)
    return Glm47Drafter(config, shard, model, spec.draft_depth)


@hookimpl
def dgpp_memory_plan(config: ModelConfig) -> tuple[PlanTerm, ...]:
    """The rotary tables, which are no checkpoint tensors."""
    assert isinstance(config, Glm47Config)
    return (PlanTerm("rotary tables", rotary_table_bytes(config.rotary_dim, config.max_positions)),)


@hookimpl
def dgpp_dialect(spec: ModelSpec) -> Dialect:
    """The checkpoint's own template; reasoning that a template variable turns off."""
    return Dialect(reasoning=("<think>", "</think>"), thinking_switches=("enable_thinking",))
