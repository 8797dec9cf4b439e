"""The two kinds of attention of GLM-5.3-Flash: delta attention, and latent attention to blocks that it chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard
from dgpp_core.layers.kimi_delta import KimiDeltaAttention
from dgpp_core.layers.paged import Selection
from dgpp_core.layers.pooled_index import PooledIndexer
from dgpp_core.layers.stream import divided_sum
from dgpp_core.ops.linear import Linear
from dgpp_glm.glm53_flash.config import FlashConfig
from dgpp_glm.latent import INDEX_NORM_EPS, Attention, Step


class DeltaAttention:
    """The products around `KimiDeltaAttention`, one rank's heads of it."""

    def __init__(self, config: FlashConfig, shard: Shard, index: int) -> None:
        def take(name: str) -> Tensor:
            return shard.weights.take(f"layers.{index}.{name}")

        self.place, self.bus, self.width = config.place(index), shard.bus, config.linear_width
        heads = config.linear_heads // shard.bus.world
        self.sizes = [3 * heads * self.width, heads]
        self.products = Linear.load(shard, f"layers.{index}.in")
        self.narrow = Linear.load(shard, f"layers.{index}.narrow")
        self.f, self.g = Linear.load(shard, f"layers.{index}.f"), Linear.load(shard, f"layers.{index}.g")
        self.attend = KimiDeltaAttention(
            heads,
            self.width,
            conv=take("conv").squeeze(1),
            a_log=take("a_log"),
            dt_bias=take("dt_bias"),
            norm=take("o_norm"),
            eps=config.rms_norm_eps,
            lowest=config.linear_lowest,
        )
        self.o = Linear.load(shard, f"layers.{index}.o")

    def output(self, x: Tensor, step: Step) -> Tensor:
        """What all ranks make of it, float32 ``[R, hidden]``."""
        qkv, b = torch.split(self.products.wide(x, step.decode), self.sizes, dim=1)
        f, g = torch.split(self.narrow(x, step.decode), self.width, dim=1)
        f, g = self.f.wide(f.contiguous(), step.decode), self.g.wide(g.contiguous(), step.decode)
        ring, states = step.state["conv"][self.place], step.state["delta"][self.place]
        seen = self.attend(step.rows.batch, qkv, f, b, g, ring, states, x.dtype)
        return divided_sum(self.o, self.bus, seen, step.decode)


class BlockIndexer:
    """The products around `PooledIndexer`; see `dgpp_glm.latent.Indexer`."""

    def __init__(self, config: FlashConfig, shard: Shard, index: int) -> None:
        part, width = f"layers.{index}.index", config.index_head_dim
        self.place, self.sizes = config.place(index), [width, width, config.index_n_heads]
        self.q, self.products = Linear.load(shard, f"{part}_q"), Linear.load(shard, f"{part}_in")
        self.choose = PooledIndexer(
            config.index_n_heads,
            width,
            config.index_topk // config.index_kpool,
            key_norm=shard.weights.take(f"{part}_norm"),
            key_bias=shard.weights.take(f"{part}_bias"),
            eps=INDEX_NORM_EPS,
            places=shard.weights.take(f"{part}_places"),
        )

    def __call__(self, x: Tensor, q_latent: Tensor, step: Step) -> Selection:
        """Keys for the rows."""
        q = self.q.wide(q_latent, step.decode)
        k, weights, gates = torch.split(self.products.wide(x, step.decode), self.sizes, dim=1)
        pool, ring = step.state["index"][self.place], step.state["index_tail"][self.place]
        return self.choose(q, k, weights, gates, step.rows, pool, ring, x.dtype)


def latent_attention(config: FlashConfig, shard: Shard, index: int) -> Attention:
    """That of a layer, or of the draft layer."""
    indexer = BlockIndexer(config, shard, index)
    return Attention(config, shard, f"layers.{index}", config.place(index), rope=None, indexer=indexer)
