"""The arithmetic of GLM-5.3-Flash, one rank of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.embedding import Embedding
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.layers.hyper_connections import HyperConnection, collapse, expand
from dgpp_core.ops.fold import fold
from dgpp_core.ops.linear import Linear, load_recoded
from dgpp_core.ops.norm import rms_norm
from dgpp_glm.glm53_flash.config import FlashConfig
from dgpp_glm.glm53_flash.encoder import Encoder
from dgpp_glm.glm53_flash.mixers import DeltaAttention, latent_attention
from dgpp_glm.latent import Attention, Step
from dgpp_glm.mixture import mixture
from dgpp_glm.tables import DRAFT_HEAD


def hyper_connection(config: FlashConfig, shard: Shard, part: str) -> HyperConnection:
    """That of one sublayer."""
    return HyperConnection(
        Linear.load(shard, f"{part}.fn"),
        shard.weights.take(f"{part}.base"),
        shard.weights.take(f"{part}.scale"),
        streams=config.hc_mult,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        rounds=config.hc_sinkhorn_iters,
    )


class Layer:
    """A decoder layer: attention of either kind and a feed-forward, each reading and feeding all streams."""

    def __init__(self, config: FlashConfig, shard: Shard, index: int) -> None:
        part, self.eps, self.dtype = f"layers.{index}", config.rms_norm_eps, shard.dtype
        self.attention_site = hyper_connection(config, shard, f"{part}.attention_site")
        self.mlp_site = hyper_connection(config, shard, f"{part}.mlp_site")
        self.attention_norm = shard.weights.take(f"{part}.attention_norm")
        self.mlp_norm = shard.weights.take(f"{part}.mlp_norm")
        self.attention: Attention | DeltaAttention
        if config.sparse[index]:
            self.attention = latent_attention(config, shard, index)
        else:
            self.attention = DeltaAttention(config, shard, index)
        self.mlp: FeedForward | Mixture
        if index < config.first_k_dense_replace:
            self.mlp = FeedForward(shard, part, limit=config.swiglu_limit)
        else:
            self.mlp = mixture(config, shard, part, shared_apart=True)

    def __call__(self, streams: Tensor, step: Step) -> Tensor:
        """float32 ``[R, S, hidden]`` to the same."""
        found = self.attention_site(streams, step.decode)
        x = rms_norm(collapse(streams, found.pre), self.attention_norm, self.eps, self.dtype)
        streams = expand(streams, self.attention.output(x, step), found)
        found = self.mlp_site(streams, step.decode)
        x = rms_norm(collapse(streams, found.pre), self.mlp_norm, self.eps, self.dtype)
        return expand(streams, self.mlp.output(x, step.decode), found)


class FlashModel:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: FlashConfig, shard: Shard) -> None:
        self.config, self.bus, self.dtype = config, shard.bus, shard.dtype
        self.encoder = None if config.encoding is None else Encoder(config.encoding, shard)
        self.embed = Embedding.load(shard, "embed", config.vocab_size)
        self.layers = [Layer(config, shard, index) for index in range(config.num_hidden_layers)]
        self.norm = shard.weights.take("norm")
        if shard.drafting:
            self.head, self.draft_head = load_recoded(shard, "head", DRAFT_HEAD)
        else:
            self.head = self.draft_head = Linear.load(shard, "head")

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """The mean of the streams under the last norm, ``[R, hidden_size]``."""
        step, count = Step.of(batch, state), self.config.hc_mult
        embedded = self.embed[batch.tokens].float()
        if batch.seen is not None:
            embedded = embedded.index_copy(0, batch.seen.rows, batch.seen.values.float())
        streams = embedded.unsqueeze(1).expand(-1, count, -1)
        for layer in self.layers:
            streams = layer(streams, step)
        return rms_norm(fold(streams, 1) / count, self.norm, self.config.rms_norm_eps, self.dtype)

    def see(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """An image, ``[rows * columns, hidden_size]``, with rank 0's bits: see `dgpp_core.api.Seeing`."""
        assert self.encoder is not None, "the plugin says that such a checkpoint takes no images"
        seen = self.encoder(patches, rows, columns)
        # A BLAS may add in another order on another rank, and ranks must choose the same keys and experts.
        return self.bus.all_reduce(seen if self.bus.rank == 0 else torch.zeros_like(seen))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``; every rank holds some of the vocabulary's rows."""
        return self.bus.all_gather(self.head.wide(hidden), dim=1)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`logits`, on a GPU from weights rounded to `DRAFT_HEAD`: drafts are verified, and a step reads less."""
        return self.bus.all_gather(self.draft_head.wide(hidden), dim=1)
