"""What a GLM-5.3-Flash config.json may say, and the tensors, the state and the plans that follow from it."""

import functools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dgpp_glm.glm53_flash.config import read_config
from dgpp_glm.glm53_flash.specs import FULL, QUANTISED, TINY
from dgpp_glm.glm53_flash.tables import bindings, groups

from dgpp_core.api import BindingTable, ConfigError, PlanError, StateGroup, for_device
from dgpp_core.checkpoint.cuts import cut_shape
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.plan import Plan, make_plan
from dgpp_core.engine.plan_terms import row_bytes
from dgpp_core.formats.storage import parts

CONFIGS = Path(__file__).parents[4] / "shared" / "data" / "configs"
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
HYBRID = FULL | {"quantization_config": QUANTISED["hybrid"]}
RELEASES = {"fp8": FULL, "hybrid": HYBRID}


@functools.cache
def table(name: str) -> BindingTable:
    """Of a release; it has a hundred thousand entries."""
    return bindings(read_config(RELEASES[name]))


@pytest.mark.parametrize(("name", "file"), [("fp8", "fp8"), ("hybrid", "nvfp4_fp8")])
def test_the_specs_config_is_the_recorded_one(name: str, file: str) -> None:
    raw, path = RELEASES[name], CONFIGS / f"glm53_flash_{file}.json"
    if not path.is_file():
        pytest.skip(f"no recorded config at {path}")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert recorded["text_config"].items() >= raw["text_config"].items()
    assert recorded["vision_config"] == raw["vision_config"]
    others = ("architectures", "model_type", "tie_word_embeddings", "dtype")
    assert {key: value for key, value in recorded.items() if key in others or key.endswith("_id")}.items() <= (
        raw.items()
    )
    assert bindings(read_config(recorded)) == table(name), "the same matrices are quantised"


def test_either_spelling_of_the_layers_and_lists_that_may_be_absent() -> None:
    text = TINY["text_config"]
    other = text | {"layer_types": [kind.replace("deepseek_sparse", "indexed") for kind in text["layer_types"]]}
    linear = {key: value for key, value in text["linear_attn_config"].items() if not key.endswith("layers")}
    for key in ("mlp_layer_types", "indexer_types"):
        del other[key]
    other["linear_attn_config"] = linear
    assert read_config(TINY | {"text_config": other}) == read_config(TINY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"), ("num_hidden_layers", 0), ("attention_bias", True), ("kv_lora_rank", 0),
        ("qk_rope_head_dim", 64), ("mla_use_nope", False), ("scoring_func", "softmax"), ("n_shared_experts", 2),
        ("num_nextn_predict_layers", 0), ("index_kpool", 3), ("index_topk", 18), ("index_kpool_compress", False),
        ("index_kpool_always_select_tail", False), ("mhc", False), ("hc_mult", 0), ("hc_eps", 0.0),
        ("hc_sinkhorn_iters", 0), ("swiglu_limit", 0.0), ("swiglu_limit", None), ("rms_norm_eps", math.nan),
        ("layer_types", ["linear_attention"]), ("layer_types", ["linear_attention", "full_attention"]),
        ("mlp_layer_types", ["sparse"] * 2), ("indexer_types", ["full", "shared"]), ("routed_scaling_factor", math.inf),
        ("linear_attn_config", None), ("n_routed_experts", 10**12),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"text_config": TINY["text_config"] | {field: value}})
    assert field.replace("index_topk", "index_") in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_heads", 0), ("gate_lower_bound", 0.0), ("gate_lower_bound", -math.inf), ("kda_layers", [1])],
)
def test_what_it_cannot_serve_of_delta_attention(field: str, value: object) -> None:
    linear = TINY["text_config"]["linear_attn_config"] | {field: value}
    with pytest.raises(ConfigError, match=field):
        read_config(TINY | {"text_config": TINY["text_config"] | {"linear_attn_config": linear}})


def test_the_root_is_checked_too() -> None:
    for key, value in (("model_type", "glm_moe_dsa"), ("tie_word_embeddings", True), ("text_config", None)):
        with pytest.raises(ConfigError, match=key):
            read_config(TINY | {key: value})


def mixed(**experts: Any) -> dict[str, Any]:
    """The hybrid's section with something else said about its experts."""
    section = QUANTISED["hybrid"]
    return section | {"routed_experts": section["routed_experts"] | experts}


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"quant_method": "modelopt"}, "quant_method"), (QUANTISED["fp8"] | {"fmt": "e5m2"}, "fmt"),
        (QUANTISED["fp8"] | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (mixed(num_bits=8), "num_bits"), (mixed(group_size=32), "group_size"), (mixed(symmetric=False), "symmetric"),
        (mixed(format="pack-quantized"), "format"), (mixed(layers=[0, 1]), "layers"),
        (mixed(scale_dtype="torch.bfloat16"), "scale_dtype"), (QUANTISED["hybrid"] | {"fp8": {}}, "quant_method"),
        (QUANTISED["hybrid"] | {"mtp_layer": {"index": 45}}, "mtp_layer.index"),
        ({"quant_method": "dgpp_mixed"}, "routed_experts"),
    ],
)  # fmt: skip
def test_a_quantisation_it_cannot_load_is_refused_by_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": section})
    assert key in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensors", "size"), [("fp8", 76_108, 328_326_771_576), ("hybrid", 112_396, 195_075_058_296)]
)
def test_the_release_is_bound_tensor_by_tensor(name: str, tensors: int, size: int) -> None:
    stored = [
        (part, b) for b in table(name).tensors for part in parts(b.storage, b.name, b.shape)
        if part.use == "required"
    ]  # fmt: skip
    assert len({part.name for part, _ in stored}) == len(stored) == tensors
    kinds = [
        "F32" if b.formats == ("F32",) else "BF16" if b.storage == "dense" else part.dtypes[0] for part, b in stored
    ]
    found = sum(math.prod(part.shape) * BYTES[kind] for (part, _), kind in zip(stored, kinds, strict=True))
    assert found == size


def test_what_the_encoder_takes_of_the_release() -> None:
    """347 tensors, which a checkpoint without a vision_config has beside the model."""
    found = [b for b in table("fp8").tensors if b.name.startswith("model.visual.")]
    assert len(found) == 347
    assert sum(2 * math.prod(b.shape) for b in found) == 1_127_254_016
    text = bindings(read_config({key: value for key, value in FULL.items() if key != "vision_config"}))
    assert set(text.tensors) == set(table("fp8").tensors) - set(found)
    assert text.ignored[0] == "model.visual.*"


def test_which_matrices_are_quantised() -> None:
    kinds = Counter((b.storage, ".experts." in b.name) for b in table("hybrid").tensors)
    assert kinds["nvfp4_ct", True] == 42 * 288 * 3
    assert kinds["fp8_block", True] == 288 * 3, "the draft layer's experts"
    assert kinds["fp8_block", False] == 12 * 4 + 3 * 3 + 43 * 3
    stored = {b.name: b.storage for b in table("fp8").tensors}
    assert stored["model.language_model.layers.3.self_attn.o_proj.weight"] == "fp8_block"
    assert stored["model.language_model.layers.2.self_attn.o_proj.weight"] == "dense", "delta attention has one too"
    assert stored["model.language_model.layers.3.self_attn.kv_b_proj.weight"] == "dense"


def test_what_ranks_hold() -> None:
    held = {b.name.removeprefix("model.language_model.layers."): cut_shape(b, 4) for b in table("fp8").tensors}
    assert held["4.self_attn.q_proj.weight"] == (2048, 4096)
    assert held["4.self_attn.k_conv1d.weight"] == (2048, 1, 4)
    assert held["4.self_attn.b_proj.weight"] == held["4.self_attn.A_log"] + (4096,) == (16, 4096)
    assert held["4.self_attn.f_a_proj.weight"] == (128, 4096)
    assert held["4.self_attn.g_b_proj.weight"] == (2048, 128)
    assert held["4.self_attn.o_proj.weight"] == (4096, 2048)
    assert held["3.self_attn.o_proj.weight"] == (4096, 4096)
    assert held["3.self_attn.indexer.wq_b.weight"] == (4096, 1536)
    assert held["4.hc_attn_fn"] == (24, 16384)
    with pytest.raises(ConfigError, match="world_size"):
        groups(read_config(FULL), 3, {})


@pytest.mark.parametrize(
    ("name", "ranks", "main", "whole"),
    [("fp8", 1, 297.8, 305.8), ("fp8", 4, 75.7, 78.5), ("hybrid", 2, 87.7, 92.2), ("hybrid", 4, 44.7, 47.5)],
)  # fmt: skip
def test_bytes_of_a_rank_on_a_gpu(name: str, ranks: int, main: float, whole: float) -> None:
    """GiB of the text model, and of everything."""
    sizes = {target: p.bytes("cuda") / 2**30 for target, p in parameters(table(name), ranks).items()}
    assert sum(sizes.values()) == pytest.approx(whole, abs=0.11)
    mine = sum(size for target, size in sizes.items() if not target.startswith(("layers.45.", "draft.", "encoder.")))
    assert mine == pytest.approx(main, abs=0.11)


def kept(ranks: int, kv_dtype: str = "bf16") -> dict[str, StateGroup]:
    found = for_device(groups(read_config(FULL), ranks, {"kv_dtype": kv_dtype}), "cuda")
    return {group.name: group for group in found}


@pytest.mark.parametrize(("kv_dtype", "latent"), [("bf16", 1024), ("fp8", 516), ("fp4", 292)])
def test_the_state_of_a_token(kv_dtype: str, latent: int) -> None:
    """12 latent rows, and a quarter of 12 pooled keys in bfloat16: whole on every rank."""
    for ranks in (1, 4):
        found = kept(ranks, kv_dtype)
        assert row_bytes(found["latent"]) == 12 * latent  # type: ignore[arg-type]
        assert row_bytes(found["index"]) == 12 * 64  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_state_of_a_request(ranks: int) -> None:
    """136 MiB of delta states and 4.78 MiB before convolutions, divided; rings of the indexers, whole."""
    found = kept(ranks)
    delta, conv, tail = found["delta"], found["conv"], found["index_tail"]
    assert 4 * delta.layers * math.prod(delta.shape) == 136 * 2**20 / ranks  # type: ignore[union-attr]
    assert 2 * conv.layers * conv.width * conv.window / 2**20 == pytest.approx(4.78 / ranks, abs=0.01)  # type: ignore[union-attr]
    assert (tail.layers, tail.width, tail.window) == (12, 256, 3)  # type: ignore[union-attr]


def planned(name: str, ranks: int, settings: EngineSettings) -> Plan:
    """On a machine of 128 GB, 119 GiB of them to be had."""
    config = read_config(RELEASES[name])
    return make_plan(
        table=table(name), groups=groups(config, ranks, {"kv_dtype": settings.kv_dtype}), config=config,
        settings=settings, world=ranks, device_kind="cuda", step_width=2, extra=(), available=119 * 2**30,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "capacity", "kv_dtype", "gib"),
    [("hybrid", 4, 786_432, "bf16", 8.0), ("hybrid", 2, 163_840, "fp8", 1.5), ("fp8", 4, 393_216, "bf16", 8.0)],
)
def test_deployments_that_fit(name: str, ranks: int, capacity: int, kv_dtype: Any, gib: float) -> None:
    settings = EngineSettings(
        max_concurrency=4, kv_capacity=capacity, kv_dtype=kv_dtype, prefix_cache_gib=gib, prefill_budget_tokens=2048
    )
    plan = planned(name, ranks, settings)
    plan.require()
    assert plan.fits


def test_two_such_machines_cannot_hold_the_release_in_8_bits() -> None:
    plan = planned("fp8", 2, EngineSettings(max_concurrency=4, kv_capacity=65_536))
    with pytest.raises(PlanError) as refused:
        plan.require()
    assert "largest items: weights: linear, fp8_block 14" in str(refused.value)
    assert "not one block of kv_capacity fits" in str(refused.value)


def test_paged_blocks_hold_whole_index_blocks() -> None:
    with pytest.raises(ConfigError, match="block_tokens"):
        groups(read_config(FULL), 1, {"block_tokens": 18})
