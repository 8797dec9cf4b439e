"""The arithmetic of GLM-5.3, one rank of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.mla import LatentAttention
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.layers.sparse_index import SparseIndexer
from dgpp_core.ops.linear import Linear, load_recoded
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.residual import embed_norm
from dgpp_core.ops.rope import RotaryTable
from dgpp_glm.blocks import FeedForward, Mixture, Stream, parts
from dgpp_glm.glm53.config import Glm53Config
from dgpp_glm.tables import DRAFT_HEAD

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


class Indexer:
    """The products around `SparseIndexer`; ``place`` is the layer's in the group of index keys."""

    def __init__(self, config: Glm53Config, shard: Shard, layer: int, rope: RotaryTable) -> None:
        part = f"layers.{layer}.index"
        self.place = config.index_layers.index(layer)
        self.q, self.k = Linear.load(shard, f"{part}_q"), Linear.load(shard, f"{part}_k")
        self.gates = Linear.load(shard, f"{part}_gates")
        self.choose = SparseIndexer(
            config.index_n_heads,
            config.index_head_dim,
            config.index_topk,
            key_norm=shard.weights.take(f"{part}_norm"),
            key_bias=shard.weights.take(f"{part}_bias"),
            eps=INDEX_NORM_EPS,
            rope=rope,
        )

    def __call__(self, x: Tensor, q_latent: Tensor, step: Step) -> Selection:
        """Keys for the rows ``x`` ``[R, hidden]``, whose queries come of ``q_latent`` ``[R, q_lora_rank]``."""
        q, k = self.q.wide(q_latent, step.decode), self.k.wide(x, step.decode)
        gates = self.gates.wide(x, step.decode)
        return self.choose(q, k, gates, step.rows, step.state["index"][self.place], x.dtype)


class Attention:
    """Latent attention; ``layer`` is its place in the group of latent rows."""

    def __init__(self, config: Glm53Config, shard: Shard, layer: int, rope: RotaryTable) -> None:
        part = f"layers.{layer}"
        self.layer, self.bus, self.eps = layer, shard.bus, config.latent_norm_eps
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
        )
        self.indexer = Indexer(config, shard, layer, rope) if layer in config.index_layers else None
        self.o = Linear.load(shard, f"{part}.o")

    def __call__(self, x: Tensor, step: Step, chosen: Selection) -> tuple[Tensor, Selection]:
        """``[S, R, hidden]``, and the keys attended to: ``chosen`` where the layer has no indexer."""
        q_latent = rms_norm(self.q_latent.wide(x, step.decode), self.q_norm, self.eps, x.dtype)
        if self.indexer is not None:
            chosen = self.indexer(x, q_latent, step)
        out = self.attend(
            self.q.wide(q_latent, step.decode),
            self.latent.wide(x, step.decode),
            step.rows,
            step.state["latent"][self.layer],
            x.dtype,
            chosen=chosen,
            decode=step.decode,
        )
        return parts(self.o, self.bus, out, step.decode), chosen


class Layer:
    """A decoder layer. The norm before its attention belongs to whoever feeds the stream, so it is told the next one.

    Attributes:
        attention_norm: to be applied to what this layer reads.
    """

    def __init__(self, config: Glm53Config, shard: Shard, index: int, rope: RotaryTable) -> None:
        part = f"layers.{index}"
        self.attention_norm = shard.weights.take(f"{part}.attention_norm")
        self.attention = Attention(config, shard, index, rope)
        self.mlp_norm = shard.weights.take(f"{part}.mlp_norm")
        self.mlp: FeedForward | Mixture
        if index < config.first_k_dense_replace:
            self.mlp = FeedForward(shard, part)
        else:
            self.mlp = Mixture(config, shard, part, shared_apart=True)

    def __call__(
        self, x: Tensor, stream: Stream, next_norm: Tensor, step: Step, chosen: Selection
    ) -> tuple[Tensor, Selection]:
        """``[R, hidden]`` under this layer's norm to the stream after it under ``next_norm``; and its chosen keys."""
        added, chosen = self.attention(x, step, chosen)
        x = stream.add(added, self.mlp_norm)
        return self.mlp(x, stream, next_norm, step.decode), chosen


class Glm53Model:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: Glm53Config, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.rope = RotaryTable(config.qk_rope_head_dim, config.max_positions, config.rope_theta, shard.device)
        self.embed = shard.weights.take("embed")
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
        residual, x = embed_norm(self.embed, batch.tokens, norms[0], eps, self.dtype)
        stream = Stream(residual, eps, self.dtype)
        chosen: Selection = ()
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            x, chosen = layer(x, stream, next_norm, step, chosen)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``; every rank holds some of the vocabulary's rows."""
        return self.bus.all_gather(self.head.wide(hidden), dim=1)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`logits`, on a GPU from weights rounded to `DRAFT_HEAD`: drafts are verified, and a step reads less."""
        return self.bus.all_gather(self.draft_head.wide(hidden), dim=1)
