"""The two kinds of layers that look back: a gated delta layer, and attention over chosen blocks of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard
from dgpp_core.layers.block_index import BlockIndexer, unit_norm
from dgpp_core.layers.gated_delta import GatedDeltaNet
from dgpp_core.layers.stream import divided_sum
from dgpp_core.ops.activation import sigmoid
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.rope import RotaryTable, rotate
from dgpp_qwen.flash_next.branches import centred
from dgpp_qwen.flash_next.config import FlashNextConfig
from dgpp_qwen.flash_next.step import Step


class GatedDelta:
    """A gated delta layer, one rank's heads of it; ``layer`` is its place in the state groups."""

    def __init__(self, config: FlashNextConfig, shard: Shard, part: str, layer: int) -> None:
        def take(name: str) -> Tensor:
            return shard.weights.take(f"{part}.{name}")

        self.layer, self.bus, world = layer, shard.bus, shard.bus.world
        heads = config.linear_num_value_heads // world
        self.sizes = [config.channels // world, config.value_size // world]
        self.products, self.rates = Linear.load(shard, f"{part}.in"), Linear.load(shard, f"{part}.rates")
        self.net = GatedDeltaNet(
            config.linear_num_key_heads // world,
            heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            conv=take("conv").squeeze(1),
            a_log=take("a_log"),
            dt_bias=take("dt_bias"),
            norm=take("norm"),
            eps=config.rms_norm_eps,
            gate=config.output_gate,
        )
        self.out = Linear.load(shard, f"{part}.out")

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """float32 ``[R, width]``."""
        qkv, z = torch.split(self.products.wide(x, step.decode), self.sizes, dim=1)
        a, b = self.rates.wide(x, step.decode).chunk(2, dim=1)
        ring, states = step.state["conv"][self.layer], step.state["delta"][self.layer]
        seen = self.net(step.batch, qkv, z, a, b, ring, states, x.dtype)
        return divided_sum(self.out, self.bus, seen, step.decode)


class SparseAttention:
    """Grouped-query attention over the blocks that an indexer chooses, its heads gated; ``layer`` as above.

    A rank has its query heads and the key/value heads that they read; of the indexer it has all.
    """

    def __init__(self, config: FlashNextConfig, shard: Shard, part: str, layer: int, rope: RotaryTable) -> None:
        c, self.layer, self.rope, self.eps, self.bus = config, layer, rope, config.rms_norm_eps, shard.bus
        self.heads, self.width = c.num_attention_heads // shard.bus.world, c.head_dim
        self.kv_heads = max(1, c.num_key_value_heads // shard.bus.world)
        index, kept = c.indexer_n_heads * c.indexer_head_dim, self.kv_heads * self.width
        self.sizes = [2 * self.heads * self.width, kept, kept, index, c.indexer_head_dim]
        self.products = Linear.load(shard, f"{part}.in")
        self.q_norm, self.k_norm = centred(shard, f"{part}.q_norm"), centred(shard, f"{part}.k_norm")
        self.indexer = BlockIndexer(
            c.indexer_n_heads,
            c.indexer_head_dim,
            c.indexer_compress_ratio,
            c.top_blocks,
            q_norm=centred(shard, f"{part}.index_q_norm"),
            k_norm=centred(shard, f"{part}.index_k_norm"),
            eps=self.eps,
            rope=rope,
        )
        self.out = Linear.load(shard, f"{part}.out")

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """float32 ``[R, width]``."""
        parts = torch.split(self.products.wide(x, step.decode), self.sizes, dim=1)
        k_pool, v_pool, index, tail = (step.state[name][self.layer] for name in ("k", "v", "index", "index_tail"))
        chosen = self.indexer(parts[3], parts[4], step.rows, index, tail, x.dtype)
        queries, gates = parts[0].reshape(len(x), self.heads, 2, self.width).unbind(2)
        keys, values = (part.reshape(len(x), self.kv_heads, self.width) for part in parts[1:3])
        angles = self.rope.of(step.batch, step.batch.positions)
        step.rows.write(k_pool, rotate(unit_norm(keys, self.k_norm, self.eps), *angles))
        step.rows.write(v_pool, values)
        turned = rotate(unit_norm(queries, self.q_norm, self.eps), *angles).to(x.dtype)
        seen = step.rows.attend(turned, k_pool, v_pool, self.width**-0.5, chosen)
        gated = (seen.float() * sigmoid(gates)).flatten(1).to(x.dtype)
        return divided_sum(self.out, self.bus, gated, step.decode)
