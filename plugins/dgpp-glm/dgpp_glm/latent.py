"""Attention to latents whose keys are chosen, and the decoder layer around it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.divided import DividedBlocks
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.layers.mla import LatentAttention
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.layers.stream import Stream, divided_parts, divided_sum
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.rope import RotaryTable
from dgpp_glm.config import LatentConfig
from dgpp_glm.mixture import mixture

INDEX_NORM_EPS = 1e-6
"""Of the index keys' layer norm; no config.json names it."""


class Step(NamedTuple):
    """What every layer of a step needs. ``decode``: its rows are a decode step's, not a prefill chunk's."""

    rows: PagedIndex
    state: State
    decode: bool

    @classmethod
    def of(cls, batch: StepBatch, state: State) -> Step:
        """Computed once a step."""
        return cls(PagedIndex(batch, state["latent"].shape[3]), state, batch.keep_rows)


class Indexer(Protocol):
    """Chooses the keys that rows attend to."""

    def __call__(self, x: Tensor, q_latent: Tensor, step: Step) -> Selection:
        """Keys for the rows ``x`` ``[R, hidden]``, whose queries come of ``q_latent`` ``[R, q_lora_rank]``."""
        ...


class Attention:
    """Latent attention.

    Args:
        part: the prefix of its parameters.
        place: its layer in the group of latent rows.
        rope: as in `LatentAttention`.
        indexer: None where the layer attends to what the one before it chose.
    """

    def __init__(
        self,
        config: LatentConfig,
        shard: Shard,
        part: str,
        place: int,
        *,
        rope: RotaryTable | None,
        indexer: Indexer | None,
    ) -> None:
        self.place, self.bus, self.eps, self.indexer = place, shard.bus, config.latent_norm_eps, indexer
        self.q_latent = Linear.load(shard, f"{part}.q_latent")
        self.q_norm = shard.weights.take(f"{part}.q_norm")
        self.q = Linear.load(shard, f"{part}.q")
        self.latent = Linear.load(shard, f"{part}.latent")
        self.attend = LatentAttention(
            shard.weights.matrix(f"{part}.expand").dequantise().to(shard.dtype),
            shard.weights.take(f"{part}.latent_norm"),
            heads=config.num_attention_heads // shard.bus.world,
            nope=config.qk_nope_head_dim,
            scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
            eps=config.latent_norm_eps,
            rope=rope,
            blocks=DividedBlocks(shard.bus, shard.pool_ranks),
        )
        self.o = Linear.load(shard, f"{part}.o")

    def __call__(self, x: Tensor, step: Step, chosen: Selection) -> tuple[Tensor, Selection]:
        """``[S, R, hidden]``, and the keys attended to: ``chosen`` where the layer has no indexer."""
        out, chosen = self._heads(x, step, chosen)
        return divided_parts(self.o, self.bus, out, step.decode), chosen

    def output(self, x: Tensor, step: Step) -> Tensor:
        """What all ranks make of it, float32 ``[R, hidden]``; of a layer with an indexer."""
        return divided_sum(self.o, self.bus, self._heads(x, step, ())[0], step.decode)

    def _heads(self, x: Tensor, step: Step, chosen: Selection) -> tuple[Tensor, Selection]:
        q_latent = rms_norm(self.q_latent.wide(x, step.decode), self.q_norm, self.eps, x.dtype)
        if self.indexer is not None:
            chosen = self.indexer(x, q_latent, step)
        out = self.attend(
            self.q.wide(q_latent, step.decode),
            self.latent.wide(x, step.decode),
            step.rows,
            step.state["latent"][self.place],
            x.dtype,
            chosen=chosen,
            decode=step.decode,
        )
        return out, chosen


class Layer:
    """A decoder layer. The norm before its attention belongs to whoever feeds the stream, so it is told the next one.

    Attributes:
        attention_norm: to be applied to what this layer reads.
    """

    def __init__(self, config: LatentConfig, shard: Shard, index: int, attention: Attention) -> None:
        part, self.attention = f"layers.{index}", attention
        self.attention_norm = shard.weights.take(f"{part}.attention_norm")
        self.mlp_norm = shard.weights.take(f"{part}.mlp_norm")
        self.mlp: FeedForward | Mixture
        if index < config.first_k_dense_replace:
            self.mlp = FeedForward(shard, part, limit=config.swiglu_limit)
        else:
            self.mlp = mixture(config, shard, part, shared_apart=True)

    def __call__(
        self, x: Tensor, stream: Stream, next_norm: Tensor, step: Step, chosen: Selection
    ) -> tuple[Tensor, Selection]:
        """``[R, hidden]`` under this layer's norm to the stream after it under ``next_norm``; and its chosen keys."""
        added, chosen = self.attention(x, step, chosen)
        x = stream.add(added, self.mlp_norm)
        return self.mlp(x, stream, next_norm, step.decode), chosen
