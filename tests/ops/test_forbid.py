"""Masks on logits, and the likeliest token, against their definitions."""

from __future__ import annotations

import pytest
import torch

from dgpp_core.api.errors import EngineError
from dgpp_core.ops.forbid import forbid
from dgpp_core.ops.pick import greedy


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 32, 33, 49, 100, 1000])
def test_a_token_is_kept_where_its_bit_is_set(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    words = torch.randint(-(2**31), 2**31, (5, (vocab + 31) // 32), generator=generator).int()
    words[1], words[2] = -1, 0
    wanted = [
        [value if int(row[i // 32]) >> i % 32 & 1 else -torch.inf for i, value in enumerate(values.tolist())]
        for row, values in zip(words, logits, strict=True)
    ]
    forbid(logits, words)
    assert logits.tolist() == wanted


def test_part_of_a_buffer_is_written_and_no_more() -> None:
    """A step's live rows are the first of those that its buffers have room for."""
    buffer = torch.zeros(4, 40)
    forbid(buffer[:2], torch.zeros(2, 2, dtype=torch.int32))
    assert (buffer[:2] == -torch.inf).all()
    assert (buffer[2:] == 0).all()


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (3, 2), (2,)])
def test_masks_of_another_vocabulary_or_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="wrong shape") as caught:
        forbid(torch.zeros(2, 40), torch.zeros(shape, dtype=torch.int32))
    assert caught.value.found == str(list(shape))
    assert caught.value.expected == "[2, 2]"


def test_the_likeliest_is_the_first_of_equals_and_a_row_that_is_not_sound_is_named() -> None:
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    logits[1] = 3.0
    logits[2] = -torch.rand(1000)
    logits[2, [70, 200]] = torch.tensor([-0.0, 0.0])
    logits[3, :999] = -torch.inf
    logits[4, [5, 900]] = torch.nan
    logits[5, 17] = torch.inf
    logits[6] = -torch.inf
    logits[7, 17] = -torch.inf
    tokens, fine = greedy(logits)
    assert fine.tolist() == [True] * 4 + [False] * 3 + [True]
    for row in (0, 1, 2, 3, 7):
        assert tokens[row] == (logits[row] == logits[row].max()).nonzero()[0]
    assert (int(tokens[1]), int(tokens[2])) == (0, 70)
