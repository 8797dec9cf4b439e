"""What a plugin may import: hook specifications, the model contract, errors and the contract version."""

from dgpp_core.api.bindings import Binding, BindingTable, Init, Lookup, Recoded, Stack
from dgpp_core.api.errors import (
    CheckpointError,
    ConfigError,
    DgppError,
    EngineError,
    PlanError,
    PluginError,
    RequestError,
    TokenizerError,
)
from dgpp_core.api.hooks import API_VERSION, ENTRY_POINT_GROUP, Hooks, hookimpl, hookspec
from dgpp_core.api.model import Bus, Confident, Drafter, Model, Rows, Seeing, SeenRows, Shard, State, StepBatch, Weights
from dgpp_core.api.reading import end_tokens, read_section, refuse, require_values
from dgpp_core.api.spec import Dialect, ModelConfig, ModelSpec, PackagedCheckpoint, PlanTerm
from dgpp_core.api.state import DTYPE_BYTES, PagedGroup, RecurrentGroup, StateGroup, WindowGroup, for_device
from dgpp_core.api.vision import SEEN_TOKENS, Canvas, Vision, encoder_section, processor_count, require_processor

__all__ = [
    "API_VERSION",
    "DTYPE_BYTES",
    "ENTRY_POINT_GROUP",
    "SEEN_TOKENS",
    "Binding",
    "BindingTable",
    "Bus",
    "Canvas",
    "CheckpointError",
    "Confident",
    "ConfigError",
    "DgppError",
    "Dialect",
    "Drafter",
    "EngineError",
    "Hooks",
    "Init",
    "Lookup",
    "Model",
    "ModelConfig",
    "ModelSpec",
    "PackagedCheckpoint",
    "PagedGroup",
    "PlanError",
    "PlanTerm",
    "PluginError",
    "Recoded",
    "RecurrentGroup",
    "RequestError",
    "Rows",
    "Seeing",
    "SeenRows",
    "Shard",
    "Stack",
    "State",
    "StateGroup",
    "StepBatch",
    "TokenizerError",
    "Vision",
    "Weights",
    "WindowGroup",
    "encoder_section",
    "end_tokens",
    "for_device",
    "hookimpl",
    "hookspec",
    "processor_count",
    "read_section",
    "refuse",
    "require_processor",
    "require_values",
]  # fmt: skip
