"""bf12 against golden vectors, a plain search for the base, and the bits it packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats import bf12


def _trained(rows: int, columns: int = 1024, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=source) * 0.02).to(torch.bfloat16)


def _bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int16)


def test_golden_fields(golden: dict[str, Tensor]) -> None:
    matrix = bf12.encode(golden["bf12.weight"].view(torch.bfloat16))
    assert matrix is not None
    for field in ("mantissas", "offsets", "heads", "escapes"):
        assert torch.equal(matrix.tensors()[field], golden[f"bf12.{field}"]), field
    assert torch.equal(_bits(matrix.raw), golden["bf12.raw"])
    assert torch.equal(_bits(matrix.weight()), golden["bf12.weight"])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), odd=st.integers(0, 200), spread=st.sampled_from([1, 8, 30]))
def test_any_bits_are_restored(seed: int, odd: int, spread: int) -> None:
    source = torch.Generator().manual_seed(seed)
    exponents = torch.randn(9, 1, generator=source) * spread
    weight = (torch.randn(9, 1024, generator=source) * torch.exp2(exponents)).to(torch.bfloat16)
    bits = _bits(weight)
    places = torch.randint(0, 1024, (odd,), generator=source)
    bits[seed % 9, places] = torch.randint(-(1 << 15), 1 << 15, (odd,), generator=source).to(torch.int16)
    matrix = bf12.encode(weight)
    assert matrix is not None
    assert torch.equal(_bits(matrix.weight()), bits)


@pytest.mark.parametrize("chunk", [1, 3000, 1 << 20])
def test_packing_in_pieces_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _trained(17)
    weight[3] = torch.exp2(torch.linspace(-60, 60, 1024)).to(torch.bfloat16)
    weight[16, 7] = 1e30
    whole = bf12.encode(weight)
    monkeypatch.setattr(bf12, "_CHUNK", chunk)
    pieces = bf12.encode(weight)
    assert whole is not None
    assert pieces is not None
    assert all(torch.equal(value, pieces.tensors()[field]) for field, value in whole.tensors().items())


def test_the_base_is_the_lowest_of_the_best_windows() -> None:
    source = torch.Generator().manual_seed(5)
    exponents = torch.randint(90, 140, (20, 200), generator=source)
    exponents[0], exponents[1], exponents[2] = 0, 255, 241
    for row, found in zip(exponents.tolist(), bf12.window_bases(exponents).tolist(), strict=True):
        held = [sum(b <= e < b + 15 for e in row) for b in range(242)]
        assert found == held.index(max(held))


def test_sixty_four_escapes_are_listed_and_one_more_makes_the_row_raw() -> None:
    weight = _trained(16).clamp(0.001, 0.1)
    weight[2, :64] = 1e20
    weight[5, :65] = 1e20
    matrix = bf12.encode(weight)
    assert matrix is not None
    assert matrix.raw.shape == (1, 1024)
    assert matrix.heads[5, 1] == -(1 << 31)
    assert matrix.heads[-1].tolist() == [64, 0]
    assert (matrix.escapes >> 16).tolist() == list(range(64))
    assert torch.equal(_bits(matrix.weight()), _bits(weight))


def test_a_matrix_that_does_not_suit_is_refused() -> None:
    assert bf12.encode(_trained(8, 1000)) is None
    assert bf12.encode(_trained(1, 1 << 17)) is None
    weight = _trained(16)
    wild = torch.exp2(torch.linspace(-60, 60, 1024)).to(torch.bfloat16)
    weight[:2] = wild
    assert bf12.encode(weight) is not None
    weight[2] = wild
    assert bf12.encode(weight) is None


def test_it_takes_three_quarters_of_the_bytes() -> None:
    weight = _trained(256, 2048)
    matrix = bf12.encode(weight)
    assert matrix is not None
    assert sum(t.nbytes for t in matrix.tensors().values()) < 0.76 * weight.nbytes


def test_cut_and_stacked_bits_are_those_of_the_weight() -> None:
    weight = _trained(16, 3072)
    weight[3, 1030] = 1e30
    matrix = bf12.encode(weight)
    assert matrix is not None
    assert torch.equal(matrix.rows(2, 5).weight(), weight[2:7])
    assert torch.equal(matrix.columns(1024, 2048).weight(), weight[:, 1024:])
    assert torch.equal(bf12.Bf12Matrix.stack([matrix, matrix]).weight(), torch.cat([weight, weight]))
    with pytest.raises(CheckpointError, match="multiples of 1024"):
        matrix.columns(512, 1024)
