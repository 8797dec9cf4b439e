"""GLM models for dgpp.

This module says what the family is and must not import torch; the arithmetic of each model lies in a package of its
own (`dgpp_glm.glm47`, `dgpp_glm.glm53`, `dgpp_glm.glm53_flash`) and is imported when a model is built.
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
from dgpp_glm.glm47 import specs as glm47_specs
from dgpp_glm.glm47 import tables as glm47_tables
from dgpp_glm.glm47.config import Glm47Config
from dgpp_glm.glm53 import specs as glm53_specs
from dgpp_glm.glm53 import tables as glm53_tables
from dgpp_glm.glm53.config import Glm53Config
from dgpp_glm.glm53_flash import specs as flash_specs
from dgpp_glm.glm53_flash import tables as flash_tables
from dgpp_glm.glm53_flash.config import FlashConfig
from dgpp_glm.vision_canvas import flash_vision

DGPP_API = 1


@hookimpl
def dgpp_models() -> tuple[ModelSpec, ...]:
    """GLM-4.7, GLM-5.3 and GLM-5.3-Flash."""
    return glm47_specs.SPECS + glm53_specs.SPECS + flash_specs.SPECS


@hookimpl
def dgpp_bindings(spec: ModelSpec, config: ModelConfig) -> BindingTable:
    """Every tensor of the checkpoint, the draft layer's included."""
    if isinstance(config, Glm53Config):
        return glm53_tables.bindings(config)
    if isinstance(config, FlashConfig):
        return flash_tables.bindings(config)
    assert isinstance(config, Glm47Config)
    return glm47_tables.bindings(config)


@hookimpl
def dgpp_groups(
    spec: ModelSpec, config: ModelConfig, world: int, settings: Mapping[str, Any]
) -> tuple[StateGroup, ...]:
    """What every layer keeps of a token or a request, the draft layer's last."""
    if isinstance(config, Glm53Config):
        ranks = int(settings.get("decode_context_parallel", 1))
        return glm53_tables.groups(config, world, str(settings.get("kv_dtype", "bf16")), ranks)
    if isinstance(config, FlashConfig):
        return flash_tables.groups(config, world, settings)
    assert isinstance(config, Glm47Config)
    return glm47_tables.groups(config, world)


@hookimpl
def dgpp_build(spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
    """The target model of one rank."""
    if isinstance(config, Glm53Config):
        from dgpp_glm.glm53.model import Glm53Model

        return Glm53Model(config, shard)
    if isinstance(config, FlashConfig):
        from dgpp_glm.glm53_flash.model import FlashModel

        return FlashModel(config, shard)
    from dgpp_glm.glm47.model import Glm47Model

    assert isinstance(config, Glm47Config)
    return Glm47Model(config, shard)


@hookimpl
def dgpp_drafter(spec: ModelSpec, config: ModelConfig, shard: Shard, model: Model) -> Drafter:
    """The multi-token-prediction layer."""
    if isinstance(config, Glm53Config):
        from dgpp_glm.glm53.drafter import Glm53Drafter
        from dgpp_glm.glm53.model import Glm53Model

        assert isinstance(model, Glm53Model)
        return Glm53Drafter(config, shard, model, spec.draft_depth)
    if isinstance(config, FlashConfig):
        from dgpp_glm.glm53_flash.drafter import FlashDrafter
        from dgpp_glm.glm53_flash.model import FlashModel

        assert isinstance(model, FlashModel)
        return FlashDrafter(config, shard, model, spec.draft_depth)
    from dgpp_glm.glm47.drafter import Glm47Drafter
    from dgpp_glm.glm47.model import Glm47Model

    assert isinstance(config, Glm47Config)
    assert isinstance(model, Glm47Model)
    return Glm47Drafter(config, shard, model, spec.draft_depth)


@hookimpl
def dgpp_memory_plan(config: ModelConfig) -> tuple[PlanTerm, ...]:
    """The rotary tables, which are no checkpoint tensors; GLM-5.3-Flash has none, but images."""
    if isinstance(config, FlashConfig):
        if config.encoding is None:
            return ()
        return (
            PlanTerm("images seen", SEEN_BYTES, exact=False),
            PlanTerm("an image being encoded", config.encoding.working_bytes, exact=False),
        )
    assert isinstance(config, Glm47Config | Glm53Config)
    width = config.rotary_dim if isinstance(config, Glm47Config) else config.qk_rope_head_dim
    return (PlanTerm("rotary tables", rotary_table_bytes(width, config.max_positions)),)


@hookimpl
def dgpp_vision(config: ModelConfig, processor: Mapping[str, Any]) -> Vision | None:
    """Images of GLM-5.3-Flash, where the checkpoint has its encoder."""
    if not isinstance(config, FlashConfig) or config.encoding is None:
        return None
    return flash_vision(processor, config.encoding.placeholder)


@hookimpl
def dgpp_dialect(spec: ModelSpec) -> Dialect:
    """The checkpoint's own template; reasoning that a template variable turns off."""
    switches = ("enable_thinking",) if spec.name == "glm47" else ()
    return Dialect(reasoning=("<think>", "</think>"), thinking_switches=switches)
