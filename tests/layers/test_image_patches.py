"""Patches of an image: where they stand, how they turn, and that they see each other without a table of scores."""

import itertools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dgpp_core.layers.image_patches import places, see_all, turns
from dgpp_core.ops.rope import rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "columns", "merge"), [(2, 3, 2), (3, 1, 2), (1, 1, 1), (1, 2, 3)])
def test_patches_stand_square_by_square(rows: int, columns: int, merge: int) -> None:
    squares = itertools.product(range(rows), range(columns), range(merge), range(merge))
    wanted = [(merge * row + down, merge * column + across) for row, column, down, across in squares]
    row, column = places(rows, columns, merge, CPU)
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == wanted


def test_pairs_turn_by_row_and_then_by_column() -> None:
    """Pair i of a head of 16: dimensions i and i + 8; by complex numbers."""
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    row, column = torch.tensor([0, 5, 63]), torch.tensor([2, 0, 40])
    found = rotate(x, *turns(row, column, 16))
    for at, head, pair in itertools.product(range(3), range(2), range(8)):
        place = (row if pair < 4 else column)[at].item()
        angle = place * 10_000.0 ** (-(pair % 4) / 4)
        turned = complex(x[at, head, pair], x[at, head, pair + 8]) * complex(math.cos(angle), math.sin(angle))
        assert complex(found[at, head, pair], found[at, head, pair + 8]) == pytest.approx(turned, abs=1e-5)


def test_every_patch_sees_every_patch_without_a_table_of_scores() -> None:
    source = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(40, 3, 16, generator=source) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # no other may be taken, so that a shape it refuses is an error
        found = see_all(q, k, v)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / 4
    wanted = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v.double()).flatten(1)
    assert (found - wanted).abs().max().item() < 1e-6
