"""Row bits of the linear product, against a float64 product and against itself in every batch."""

import pytest
import torch

from dgpp_core.ops.linear import Linear, PackedWeight, RowWeight, packing_is_exact, pad_rows, rows_agree

SHAPES = [(576, 576), (576, 1536), (3072, 576), (7, 5), (33, 100), (512, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_batch(shape: tuple[int, int]) -> None:
    rows, columns = shape
    linear = Linear(torch.randn(rows, columns))
    x = torch.randn(300, columns)
    whole = linear(x)
    assert torch.allclose(whole.double(), x.double() @ _weight(linear, columns).double().T, rtol=1e-4, atol=1e-4)
    for count in range(1, 41):
        assert torch.equal(linear(x[:count]), whole[:count]), count
    for start in range(0, 290, 23):
        assert torch.equal(linear(x[start : start + 9]), whole[start : start + 9]), start


def _weight(linear: Linear, columns: int) -> torch.Tensor:
    """The weight, read back through the product itself: its rows for the unit vectors."""
    return linear(torch.eye(columns)).T


@pytest.mark.parametrize("shape", SHAPES)
def test_single_rows_give_the_same_promise(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    assert rows_agree(RowWeight(weight), shape[1])


def test_the_check_sees_a_product_that_depends_on_the_row_count() -> None:
    class Leaky(RowWeight):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + x.shape[0]

    assert not rows_agree(Leaky(torch.randn(16, 16)), 16)


def test_packed_and_single_rows_agree_within_rounding() -> None:
    weight, x = torch.randn(96, 64), torch.randn(11, 64)
    if not packing_is_exact(96, 64):
        pytest.skip("this processor's packed product is not row-exact; dgpp takes rows one by one here")
    assert torch.allclose(PackedWeight(weight)(x), RowWeight(weight)(x), rtol=1e-5, atol=1e-5)


def test_rows_are_padded_to_whole_tiles() -> None:
    assert pad_rows(torch.ones(3, 2)).shape == (8, 2)
    assert pad_rows(torch.ones(16, 2)).shape == (16, 2)
    assert pad_rows(torch.ones(3, 2))[3:].abs().sum() == 0
