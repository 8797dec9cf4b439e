"""What a MiMo-V2.6 config.json may say, and the tensors, bytes and state that follow from it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dgpp_mimo.mimo26 import tables
from dgpp_mimo.mimo26.config import read_config
from dgpp_mimo.mimo26.specs import FULL, QUANTISED, SPECS, TINY
from dgpp_mimo.mimo26.tables import bindings, groups

from dgpp_core.api import ConfigError, PagedGroup, WindowGroup, for_device
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.cuts import cut_shape
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.host.loading import load_plugins

RELEASED = Path(__file__).parents[4] / "shared" / "data" / "configs" / "mimo_v26_flash.json"


def test_the_released_config() -> None:
    c = read_config(FULL)
    assert [layer for layer, windowed in enumerate(c.windowed) if not windowed] == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert [layer for layer, sparse in enumerate(c.sparse) if not sparse] == [0]
    assert (c.whole.rows, c.window.rows) == (13568, 14848)
    assert (c.whole.rotary_dim, c.whole.theta, c.window.rotary_dim, c.window.theta) == (64, 1e7, 64, 1e4)
    assert (c.window_rows, c.value_scale, c.eos_ids) == (128, 0.707, (151645,))


def test_the_specs_config_is_the_recorded_one() -> None:
    if not RELEASED.is_file():
        pytest.skip(f"no recorded config at {RELEASED}")
    recorded = json.loads(RELEASED.read_text(encoding="utf-8"))
    assert {key: recorded[key] for key in FULL} == FULL
    assert read_config(recorded) == read_config(FULL)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mimo"), ("hidden_size", 0), ("attention_projection_layout", "split"), ("attention_bias", True),
        ("add_swa_attention_sink_bias", False), ("add_full_attention_sink_bias", True), ("n_shared_experts", 1),
        ("scoring_func", "softmax"), ("n_group", 2), ("norm_topk_prob", False), ("routed_scaling_factor", 2.5),
        ("hybrid_layer_pattern", [0, 1]), ("hybrid_layer_pattern", [1, 1, 1]), ("moe_layer_freq", [0, 1, 2]),
        ("sliding_window_size", 17), ("attention_chunk_size", 8), ("num_experts_per_tok", 9),
        ("num_key_value_heads", 3), ("swa_num_key_value_heads", 6), ("partial_rotary_factor", 0.11),
        ("swa_num_key_value_heads", 2),
        ("partial_rotary_factor", 1.5), ("rope_parameters", {"rope_type": "yarn"}), ("rope_theta", float("inf")),
        ("rope_parameters", {"rope_theta": 5}), ("num_nextn_predict_layers", 1), ("n_routed_experts", 10**9),
        ("tie_word_embeddings", True), ("rope_scaling", {"type": "linear"}),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {field: value})
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "gptq"), ("fmt", "e5m2"), ("weight_block_size", [64, 64]), ("weight_block_size", None),
        ("store_dtype", "int4"), ("mxfp4_block_size", 16),
    ],
)  # fmt: skip
def test_a_quantisation_it_cannot_load_is_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": QUANTISED["mxfp4"] | {key: value}})
    assert key in str(refused.value)


def test_the_release_is_bound_tensor_by_tensor() -> None:
    """73,081 tensors are in it, 459 of them of the encoders."""
    table = bindings(read_config(FULL))
    stored = {part.name: part for b in table.tensors for part in parts_of(b)}
    assert len(stored) == sum(len(parts_of(b)) for b in table.tensors) == 73081 - 459
    for name, shape in (
        ("model.layers.5.self_attn.qkv_proj.weight_scale_inv", (108, 32)),
        ("model.layers.1.self_attn.qkv_proj.weight_scale_inv", (116, 32)),
        ("model.mtp.layers.2.self_attn.qkv_proj.weight_scale_inv", (116, 32)),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", (32, 128)),
        ("model.layers.47.mlp.experts.255.down_proj.weight", (4096, 1024)),
        ("model.layers.1.mlp.experts.0.up_proj.weight_scale", (2048, 128)),
        ("model.mtp.layers.0.eh_proj.weight", (4096, 8192)),
        ("model.layers.1.self_attn.attention_sink_bias", (64,)),
    ):
        assert stored[name].shape == shape
    kinds = Counter(b.storage for b in table.tensors if b.role == "linear")
    assert kinds == {"mxfp4_u8": 47 * 256 * 3, "fp8_block": 48 + 3 + 3 * 4, "dense": 48 + 47 + 1 + 3 + 3}


@pytest.mark.parametrize(("world", "gib"), [(1, 159.20), (2, 80.32), (4, 40.88)])
def test_bytes_that_a_rank_holds_of_the_release(world: int, gib: float) -> None:
    table = bindings(read_config(FULL))
    held = sum(parameter.bytes("cuda") for parameter in parameters(table, world).values())
    assert held / 2**30 == pytest.approx(gib, abs=0.02)


def test_without_drafts_the_blocks_are_passed_over() -> None:
    whole = bindings(read_config(FULL))
    left = {b.name for b in whole.tensors} - {b.name for b in whole.for_serving(drafting=False).tensors}
    assert left == {b.name for b in whole.tensors if b.name.startswith("model.mtp.")}


def test_what_ranks_hold() -> None:
    c = read_config(FULL)
    held = {b.name: cut_shape(b, 4) for b in bindings(c).tensors}
    assert held["model.layers.5.self_attn.qkv_proj.weight"] == (3392, 4096)
    assert held["model.layers.1.self_attn.qkv_proj.weight"] == (3712, 4096)
    assert held["model.layers.1.self_attn.attention_sink_bias"] == (16,)
    assert held["model.layers.1.self_attn.o_proj.weight"] == (4096, 2048)
    assert held["lm_head.weight"] == (38144, 4096)
    with pytest.raises(ConfigError, match="world_size"):
        groups(c, 3)


@pytest.mark.parametrize(("world", "paged", "rings"), [(1, 22.5, 24.4), (2, 11.25, 12.2), (4, 5.625, 6.1)])
def test_bytes_of_the_state(world: int, paged: float, rings: float) -> None:
    """KiB a token in blocks and MiB a request in rings of the target, bf16."""
    found = for_device(groups(read_config(FULL), world), "cuda")
    rows = sum(2 * g.layers * g.heads * g.width for g in found if isinstance(g, PagedGroup))
    assert rows / 2**10 == paged
    kept = [g for g in found if isinstance(g, WindowGroup) and not g.name.startswith("draft")]
    assert sum(2 * g.layers * g.heads * g.width * g.window for g in kept) / 2**20 == pytest.approx(rings, abs=0.05)


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_the_first_layers_alone(layers: int) -> None:
    cut: dict[str, Any] = {key: FULL[key][:layers] for key in ("hybrid_layer_pattern", "moe_layer_freq")}
    c = read_config(FULL | cut | {"num_hidden_layers": layers})
    assert {g.name: g.layers for g in groups(c, 1)}.get("window_k", 0) == sum(c.windowed)
    assert all(g.layers for g in groups(c, 1))


def test_the_dialect_has_reasoning_that_can_be_turned_off() -> None:
    dialect = load_plugins(environ={}).model(SPECS[0].name).dialect()
    assert dialect.reasoning == ("<think>", "</think>")
    assert dialect.thinking_switches == ("enable_thinking",)


def test_rows_in_eight_bits() -> None:
    """328 bytes of a key/value head; 114 KiB a token if every layer and one block kept all rows."""
    found = {g.name: g for g in groups(read_config(FULL), 1, "fp8") if not g.name.endswith("hidden")}
    assert {g.dtype for g in found.values()} == {"uint8"}
    row = {name: g.heads * g.width for name, g in found.items() if isinstance(g, PagedGroup | WindowGroup)}
    assert (row["k"] + row["v"], row["window_k"] + row["window_v"]) == (4 * 328, 8 * 328)
    assert 9 * (row["k"] + row["v"]) + 40 * (row["window_k"] + row["window_v"]) == pytest.approx(114 * 1024, rel=0.01)
    with pytest.raises(ConfigError, match="kv_dtype"):
        groups(read_config(FULL), 1, "fp4")


def test_the_bytes_of_a_scale_are_those_of_the_format() -> None:
    from dgpp_core.formats import cache_rows

    assert tables.SCALE_BYTES == cache_rows.SCALE_BYTES
