"""DeepSeek models for dgpp.

This module says what the family is and must not import torch; the arithmetic of each model lies in a package of its
own (`dgpp_deepseek.deepseek41`) and is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.groups import groups
from dgpp_deepseek.deepseek41.specs import SPECS
from dgpp_deepseek.deepseek41.tables import bindings

if TYPE_CHECKING:
    import click

DGPP_API = 1


@hookimpl
def dgpp_models() -> tuple[ModelSpec, ...]:
    """DeepSeek-V4.1-Flash."""
    return SPECS


@hookimpl
def dgpp_bindings(spec: ModelSpec, config: ModelConfig) -> BindingTable:
    """Every tensor of the text model and its drafter."""
    assert isinstance(config, Deepseek41Config)
    return bindings(config)


@hookimpl
def dgpp_groups(
    spec: ModelSpec, config: ModelConfig, world: int, settings: Mapping[str, Any]
) -> tuple[StateGroup, ...]:
    """Compressed entries and their keys, windows of the target's and the drafter's layers, the last tokens."""
    assert isinstance(config, Deepseek41Config)
    return groups(config, world, settings)


@hookimpl
def dgpp_build(spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
    """The target model of one rank."""
    from dgpp_deepseek.deepseek41.model import Deepseek41Model

    assert isinstance(config, Deepseek41Config)
    return Deepseek41Model(config, shard)


@hookimpl
def dgpp_drafter(spec: ModelSpec, config: ModelConfig, shard: Shard, model: Model) -> Drafter:
    """The layers that draft a block of tokens at once."""
    from dgpp_deepseek.deepseek41.drafter import Deepseek41Drafter
    from dgpp_deepseek.deepseek41.model import Deepseek41Model

    assert isinstance(config, Deepseek41Config)
    assert isinstance(model, Deepseek41Model)
    return Deepseek41Drafter(config, shard, model)


@hookimpl
def dgpp_memory_plan(config: ModelConfig, world: int) -> tuple[PlanTerm, ...]:
    """The rotary tables and the hash sizes, which are no checkpoint tensors."""
    assert isinstance(config, Deepseek41Config)
    rotary = rotary_table_bytes(config.rope, config.max_positions)
    slots = len(config.engram_layers) * config.ngram_slots // world
    return (
        PlanTerm("rotary tables", 2 * rotary, "of windows and of entries"),
        PlanTerm("n-gram hashes", 2 * 8 * slots),
    )


@hookimpl
def dgpp_dialect(spec: ModelSpec) -> Dialect:
    """A template that renders what the release's encoder does; reasoning that a template variable turns off."""
    template = Path(__file__).parent / "deepseek41" / "chat_template.jinja"
    return Dialect(
        chat_template=template.read_text(encoding="utf-8"),
        reasoning=("<think>", "</think>"),
        thinking_switches=("enable_thinking",),
    )


@hookimpl
def dgpp_commands(cli: click.Group) -> None:
    """``dgpp engram-classes``."""
    from dgpp_deepseek.commands import engram_classes

    cli.add_command(engram_classes)
