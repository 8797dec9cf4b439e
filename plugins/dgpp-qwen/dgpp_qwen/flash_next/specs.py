"""The Qwen3.8-Flash-Next that this package serves: the released config, a tiny one, the releases' quantisations."""

from __future__ import annotations

from typing import Any

from dgpp_core.api import ModelSpec
from dgpp_qwen.flash_next.config import LINEAR, SPARSE, read_config
from dgpp_qwen.flash_next.scaling import rescale

QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_per_tensor": False, "act_per_tensor": False,
        "weight_block_size": [128, 128],
    },
    "nvfp4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "config_groups": {"group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"],
        }},
    },
}  # fmt: skip
"""``quantization_config`` by weight format."""


_TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48,
    "layer_types": [*[LINEAR] * 3, SPARSE[0]] * 12, "full_attention_interval": 4, "hc_count": 4, "hc_lowrank": 320,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_compress_ratio": 4,
    "indexer_budget": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid",
    "mamba_ssm_dtype": "float32", "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4,
    "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20000000,
    "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": False, "bos_token_id": 248044,
    "eos_token_id": 248044, "dtype": "bfloat16",
}  # fmt: skip
FULL: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": _TEXT,
    "tie_word_embeddings": False, "quantization_config": QUANTISED["fp8"], "language_model_only": False,
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "vision_config": {
        "model_type": "qwen4_exp", "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh", "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "in_channels": 3, "out_hidden_size": 2560, "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
    },
}  # fmt: skip
_TINY_TEXT: dict[str, Any] = _TEXT | {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "layer_types": [SPARSE[0], LINEAR, LINEAR],
    "hc_lowrank": 16,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "rope_parameters": _TEXT["rope_parameters"] | {"rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    "indexer_n_heads": 2, "indexer_head_dim": 32, "indexer_budget": 16, "linear_num_key_heads": 4,
    "linear_num_value_heads": 12, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "ple_embed_dim": 64,
    "heads_per_ngram": 2, "ngram_vocab_size_base": 500, "split_ngram_parts": 4, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
_TINY_VISION: dict[str, Any] = FULL["vision_config"] | {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "num_position_embeddings": 25,
}  # fmt: skip
TINY: dict[str, Any] = FULL | {
    "text_config": _TINY_TEXT, "quantization_config": None, "vision_config": _TINY_VISION, "image_token_id": 300,
    "vision_start_token_id": 301, "vision_end_token_id": 302, "video_token_id": 303,
}  # fmt: skip
SPECS = (
    ModelSpec(
        name="qwen38-flash-next",
        title="Qwen3.8-Flash-Next, 126B-A6B and a table of 51B",
        architectures=("Qwen4ExpForConditionalGeneration",),
        repository="Qwen/Qwen3.8-Flash-Next-FP8",
        read_config=read_config,
        full_config=FULL,
        tiny_config=TINY,
        formats=("bf16", *QUANTISED),
        draft_depth=4,
        quantised=QUANTISED,
        rescale=rescale,
        releases={"Qwen/Qwen3.8-Flash-Next-FP8": "fp8", "nvidia/Qwen3.8-Flash-Next-NVFP4": "nvfp4"},
    ),
)
