"""The arithmetic of a Llama model (Touvron et al., 2023), one rank of it: halves of layers add to a residual stream."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.feed_forward import FeedForward
from dgpp_core.layers.gqa import GroupedQueryAttention
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.layers.stream import Stream, divided_parts
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.residual import embed_norm
from dgpp_core.ops.rope import RotaryTable
from dgpp_llama.config import LlamaConfig


class Layer:
    """Attention and feed-forward of one layer."""

    def __init__(self, config: LlamaConfig, index: int, shard: Shard, rope: RotaryTable) -> None:
        self.index, self.bus = index, shard.bus
        self.attention_norm = shard.weights.take(f"layers.{index}.attention_norm")
        self.qkv, self.o = Linear.load(shard, f"layers.{index}.qkv"), Linear.load(shard, f"layers.{index}.o")
        self.mlp_norm = shard.weights.take(f"layers.{index}.mlp_norm")
        self.mlp = FeedForward(shard, f"layers.{index}")
        heads = config.num_attention_heads // shard.bus.world, config.num_key_value_heads // shard.bus.world
        self.attend = GroupedQueryAttention(*heads, config.head_dim, config.head_dim**-0.5, rope=rope)

    def attention(self, x: Tensor, index: PagedIndex, state: State, decode: bool) -> Tensor:
        """Causal grouped-query attention over the request's rows; what it adds to the stream."""
        pools = state["k"][self.index], state["v"][self.index]
        return divided_parts(self.o, self.bus, self.attend(self.qkv.wide(x, decode), index, *pools, x.dtype), decode)


class LlamaModel:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: LlamaConfig, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.rope = RotaryTable(config.head_dim, config.max_positions, config.rope_theta, shard.device)
        self.embed = shard.weights.take("embed")
        self.layers = [Layer(config, i, shard, self.rope) for i in range(config.num_hidden_layers)]
        self.norm = shard.weights.take("norm")
        self.head = Linear(self.embed) if config.tied else Linear.load(shard, "head")

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """Hidden states after the last norm, ``[R, hidden_size]``."""
        index, eps, decode = PagedIndex(batch, state["k"].shape[3]), self.config.rms_norm_eps, batch.keep_rows
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        residual, x = embed_norm(self.embed, batch.tokens, norms[0], eps, self.dtype)
        stream = Stream(residual, eps, self.dtype)
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            x = stream.add(layer.attention(x, index, state, decode), layer.mlp_norm)
            x = layer.mlp(x, stream, next_norm, decode)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``."""
        return self.head.wide(hidden)
