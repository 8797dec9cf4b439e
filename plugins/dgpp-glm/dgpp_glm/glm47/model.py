"""The arithmetic of GLM-4.7, one rank of it.

Every sublayer reads the normed residual stream and hands back parts to be added to it; adding them, norming the sum
for the next sublayer and rounding it are one operation.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.embedding import Embedding
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.layers.gqa import GroupedQueryAttention
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.layers.stream import Stream, divided_parts
from dgpp_core.ops.linear import Linear, load_recoded
from dgpp_core.ops.rope import RotaryTable
from dgpp_glm.glm47.config import Glm47Config
from dgpp_glm.mixture import mixture
from dgpp_glm.tables import DRAFT_HEAD


class Step(NamedTuple):
    """What every layer of a step needs. ``decode``: its rows are a decode step's, not a prefill chunk's."""

    rows: PagedIndex
    state: State
    decode: bool

    @classmethod
    def of(cls, batch: StepBatch, state: State) -> Step:
        """Computed once a step."""
        return cls(PagedIndex(batch, state["k"].shape[3]), state, batch.keep_rows)


class Attention:
    """Grouped-query attention; ``layer`` is its place in the state groups."""

    def __init__(self, config: Glm47Config, shard: Shard, layer: int, rope: RotaryTable) -> None:
        def take(name: str) -> Tensor:
            return shard.weights.take(f"layers.{layer}.{name}")

        self.layer, self.bus = layer, shard.bus
        self.qkv = Linear.load(shard, f"layers.{layer}.qkv")
        self.attend = GroupedQueryAttention(
            config.num_attention_heads // shard.bus.world,
            config.num_key_value_heads // shard.bus.world,
            config.head_dim,
            config.head_dim**-0.5,
            bias=take("qkv_bias"),
            q_norm=take("q_norm"),
            k_norm=take("k_norm"),
            eps=config.rms_norm_eps,
            rope=rope,
        )
        self.o = Linear.load(shard, f"layers.{layer}.o")

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """``[S, R, hidden]``."""
        k_pool, v_pool = step.state["k"][self.layer], step.state["v"][self.layer]
        out = self.attend(self.qkv.wide(x, step.decode), step.rows, k_pool, v_pool, x.dtype)
        return divided_parts(self.o, self.bus, out, step.decode)


class Layer:
    """A decoder layer. The norm before its attention belongs to whoever feeds the stream, so it is told the next one.

    Attributes:
        attention_norm: to be applied to what this layer reads.
    """

    def __init__(self, config: Glm47Config, shard: Shard, index: int, rope: RotaryTable) -> None:
        part = f"layers.{index}"
        self.attention_norm = shard.weights.take(f"{part}.attention_norm")
        self.attention = Attention(config, shard, index, rope)
        self.mlp_norm = shard.weights.take(f"{part}.mlp_norm")
        dense = index < config.first_k_dense_replace
        self.mlp: FeedForward | Mixture = FeedForward(shard, part) if dense else mixture(config, shard, part)

    def __call__(self, x: Tensor, stream: Stream, next_norm: Tensor, step: Step) -> Tensor:
        """``[R, hidden]`` under this layer's norm to the stream after it under ``next_norm``."""
        x = stream.add(self.attention(x, step), self.mlp_norm)
        return self.mlp(x, stream, next_norm, step.decode)


class Glm47Model:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: Glm47Config, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.rope = RotaryTable(config.rotary_dim, config.max_positions, config.rope_theta, shard.device)
        self.embed = Embedding.load(shard, "embed", config.vocab_size)
        self.layers = [Layer(config, shard, i, self.rope) for i in range(config.num_hidden_layers)]
        self.norm = shard.weights.take("norm")
        if shard.drafting:
            self.head, self.draft_head = load_recoded(shard, "head", DRAFT_HEAD)
        else:
            self.head = self.draft_head = Linear.load(shard, "head")

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """Hidden states after the last norm, ``[R, hidden_size]``."""
        step, eps = Step.of(batch, state), self.config.rms_norm_eps
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        residual, x = self.embed.normed(batch.tokens, norms[0], eps, self.dtype)
        stream = Stream(residual, eps, self.dtype)
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            x = layer(x, stream, next_norm, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``; every rank holds some of the vocabulary's rows."""
        return self.bus.all_gather(self.head.wide(hidden), dim=1)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`logits`, on a GPU from weights rounded to `DRAFT_HEAD`: drafts are verified, and a step reads less."""
        return self.bus.all_gather(self.draft_head.wide(hidden), dim=1)
