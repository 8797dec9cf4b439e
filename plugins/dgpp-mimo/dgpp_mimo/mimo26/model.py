"""The arithmetic of MiMo-V2.6-Flash, one rank of it.

Every sublayer reads the normed residual stream and hands back parts to be added to it; adding them, norming the sum
for the next sublayer and rounding it are one operation.
"""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.experts import Experts
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.residual import embed_norm
from dgpp_core.ops.router import Router
from dgpp_mimo.mimo26.attention import Attention, Ropes, Step, WindowAttention
from dgpp_mimo.mimo26.config import Mimo26Config


def mixture(config: Mimo26Config, shard: Shard, part: str) -> Mixture:
    """The routed experts of one layer; there is no shared one."""
    weight, bias = shard.weights.matrix(f"{part}.router"), shard.weights.take(f"{part}.router_bias")
    experts = Experts.load(shard, f"{part}.experts", experts=config.n_routed_experts, shared=False)
    return Mixture(shard, Router(weight, bias, config.num_experts_per_tok), experts)


class Layer:
    """A decoder layer, or the second half of a draft block.

    The norm before its attention belongs to whoever feeds the stream, so the layer is told the next one.

    Attributes:
        attention_norm: to be applied to what this layer reads.
    """

    def __init__(
        self, config: Mimo26Config, shard: Shard, part: str, kind: type[Attention], place: int, *, sparse: bool
    ) -> None:
        self.attention_norm = shard.weights.take(f"{part}.attention_norm")
        self.attention = kind(config, shard, part, place)
        self.mlp_norm = shard.weights.take(f"{part}.mlp_norm")
        self.mlp: FeedForward | Mixture = mixture(config, shard, part) if sparse else FeedForward(shard, part)

    def __call__(self, x: Tensor, stream: Stream, next_norm: Tensor, step: Step) -> Tensor:
        """``[R, hidden]`` under this layer's norm to the stream after it under ``next_norm``."""
        x = stream.add(self.attention(x, step), self.mlp_norm)
        return self.mlp(x, stream, next_norm, step.decode)


class Mimo26Model:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: Mimo26Config, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.ropes = Ropes(config, shard.device)
        self.embed = shard.weights.take("embed")
        self.layers = [self._layer(shard, index) for index in range(len(config.windowed))]
        self.norm = shard.weights.take("norm")
        self.head = Linear.load(shard, "head")

    def _layer(self, shard: Shard, index: int) -> Layer:
        config, windowed = self.config, self.config.windowed
        kind = WindowAttention if windowed[index] else Attention
        place = windowed[:index].count(windowed[index])
        return Layer(config, shard, f"layers.{index}", kind, place, sparse=config.sparse[index])

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """Hidden states after the last norm, ``[R, hidden_size]``."""
        step, eps = Step(batch, state, self.ropes), self.config.layernorm_epsilon
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        residual, x = embed_norm(self.embed, batch.tokens, norms[0], eps, self.dtype)
        stream = Stream(residual, eps, self.dtype)
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            x = layer(x, stream, next_norm, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``; every rank holds some of the vocabulary's rows."""
        return self.bus.all_gather(self.head.wide(hidden), dim=1)
