"""Gathering and committing a decode step's rows in the interpreter, against the reference, exactly."""

import pytest
import torch

from dgpp_core.ops import step
from dgpp_core.ops.kernels.step import commit_rows, copy_rows, gather_rows, place_drafts

SLOTS, TABLE = 5, 7
G = torch.Generator().manual_seed(1)


def registers(depth: int) -> list[torch.Tensor]:
    """Lengths, candidates, last tokens, drafts, tables; the last row is the inert one."""
    held = [torch.randint(1, 90, shape, generator=G) for shape in ((6,), (6,), (6,), (6, depth), (6, TABLE))]
    for tensor in (*held[:3], held[4]):
        tensor[SLOTS] = 0
    return held


@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("slots", [[3], [4, 0, 2], [1, 5, 5]])
def test_rows_are_gathered(width: int, slots: list[int]) -> None:
    held, which = registers(width - 1), torch.tensor(slots)
    wanted = step.gather(which, *held, width)
    tokens, positions = torch.full((2, len(slots) * width), -1)
    starts, chosen, tables = torch.full_like(which, -1), torch.full_like(which, -1), which.new_full((len(slots), 7), -1)
    gather_rows[(len(slots), 2)](
        which, *held, tokens, positions, starts, chosen, tables,
        INERT=SLOTS, WIDTH=width, SPAN=8, DEPTH=width - 1, TABLE=TABLE, ENTRIES=4, PDL=False,
    )  # fmt: skip
    found = (tokens, positions, starts, chosen, tables)
    fields = (wanted.tokens, wanted.positions, wanted.starts, wanted.candidates, wanted.tables)
    assert all(torch.equal(a, b) for a, b in zip(found, fields, strict=True))
    assert tokens[0] == held[2][slots[0]]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("judged", [None, [0, 0, 0], [0, 1, 0]])
def test_picks_are_committed(width: int, judged: list[int] | None) -> None:
    held, which = registers(width - 1), torch.tensor([4, 1, 5])
    rows = step.gather(which, *held, width)
    picked = rows.tokens.roll(-1).clone()  # every draft right
    picked[width - 1 :: width] = torch.tensor([100, 101, 102])
    if width > 2:
        picked[width + 1] += 1  # the second segment's second draft is wrong
    fine = torch.ones(len(picked), dtype=torch.bool)
    fine[-1] = False
    say = None if judged is None else torch.tensor(judged).clamp(max=width - 1)
    reference, kept = [tensor.clone() for tensor in held[:3]], [tensor.clone() for tensor in held[:3]]
    wanted = step.commit(which, rows, picked, fine, *reference, judged=say)
    results, tail = torch.full((3, width + 3), -1), torch.full((4, 3), -1)
    standing = which if say is None else say
    commit_rows[(3,)](
        which, rows.starts, rows.tokens, picked, fine, standing, *kept, results, tail, which, which,
        INERT=SLOTS, WIDTH=width, SPAN=4, JUDGED=say is not None, KEPT=0, PDL=False,
    )  # fmt: skip
    assert torch.equal(results, wanted.results)
    assert torch.equal(tail, torch.stack((wanted.rows, wanted.tokens, wanted.positions, wanted.last)))
    assert all(torch.equal(a, b) for a, b in zip(kept, reference, strict=True))
    accepted = results[:, width].tolist()
    if say is None:
        assert accepted == [width - 1, min(width - 1, 1), 0 if width == 1 else accepted[2]]
    else:
        assert accepted == say.tolist()
    assert results[:, width + 1].tolist() == [width, width, width - 1], "the faulty row is the last one"
    assert not kept[0][SLOTS], "the inert length grew"
    assert kept[0][4] == held[0][4] + accepted[0] + 1


def test_results_are_posted_with_the_step_s_number() -> None:
    held, which = registers(1), torch.tensor([4, 1, 5])
    posted, turns = torch.full((2, 3, 6), -1), torch.full((3,), 7)
    for turn in range(7, 12):
        rows = step.gather(which, *held, 2)
        picked, fine = rows.tokens + turn, torch.ones(6, dtype=torch.bool)
        results, tail = torch.full((3, 5), -1), torch.full((4, 3), -1)
        before = posted.clone()
        commit_rows[(3,)](
            which, rows.starts, rows.tokens, picked, fine, which, *held[:3], results, tail, posted, turns,
            INERT=SLOTS, WIDTH=2, SPAN=2, JUDGED=False, KEPT=2, PDL=False,
        )  # fmt: skip
        assert torch.equal(posted[turn % 2, :, :5], results)
        assert posted[turn % 2, :, 5].tolist() == [turn] * 3
        assert torch.equal(posted[1 - turn % 2], before[1 - turn % 2]), "the step before is kept"
        assert turns.tolist() == [turn + 1] * 3


def test_rows_are_taken_and_drafts_kept() -> None:
    x, rows = torch.randn(9, 13, generator=G), torch.tensor([8, 0, 3, 3])
    out = torch.full((4, 13), float("nan"))
    copy_rows[(4, 4)](x, rows, out, H=13, SPAN=4, PDL=False)
    assert torch.equal(out, step.rows_of(x, rows))
    held, drafts = torch.full((6, 3), -1), torch.randint(99, (3, 3), generator=G)
    place_drafts[(3,)](held, torch.tensor([4, 1, 5]), drafts, DEPTH=3, SPAN=4, PDL=False)
    wanted = torch.full_like(held, -1)
    step.keep_drafts(wanted, torch.tensor([4, 1, 5]), drafts)
    assert torch.equal(held, wanted)
    assert (held[[0, 2, 3]] == -1).all()
