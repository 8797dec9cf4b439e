"""Penalties and bias: each alone, and in their binding order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.shape import shape

LOGITS = torch.tensor([2.0, -2.0, 0.5, 3.0, 0.0])
COUNTS = torch.tensor([1, 1, 0, 3, 2], dtype=torch.int32)


def bias(**values: float) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([int(name[1:]) for name in values])
    return ids, torch.tensor(list(values.values()), dtype=torch.float64)


def test_repetition_divides_positive_and_multiplies_negative() -> None:
    row = shape(LOGITS, SamplingParams(repetition_penalty=2.0), COUNTS)
    assert row.tolist() == [1.0, -4.0, 0.5, 1.5, 0.0]


def test_frequency_grows_with_the_count() -> None:
    row = shape(LOGITS, SamplingParams(frequency_penalty=0.25), COUNTS)
    assert row.tolist() == [1.75, -2.25, 0.5, 2.25, -0.5]


def test_presence_counts_once() -> None:
    row = shape(LOGITS, SamplingParams(presence_penalty=-0.5), COUNTS)
    assert row.tolist() == [2.5, -1.5, 0.5, 3.5, 0.5]


def test_repetition_before_frequency_and_presence() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5)
    row = shape(LOGITS, params, COUNTS)
    assert row.tolist() == [2 / 2 - 1 - 0.5, -2 * 2 - 1 - 0.5, 0.5, 3 / 2 - 3 - 0.5, 0 - 2 - 0.5]


def test_penalty_before_bias() -> None:
    row = shape(LOGITS, SamplingParams(repetition_penalty=2.0), COUNTS, bias(t0=4.0, t1=5.0))
    assert row.tolist()[:2] == [2 / 2 + 4, -2 * 2 + 5]  # not (2 + 4) / 2 and (-2 + 5) / 2


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-38, 100.0])
def test_no_repetition_penalty_leaves_the_numbers(penalty: float) -> None:
    row = shape(LOGITS, SamplingParams(repetition_penalty=penalty), COUNTS)
    assert row.isfinite().all()
    assert row[0] <= row[3]
    assert row[2] == LOGITS[2]


def test_absent_tokens_stay_absent() -> None:
    logits = torch.tensor([1.0, -math.inf, 2.0])
    params = SamplingParams(repetition_penalty=0.5, frequency_penalty=-2.0)
    row = shape(logits, params, torch.tensor([0, 5, 1], dtype=torch.int32), bias(t1=100.0))
    assert row.tolist() == [1.0, -math.inf, 6.0]


def test_new_row_without_negative_zero() -> None:
    logits = torch.tensor([-0.0, 0.0, 1.0])
    row = shape(logits, SamplingParams())
    assert [math.copysign(1, x) for x in row.tolist()] == [1, 1, 1]
    row[2] = 7.0
    assert logits[2] == 1.0
