"""A thousand damaged checkpoints: none loads silently.

Rule for every mutated file: the load either raises a `DgppError` that names the file, or it succeeds and is explained:

* weights, index: the loaded values are the original's. Where the mutation hit the tensor data itself, which carries no
  checksum, they are what an independent reader finds in the mutated file.
* config.json: the result has exactly the values that the file's JSON has (a changed number that is still allowed is
  another model's config, not damage), every field is in the file, and the weights are the original's. A config that no
  longer fits the weights may be refused by the tensor that shows it.
* tokenizer files: ids, special tokens and template are those that the mutated file says to an independent reader.

Anything else (another exception, a crash, other values, a refusal that names no file) fails.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from dgpp_core.api import BindingTable, DgppError, ModelConfig, ModelSpec
from dgpp_core.checkpoint.config_json import read_config
from dgpp_core.checkpoint.headers import INDEX, read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.text.tokenizer import Tokenizer

TableOf = Callable[[ModelConfig], BindingTable]
Mutate = Callable[[bytes, random.Random], bytes]

WRONG: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**31,
    2**60,
    10**30,
    1e308,
    0.5,
    "",
    "x",
    "BF16",
    "F64",
    [],
    {},
    [0, 8],
)


def bit(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, 7, len(data) // 2, len(data) - 1, rng.randrange(len(data))])]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice([b"\0", b" ", b"9", b'"', b"}", b",", b"\xff"]) + data[at:]


def drop(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 1, 2, 8]) :]


def blank(data: bytes, rng: random.Random) -> bytes:
    at, count = rng.randrange(len(data)), rng.choice([4, 64, 4096])
    return data[:at] + bytes(len(data[at : at + count])) + data[at + count :]


BYTES: tuple[Mutate, ...] = (bit, bit, bit, cut, insert, drop, blank)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [spot for key, inner in items for spot in [(*path, key), *places(inner, (*path, key))]]


def structure(data: bytes, rng: random.Random) -> bytes:
    """One key or item of a JSON document removed, renamed, repeated or given a wrong value."""
    document = json.loads(data)
    *path, key = rng.choice(places(document))
    holder = document
    for step in path:
        holder = holder[step]
    action = rng.choice(["drop", "replace", "replace", "replace", "rename", "swap"])
    if action == "drop":
        del holder[key]
    elif action == "rename" and isinstance(holder, dict):
        holder[key + rng.choice("_sX ")] = holder.pop(key)
    elif action == "swap" and isinstance(holder, dict):
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = rng.choice(WRONG)
    return json.dumps(document).encode()


def header_of(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def in_header(data: bytes, rng: random.Random) -> bytes:
    header, payload = header_of(data)
    changed = rng.choice([*BYTES, structure, structure, structure])(header, rng)
    return len(changed).to_bytes(8, "little") + changed + payload


def in_length(data: bytes, rng: random.Random) -> bytes:
    return bit(data[:8], rng) + data[8:]


def in_payload(data: bytes, rng: random.Random) -> bytes:
    header, payload = header_of(data)
    return data[: 8 + len(header)] + rng.choice((bit, blank))(payload, rng)


SHARD: tuple[Mutate, ...] = (in_header, in_header, in_header, in_length, in_payload, *BYTES)
JSON: tuple[Mutate, ...] = (*BYTES, structure, structure, structure, structure)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("original")


@pytest.fixture
def folder(original: Path, tmp_path: Path, spec: ModelSpec, table: BindingTable) -> Path:
    if not (original / "config.json").exists():
        synthesise(spec, table, spec.tiny_config, original, seed=3, shard_bytes=6000)
    return Path(shutil.copytree(original, tmp_path / "mutated"))


class Loaded:
    """What a load gives."""

    def __init__(self, folder: Path, spec: ModelSpec, table_of: TableOf) -> None:
        self.config = read_config(folder, spec.read_config, spec.full_config)
        table = table_of(self.config)
        weights = CheckpointWeights(
            table, read_headers(folder), device=torch.device("cpu"), dtype=torch.float32, rank=0, world=1
        )
        self.weights = {target: weights.take(target) for target in dict.fromkeys(b.target for b in table.tensors)}
        weights.finish()


def independent(folder: Path) -> Mapping[str, Tensor]:
    """All tensors of a folder, by the bare definition of the format."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
    found = {}
    for file in folder.glob("*.safetensors"):
        header, payload = header_of(file.read_bytes())
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                raw = bytearray(payload[slice(*entry["data_offsets"])])
                found[name] = torch.frombuffer(raw, dtype=kinds[entry["dtype"]]).view(entry["shape"]).float()
    return found


def equal(weights: Mapping[str, Tensor], table: BindingTable, stored: Mapping[str, Tensor]) -> bool:
    def same(target: str, value: Tensor) -> bool:
        parts = torch.cat([stored[b.name] for b in table.tensors if b.target == target])
        return torch.equal(value.view(torch.int32), parts.view(torch.int32))  # bit for bit: damage may make NaNs

    return all(same(target, value) for target, value in weights.items())


def run(
    folder: Path, name: str, mutations: tuple[Mutate, ...], seeds: range, check: Callable[[Mutate], None]
) -> Counter[str]:
    """Mutate the file once a seed; ``check`` loads it and verifies what it got. Returns how each ended."""
    path, endings = folder / name, Counter[str]()
    whole = path.read_bytes()
    for seed in seeds:
        rng = random.Random(seed)
        mutate = rng.choice(mutations)
        path.write_bytes(mutate(whole, rng))
        try:
            said = refusal(check, mutate)
        except AssertionError as error:
            error.add_note(f"seed {seed}, {mutate.__name__}")
            raise
        endings["refused" if said else "explained"] += 1
        assert not said or str(folder) in said, f"seed {seed}, {mutate.__name__}: names no file: {said}"
        assert not said or name in said or name == "config.json", f"seed {seed}: names another file: {said}"
    return endings


def refusal(check: Callable[[Mutate], None], mutate: Mutate) -> str:
    """What a `DgppError` says, or nothing."""
    try:
        check(mutate)
    except DgppError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("block", range(4))
def test_shards(folder: Path, spec: ModelSpec, table: BindingTable, table_of: TableOf, block: int) -> None:
    before = independent(folder)

    def check(mutate: Mutate) -> None:
        loaded = Loaded(folder, spec, table_of)
        whole_file = mutate in BYTES  # may have hit header or data: the independent reader says which
        stored = independent(folder) if mutate is in_payload or whole_file else before
        assert {k: v.shape for k, v in stored.items()} == {k: v.shape for k, v in before.items()}
        assert equal(loaded.weights, table, stored)

    endings = run(folder, "model-00002-of-00002.safetensors", SHARD, range(100 * block, 100 * block + 100), check)
    assert endings["refused"] > 40
    assert endings["explained"] > 5


def test_index(folder: Path, spec: ModelSpec, table: BindingTable, table_of: TableOf) -> None:
    before = independent(folder)

    def check(mutate: Mutate) -> None:
        assert equal(Loaded(folder, spec, table_of).weights, table, before)

    assert run(folder, INDEX, JSON, range(1000, 1150), check)["refused"] > 100


@pytest.mark.parametrize("block", range(2))
def test_config(folder: Path, spec: ModelSpec, table: BindingTable, table_of: TableOf, block: int) -> None:
    before = independent(folder)
    names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_layers"}
    names |= {"max_positions": "max_position", "eps": "eps"}

    def check(mutate: Mutate) -> None:
        loaded = Loaded(folder, spec, table_of)
        raw = json.loads((folder / "config.json").read_text())
        assert {field: getattr(loaded.config, field) for field in names} == {f: raw[key] for f, key in names.items()}
        assert loaded.config.eos_ids == (raw["eos_token_id"],)
        assert equal(loaded.weights, table, before)

    assert run(folder, "config.json", JSON, range(2000 + 100 * block, 2100 + 100 * block), check)["refused"] > 50


PROBES = ("plain words", "é 世界 🧑‍💻\n\t", "<|im_start|>user\nhi<|im_end|>", " ab ac zz")


def test_tokenizer(folder: Path) -> None:
    def check(mutate: Mutate) -> None:
        loaded = Tokenizer.load(folder)
        plain = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for probe in PROBES:
            assert loaded.encode(probe) == plain.encode(probe, add_special_tokens=False).ids
        assert loaded.vocab_size == plain.get_vocab_size()

    assert run(folder, "tokenizer.json", JSON, range(3000, 3130), check)["refused"] > 60


def test_tokenizer_config(folder: Path) -> None:
    def check(mutate: Mutate) -> None:
        loaded = Tokenizer.load(folder)
        raw = json.loads((folder / "tokenizer_config.json").read_bytes())
        named = {key: value for key, value in raw.items() if key.endswith("_token") and not key.startswith("add_")}
        assert dict(loaded.special_tokens) == {key: value for key, value in named.items() if value is not None}
        assert loaded.encode("<|im_end|>") == [257]

    assert run(folder, "tokenizer_config.json", JSON, range(4000, 4120), check)["refused"] > 30
