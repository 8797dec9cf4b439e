"""The GLM-5.3-Flash that this package serves: the released config, a tiny one, the releases' quantisations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgpp_core.api import ModelSpec
from dgpp_glm.config import fewer_dense
from dgpp_glm.glm53_flash.config import LINEAR, SPARSE, read_config

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": _FP8,
    "hybrid": {
        "quant_method": "dgpp_mixed",
        "routed_experts": {
            "format": "nvfp4-pack-quantized", "num_bits": 4, "group_size": 16, "symmetric": True,
            "scale_dtype": "torch.float8_e4m3fn", "global_scale_dtype": "torch.float32",
            "tensor_suffixes": ["weight_packed", "weight_scale", "weight_global_scale"],
        },
        "fp8": _FP8,
    },
}  # fmt: skip
"""``quantization_config`` by weight format."""


def _layers(kinds: list[str], dense: int) -> dict[str, Any]:
    """What depends on the layers; ``dense``: how many have no experts."""
    return {
        "num_hidden_layers": len(kinds), "layer_types": kinds, "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(kinds) - dense),
        "indexer_types": ["full"] * len(kinds),
    }  # fmt: skip


def _linear(kinds: list[str], heads: int, width: int) -> dict[str, Any]:
    return {
        "num_heads": heads, "head_dim": width, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "kda_layers": [i for i, kind in enumerate(kinds) if kind == LINEAR],
        "full_attn_layers": [i for i, kind in enumerate(kinds) if kind != LINEAR],
    }  # fmt: skip


def _shorten(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `dgpp_core.api.ModelSpec.shorten`."""
    text = fewer_dense(config["text_config"])
    linear, count = text["linear_attn_config"], text["num_hidden_layers"]
    left = {name: [layer for layer in linear[name] if layer < count] for name in ("kda_layers", "full_attn_layers")}
    return {**config, "text_config": {**text, "linear_attn_config": {**linear, **left}}}


_KINDS = [SPARSE[0] if layer % 4 == 3 else LINEAR for layer in range(45)]
_TEXT: dict[str, Any] = {
    **_layers(_KINDS, 3), "linear_attn_config": _linear(_KINDS, 64, 128), "model_type": "glm5_next_text",
    "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 0, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_head_dim": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "mla_use_nope": True,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "index_kpool_compress": True,
    "index_kpool_always_select_tail": True, "index_share_for_mtp_iteration": True, "indexer_rope_interleave": True,
    "mhc": True, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "n_routed_experts": 288,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32",
    "swiglu_limit": 10.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "hidden_act": "silu",
    "attention_bias": False, "num_nextn_predict_layers": 1, "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820, "dtype": "bfloat16",
}  # fmt: skip
_VISION: dict[str, Any] = {
    "model_type": "glm5_next_vision", "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
    "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "image_size": 448,
    "out_hidden_size": 4096, "projection_intermediate_size": 10240, "attention_bias": True, "attention_dropout": 0.0,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "swiglu_limit": 10.0,
}  # fmt: skip
FULL: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": _TEXT,
    "tie_word_embeddings": False, "dtype": "bfloat16", "quantization_config": QUANTISED["fp8"],
    "vision_config": _VISION, "image_token_id": 154854, "video_token_id": 154855, "image_start_token_id": 154830,
    "image_end_token_id": 154831, "video_start_token_id": 154832, "video_end_token_id": 154833,
}  # fmt: skip
_TINY_KINDS = [LINEAR, SPARSE[0]]
_TINY_TEXT: dict[str, Any] = _TEXT | {
    **_layers(_TINY_KINDS, 1), "linear_attn_config": _linear(_TINY_KINDS, 4, 8), "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 64, "hc_sinkhorn_iters": 3, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5, "max_position_embeddings": 4096,
    "eos_token_id": [1, 2, 3], "pad_token_id": 0,
}  # fmt: skip
_TINY_VISION: dict[str, Any] = _VISION | {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "projection_intermediate_size": 96, "swiglu_limit": 1.5,
}  # fmt: skip
TINY: dict[str, Any] = FULL | {
    "text_config": _TINY_TEXT, "quantization_config": None, "vision_config": _TINY_VISION, "image_token_id": 300,
    "video_token_id": 301, "image_start_token_id": 302, "image_end_token_id": 303, "video_start_token_id": 304,
    "video_end_token_id": 305,
}  # fmt: skip
SPECS = (
    ModelSpec(
        name="glm53-flash",
        title="GLM-5.3-Flash, 320B-A17B",
        architectures=("Glm5NextForConditionalGeneration",),
        repository="zai-org/GLM-5.3-Flash",
        read_config=read_config,
        full_config=FULL,
        tiny_config=TINY,
        formats=("bf16", *QUANTISED),
        draft_depth=5,
        quantised=QUANTISED,
        shorten=_shorten,
        releases={"unsloth/GLM-5.3-Flash-FP8": "fp8", "HawkBearPig/GLM-5.3-Flash-NVFP4-FP8": "hybrid"},
    ),
)
