"""What a GLM-4.7 config.json may say, and the tensors that follow from it."""

import fnmatch
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dgpp_glm.glm47.config import read_config
from dgpp_glm.glm47.specs import FULL, QUANTISED, SPECS, TINY
from dgpp_glm.glm47.tables import bindings, groups
from dgpp_glm.quantisation import Quantisation, read_quantisation

from dgpp_core.api import ConfigError
from dgpp_core.checkpoint.cuts import cut_shape
from dgpp_core.formats.storage import parts
from dgpp_core.host.loading import load_plugins

RELEASED = Path(__file__).parents[4] / "shared" / "data" / "configs" / "glm47_nvfp4.json"


def test_the_released_config() -> None:
    c = read_config(FULL)
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.max_positions) == (151552, 5120, 92, 202752)
    assert (c.rotary_dim, c.rope_theta, c.eos_ids) == (64, 1e6, (151329, 151336, 151338))
    assert c.num_attention_heads * c.head_dim == 12288


def test_the_specs_config_is_the_recorded_one() -> None:
    if not RELEASED.is_file():
        pytest.skip(f"no recorded config at {RELEASED}")
    recorded = json.loads(RELEASED.read_text(encoding="utf-8"))
    assert {key: recorded[key] for key in FULL if key != "quantization_config"} == {
        key: value for key, value in FULL.items() if key != "quantization_config"
    }
    assert bindings(read_config(recorded)) == bindings(read_config(FULL)), "the rules name the same matrices"


def test_rotary_constants_may_be_nested() -> None:
    flat = ("rope_theta", "partial_rotary_factor", "rope_scaling")
    nested = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    raw = {key: value for key, value in FULL.items() if key not in flat} | {"rope_parameters": nested}
    assert read_config(raw) == read_config(FULL)


@pytest.mark.parametrize(("key", "other"), [("rope_theta", 10000), ("partial_rotary_factor", 1.0)])
def test_rotary_constants_that_are_given_twice_agree(key: str, other: float) -> None:
    nested = {"rope_type": "default", "rope_theta": FULL["rope_theta"], "partial_rotary_factor": 0.5}
    assert read_config(FULL | {"rope_parameters": nested}) == read_config(FULL)
    with pytest.raises(ConfigError, match=rf"rope_parameters\.{key} is not supported"):
        read_config(FULL | {"rope_parameters": nested | {key: other}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "glm4"), ("vocab_size", 0), ("hidden_size", "128"), ("num_hidden_layers", None),
        ("num_key_value_heads", 3), ("attention_bias", False), ("use_qk_norm", False), ("hidden_act", "gelu"),
        ("tie_word_embeddings", True), ("n_shared_experts", 2), ("num_nextn_predict_layers", 0), ("rms_norm_eps", -1.0),
        ("first_k_dense_replace", 4), ("n_group", 3), ("topk_group", 2), ("num_experts_per_tok", 9),
        ("rope_theta", 0), ("partial_rotary_factor", 1.5), ("partial_rotary_factor", 0.1), ("rope_theta", None),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}), ("routed_scaling_factor", float("inf")),
        ("rope_scaling", {"factor": 4.0}), ("rope_parameters", {"rope_theta": True}), ("n_routed_experts", 10**12),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {field: value})
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"quant_method": "gptq"}, "quant_method"), ({}, "quant_method"),
        (QUANTISED["fp8"] | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (QUANTISED["fp8"] | {"weight_block_size": None}, "weight_block_size"),
        (QUANTISED["fp8"] | {"fmt": "e5m2"}, "fmt"), (QUANTISED["nvfp4"] | {"quant_algo": "FP8"}, "quant_algo"),
        (QUANTISED["nvfp4"] | {"group_size": 32}, "group_size"),
        (
            QUANTISED["nvfp4"] | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
            "config_groups.group_0.weights.num_bits",
        ),
    ],
)  # fmt: skip
def test_a_quantisation_it_cannot_load_is_refused_by_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": section})
    assert key in str(refused.value)


def test_excluded_modules_by_name_by_pattern_and_with_what_lies_below() -> None:
    rules = Quantisation("nvfp4", ("lm_head", "model.layers.1.self_attn*", "model.layers.92*", "model.layers.2.mlp"))
    dense = ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.92.eh_proj", "model.layers.2.mlp.up_proj")
    assert {rules.of(name) for name in dense} == {"dense"}
    stored = ("model.layers.1.mlp.up_proj", "model.layers.11.self_attn.q_proj", "model.layers.9.mlp.experts.2.up_proj")
    assert {rules.of(name) for name in stored} == {"nvfp4"}
    older = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    assert read_quantisation(older) == Quantisation("nvfp4", ("lm_head",))


def test_the_release_is_bound_tensor_by_tensor() -> None:
    """173,863 tensors are in it: those bound, a cache scale for each k and v, two copies in the draft layer."""
    table = bindings(read_config(FULL))
    stored = [part for b in table.tensors for part in parts(b.storage, b.name, b.shape)]
    assert len({part.name for part in stored}) == len(stored) == 173863 - 2 * 92 - 2
    kinds = Counter((b.storage, b.resident) for b in table.tensors if b.role == "linear")
    assert kinds["dense", "nvfp4"] == 161 * 3 + 5, "the draft layer's matrices are dense there and recoded here"
    assert kinds["nvfp4", ""] == 89 * 161 * 3 + 3 * 3
    fp8 = {b.name: b.storage for b in bindings(read_config(FULL | {"quantization_config": QUANTISED["fp8"]})).tensors}
    assert fp8["model.layers.5.self_attn.o_proj.weight"] == fp8["model.layers.92.mlp.experts.0.up_proj.weight"]
    assert fp8["model.layers.5.self_attn.o_proj.weight"] == "fp8_block"
    kept = ("lm_head", "model.embed_tokens", "model.layers.5.mlp.gate", "model.layers.92.eh_proj")
    assert {fp8[f"{name}.weight"] for name in kept} == {"dense"}


def test_what_ranks_hold() -> None:
    c = read_config(FULL)
    held = {b.name.removeprefix("model.layers.5."): cut_shape(b, 4) for b in bindings(c).tensors}
    assert held["self_attn.q_proj.weight"] == (3072, 5120)
    assert held["self_attn.k_proj.bias"] == (256,)
    assert held["self_attn.o_proj.weight"] == (5120, 3072)
    assert held["mlp.experts.7.gate_proj.weight"] == (384, 5120)
    assert held["mlp.shared_experts.down_proj.weight"] == (5120, 384)
    assert held["mlp.gate.weight"] == (160, 5120)
    assert held["lm_head.weight"] == (37888, 5120)
    assert held["model.layers.92.eh_proj.weight"] == (5120, 10240)
    assert {group.heads for group in groups(c, 4)} == {2}
    assert {group.layers for group in groups(c, 4)} == {93}
    with pytest.raises(ConfigError, match="world_size"):
        groups(c, 3)


def test_the_dialect_has_reasoning_that_can_be_turned_off() -> None:
    dialect = load_plugins(environ={}).model(SPECS[0].name).dialect()
    assert dialect.reasoning == ("<think>", "</think>")
    assert dialect.thinking_switches == ("enable_thinking",)
    assert dialect.chat_template is None


def test_without_drafts_the_drafters_tensors_are_passed_over() -> None:
    whole = bindings(read_config(FULL))
    served = whole.for_serving(drafting=False)
    left = {b.name for b in whole.tensors} - {b.name for b in served.tensors}
    assert left == {b.name for b in whole.tensors if b.name.startswith("model.layers.92.")}
    assert not served.recoded
    assert not any(stack.target.startswith("layers.92.") for stack in served.stacks)
    names = [part.name for b in whole.tensors if b.name in left for part in parts(b.storage, b.name, b.shape)]
    assert all(any(fnmatch.fnmatchcase(name, pattern) for pattern in served.ignored) for name in names)
    assert whole.for_serving(drafting=True) is whole
