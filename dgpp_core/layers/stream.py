"""The residual stream of a pre-norm decoder, and what products whose inputs are divided among ranks add to it."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.model import Bus
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.residual import residual_norm


class Stream:
    """The residual stream of a step.

    Args:
        residual: float32 ``[R, hidden]``; updated in place.
        eps: of the norms through which it is read.
        dtype: of what sublayers read.
    """

    def __init__(self, residual: Tensor, eps: float, dtype: torch.dtype) -> None:
        self.residual, self.eps, self.dtype = residual, eps, dtype

    def add(self, parts: Tensor, norm: Tensor) -> Tensor:
        """Add parts ``[S, R, hidden]`` in order; the new stream under ``norm``."""
        return residual_norm(self.residual, parts, norm, self.eps, self.dtype)


def divided_parts(linear: Linear, bus: Bus, x: Tensor, decode: bool) -> Tensor:
    """What a product whose inputs are divided among the ranks adds to the stream, float32 ``[S, R, hidden]``.

    Args:
        x: this rank's inputs, ``[R, inputs]``; with several ranks each one's part is rounded to its dtype.
        decode: as in `dgpp_core.ops.linear`.
    """
    return linear.partials(x, decode) if bus.world == 1 else all_ranks(bus, linear(x, decode)).unsqueeze(0)


def divided_sum(linear: Linear, bus: Bus, x: Tensor, decode: bool) -> Tensor:
    """The same in one piece, float32 ``[R, hidden]``."""
    return linear.wide(x, decode) if bus.world == 1 else all_ranks(bus, linear(x, decode))


def all_ranks(bus: Bus, given: Tensor) -> Tensor:
    """The sum of what the ranks give, ``[R, hidden]``, in float32."""
    return bus.all_reduce(given).float()
