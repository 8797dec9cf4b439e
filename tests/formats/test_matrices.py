"""What all stored matrices have in common: golden values, cuts, stacks, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats import codec
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.storage import STORAGES

GROUPS = {
    "nvfp4": 16,
    "nvfp4_ct": 16,
    "mxfp4": 32,
    "mxfp4_u8": 32,
    "int4_g64": 64,
    "int8_g64": 64,
    "int4_g128": 128,
    "int8_g128": 128,
    "code3_g128": 128,
    "code4_g128": 128,
    "code6_g128": 128,
}
"""Columns a scale, of the formats that have no blocks."""

ROWS, COLUMNS = 48, 512


def _weight(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Normal, with magnitudes that differ by row and by column group, so that a scale in the wrong place shows."""
    source = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(rows, columns // 16, generator=source)).repeat_interleave(16, 1)
    return torch.randn(rows, columns, generator=source) * scale * 0.02


def _stored(storage: str, weight: Tensor) -> Matrix:
    return codec.decode(storage, codec.encode(storage, weight), (weight.shape[0], weight.shape[1]))


def test_golden_values(golden: dict[str, Tensor]) -> None:
    e4m3 = torch.float8_e4m3fn
    g = golden

    def check(storage: str, shape: tuple[int, int], value: Tensor, **tensors: Tensor) -> None:
        assert torch.equal(codec.decode(storage, tensors, shape).dequantise(), value), storage

    fp4 = {"weight_scale": g["nvfp4.scales"].view(e4m3), "weight_scale_2": g["nvfp4.multiplier"]}
    check("nvfp4", (6, 256), g["nvfp4.value"], weight=g["nvfp4.codes"], **fp4)
    fp4 = {"weight_scale": g["nvfp4_ct.scales"].view(e4m3), "weight_global_scale": g["nvfp4_ct.divisor"]}
    check("nvfp4_ct", (6, 256), g["nvfp4_ct.value"], weight_packed=g["nvfp4_ct.codes"], **fp4)
    check("mxfp4", (6, 256), g["mxfp4.value"], weight=g["mxfp4.codes"], scale=g["mxfp4.scales"])
    for bits in (4, 8):
        scales = g[f"int{bits}.scales"].view(torch.bfloat16)
        words = g[f"int{bits}.words"]
        check(f"int{bits}_g64", (6, 256), g[f"int{bits}.value"], weight_packed=words, weight_scale=scales)


def test_golden_value_of_fp8_blocks_where_four_meet(golden: dict[str, Tensor]) -> None:
    tensors = {"weight": golden["fp8.codes"].view(torch.float8_e4m3fn), "weight_scale_inv": golden["fp8.scales"]}
    values = codec.decode("fp8_block", tensors, (150, 200)).dequantise()
    assert torch.equal(values[120:136, 120:136], golden["fp8.value"])


def test_golden_encodings(golden: dict[str, Tensor]) -> None:
    def check(storage: str, **expected: Tensor) -> None:
        tensors = codec.encode(storage, golden["weight"])
        for suffix, tensor in expected.items():
            assert torch.equal(tensors[suffix].view(tensor.dtype), tensor), (storage, suffix)

    g = golden
    scales = {"weight_scale": g["nvfp4.scales"], "weight_scale_2": g["nvfp4.multiplier"]}
    check("nvfp4", weight=g["nvfp4.codes"], **scales)
    scales = {"weight_scale": g["nvfp4_ct.scales"], "weight_global_scale": g["nvfp4_ct.divisor"]}
    check("nvfp4_ct", weight_packed=g["nvfp4_ct.codes"], **scales)
    check("mxfp4", weight=g["mxfp4.codes"], scale=g["mxfp4.scales"])
    check("int4_g64", weight_packed=g["int4.words"], weight_scale=g["int4.scales"])
    check("int8_g64", weight_packed=g["int8.words"], weight_scale=g["int8.scales"])


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        ("dense", 0),
        *((name, 0.04) for name in STORAGES if name.startswith("fp8")),
        *((name, 0.13) for name in ("nvfp4", "nvfp4_ct", "mxfp4", "int4_g64", "int4_g128")),
        ("int8_g64", 0.008),
        ("int8_g128", 0.008),
        ("code3_g128", 0.22),
        ("code4_g128", 0.11),
        ("code6_g128", 0.03),
    ],
)
def test_an_encoded_matrix_is_near_the_original(storage: str, error: float) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    matrix = _stored(storage, weight)
    assert matrix.shape == (ROWS, COLUMNS)
    assert float((matrix.dequantise() - weight).norm() / weight.norm()) <= error


@pytest.mark.parametrize("storage", STORAGES)
def test_a_matrix_of_zeros_stays_zero(storage: str) -> None:
    assert not _stored(storage, torch.zeros(16, 256)).dequantise().any()


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_cut_has_the_values_of_the_whole(storage: str, data: st.DataObject) -> None:
    matrix = _stored(storage, _weight(5))
    unit = GROUPS.get(storage, 16)
    row = 8 * data.draw(st.integers(0, ROWS // 8 - 1))
    rows = 8 * data.draw(st.integers(1, (ROWS - row) // 8))
    column = unit * data.draw(st.integers(0, COLUMNS // unit - 1))
    columns = unit * data.draw(st.integers(1, (COLUMNS - column) // unit))
    part = matrix.rows(row, rows).columns(column, columns)
    assert part.shape == (rows, columns)
    whole = matrix.dequantise()
    assert torch.equal(part.dequantise(), whole[row : row + rows, column : column + columns])
    other = matrix.columns(column, columns).rows(row, rows)
    assert torch.equal(other.dequantise(), part.dequantise())


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=25, deadline=None)
@given(heights=st.lists(st.sampled_from([8, 16, 24, 40, 128, 136]), min_size=1, max_size=4))
def test_a_stack_has_the_values_of_its_parts(storage: str, heights: list[int]) -> None:
    parts = [_stored(storage, _weight(seed, rows, 128)) for seed, rows in enumerate(heights)]
    stack = type(parts[0]).stack(parts)
    assert stack.shape == (sum(heights), 128)
    values = torch.cat([part.dequantise() for part in parts])
    assert torch.equal(stack.dequantise(), values)
    start = 8 * (sum(heights) // 24)
    assert torch.equal(stack.rows(start, 8).dequantise(), values[start : start + 8])


@pytest.mark.parametrize("storage", GROUPS)
@pytest.mark.parametrize(("start", "count"), [(8, 128), (0, 120)])
def test_a_cut_through_a_group_is_refused(storage: str, start: int, count: int) -> None:
    with pytest.raises(CheckpointError, match="scale's boundary") as caught:
        _stored(storage, _weight(5)).columns(start, count)
    assert caught.value.expected == f"multiples of {GROUPS[storage]}"
    assert set(caught.value.parts()) == {"what", "where", "found", "expected", "hint"}


@pytest.mark.parametrize("storage", STORAGES)
def test_moving_keeps_every_tensor(storage: str) -> None:
    matrix = _stored(storage, _weight(5))
    moved = matrix.to(torch.device("meta"))
    assert moved.shape == matrix.shape
    assert moved.tensors().keys() == matrix.tensors().keys()
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}


def test_tensors_that_do_not_belong_are_refused() -> None:
    tensors = codec.encode("int4_g64", _weight(5))
    shape = (ROWS, COLUMNS)
    with pytest.raises(CheckpointError, match=r"no tensor a\.weight_packed"):
        codec.decode("int4_g64", {key: t for key, t in tensors.items() if key != "weight_packed"}, shape, "a.weight")
    with pytest.raises(CheckpointError, match=r"a.weight_scale cannot be decoded"):
        codec.decode("int4_g64", tensors | {"weight_scale": tensors["weight_scale"][:1]}, shape, "a.weight")
    with pytest.raises(CheckpointError, match=r"a.weight_packed cannot be decoded"):
        codec.decode("int4_g64", tensors | {"weight_packed": tensors["weight_packed"].long()}, shape, "a.weight")
    with pytest.raises(CheckpointError, match=r"another shape"):
        codec.decode("int4_g64", tensors | {"weight_shape": torch.tensor([COLUMNS, ROWS])}, shape, "a.weight")
    del tensors["weight_shape"]
    assert codec.decode("int4_g64", tensors, shape, "a.weight").shape == shape


def test_converting_is_encoding_what_is_decoded() -> None:
    dense = _stored("dense", _weight(5))
    fp4 = codec.convert(dense, "nvfp4")
    assert torch.equal(fp4.dequantise(), _stored("nvfp4", _weight(5)).dequantise())
    assert math.isclose(
        float((fp4.dequantise() - dense.dequantise()).norm() / dense.dequantise().norm()), 0.095, rel_tol=0.2
    )
