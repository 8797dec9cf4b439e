"""What a DeepSeek-V4.1 config.json may say, and the tensors, bytes and state that follow from it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dgpp_deepseek.deepseek41.config import read_config
from dgpp_deepseek.deepseek41.groups import groups
from dgpp_deepseek.deepseek41.specs import FULL, QUANTISED, SPECS, TINY
from dgpp_deepseek.deepseek41.tables import SIDECAR, bindings, constants_of

from dgpp_core.api import ConfigError, PagedGroup, WindowGroup
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.cuts import cut_shape
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.plan import make_plan
from dgpp_core.host.loading import load_plugins

CONFIGS = Path(__file__).parents[4] / "shared" / "data" / "configs"


def changed(key: str, value: object, config: dict[str, Any] = TINY) -> dict[str, Any]:
    """A config with another value in ``text_config``, or at the root."""
    if key in config["text_config"]:
        return config | {"text_config": config["text_config"] | {key: value}}
    return config | {key: value}


def test_the_released_config() -> None:
    c = read_config(FULL)
    assert [c.source_of(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [c.place_of(source) for source in c.sources] == [0, 1, 2, 0]
    assert (c.split, c.hidden_size, c.ngram_slots, c.eos_ids) == (20, 4 * 5120, 24, (1,))
    assert c.yarn is not None
    assert (c.yarn.factor, c.yarn.length, c.yarn.fast, c.yarn.slow) == (16, 65536, 32, 1)


def test_the_specs_config_is_the_recorded_one() -> None:
    if not (recorded := CONFIGS / "deepseek_v41_flash.json").is_file():
        pytest.skip(f"no recorded config at {recorded}")
    found = json.loads(recorded.read_text(encoding="utf-8"))
    assert read_config(found) == read_config(FULL)
    assert found["text_config"] | FULL["text_config"] == found["text_config"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "deepseek_v4"), ("hidden_size", 0), ("num_key_value_heads", 2), ("head_dim", 48),
        ("index_head_dim", 32), ("qk_rope_head_dim", 15), ("qk_rope_head_dim", 80), ("o_groups", 3),
        ("hidden_act", "gelu"), ("attention_bias", True), ("tie_word_embeddings", True), ("n_shared_experts", 2),
        ("scoring_func", "sigmoid"), ("topk_method", "greedy"), ("norm_topk_prob", False), ("num_experts_per_tok", 5),
        ("n_routed_experts", 10**9), ("compress_ratios", [0, 2, 1, 1, 1, 0]),
        ("compress_ratios", [0, 4, 1, 1, 1, 0, 0]),
        ("compress_ratios", [0, 2, 1, 2, 1, 0, 0]), ("compress_ratios", [0, 2, 1, 1, 1, 1, 0]),
        ("compress_ratios", [2, 2, 1, 1, 1, 0, 0]), ("kv_source_layer_ids", [0, 2]), ("kv_source_layer_ids", [2, 1]),
        ("kv_source_layer_ids", [1, 2, 3]), ("index_source_layer_ids", [0, 1, 2, 4]),
        ("candidate_source_layer_id", 1), ("engram_layer_ids", [0, 2]),
        ("engram_num_embeddings", [6568]), ("dspark_target_layer_ids", [1, 3, 4]), ("dspark_noise_token_id", 512),
        ("engram_max_ngram_size", 1), ("engram_compressed_vocab_size", 513), ("rope_scaling", {"rope_type": "linear"}),
        ("rope_theta", float("inf")),
    ],
)  # fmt: skip
def test_a_config_it_cannot_serve_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(changed(field, value))
    assert field in str(refused.value)


def test_tables_of_other_sizes_than_their_hashes_are_refused() -> None:
    with pytest.raises(ConfigError, match="engram_num_embeddings"):
        bindings(read_config(changed("engram_num_embeddings", [6568, 7463])))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "gptq"), ("activation_scheme", "static"), ("weight_block_size", [128, 128]),
        ("scale_fmt", "float"), ("expert_dtype", "fp8"),
    ],
)  # fmt: skip
def test_a_quantisation_it_cannot_load_is_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(TINY | {"quantization_config": QUANTISED["fp8-fp4"] | {key: value}})
    assert key in str(refused.value)


def test_hashes_of_the_release() -> None:
    first, second = constants_of(read_config(FULL))
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert (first.sizes[0], first.rows, second.rows) == (16000057, 384006168, 384016682)
    assert len(set(first.sizes) | set(second.sizes)) == 48
    if not (recorded := CONFIGS / "deepseek_v41_flash_engram_constants.json").is_file():
        pytest.skip(f"no recorded constants at {recorded}")
    found = json.loads(recorded.read_text(encoding="utf-8"))
    for own, sizes, offsets in zip((first, second), found["primes"], found["offsets"], strict=True):
        assert list(own.sizes) == [size for run in sizes for size in run]
        assert list(own.offsets) == [offset for run in offsets for offset in run]


def test_the_release_is_bound_tensor_by_tensor() -> None:
    """96,085 tensors are in it: 266 of images' encoder, a bias for images in every router."""
    table = bindings(read_config(FULL))
    stored = {part.name: part for b in table.tensors for part in parts_of(b)}
    assert len(stored) == sum(len(parts_of(b)) for b in table.tensors) == 96085 - 266 - 43 + 1
    assert SIDECAR in stored
    assert sum(name.endswith(".scale") for name in stored) == 47589
    for name, shape in (
        ("layers.0.attn.wq_a.scale", (40, 160)), ("layers.39.attn.wo_b.scale", (160, 256)),
        ("layers.20.attn.indexer.wq_b.scale", (128, 40)), ("layers.0.hc_attn_fn", (24, 20480)),
        ("layers.39.ffn.experts.383.w1.weight", (2304, 2560)), ("layers.39.ffn.experts.383.w2.scale", (5120, 72)),
        ("mtp.2.ffn.shared_experts.w1.scale", (72, 160)), ("layers.14.engram.embed.scale", (384016682, 8)),
        ("layers.1.engram.wkv.scale", (800, 192)), ("mtp.0.main_proj.weight", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", (1, 5376)), ("mtp.1.attn.attn_sink", (64,)),
    ):  # fmt: skip
        assert stored[name].shape == shape
    assert "layers.20.attn.compressor.wgate.weight" not in stored
    assert "layers.14.attn.compressor.wgate.weight" in stored
    kinds = Counter(b.storage for b in table.tensors if b.role == "linear")
    assert kinds["mxfp4"] == 3 * (40 * 384 + 3 * 128)
    assert kinds["fp8_e8m0_32"] == 43 * 8 + 8 + 2 + 1


@pytest.mark.parametrize(("world", "gib"), [(1, 285.5), (2, 143.8), (4, 73.0)])
def test_bytes_that_a_rank_holds_of_the_release(world: int, gib: float) -> None:
    """Without the tables, which are 188.8 GiB."""
    held = parameters(bindings(read_config(FULL)), world)
    tables = {name for name in held if name.endswith((".table", ".scales"))}
    assert sum(held[name].bytes("cuda") for name in tables) / 2**30 == pytest.approx(188.8, abs=0.1)
    rest = sum(parameter.bytes("cuda") for name, parameter in held.items() if name not in tables)
    assert rest / 2**30 == pytest.approx(gib, rel=0.005)


def test_the_plan_names_what_does_not_fit() -> None:
    model = load_plugins(environ={}).model(SPECS[0].name)
    config, settings = model.read_config(FULL), EngineSettings(mtp=True, mtp_depth=4)
    plan = make_plan(
        table=model.bindings(config), groups=model.groups(config, 4), config=config, settings=settings, world=4,
        device_kind="cuda", step_width=5, extra=model.plan_terms(config, 4, {}), available=121 << 30,
    )  # fmt: skip
    assert not plan.fits
    line = next(line for line in plan.lines if line.name == "weights: embedding")
    assert line.bytes > 188 << 30, "the resident tables are what breaks it"
    assert plan.token_bytes == 890


def test_without_drafts_the_draft_layers_are_passed_over() -> None:
    whole = bindings(read_config(FULL))
    left = {b.name for b in whole.tensors} - {b.name for b in whole.for_serving(drafting=False).tensors}
    assert left == {b.name for b in whole.tensors if b.name.startswith("mtp.")}


def test_what_ranks_hold() -> None:
    c = read_config(FULL)
    held = {b.name: cut_shape(b, 4) for b in bindings(c).tensors}
    assert held["layers.0.attn.wq_b.weight"] == (8192, 1280)
    assert held["layers.0.attn.wo_a.weight"] == (2048, 4096)
    assert held["layers.0.attn.attn_sink"] == (16,)
    assert held["layers.5.ffn.experts.0.w2.weight"] == (5120, 576)
    assert held["layers.1.engram.wkv.weight"] == (25600, 1536)
    assert held["head.weight"] == (32320, 5120)
    for world in (3, 16):
        with pytest.raises(ConfigError, match="world_size"):
            groups(c, world, {})


@pytest.mark.parametrize("world", [1, 4])
def test_bytes_of_the_state(world: int) -> None:
    """Of a token in blocks, and of a request in windows; every rank keeps all of it."""
    found = groups(read_config(FULL), world, {})
    assert sum(g.layers * g.width for g in found if isinstance(g, PagedGroup)) == 890
    windows = {g.name: g for g in found if isinstance(g, WindowGroup)}
    assert (windows["window"].width, windows["window"].dtype, windows["window"].layers) == (528, "uint8", 40)
    assert windows["draft_window"].layers == 3
    assert (windows["halves"].layers, windows["halves"].width, windows["halves"].dtype) == (3, 1024, "float32")


def test_a_cache_in_another_form_and_blocks_that_cut_an_entry_are_refused() -> None:
    c = read_config(TINY)
    with pytest.raises(ConfigError, match="kv_dtype"):
        groups(c, 1, {"kv_dtype": "fp8"})
    with pytest.raises(ConfigError, match="block_tokens"):
        groups(c, 1, {"block_tokens": 17})
