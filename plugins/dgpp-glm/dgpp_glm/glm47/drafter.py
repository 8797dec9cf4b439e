"""Multi-token prediction: one decoder layer that drafts the token after the next (DeepSeek-V3, 2024, section 2.2)."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.pick import greedy
from dgpp_glm.glm47.config import Glm47Config
from dgpp_glm.glm47.model import Glm47Model, Layer, Step, Stream


class Glm47Drafter:
    """Implements `dgpp_core.api.Drafter`.

    Row q combines the target's hidden state of row q, after its last norm, with the embedding of token q + 1, and so
    predicts token q + 2. It keeps keys and values of its own, at position q; embedding and head are the target's.

    Args:
        depth: most tokens a step. Beyond the first the layer runs over its own last output.
        recycle_normed: whether that output is taken after the draft layer's last norm, as transformers does, or
            before it, as the model's first engine did. Drafts differ, replies do not.
    """

    def __init__(
        self, config: Glm47Config, shard: Shard, model: Glm47Model, depth: int, *, recycle_normed: bool = True
    ) -> None:
        weights = shard.weights
        self.model, self.depth, self.eps, self.recycle_normed = model, depth, config.rms_norm_eps, recycle_normed
        self.embedding_norm, self.hidden_norm = weights.take("draft.embedding_norm"), weights.take("draft.hidden_norm")
        self.mix = Linear.load(shard, "draft.mix")
        self.layer = Layer(config, shard, config.num_hidden_layers, model.rope)
        self.norm = weights.take("draft.norm")

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """The draft layer over a step's rows, ``[R, hidden_size]``."""
        step, dtype = Step.of(batch, state), self.model.dtype
        embedded = rms_norm(self.model.embed[next_tokens], self.embedding_norm, self.eps, dtype)
        mixed = torch.cat((embedded, rms_norm(hidden, self.hidden_norm, self.eps, dtype)), dim=-1)
        stream = Stream(self.mix.wide(mixed, step.decode), self.eps, dtype)
        x = rms_norm(stream.residual, self.layer.attention_norm, self.eps, dtype)
        x = self.layer(x, stream, self.norm, step)
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
        return torch.stack(drafts, dim=1)

    def _pick(self, hidden: Tensor) -> Tensor:
        """The likeliest next token of each draft row."""
        if not self.recycle_normed:
            hidden = rms_norm(hidden, self.norm, self.eps, self.model.dtype)
        return greedy(self.model.draft_logits(hidden))[0]
