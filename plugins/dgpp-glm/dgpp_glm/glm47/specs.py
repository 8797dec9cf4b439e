"""The GLM-4.7 that this package serves: the released config, a tiny one, and the releases' quantisations."""

from __future__ import annotations

from typing import Any

from dgpp_core.api import ModelSpec
from dgpp_glm.config import fewer_dense
from dgpp_glm.glm47.config import read_config

QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
    "nvfp4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.41.0"},
        "config_groups": {"group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.92*"],
    },
}  # fmt: skip
"""``quantization_config`` by weight format; layer 92 is the draft layer."""

FULL: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
    "num_hidden_layers": 92, "first_k_dense_replace": 3, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000,
    "rope_scaling": None, "rms_norm_eps": 1e-5, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu", "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 202752, "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329, "dtype": "bfloat16", "quantization_config": QUANTISED["nvfp4"],
}  # fmt: skip
TINY: dict[str, Any] = FULL | {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 3, "max_position_embeddings": 4096,
    "eos_token_id": [1, 2, 3], "pad_token_id": 0, "quantization_config": None,
}  # fmt: skip
SPECS = (
    ModelSpec(
        name="glm47",
        title="GLM-4.7, 355B-A32B",
        architectures=("Glm4MoeForCausalLM",),
        repository="nvidia/GLM-4.7-NVFP4",
        read_config=read_config,
        full_config=FULL,
        tiny_config=TINY,
        formats=("bf16", *QUANTISED),
        draft_depth=5,
        quantised=QUANTISED,
        shorten=fewer_dense,
    ),
)
