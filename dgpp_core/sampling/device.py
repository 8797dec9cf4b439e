"""Sampling parameters where the device can use them, so that a step that samples needs no host.

Requests with penalties, a bias or logprobs, and a top_p too small for 63 bits, are left to the host's sampler.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from dgpp_core.sampling.draw import draw, inverse_temperature, least_scaled, weight_unit
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.random import uniform

COLUMNS = 8
"""Of `dgpp_core.ops.kernels.sample`: mode, seed, 1 / temperature, least scaled logit, unit, top_k, and top_p's two."""
LEAST_VOCABULARY = 128
"""Candidates that the kernels keep of a row."""
_MOST_POWER = 62


def sampled_row(params: SamplingParams, vocab_size: int) -> list[int] | None:
    """One slot's row of the device's table, floating-point values as their bits; None for the host's sampler.

    Args:
        params: without penalties and bias.
        vocab_size: of the model.
    """
    part, whole = params.top_p.as_integer_ratio()
    power = whole.bit_length() - 1
    if params.temperature <= 0 or power > _MOST_POWER or vocab_size < LEAST_VOCABULARY:
        return None
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return [
        1,
        _signed(params.seed),
        _bits(inverse_temperature(params)),
        _bits(least_scaled(params)),
        _bits(float(weight_unit(top_k or vocab_size))),
        top_k,
        part,
        power,
    ]


def agrees_with_the_host(vocab_size: int, device: torch.device) -> bool:
    """Whether the kernels on a GPU pick what the host's sampler picks there, on rows of several shapes.

    Both take an exponential in float64, from two libraries that must round alike for the promise to hold.
    """
    from dgpp_core.ops.kernels.sample import sample

    rows = [sampled_row(params, vocab_size) for params in PROBES]
    held = table(len(PROBES) - 1, device)
    held.copy_(torch.tensor(rows))
    slots = torch.arange(len(PROBES), device=device)
    source = torch.Generator(device).manual_seed(11)
    for spread in (0.5, 3.0, 12.0):
        logits = torch.randn(len(PROBES), vocab_size, device=device, generator=source) * spread
        picked = logits.argmax(dim=1)
        sample(logits, picked, slots, slots * 1000, held)
        wanted = [
            draw(row + 0.0, params, uniform(params.seed, 1000 * at + 1)).token
            for at, (row, params) in enumerate(zip(logits, PROBES, strict=True))
        ]
        if picked.tolist() != wanted:
            return False
    return True


PROBES = tuple(
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=1234567 * top_k + 89)
    for temperature in (0.6, 1.0)
    for top_p, top_k, min_p in ((1.0, 0, 0.0), (0.95, 0, 0.0), (0.9, 40, 0.0), (1.0, 300, 0.0), (0.8, 0, 0.05))
)


def greedy_row() -> list[int]:
    """The row of a slot whose pick is the likeliest token, or the host's."""
    return [0] * COLUMNS


def table(slots: int, device: torch.device) -> Tensor:
    """A table for ``slots`` slots and the inert one, all greedy: int64 ``[slots + 1, COLUMNS]``."""
    return torch.zeros(slots + 1, COLUMNS, dtype=torch.int64, device=device)


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
