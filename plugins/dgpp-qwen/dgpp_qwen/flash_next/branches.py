"""The residual branches: what a sublayer reads of them, and how its output goes back into each."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard
from dgpp_core.layers.block_index import unit_norm
from dgpp_core.ops.activation import sigmoid, silu
from dgpp_core.ops.fold import fold
from dgpp_core.ops.linear import Linear
from dgpp_qwen.flash_next.config import FlashNextConfig


def centred(shard: Shard, target: str) -> Tensor:
    """A norm's weight, float32; it is stored as its distance from 1."""
    return 1.0 + shard.weights.take(target).float()


class Mix:
    """A learned, input-dependent mean of the normed branches.

    ``N = norm of each branch;  G = sigmoid(up silu(down N / B));  x = mean over branches of G N``

    Args:
        part: the prefix of its parameters.
    """

    def __init__(self, config: FlashNextConfig, shard: Shard, part: str) -> None:
        self.count, self.rank = config.hc_count, config.hc_lowrank
        self.eps, self.dtype = config.rms_norm_eps, shard.dtype
        self.norm = centred(shard, f"{part}.norm").view(config.hc_count, config.width)
        self.down, self.up = Linear.load(shard, f"{part}.down"), Linear.load(shard, f"{part}.up")

    def __call__(self, branches: Tensor, decode: bool) -> Tensor:
        """float32 ``[R, B, width]`` to ``[R, width]``."""
        return self._mixed(*self._read(branches, decode), decode)

    def _read(self, branches: Tensor, decode: bool) -> tuple[Tensor, Tensor]:
        """The normed branches, and their product with ``down``."""
        normed = unit_norm(branches, self.norm, self.eps).to(self.dtype)
        return normed, self.down.wide(normed.flatten(1), decode) / self.count

    def _mixed(self, normed: Tensor, low: Tensor, decode: bool) -> Tensor:
        gates = sigmoid(self.up.wide(silu(low[:, : self.rank]).to(self.dtype), decode)).view(normed.shape)
        return (fold(gates * normed.float(), 1) / self.count).to(self.dtype)


class Site(Mix):
    """A mix, and one gate a branch for what the sublayer gives: ``s = 2 sigmoid(inject N / B)``."""

    def read(self, branches: Tensor, decode: bool) -> tuple[Tensor, Tensor]:
        """The sublayer's input ``[R, width]``, and the gates ``[R, B]`` for `add`."""
        normed, low = self._read(branches, decode)
        return self._mixed(normed, low, decode), 2.0 * sigmoid(low[:, self.rank :])


def add(branches: Tensor, gates: Tensor, given: Tensor) -> Tensor:
    """The branches with a sublayer's output, float32 ``[R, width]``, in each."""
    return branches + gates.unsqueeze(-1) * given.unsqueeze(1)


def rows_of(hidden: Tensor, config: FlashNextConfig) -> Tensor:
    """float32 ``[N, B, width]`` from hidden states ``[N, B * width]``."""
    return hidden.view(len(hidden), config.hc_count, config.width).to(torch.float32)
