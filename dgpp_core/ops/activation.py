"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` from operations that give an element the same bits wherever it lies in a tensor."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, with the bits of an element as `sigmoid`."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, with the bits of an element as `sigmoid`; large ``x`` do not overflow."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """SiLU of the first half of the last axis, times the second half (Shazeer, 2020).

    With a ``limit`` no gate is above it, and nothing that is gated farther from zero (gpt-oss, 2025).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1.0 + torch.exp(-gate)) * up
