"""The images' encoder: a vision transformer whose patches see all others of their image (after Bai et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import Shard
from dgpp_core.layers.image_patches import Dense, places, see_all, turns
from dgpp_core.ops.rope import rotate
from dgpp_qwen.flash_next.vision import Encoding

EPS = 1e-6


class Norm:
    """Layer norm over the last axis."""

    def __init__(self, shard: Shard, part: str) -> None:
        self.weight, self.bias = shard.weights.take(f"{part}.weight"), shard.weights.take(f"{part}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """The shape of ``x``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)


class Block:
    """Attention within one image, and a feed-forward layer."""

    def __init__(self, config: Encoding, shard: Shard, part: str) -> None:
        self.heads = config.heads
        self.norm1, self.norm2 = Norm(shard, f"{part}.norm1"), Norm(shard, f"{part}.norm2")
        self.qkv, self.proj = Dense(shard, f"{part}.qkv"), Dense(shard, f"{part}.proj")
        self.fc1, self.fc2 = Dense(shard, f"{part}.fc1"), Dense(shard, f"{part}.fc2")

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``[n, width]``."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = rotate(q, *angles), rotate(k, *angles)
        x = x + self.proj(see_all(q, k, v))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Encoder:
    """Patches of one image to a row for each of its squares."""

    def __init__(self, config: Encoding, shard: Shard) -> None:
        self.config, self.dtype, self.device = config, shard.dtype, shard.device
        self.patch = Dense(shard, "encoder.patch")
        self.positions = shard.weights.take("encoder.positions")
        self.blocks = [Block(config, shard, f"encoder.blocks.{index}") for index in range(config.depth)]
        self.norm = Norm(shard, "encoder.merger.norm")
        self.fc1, self.fc2 = Dense(shard, "encoder.merger.fc1"), Dense(shard, "encoder.merger.fc2")

    def __call__(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """``[rows * columns, output]`` from float32 patches, in the order of `dgpp_core.images.patches`."""
        merge = self.config.merge_size
        row, column = places(rows, columns, merge, self.device)
        x = self.patch(patches.to(self.dtype)) + self._resampled(row, column, rows * merge, columns * merge)
        angles = turns(row, column, self.config.width // self.config.heads)
        for block in self.blocks:
            x = block(x, angles)
        merged = self.norm(x).view(rows * columns, -1)
        return self.fc2(F.gelu(self.fc1(merged)))

    def _resampled(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """The learned square of positions, stretched to the patches of an image, corner to corner and bilinearly."""
        side = self.config.side
        taps = []
        for place, count in ((row, rows), (column, columns)):
            at = place.float() * (side - 1) / max(count - 1, 1)
            low = at.floor().long().clamp(max=side - 1)
            taps.append(((low, 1 - (at - low)), ((low + 1).clamp(max=side - 1), at - low)))
        total = torch.zeros(len(row), self.config.width, device=self.device)
        for down, down_share in taps[0]:
            for across, across_share in taps[1]:
                share = (down_share * across_share).unsqueeze(1)
                total = total + self.positions[down * side + across].float() * share
        return total.to(self.dtype)
