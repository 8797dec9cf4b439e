"""Matrices quantised as several of equal height: scale blocks that begin anew, also inside of what would be a block."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError
from dgpp_core.checkpoint.check import parts_of
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth_values import stored_tensors
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.resident import stored_bytes
from dgpp_core.host.check import _table_faults

GRIDS, HEIGHT, K = 4, 176, 256
"""As the global layers' fused projection of a small MiMo: a block and a part of one a grid."""

BINDING = Binding(name="a.qkv.weight", shape=(GRIDS * HEIGHT, K), target="qkv", cut=0, storage="fp8_block", grids=GRIDS)


def stored() -> dict[str, Tensor]:
    """Grids of very different sizes, so that a scale taken from a neighbour shows."""
    source = torch.Generator().manual_seed(1)
    grids = [torch.randn(HEIGHT, K, generator=source) * 8.0**i for i in range(GRIDS)]
    return encode("fp8_block", torch.cat(grids), GRIDS)


def written_out(tensors: dict[str, Tensor]) -> Tensor:
    """Row r of grid c has scale row 2 c + r div 128."""
    row = torch.arange(GRIDS * HEIGHT)
    scales = tensors["weight_scale_inv"][2 * (row // HEIGHT) + row % HEIGHT // 128]
    return tensors["weight"].float() * scales.repeat_interleave(128, 1)


def test_the_tensors_of_a_binding_with_grids() -> None:
    codes, scales = parts_of(BINDING)
    assert (codes.shape, scales.shape) == ((704, 256), (8, 2))
    released = Binding(name="q.weight", shape=(13568, 4096), target="q", storage="fp8_block", grids=4)
    assert parts_of(released)[1].shape == (108, 32)
    assert parts_of(msgspec.structs.replace(released, grids=1))[1].shape == (106, 32)


def test_each_grid_has_scale_blocks_of_its_own() -> None:
    tensors = stored()
    matrix = decode("fp8_block", tensors, (GRIDS * HEIGHT, K), grids=GRIDS)
    assert torch.equal(matrix.dequantise(), written_out(tensors))
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        decode("fp8_block", tensors, (GRIDS * HEIGHT, K))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_cut_between_grids(tmp_path: Path, world: int) -> None:
    tensors, table = stored(), BindingTable((BINDING,))
    save_file({f"a.qkv.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
    entries, parts = read_headers(tmp_path), []
    for rank in range(world):
        weights = CheckpointWeights(
            table, entries, device=torch.device("cpu"), dtype=torch.float32, rank=rank, world=world
        )
        parts.append(weights.matrix("qkv"))
    assert torch.equal(torch.cat([part.dequantise() for part in parts]), written_out(tensors))
    held = sum(tensor.nbytes for tensor in parts[0].tensors().values())
    assert parameters(table, world)["qkv"].bytes("cuda") == held
    assert held > stored_bytes("fp8_block", (GRIDS * HEIGHT // world, K)), "smaller blocks, more scales"


def test_random_values_fit_the_binding() -> None:
    for shape in ((704, 256), (4 * 1328, 256)):
        made = stored_tensors(msgspec.structs.replace(BINDING, shape=shape), 3)
        tensors = {name.removeprefix("a.qkv."): tensor for name, tensor in made.items()}
        values = decode("fp8_block", tensors, shape, grids=GRIDS).dequantise()
        assert values.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_table_with_grids_that_cannot_be_is_refused() -> None:
    def faults(**changes: object) -> list[str]:
        return list(_table_faults(BindingTable((msgspec.structs.replace(BINDING, **changes),))))

    assert not faults()
    assert "3 grids" in faults(grids=3)[0]
    assert "grids of dense" in faults(storage="dense")[0]
    with pytest.raises(CheckpointError, match="equal height"):
        parts_of(msgspec.structs.replace(BINDING, grids=3))


def test_exponents_stored_as_bytes_are_checked_as_exponents(tmp_path: Path) -> None:
    binding = Binding(name="e.weight", shape=(8, 64), target="e", storage="mxfp4_u8")
    source = torch.Generator().manual_seed(2)
    tensors = encode("mxfp4_u8", torch.randn(8, 64, generator=source))
    assert {suffix: tensor.dtype for suffix, tensor in tensors.items()} == {
        "weight": torch.uint8, "weight_scale": torch.uint8,
    }  # fmt: skip

    def load() -> Tensor:
        save_file({f"e.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
        entries = read_headers(tmp_path)
        device = torch.device("cpu")
        weights = CheckpointWeights(
            BindingTable((binding,)), entries, device=device, dtype=torch.float32, rank=0, world=1
        )
        return weights.matrix("e").dequantise()

    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack((tensors["weight"] & 15, tensors["weight"] >> 4), -1).view(8, 64).long()
    scales = torch.exp2(tensors["weight_scale"].float() - 127).repeat_interleave(32, 1)
    assert torch.equal(load(), levels[codes] * scales)
    tensors["weight_scale"][7, 1] = 0xFF
    with pytest.raises(CheckpointError, match=r"e\.weight_scale has values that are no finite numbers"):
        load()
