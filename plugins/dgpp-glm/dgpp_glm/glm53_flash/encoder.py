"""The images' encoder: a vision transformer with normed queries and keys, and a row for each square of its patches."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import Shard
from dgpp_core.layers.image_patches import Dense, places, see_all, turns
from dgpp_core.ops.activation import swiglu
from dgpp_core.ops.norm import layer_norm, rms_norm
from dgpp_core.ops.rope import rotate
from dgpp_glm.glm53_flash.vision import Encoding

MERGER_EPS = 1e-5
"""Of the merger's layer norm; no config says it."""


class Block:
    """Attention within one image, and a gated feed-forward."""

    def __init__(self, config: Encoding, shard: Shard, part: str) -> None:
        take = shard.weights.take
        self.config, self.dtype = config, shard.dtype
        self.norm1, self.norm2 = take(f"{part}.norm1"), take(f"{part}.norm2")
        self.q_norm, self.k_norm = take(f"{part}.q_norm"), take(f"{part}.k_norm")
        self.qkv, self.proj = Dense(shard, f"{part}.qkv"), Dense(shard, f"{part}.proj")
        self.gate_up, self.down = Dense(shard, f"{part}.gate_up"), Dense(shard, f"{part}.down")

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """float32 ``[n, width]`` to the same."""
        x = x + self.proj(self._attend(rms_norm(x, self.norm1, self.config.block_eps, self.dtype), angles))
        gate_up = self.gate_up(rms_norm(x, self.norm2, self.config.block_eps, self.dtype))
        return x + self.down(swiglu(gate_up.float(), self.config.limit).to(self.dtype))

    def _attend(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.config.heads, -1).unbind(1)
        q = rotate(rms_norm(q, self.q_norm, self.config.eps, self.dtype), *angles)
        k = rotate(rms_norm(k, self.k_norm, self.config.eps, self.dtype), *angles)
        return see_all(q, k, v)


class Merger:
    """Squares to rows of the text model."""

    def __init__(self, config: Encoding, shard: Shard) -> None:
        take = shard.weights.take
        self.limit, self.dtype = config.limit, shard.dtype
        self.proj = take("encoder.merger.proj")
        self.norm, self.norm_bias = take("encoder.merger.norm.weight"), take("encoder.merger.norm.bias")
        self.gate_up, self.down = take("encoder.merger.gate_up"), take("encoder.merger.down")

    def __call__(self, x: Tensor) -> Tensor:
        """``[squares, output]`` to the same."""
        x = layer_norm(F.linear(x, self.proj), self.norm, self.norm_bias, MERGER_EPS)
        gate_up = F.linear(F.gelu(x).to(self.dtype), self.gate_up)
        return F.linear(swiglu(gate_up.float(), self.limit).to(self.dtype), self.down)


class Encoder:
    """Patches of one image to a row for each of its squares."""

    def __init__(self, config: Encoding, shard: Shard) -> None:
        self.config, self.dtype, self.device = config, shard.dtype, shard.device
        self.patch = Dense(shard, "encoder.patch")
        self.blocks = [Block(config, shard, f"encoder.blocks.{index}") for index in range(config.depth)]
        self.norm = shard.weights.take("encoder.norm")
        self.squares, self.merger = Dense(shard, "encoder.squares"), Merger(config, shard)

    def __call__(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """``[rows * columns, output]`` from float32 patches, in the order of `dgpp_core.images.patches`."""
        c = self.config
        row, column = places(rows, columns, c.merge_size, self.device)
        angles = turns(row, column, c.width // c.heads)
        x = self.patch(patches.to(self.dtype)).float()
        for block in self.blocks:
            x = block(x, angles)
        x = rms_norm(x, self.norm, c.eps, self.dtype)
        # The convolution over a square has its weights by channel, row and column of the patch.
        squares = x.view(rows * columns, c.merge_size**2, c.width).transpose(1, 2)
        return self.merger(self.squares(squares.flatten(1)))
