"""The hook specifications of the plugin contract.

A plugin is a module (or object) named by an entry point of the group ``dgpp.plugins``. It declares the contract it was
written for as ``DGPP_API = 1`` and implements the hooks below with `hookimpl`. Importing it must not import torch:
the front end loads it too. Heavy imports belong inside `dgpp_build` and `dgpp_drafter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from dgpp_core.api.bindings import BindingTable
from dgpp_core.api.model import Drafter, Model, Shard
from dgpp_core.api.spec import Dialect, ModelConfig, ModelSpec, PlanTerm
from dgpp_core.api.state import StateGroup
from dgpp_core.api.vision import Vision

if TYPE_CHECKING:
    import click

API_VERSION = 1
ENTRY_POINT_GROUP = "dgpp.plugins"
PROJECT = "dgpp"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks(Protocol):
    """Each method is a hook; ``dgpp_models``, ``dgpp_bindings``, ``dgpp_groups`` and ``dgpp_build`` are required."""

    @hookspec(firstresult=True)
    def dgpp_models(self) -> Sequence[ModelSpec]:
        """The family's models."""
        ...

    @hookspec(firstresult=True)
    def dgpp_bindings(self, spec: ModelSpec, config: ModelConfig) -> BindingTable:
        """Every tensor the model expects of its checkpoint."""
        ...

    @hookspec(firstresult=True)
    def dgpp_groups(
        self, spec: ModelSpec, config: ModelConfig, world: int, settings: Mapping[str, Any]
    ) -> Sequence[StateGroup]:
        """State groups of the model and its drafter together, as one rank of ``world`` keeps them.

        ``settings``: a deployment's ``engine`` section, or less of it. A model that can keep its cache in other forms
        goes by ``kv_dtype``; where the groups are the same for each, another one than ``bf16`` is refused.
        """
        ...

    @hookspec(firstresult=True)
    def dgpp_build(self, spec: ModelSpec, config: ModelConfig, shard: Shard) -> Model:
        """The model of one rank, with its weights."""
        ...

    @hookspec(firstresult=True)
    def dgpp_drafter(self, spec: ModelSpec, config: ModelConfig, shard: Shard, model: Model) -> Drafter | None:
        """The drafter that goes with ``model``, if there is one."""
        ...

    @hookspec(firstresult=True)
    def dgpp_memory_plan(
        self, spec: ModelSpec, config: ModelConfig, world: int, settings: Mapping[str, Any]
    ) -> Sequence[PlanTerm]:
        """Terms of the memory plan that the binding table and the state groups do not tell."""
        ...

    @hookspec(firstresult=True)
    def dgpp_dialect(self, spec: ModelSpec) -> Dialect:
        """Chat template and markers."""
        ...

    @hookspec(firstresult=True)
    def dgpp_vision(self, spec: ModelSpec, config: ModelConfig, processor: Mapping[str, Any]) -> Vision | None:
        """How the model takes images, if it does.

        ``processor``: what the checkpoint's ``preprocessor_config.json`` says, empty where there is none. A model with
        one must have the method ``see`` of `dgpp_core.api.Seeing`.
        """
        ...

    @hookspec
    def dgpp_commands(self, cli: click.Group) -> None:
        """Add commands to ``dgpp``."""
        ...

    @hookspec
    def dgpp_routes(self) -> Sequence[Any]:
        """Litestar route handlers to add to the service."""
        ...
