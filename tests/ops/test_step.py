"""What a step takes from its rows and leaves in the registers, one row at a time."""

import pytest
import torch

from dgpp_core.api import EngineError
from dgpp_core.ops.step import keep_drafts, rows_of

G = torch.Generator().manual_seed(2)


@pytest.mark.parametrize("shape", [(9, 13), (9, 2, 3), (9,)])
def test_rows_come_in_the_order_asked_for(shape: tuple[int, ...]) -> None:
    x, rows = torch.randn(shape, generator=G), [8, 0, 3, 3]
    found = rows_of(x, torch.tensor(rows))
    assert found.shape == (4, *shape[1:])
    assert all(torch.equal(found[i], x[row]) for i, row in enumerate(rows))


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_go_to_their_slots_and_nowhere_else(depth: int) -> None:
    """Slot 5 is the inert one: it may come twice, and what it is left with means nothing."""
    held, slots = torch.full((6, depth), -1), [4, 1, 5, 5]
    drafts = torch.randint(99, (4, depth), generator=G)
    keep_drafts(held, torch.tensor(slots), drafts)
    assert held[[4, 1]].tolist() == drafts[:2].tolist()
    assert held[[0, 2, 3]].tolist() == [[-1] * depth] * 3


@pytest.mark.parametrize("drafts", [torch.zeros(2, 1).long(), torch.zeros(1, 3).long(), torch.zeros(2, 3).int()])
def test_drafts_of_another_form_are_refused(drafts: torch.Tensor) -> None:
    """A table would take the first two for every place or slot."""
    with pytest.raises(EngineError, match="cannot be kept") as error:
        keep_drafts(torch.zeros(6, 3).long(), torch.tensor([4, 1]), drafts)
    assert error.value.expected == "torch.int64 [2, 3]"
