"""Which requests the device can pick for, and what it is told of them."""

from __future__ import annotations

import struct

import pytest
import torch

from dgpp_core.sampling.device import COLUMNS, sampled_row, table
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.sampling.pick import Sampler

VOCAB = 500


def sampler(params: SamplingParams, logprobs: int = -1) -> Sampler:
    made = Sampler(VOCAB, 2, torch.device("cpu"))
    made.begin(1, params, (3, 4), logprobs)
    return made


@pytest.mark.parametrize(
    ("params", "logprobs"),
    [
        (SamplingParams(), 0), (GREEDY, 3), (SamplingParams(repetition_penalty=1.1), -1),
        (SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)), -1), (SamplingParams(top_p=1e-20), -1),
    ],
)  # fmt: skip
def test_the_host_picks_where_it_has_to_know_more(params: SamplingParams, logprobs: int) -> None:
    assert sampler(params, logprobs).device_row(1) is None


def test_a_greedy_request_is_told_nothing() -> None:
    assert sampler(GREEDY).device_row(1) == [0] * COLUMNS
    assert not table(3, torch.device("cpu")).any()


def test_parameters_are_told_exactly() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.1, seed=(1 << 64) - 2)
    row = sampler(params).device_row(1)
    assert row is not None
    mode, seed, inverse, floor, unit, top_k, part, power = row
    assert (mode, seed, top_k) == (1, -2, 40)
    floats = [struct.unpack("<d", struct.pack("<q", bits))[0] for bits in (inverse, floor, unit)]
    assert floats[0] == 1 / 0.8
    assert floats[1] == pytest.approx(-2.302585, abs=1e-6)
    assert floats[2] == 2.0**56, "40 tokens of it fit 62 bits"
    assert part / 2**power == 0.9
    whole = sampled_row(SamplingParams(top_k=VOCAB), VOCAB)
    assert whole is not None
    assert whole[5:] == [0, 1, 0], "top_k of the whole vocabulary is none"
