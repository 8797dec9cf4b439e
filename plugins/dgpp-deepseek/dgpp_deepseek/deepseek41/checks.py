"""What a DeepSeek-V4.1 config.json may say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from dgpp_core.api import refuse, require_values
from dgpp_deepseek.deepseek41.raw import Quantisation, Root, Text

_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "rms_norm_eps", "swiglu_limit", "max_position_embeddings", "rope_theta",
    "compress_rope_theta", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks",
    "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "routed_scaling_factor", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_compressed_vocab_size", "num_nextn_predict_layers", "dspark_block_size", "dspark_markov_rank",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip
_ONLY: Mapping[str, object] = {
    "model_type": "deepseek_v41_text", "num_key_value_heads": 1, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}  # fmt: skip
_QUANTISATION: Mapping[str, object] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}  # fmt: skip
MOST_EXPERTS = 1 << 17
"""Of all layers together: each takes three entries of the binding table. The release counts 15,744."""


def check(root: Root) -> None:
    """Raise `ConfigError`, naming the key, where the model cannot be served."""
    if root.model_type != "deepseek_v41":
        raise refuse("model_type", root.model_type, "'deepseek_v41'")
    if root.quantization_config is not None:
        _check_quantisation(root.quantization_config)
    t = root.text_config
    require_values(t, positive=_POSITIVE, only=_ONLY, within="text_config.")
    _check_shapes(t)
    _check_layers(t)
    _check_tokens(t)


def _check_quantisation(found: Quantisation) -> None:
    require_values(found, only=_QUANTISATION, within="quantization_config.")


def _check_shapes(t: Text) -> None:
    """Widths that must divide each other; a kept row has a scale for every 32 values, and two tokens share one row."""
    for name, unit in (("head_dim", 32), ("index_head_dim", 64), ("qk_rope_head_dim", 2)):
        if (value := getattr(t, name)) % unit:
            raise refuse(f"text_config.{name}", value, f"a multiple of {unit}")
    if t.qk_rope_head_dim > min(t.head_dim, t.index_head_dim):
        raise refuse("text_config.qk_rope_head_dim", t.qk_rope_head_dim, "no more than head_dim and index_head_dim")
    if t.num_attention_heads % t.o_groups:
        raise refuse("text_config.o_groups", t.o_groups, f"a divisor of num_attention_heads, {t.num_attention_heads}")
    for chosen, count in (
        ("num_experts_per_tok", t.n_routed_experts), ("dspark_num_experts_per_tok", t.dspark_n_routed_experts),
    ):  # fmt: skip
        if getattr(t, chosen) > count:
            raise refuse(f"text_config.{chosen}", getattr(t, chosen), f"at most {count}")
    if t.num_hidden_layers * t.n_routed_experts + t.num_nextn_predict_layers * t.dspark_n_routed_experts > MOST_EXPERTS:
        raise refuse("text_config.n_routed_experts", t.n_routed_experts, f"at most {MOST_EXPERTS} in all layers")


def _check_layers(t: Text) -> None:
    """Which layer compresses, chooses, reads n-grams or feeds the drafter."""
    count, ratios = t.num_hidden_layers, t.compress_ratios
    if len(ratios) != count + t.num_nextn_predict_layers or not set(ratios) <= {0, 1, 2} or any(ratios[count:]):
        expected = "0, 1 or 2 for each layer, and 0 for each draft stage"
        raise refuse("text_config.compress_ratios", ratios, expected)
    sources, choosers = t.kv_source_layer_ids, t.index_source_layer_ids
    for name, ids in (
        ("kv_source_layer_ids", sources), ("index_source_layer_ids", choosers),
        ("engram_layer_ids", t.engram_layer_ids), ("dspark_target_layer_ids", t.dspark_target_layer_ids),
    ):  # fmt: skip
        if not ids or not _ascend(ids, count):
            raise refuse(f"text_config.{name}", ids, f"layers from 0 to {count - 1} in ascending order")
    if not set(sources) <= set(choosers) or not all(ratios[source] for source in sources):
        raise refuse("text_config.kv_source_layer_ids", sources, "index sources whose ratio is not 0")
    for layer in range(count):
        own = max((source for source in sources if source <= layer), default=-1)
        if ratios[layer] and (own < 0 or ratios[own] != ratios[layer]):
            raise refuse("text_config.compress_ratios", ratios, "for each compressed layer the ratio of its source")
    if not all(ratios[chooser] for chooser in choosers):
        raise refuse("text_config.index_source_layer_ids", choosers, "layers whose ratio is not 0")
    if t.candidate_source_layer_id != sources[-1]:
        raise refuse(
            "text_config.candidate_source_layer_id", t.candidate_source_layer_id, f"the last kv source, {sources[-1]}"
        )
    if t.engram_layer_ids[-1] >= sources[-1]:
        raise refuse(
            "text_config.engram_layer_ids", t.engram_layer_ids, f"layers before the last kv source, {sources[-1]}"
        )
    if t.dspark_target_layer_ids[0] < sources[-1]:
        expected = f"layers from the last kv source, {sources[-1]}, on"
        raise refuse("text_config.dspark_target_layer_ids", t.dspark_target_layer_ids, expected)


def _ascend(ids: Sequence[int], count: int) -> bool:
    return all(0 <= layer < count for layer in ids) and all(a < b for a, b in itertools.pairwise(ids))


def _check_tokens(t: Text) -> None:
    for name in ("engram_pad_token_id", "dspark_noise_token_id"):
        if not 0 <= (value := getattr(t, name)) < t.vocab_size:
            raise refuse(f"text_config.{name}", value, f"a token id below {t.vocab_size}")
    if t.engram_max_ngram_size < 2:
        raise refuse("text_config.engram_max_ngram_size", t.engram_max_ngram_size, "at least 2")
    if t.engram_compressed_vocab_size > t.vocab_size:
        found = t.engram_compressed_vocab_size
        raise refuse("text_config.engram_compressed_vocab_size", found, f"at most {t.vocab_size} classes")
    if len(t.engram_num_embeddings) != len(t.engram_layer_ids):
        raise refuse("text_config.engram_num_embeddings", t.engram_num_embeddings, "one number for each Engram layer")
