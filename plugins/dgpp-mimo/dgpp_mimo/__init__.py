"""MiMo models for dgpp.

This module says what the family is and must not import torch; the arithmetic of each model lies in a package of its
own (`dgpp_mimo.mimo26`) and is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from dgpp_mimo.mimo26.config import BLOCKS, Mimo26Config
from dgpp_mimo.mimo26.specs import SPECS
from dgpp_mimo.mimo26.tables import bindings, groups

DGPP_API = 1


@hookimpl
def dgpp_models() -> tuple[ModelSpec, ...]:
    """MiMo-V2.6-Flash."""
    return SPECS


@hookimpl
def dgpp_bindings(spec: ModelSpec, config: ModelConfig) -> BindingTable:
    """Every tensor of the text model and its draft blocks."""
    assert isinstance(config, Mimo26Config)
    return bindings(config)


@hookimpl
def dgpp_groups(
    spec: ModelSpec, config: ModelConfig, world: int, settings: Mapping[str, Any]
) -> tuple[StateGroup, ...]:
    """Paged keys and values of the global layers, rings of the window layers and of the draft blocks that run."""
    assert isinstance(config, Mimo26Config)
    drafts = max(1, min(BLOCKS, settings.get("mtp_depth", BLOCKS)))
    return groups(config, world, settings.get("kv_dtype", "bf16"), drafts)


@hookimpl
def dgpp_build(spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
    """The target model of one rank."""
    from dgpp_mimo.mimo26.model import Mimo26Model

    assert isinstance(config, Mimo26Config)
    return Mimo26Model(config, shard)


@hookimpl
def dgpp_drafter(spec: ModelSpec, config: ModelConfig, shard: Shard, model: Model) -> Drafter:
    """The three multi-token-prediction blocks."""
    from dgpp_mimo.mimo26.drafter import Mimo26Drafter
    from dgpp_mimo.mimo26.model import Mimo26Model

    assert isinstance(config, Mimo26Config)
    assert isinstance(model, Mimo26Model)
    return Mimo26Drafter(config, shard, model, spec.draft_depth)


@hookimpl
def dgpp_memory_plan(config: ModelConfig) -> tuple[PlanTerm, ...]:
    """The rotary tables, which are no checkpoint tensors."""
    assert isinstance(config, Mimo26Config)
    kinds = {"global": config.whole, "window": config.window}
    return tuple(
        PlanTerm(f"rotary table, {kind} layers", rotary_table_bytes(heads.rotary_dim, config.max_positions))
        for kind, heads in kinds.items()
    )


@hookimpl
def dgpp_dialect(spec: ModelSpec) -> Dialect:
    """The checkpoint's own template; reasoning that a template variable turns off."""
    return Dialect(reasoning=("<think>", "</think>"), thinking_switches=("enable_thinking",))
