"""Multi-token prediction: one decoder layer that drafts the token after the next (DeepSeek-V3, 2024, section 2.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.embedding import Embedding
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.pick import greedy
from dgpp_glm.config import GlmConfig


class Target(Protocol):
    """What a drafter shares with the model that it drafts for."""

    dtype: torch.dtype

    @property
    def embed(self) -> Embedding:
        """The embedding."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``, near to the model's own."""
        ...


class MtpDrafter(ABC):
    """Implements `dgpp_core.api.Drafter` around the decoder layer that a model gives it.

    Row q combines the target's hidden state of row q, after its last norm, with the embedding of token q + 1, and so
    predicts token q + 2. It keeps state of its own, at position q; embedding and head are the target's.

    Args:
        depth: most tokens a step. Beyond the first the layer runs over its own last output.
        recycle_normed: whether that output is taken after the draft layer's last norm, as transformers does, or
            before it, as the model's first engine did. Drafts differ, replies do not.
    """

    def __init__(
        self, config: GlmConfig, shard: Shard, target: Target, depth: int, *, recycle_normed: bool = True
    ) -> None:
        weights = shard.weights
        self.target, self.depth, self.eps, self.recycle_normed = target, depth, config.rms_norm_eps, recycle_normed
        self.embedding_norm, self.hidden_norm = weights.take("draft.embedding_norm"), weights.take("draft.hidden_norm")
        self.mix = Linear.load(shard, "draft.mix")
        self.norm = weights.take("draft.norm")

    @abstractmethod
    def through_layer(self, stream: Stream, batch: StepBatch, state: State) -> Tensor:
        """Take the stream through the draft layer; it after that under `norm`, ``[R, hidden_size]``."""

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """The draft layer over a step's rows, ``[R, hidden_size]``."""
        dtype = self.target.dtype
        norms = self.embedding_norm, self.hidden_norm
        mixed = self.target.embed.beside(next_tokens, hidden, *norms, self.eps, dtype)
        stream = Stream(self.mix.wide(mixed, batch.keep_rows), self.eps, dtype)
        x = self.through_layer(stream, batch, state)
        return x if self.recycle_normed else stream.residual.to(dtype)

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        """Drafts ``[B, depth]``."""
        drafts = [self._pick(hidden)]
        for _ in range(depth - 1):
            batch = msgspec.structs.replace(
                batch,
                positions=batch.positions + 1,
                lengths=batch.lengths + 1,
                max_length=batch.max_length + 1,
            )
            hidden = self.observe(batch, hidden, drafts[-1], state)
            drafts.append(self._pick(hidden))
        return torch.stack(drafts, dim=1) if depth > 1 else drafts[0].unsqueeze(1)

    def _pick(self, hidden: Tensor) -> Tensor:
        """The likeliest next token of each draft row."""
        if not self.recycle_normed:
            hidden = rms_norm(hidden, self.norm, self.eps, self.target.dtype)
        return greedy(self.target.draft_logits(hidden))[0]
