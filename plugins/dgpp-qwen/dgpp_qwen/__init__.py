"""Qwen models for dgpp.

What is said here of the family needs no torch; the arithmetic of each model lies in a package of its own and is
imported when a model is built.
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
    Vision,
    hookimpl,
)
from dgpp_core.formats.resident import SEEN_BYTES, rotary_table_bytes
from dgpp_qwen.flash_next.config import FlashNextConfig
from dgpp_qwen.flash_next.specs import SPECS
from dgpp_qwen.flash_next.tables import bindings, groups
from dgpp_qwen.vision_canvas import flash_vision

DGPP_API = 1


@hookimpl
def dgpp_models() -> tuple[ModelSpec, ...]:
    """Qwen3.8-Flash-Next."""
    return SPECS


@hookimpl
def dgpp_bindings(spec: ModelSpec, config: ModelConfig) -> BindingTable:
    """Every tensor of the text model, the draft layer's included."""
    assert isinstance(config, FlashNextConfig)
    return bindings(config)


@hookimpl
def dgpp_groups(spec: ModelSpec, config: ModelConfig, world: int) -> tuple[StateGroup, ...]:
    """Keys, values and index keys; the delta rule's states; the rows that convolutions and n-grams look back at."""
    assert isinstance(config, FlashNextConfig)
    return groups(config, world)


@hookimpl
def dgpp_build(spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
    """The target model."""
    from dgpp_qwen.flash_next.model import FlashNextModel

    assert isinstance(config, FlashNextConfig)
    return FlashNextModel(config, shard)


@hookimpl
def dgpp_drafter(spec: ModelSpec, config: ModelConfig, shard: Shard, model: Model) -> Drafter:
    """The multi-token-prediction layer."""
    from dgpp_qwen.flash_next.drafter import FlashNextDrafter
    from dgpp_qwen.flash_next.model import FlashNextModel

    assert isinstance(config, FlashNextConfig)
    assert isinstance(model, FlashNextModel)
    return FlashNextDrafter(config, shard, model, spec.draft_depth)


@hookimpl
def dgpp_memory_plan(config: ModelConfig, settings: Mapping[str, Any]) -> tuple[PlanTerm, ...]:
    """Rotary tables, the routers' even preference, and what images take: no checkpoint tensors."""
    assert isinstance(config, FlashNextConfig)
    rotary = rotary_table_bytes(config.rotary_dim, config.max_positions)
    terms = (PlanTerm("rotary tables", rotary), PlanTerm("router bias", 4 * config.num_experts))
    if config.encoding is None:
        return terms
    places = 4 * 3 * (settings.get("max_concurrency", 1) + 1) * config.max_positions
    return (
        *terms,
        PlanTerm("turns of images", 8 * config.rotary_dim),
        PlanTerm("places of positions", places, exact=False),
        PlanTerm("images seen", SEEN_BYTES, exact=False),
        PlanTerm("an image being encoded", config.encoding.working_bytes, exact=False),
    )


@hookimpl
def dgpp_vision(config: ModelConfig, processor: Mapping[str, Any]) -> Vision | None:
    """Images, where the checkpoint has its encoder."""
    assert isinstance(config, FlashNextConfig)
    return None if config.encoding is None else flash_vision(processor, config.encoding.placeholder)


@hookimpl
def dgpp_dialect(spec: ModelSpec) -> Dialect:
    """The checkpoint's own template; reasoning that a template variable turns off."""
    return Dialect(reasoning=("<think>", "</think>"), thinking_switches=("enable_thinking",))
