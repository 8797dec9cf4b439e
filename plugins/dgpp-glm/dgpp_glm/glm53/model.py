"""The arithmetic of GLM-5.3, one rank of it."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.embedding import Embedding
from dgpp_core.layers.paged import Selection
from dgpp_core.layers.sparse_index import SparseIndexer
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.linear import Linear, load_recoded
from dgpp_core.ops.rope import RotaryTable
from dgpp_glm.glm53.config import Glm53Config
from dgpp_glm.latent import INDEX_NORM_EPS, Attention, Layer, Step
from dgpp_glm.tables import DRAFT_HEAD


class TokenIndexer:
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
        """See `dgpp_glm.latent.Indexer`."""
        q, k = self.q.wide(q_latent, step.decode), self.k.wide(x, step.decode)
        gates = self.gates.wide(x, step.decode)
        return self.choose(q, k, gates, step.rows, step.state["index"][self.place], x.dtype)


def decoder_layer(config: Glm53Config, shard: Shard, index: int, rope: RotaryTable) -> Layer:
    """One of the model's layers, or its draft layer."""
    indexer = TokenIndexer(config, shard, index, rope) if index in config.index_layers else None
    return Layer(config, shard, index, Attention(config, shard, f"layers.{index}", index, rope=rope, indexer=indexer))


class Glm53Model:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: Glm53Config, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.rope = RotaryTable(config.qk_rope_head_dim, config.max_positions, config.rope_theta, shard.device)
        self.embed = Embedding.load(shard, "embed", config.vocab_size)
        self.layers = [decoder_layer(config, shard, i, self.rope) for i in range(config.num_hidden_layers)]
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
