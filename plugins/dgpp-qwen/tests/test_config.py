"""What a Qwen3.8-Flash-Next config.json may say, and the tensors, constants and state that follow from it."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dgpp_qwen.flash_next.config import LINEAR, SPARSE, read_config
from dgpp_qwen.flash_next.hashing import constants
from dgpp_qwen.flash_next.quantisation import Storages
from dgpp_qwen.flash_next.specs import FULL, QUANTISED, TINY
from dgpp_qwen.flash_next.tables import bindings, groups

from dgpp_core.api import ConfigError
from dgpp_core.api.state import DTYPE_BYTES, PagedGroup, RecurrentGroup, WindowGroup, for_device
from dgpp_core.checkpoint.cuts import cut_ranges, cut_shape
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.formats.storage import parts

RECORDED = Path(__file__).parents[4] / "shared" / "data" / "configs"


def text(**changes: object) -> dict[str, Any]:
    return TINY | {"text_config": TINY["text_config"] | changes}


def test_the_released_config() -> None:
    c = read_config(FULL)
    assert (c.vocab_size, c.width, c.hidden_size, c.layers, c.max_positions) == (248320, 2560, 10240, 48, 262144)
    assert (c.rotary_dim, c.rope_theta, c.top_blocks, c.boundary, c.eos_ids) == (64, 1e7, 512, 248044, (248044,))
    assert [index for index, sparse in enumerate(c.sparse) if sparse] == list(range(3, 48, 4))
    assert (c.channels, c.value_size, c.ple_layer, c.ngram_heads, c.seed) == (10240, 6144, 1, 16, 1234)
    assert read_config(FULL | {"eos_token_id": [5, 6]}).eos_ids == (5, 6)


@pytest.mark.parametrize("fmt", list(QUANTISED))
def test_the_specs_config_is_the_recorded_one(fmt: str) -> None:
    file = RECORDED / f"qwen38_flash_next_{fmt}.json"
    if not file.is_file():
        pytest.skip(f"no recorded config at {file}")
    recorded = json.loads(file.read_text(encoding="utf-8"))
    assert read_config(recorded) == read_config(FULL | {"quantization_config": QUANTISED[fmt]})


def test_hash_constants_and_rows_are_the_recorded_ones() -> None:
    found = constants(read_config(FULL))
    assert found.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert found.sizes[:4] + found.sizes[-2:] == (20000003, 20000023, 20000033, 20000047, 20000161, 20000171)
    assert (found.offsets[:3], found.offsets[-1], found.rows) == ((0, 20000003, 40000026), 300001275, 320001536)


def test_every_spelling_of_a_sparse_layer() -> None:
    for spelling in SPARSE:
        assert read_config(text(layer_types=[spelling, LINEAR, LINEAR])) == read_config(TINY)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen3_next"), ("hidden_size", 0), ("hc_count", "4"), ("hidden_act", "gelu"),
        ("layer_types", ["linear_attention"] * 2), ("layer_types", ["sliding_attention"] * 3),
        ("num_key_value_heads", 3), ("linear_num_key_heads", 5), ("indexer_compress_ratio", 3), ("indexer_kv_heads", 2),
        ("attention_bias", True), ("output_gate_type", "tanh"), ("mamba_ssm_dtype", "bfloat16"), ("num_experts", 1),
        ("num_experts", 1 << 40), ("ple_layer_ids", [0]), ("ple_layer_ids", [1]), ("ple_layer_ids", [1, 2]),
        ("ple_embed_dim", 62), ("split_ngram_parts", 53), ("split_ngram_parts", 2177), ("split_ngram_parts", 1 << 40),
        ("ngram_size", 4), ("mtp_num_hidden_layers", 2), ("eos_token_id", 512), ("rms_norm_eps", float("nan")),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}), ("rope_parameters", {}),
        ("rope_parameters", {"rope_type": "llama3", "factor": 2.0, "rope_theta": 1e4}),
        ("rope_parameters", YARN | {"original_max_position_embeddings": 0}),
        ("rope_parameters", YARN | {"mscale": 1.0}),
        ("rope_parameters", YARN | {"factor": True}), ("rope_parameters", YARN | {"truncate": False}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 1.5}), ("tie_word_embeddings", True),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(text(**{field: value}))
    assert field in str(refused.value)


def test_pieces_of_the_table_that_leave_none_empty_are_taken() -> None:
    rows = constants(read_config(TINY)).rows
    for pieces in range(1, 90):
        height = math.ceil(rows / pieces)
        if all(range(rows)[height * shard : height * (shard + 1)] for shard in range(pieces)):
            table = [
                b for b in bindings(read_config(text(split_ngram_parts=pieces))).tensors if b.target == "ple.table"
            ]
            assert (len(table), sum(b.shape[0] for b in table)) == (pieces, rows)
        else:
            with pytest.raises(ConfigError, match="split_ngram_parts"):
                read_config(text(split_ngram_parts=pieces))


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({}, "quant_method"), (QUANTISED["fp8"] | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (QUANTISED["nvfp4"] | {"quant_algo": "FP8"}, "quant_algo"),
        (QUANTISED["nvfp4"] | {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "group_0.weights.num_bits"),
        (QUANTISED["nvfp4"] | {"config_groups": {"group_0": None}}, "group_0.weights.num_bits"),
    ],
)  # fmt: skip
def test_a_quantisation_it_cannot_load_is_refused_by_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": section})
    assert key in str(refused.value)


def test_the_releases_are_bound_tensor_by_tensor() -> None:
    """152,089 and 299,545 tensors are in them, the images' encoder's 333 included."""
    for fmt, count in (("fp8", 152089), ("nvfp4", 299545)):
        table = bindings(read_config(FULL | {"quantization_config": QUANTISED[fmt]}))
        names = [part.name for b in table.tensors for part in parts(b.storage, b.name, b.shape)]
        assert len(set(names)) == len(names) == count
    kinds = Counter(b.storage for b in table.tensors if b.role == "linear")
    assert (kinds["nvfp4"], kinds["fp8_block"]) == (48 * 512 * 3, 512 * 3)
    assert read_config(FULL).storages == Storages("fp8_block", "fp8_block", table=True)
    shards = [b for b in table.tensors if b.target == "ple.table"]
    assert {b.shape for b in shards} == {(2500012, 160)}
    assert all(b.stays_stored and b.formats == ("F8_E4M3",) for b in shards)


def test_without_drafts_the_drafters_tensors_are_passed_over() -> None:
    whole = bindings(read_config(TINY))
    left = {b.name for b in whole.tensors} - {b.name for b in whole.for_serving(drafting=False).tensors}
    assert left == {b.name for b in whole.tensors if b.name.startswith("mtp.")}


@pytest.mark.parametrize(("world", "rows", "heads"), [(1, 27456, 48), (2, 14144, 24), (4, 14144, 12)])
def test_state_of_a_rank_of_the_release(world: int, rows: int, heads: int) -> None:
    """Bytes a token, and the delta states; of two key/value heads and four ranks each has one."""
    kept = for_device(groups(read_config(FULL), world), "cuda")
    paged = [g for g in kept if isinstance(g, PagedGroup)]
    assert sum(g.layers * g.heads * g.width * DTYPE_BYTES[g.dtype] for g in paged) == rows
    (delta,) = (g for g in kept if isinstance(g, RecurrentGroup))
    assert (delta.layers, delta.shape, delta.dtype) == (36, (heads, 128, 128), "float32")
    (conv,) = (g for g in kept if isinstance(g, WindowGroup) and g.name == "conv")
    assert conv.width == 10240 // world


def test_what_a_rank_of_four_holds_of_the_release() -> None:
    c = read_config(FULL)
    by_name = {b.name: b for b in bindings(c).tensors}
    held = {name.removeprefix("model.language_model.layers."): cut_shape(b, 4) for name, b in by_name.items()}
    assert (held["0.linear_attn.in_proj_qkv.weight"], held["0.linear_attn.conv1d.weight"]) == (
        (2560, 2560),
        (2560, 1, 4),
    )
    assert [held[f"0.linear_attn.{n}"][0] for n in ("in_proj_z.weight", "in_proj_a.weight", "A_log")] == [1536, 12, 12]
    assert held["0.linear_attn.out_proj.weight"] == (2560, 1536)
    assert [held[f"3.self_attn.{n}_proj.weight"] for n in "qko"] == [(3072, 2560), (256, 2560), (2560, 1536)]
    assert held["3.self_attn.indexer.index_qk_proj.weight"] == (640, 2560)
    assert held["0.mlp.experts.511.gate_proj.weight"] == held["0.mlp.shared_expert.up_proj.weight"] == (160, 2560)
    assert held["0.mlp.experts.511.down_proj.weight"] == (2560, 160)
    assert held["1.ple.ple_embedding.ngram_embedding.shard_127.weight"] == (625003, 160)
    assert (held["lm_head.weight"], held["model.language_model.embed_tokens.weight"]) == ((62080, 2560), (248320, 2560))
    qkv = by_name["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert cut_ranges(qkv, 3, 4) == ((1536, 512), (3584, 512), (8704, 1536))
    keys = by_name["mtp.layers.0.self_attn.k_proj.weight"]
    assert [cut_ranges(keys, rank, 4)[0][0] for rank in range(4)] == [0, 0, 256, 256]


@pytest.mark.parametrize(("fmt", "stated"), [("fp8", {1: 172.76, 2: 88.10, 4: 45.78}), ("nvfp4", {2: 63.48, 4: 33.47})])
def test_weights_of_a_rank(fmt: str, stated: dict[int, float]) -> None:
    """GiB as counted from the releases' headers; here the n-grams' products are whole, and block scales are float32."""
    table = bindings(read_config(FULL | {"quantization_config": QUANTISED[fmt]}))
    for world, gib in stated.items():
        found = sum(parameter.bytes("cuda") for parameter in parameters(table, world).values())
        products = 2 * (10240 + 2560) * 2560 * (world - 1) / world
        assert found / 2**30 == pytest.approx(gib + products / 2**30, abs=0.04)


@pytest.mark.parametrize(
    ("world", "named"), [(3, "linear_num_key_heads 16"), (8, "rows of n-grams"), (32, "num_attention_heads 24")]
)
def test_ranks_that_cannot_share_the_release_are_refused(world: int, named: str) -> None:
    with pytest.raises(ConfigError, match="world_size") as refused:
        groups(read_config(FULL), world)
    assert named in str(refused.value)
