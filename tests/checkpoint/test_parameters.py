"""Planned bytes of every storage against the tensors that the loader really leaves."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.api import Binding, BindingTable, CheckpointError, ModelSpec, Stack
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.formats import bf12
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.resident import WIDENED, Bf16Form, bf16_matrix_bytes
from dgpp_core.formats.storage import STORAGES
from dgpp_core.ops.linear import Linear

QUANTISED = [storage for storage in STORAGES if storage != "dense"]


def table(storage: str, cut: int | None, shape: tuple[int, int] = (192, 512)) -> BindingTable:
    names = [f"experts.{i}.gate.weight" for i in range(3)]
    return BindingTable(tuple(Binding(name=n, shape=shape, target="t", cut=cut, storage=storage) for n in names))


@pytest.mark.parametrize("storage", QUANTISED)
@pytest.mark.parametrize(("cut", "world"), [(None, 1), (0, 1), (0, 2), (0, 4), (1, 2), (1, 4), (None, 2)])
def test_a_gpu_holds_what_the_loader_leaves(
    tmp_path: Path, spec: ModelSpec, storage: str, cut: int | None, world: int
) -> None:
    made = table(storage, cut)
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    weights = CheckpointWeights(
        made, read_headers(tmp_path), device=torch.device("cpu"), dtype=torch.float32, rank=world - 1, world=world
    )
    matrix = weights.matrix("t")
    parameter = parameters(made, world)["t"]
    held = sum(tensor.nbytes for tensor in matrix.tensors().values())
    assert parameter.loaded_bytes(storage) == held
    assert sum(tensor.untyped_storage().nbytes() for tensor in matrix.tensors().values()) == held
    assert parameter.bytes("cuda") == (4 * math.prod(matrix.shape) if storage in WIDENED else held)
    assert parameter.shape == matrix.shape


@pytest.mark.parametrize("storage", QUANTISED)
def test_a_part_of_one_matrix_keeps_no_more_than_itself(tmp_path: Path, spec: ModelSpec, storage: str) -> None:
    whole = table(storage, 0)
    made = msgspec.structs.replace(whole, tensors=whole.tensors[:1])
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    weights = CheckpointWeights(
        made, read_headers(tmp_path), device=torch.device("cpu"), dtype=torch.float32, rank=1, world=2
    )
    held = weights.matrix("t").tensors().values()
    assert parameters(made, 2)["t"].loaded_bytes(storage) == sum(t.untyped_storage().nbytes() for t in held)


def test_a_conversion_is_counted_as_what_it_leaves() -> None:
    made = table("dense", 0)
    converted = msgspec.structs.replace(
        made, tensors=tuple(msgspec.structs.replace(b, resident="nvfp4") for b in made.tensors)
    )
    matrix = decode("nvfp4", encode("nvfp4", torch.randn(192, 512)), (192, 512))
    each = sum(tensor.nbytes for tensor in matrix.tensors().values())
    assert parameters(converted, 1)["t"].bytes("cuda") == 3 * each
    assert parameters(made, 1)["t"].bytes("cuda") == 3 * 192 * 512 * 2
    assert parameters(converted, 1)["t"].bytes("cpu") == parameters(made, 1)["t"].bytes("cpu")


def test_what_stays_float32_is_counted_so() -> None:
    bias = Binding(name="b", shape=(7,), target="b", role="vector", formats=("F32",))
    made = BindingTable((bias, Binding(name="n", shape=(7,), target="n", role="vector")))
    held = parameters(made, 1)
    assert [held[name].bytes("cuda") for name in "bn"] == [28, 14]
    assert [held[name].bytes("cpu") for name in "bn"] == [28, 28]


def test_entries_of_a_stack_are_packed_one_by_one_on_a_cpu() -> None:
    """40 rows are padded to 64 in each of three entries, and 120 rows at once to 128."""
    whole = table("nvfp4", None, (40, 64))
    entries = msgspec.structs.replace(whole, stacks=(Stack("t", 3, 2),))
    assert parameters(whole, 1)["t"].bytes("cpu") == 128 * 64 * 4
    assert parameters(entries, 1)["t"].bytes("cpu") == 3 * 64 * 64 * 4
    packed = Linear(torch.zeros(40, 64))._product.data  # type: ignore[attr-defined]
    if packed.is_mkldnn:
        assert 3 * torch.ops.mkldnn._nbytes(packed) == 3 * 64 * 64 * 4
    assert (parameters(entries, 1)["t"].matrix_rows, parameters(entries, 1)["t"].met) == (40, 2)
    assert parameters(entries, 1)["t"].bytes("cuda") == parameters(whole, 1)["t"].bytes("cuda")


def test_a_cut_that_the_storage_cannot_take_is_refused_in_the_plan() -> None:
    with pytest.raises(CheckpointError) as refused:
        parameters(table("nvfp4", 1, (64, 32)), 4)["t"].bytes("cuda")
    assert refused.value.what == "the tensor experts.0.gate.weight cannot be held as nvfp4 by each of 4 ranks"
    assert refused.value.where.startswith("axis 1 of [64, 32]")
    assert refused.value.hint == "choose another world_size"


@pytest.mark.parametrize(
    ("storage", "cut", "shape", "world"),
    [
        ("nvfp4", 1, (64, 96), 4), ("mxfp4", 1, (64, 96), 2), ("int4_g64", 1, (64, 192), 2),
        ("fp8_block", 0, (48, 128), 4), ("fp8_block", 1, (128, 40), 2), ("fp8_block", None, (12, 128), 1),
        ("fp8_block", None, (12, 128), 2),
    ],
)  # fmt: skip
def test_plan_and_loader_refuse_a_cut_by_the_tensors_name(
    tmp_path: Path, spec: ModelSpec, storage: str, cut: int | None, shape: tuple[int, int], world: int
) -> None:
    made = table(storage, cut, shape)
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    weights = CheckpointWeights(
        made, read_headers(tmp_path), device=torch.device("cpu"), dtype=torch.float32, rank=world - 1, world=world
    )
    named = f"the tensor experts.0.gate.weight cannot be held as {storage}"
    divided = f" by each of {world} ranks" if cut is not None else ""
    with pytest.raises(CheckpointError) as loaded:
        weights.matrix("t")
    assert loaded.value.what == named + divided
    assert ("world_size" in loaded.value.hint) is (cut is not None)
    if cut is not None:
        with pytest.raises(CheckpointError) as planned:
            parameters(made, world)["t"].bytes("cuda")
        assert (planned.value.what, planned.value.hint) == (loaded.value.what, loaded.value.hint)


@pytest.mark.parametrize("shape", [(64, 1024), (512, 3072)])
def test_bf12_is_planned_within_a_hundredth_and_never_short(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = bf12.encode(weight)
    assert packed is not None
    held = sum(tensor.nbytes for tensor in packed.tensors().values())
    planned = bf16_matrix_bytes(shape, "bf12")
    assert held <= planned <= 1.01 * held
    assert bf16_matrix_bytes(shape, "bf12+bf16") == planned + weight.nbytes
    assert planned < 0.76 * weight.nbytes


@pytest.mark.parametrize("form", ["checkpoint", "bf12", "bf12+bf16"])
def test_a_matrix_that_cannot_be_packed_is_counted_as_it_is(form: Bf16Form) -> None:
    assert bf12.encode(torch.zeros(8, 1000, dtype=torch.bfloat16)) is None
    assert bf16_matrix_bytes((8, 1000), form) == 16000
