"""Random checkpoints: complete, deterministic, and the same however they are divided."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from dgpp_core.api import Binding, BindingTable, ConfigError, ModelSpec
from dgpp_core.checkpoint.check import check_bindings
from dgpp_core.checkpoint.config_json import read_config
from dgpp_core.checkpoint.headers import INDEX, read_headers
from dgpp_core.checkpoint.synth import random_tensor, synthesise
from dgpp_core.text.tokenizer import Tokenizer


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_shards_and_whole_hold_the_same_values(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    synthesise(spec, table, spec.tiny_config, tmp_path / "one", seed=7)
    synthesise(spec, table, spec.tiny_config, tmp_path / "many", seed=7, shard_bytes=1000)
    synthesise(spec, table, spec.tiny_config, tmp_path / "other", seed=8)
    assert same(contents(tmp_path / "one"), contents(tmp_path / "many"))
    assert not same(contents(tmp_path / "one"), contents(tmp_path / "other"))
    for folder in ("one", "many"):
        check_bindings(table, read_headers(tmp_path / folder))
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["weight_map"].keys() == contents(tmp_path / "one").keys()
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in sorted((tmp_path / "many").glob("*.safetensors"))]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert len(sizes) > 2
    assert all(size <= 1000 or i == 0 for i, size in enumerate(sizes)), (
        "only a tensor larger than a shard may exceed it"
    )


def test_tensors_follow_their_init_and_format(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    synthesise(spec, table, spec.tiny_config, tmp_path / "f32", seed=1, dtype="F32")
    assert {t.dtype for t in contents(tmp_path / "f32").values()} == {torch.float32}
    binding = msgspec.structs.replace(table.tensors[1], shape=(200, 100))
    values = random_tensor(binding, 3, "F32")
    assert values.mean().item() == pytest.approx(1.0, abs=0.005)
    assert values.std().item() == pytest.approx(0.1, abs=0.005)
    assert torch.equal(random_tensor(binding, 3, "BF16"), values.bfloat16())
    packed = random_tensor(Binding(name="p", shape=(64, 64), target="p", formats=("U8",)), 3, "U8")
    assert (packed.dtype, packed.unique().numel() > 200) == (torch.uint8, True)


def test_config_names_the_tokenizers_own_control_tokens(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    synthesise(spec, table, spec.tiny_config, tmp_path, seed=1)
    tokenizer = Tokenizer.load(tmp_path)
    config = read_config(tmp_path, spec.read_config, spec.full_config)
    assert (tokenizer.vocab_size, config.vocab_size) == (300, 300)
    assert tokenizer.encode("<|im_end|>") == list(config.eos_ids)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == config.eos_ids[0]
    assert tokenizer.encode("é") == list("é".encode())
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text()


def test_progress_ends_at_all(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    seen: list[tuple[str, int, int]] = []
    synthesise(spec, table, spec.tiny_config, tmp_path, seed=1, progress=lambda *now: seen.append(now))
    total = sum(t.nbytes for t in contents(tmp_path).values())
    assert seen[-1][1:] == (total, total)
    assert len(seen) == len(table.tensors)


def test_a_vocabulary_without_room_for_bytes(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    with pytest.raises(ConfigError, match="vocabulary is too small") as caught:
        synthesise(spec, table, dict(spec.tiny_config) | {"vocab_size": 257}, tmp_path, seed=1)
    assert (caught.value.found, "258" in caught.value.expected) == ("257", True)
