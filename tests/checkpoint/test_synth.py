"""Random checkpoints: complete, deterministic, and the same however they are divided."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from dgpp_core.api import Binding, BindingTable, CheckpointError, ConfigError, Init, ModelSpec
from dgpp_core.checkpoint.check import check_bindings, parts_of
from dgpp_core.checkpoint.config_json import read_config
from dgpp_core.checkpoint.headers import INDEX, read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.locate import incomplete
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.checkpoint.synth_values import dense_pieces, random_tensor, stored_tensors
from dgpp_core.formats.codec import decode
from dgpp_core.formats.storage import STORAGES
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


def test_pieces_of_a_large_tensor_are_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = Binding(name="w", shape=(50, 7), target="w")
    whole = random_tensor(binding, 3, "F32")
    monkeypatch.setattr("dgpp_core.checkpoint.synth_values._PIECE", 33)
    assert len(list(dense_pieces(binding, 3, "F32"))) == 11
    assert torch.equal(random_tensor(binding, 3, "F32"), whole)
    empty = Binding(name="e", shape=(0, 3), target="e")
    assert random_tensor(empty, 3, "F32").shape == (0, 3)


QUANTISED = [storage for storage in STORAGES if storage != "dense"]


def quantised_table(storage: str) -> BindingTable:
    names = [f"experts.{i}.up.weight" for i in range(3)]
    vector = Binding(name="norm", shape=(3,), target="norm", role="vector")
    return BindingTable(
        (vector, *(Binding(name=name, shape=(64, 256), target="up", storage=storage, cut=0) for name in names))
    )


@pytest.mark.parametrize("storage", QUANTISED)
def test_a_stored_checkpoint_is_one_that_loads(tmp_path: Path, spec: ModelSpec, storage: str) -> None:
    """Small matrices are encoded normal ones: what the loader reads is the normal one within the format's step."""
    made = quantised_table(storage)
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=5, shard_bytes=40_000)
    entries = read_headers(tmp_path)
    check_bindings(made, entries)
    assert not any(name.endswith("input_scale") for name in entries)
    weights = CheckpointWeights(made, entries, device=torch.device("cpu"), dtype=torch.float32, rank=0, world=1)
    got = weights.matrix("up").dequantise()
    want = torch.cat([random_tensor(b, 5, "F32") for b in made.tensors[1:]])
    assert ((got - want).norm() / want.norm()).item() < (0.2 if storage == "code3_g128" else 0.15)
    assert torch.equal(contents(tmp_path)["norm"], weights.take("norm").bfloat16())


@pytest.mark.parametrize("storage", QUANTISED)
def test_large_matrices_get_random_codes_of_their_size(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    monkeypatch.setattr("dgpp_core.checkpoint.synth_values.ENCODED_ELEMENTS", 0)
    binding = Binding(name="up.weight", shape=(256, 512), target="up", storage=storage, init=Init(std=0.02))
    stored = stored_tensors(binding, 5)
    held = {part.suffix: stored[part.name] for part in parts_of(binding) if part.use != "ignored"}
    values = decode(storage, held, (256, 512)).dequantise()
    assert values.isfinite().all()
    assert 0.02 / 1.45 < values.std().item() < 0.02 * 1.45
    assert abs(values.mean().item()) < 0.002
    codes = max(held.values(), key=lambda tensor: tensor.nbytes).contiguous().view(torch.uint8)
    assert codes.unique().numel() >= 128
    again, other = stored_tensors(binding, 5), stored_tensors(binding, 6)
    assert all(torch.equal(as_bytes(stored[name]), as_bytes(again[name])) for name in stored)
    assert any(not torch.equal(as_bytes(stored[name]), as_bytes(other[name])) for name in stored)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_full_disk_is_seen_before_the_first_byte(
    tmp_path: Path, spec: ModelSpec, table: BindingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="no room") as caught:
        synthesise(spec, table, spec.tiny_config, tmp_path, seed=1)
    assert str(tmp_path) in str(caught.value)
    assert all(flag in caught.value.hint for flag in ("--tiny", "--layers N", "--format"))
    assert not list(tmp_path.glob("*.safetensors"))


def test_what_was_not_finished_is_no_checkpoint(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    """The limit on a file's size stands for the disk that fills while it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot write the checkpoint") as caught:
            synthesise(spec, table, spec.tiny_config, tmp_path / "new", seed=0, shard_bytes=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.where, caught.value.found) == (str(tmp_path / "new"), "File too large")
    assert incomplete(tmp_path / "new") == "no config.json"


def test_a_folder_that_cannot_be_made(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        synthesise(spec, table, spec.tiny_config, tmp_path / "file" / "new", seed=0)


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
