"""What a rank holds of a tensor that is several fused ones, or of fewer heads than there are ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.cuts import cut_ranges, cut_shape
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.storage import STORAGES
from dgpp_core.host.check import _table_faults
from dgpp_core.testing.random_weights import RandomWeights

CPU, K = torch.device("cpu"), 256
FUSED = (128, 128, 384)
"""Queries, keys and values of one tensor."""


def load(table: BindingTable, folder: Path, rank: int, world: int) -> CheckpointWeights:
    return CheckpointWeights(table, read_headers(folder), device=CPU, dtype=torch.float32, rank=rank, world=world)


def written(folder: Path, *bindings: Binding) -> tuple[BindingTable, Mapping[str, Tensor]]:
    """A checkpoint of random values, and those that it stands for."""
    source = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for binding in bindings:
        encoded = encode(binding.storage, torch.randn(binding.shape, generator=source))
        tensors |= {part.name: encoded[part.suffix] for part in parts_of(binding) if part.suffix in encoded}
        rows, columns = binding.shape
        values[binding.name] = decode(binding.storage, encoded, (rows, columns)).dequantise()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return BindingTable(bindings), values


def share(value: Tensor, rank: int, world: int) -> Tensor:
    """One rank's part of each fused part, below each other."""
    return torch.cat([part.chunk(world)[rank] for part in torch.split(value, list(FUSED))])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_fused_part_is_divided_by_itself(tmp_path: Path, storage: str, world: int) -> None:
    fused = Binding(name="qkv.weight", shape=(sum(FUSED), K), target="in", cut=0, fused=FUSED, storage=storage)
    gate = Binding(name="z.weight", shape=(384, K), target="in", cut=0, storage=storage)
    table, values = written(tmp_path, fused, gate)
    for rank in range(world):
        matrix = load(table, tmp_path, rank, world).matrix("in")
        own = torch.cat([share(values["qkv.weight"], rank, world), values["z.weight"].chunk(world)[rank]])
        assert torch.equal(matrix.dequantise(), own)
        held = sum(tensor.nbytes for tensor in matrix.tensors().values())
        planned = parameters(table, world)["in"]
        assert held == (2 * planned.bytes("cuda") if storage == "dense" else planned.loaded_bytes(storage))
    assert cut_shape(fused, world) == (sum(FUSED) // world, K)


def test_a_fused_vector_is_divided_too(tmp_path: Path) -> None:
    conv = Binding(name="conv", shape=(sum(FUSED), 1, 4), target="conv", role="vector", cut=0, fused=FUSED)
    value = torch.arange(sum(FUSED) * 4.0).view(conv.shape)
    save_file({"conv": value}, tmp_path / "model.safetensors")
    for rank in range(4):
        assert torch.equal(load(BindingTable((conv,)), tmp_path, rank, 4).take("conv"), share(value, rank, 4))


@pytest.mark.parametrize("storage", ["dense", "fp8_block", "nvfp4", "int4_g64"])
def test_ranks_beyond_the_heads_hold_what_their_neighbours_hold(tmp_path: Path, storage: str) -> None:
    keys = Binding(name="k.weight", shape=(128, K), target="k", cut=0, heads=2, storage=storage)
    table, values = written(tmp_path, keys)
    for world in (1, 2, 4, 8):
        for rank in range(world):
            head = rank * 2 // world
            own = values["k.weight"] if world == 1 else values["k.weight"][64 * head : 64 * (head + 1)]
            matrix = load(table, tmp_path, rank, world).matrix("k")
            assert torch.equal(matrix.dequantise(), own)
            held = sum(tensor.nbytes for tensor in matrix.tensors().values())
            assert parameters(table, world)["k"].bytes("cuda") == (held // 2 if storage == "dense" else held)


def test_a_head_of_columns() -> None:
    values = Binding(name="v", shape=(8, 6), target="v", cut=1, heads=3)
    assert [cut_ranges(values, rank, 6) for rank in range(6)] == [((2 * (rank // 2), 2),) for rank in range(6)]
    assert cut_shape(values, 6) == (8, 2)


@pytest.mark.parametrize(
    ("binding", "world", "words"),
    [
        (Binding(name="qkv", shape=(20, 8), target="t", cut=0, fused=(8, 8, 4)), 8, "8 + 8 + 4"),
        (Binding(name="k", shape=(8, 8), target="t", cut=0, heads=2), 3, "2 heads"),
        (Binding(name="k", shape=(24, 8), target="t", cut=0, heads=6), 4, "6 heads"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(binding: Binding, world: int, words: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        cut_ranges(binding, 0, world)
    assert binding.name in str(refused.value)
    assert words in str(refused.value)


def test_tables_whose_cuts_cannot_be() -> None:
    good = Binding(name="qkv.weight", shape=(20, 8), target="t", cut=0, fused=(8, 8, 4), heads=4)
    assert not list(_table_faults(BindingTable((good,))))
    for change, fault in (
        ({"fused": (8, 8)}, "fused parts (8, 8)"), ({"cut": 1}, "fused parts"), ({"cut": None}, "fused parts"),
        ({"fused": (), "cut": None}, "4 heads"), ({"heads": 3}, "3 heads"),
    ):  # fmt: skip
        (found,) = _table_faults(BindingTable((msgspec.structs.replace(good, **change),)))
        assert fault in found


def test_random_weights_of_ranks_that_share_a_head_are_the_same() -> None:
    keys = Binding(name="k.weight", shape=(8, 16), target="k", cut=0, heads=2)
    found = [
        RandomWeights(BindingTable((keys,)), CPU, torch.float32, rank=rank, world=4).take("k") for rank in range(4)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])
