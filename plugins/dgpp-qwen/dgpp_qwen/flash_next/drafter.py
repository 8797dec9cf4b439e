"""Multi-token prediction: one sparse layer over the target's branches (after DeepSeek-V3, 2024, section 2.2)."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.block_index import unit_norm
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.pick import greedy
from dgpp_qwen.flash_next.branches import Mix, centred, rows_of
from dgpp_qwen.flash_next.config import FlashNextConfig
from dgpp_qwen.flash_next.mixers import SparseAttention
from dgpp_qwen.flash_next.model import FlashNextModel, Layer
from dgpp_qwen.flash_next.step import Step


class FlashNextDrafter:
    """Implements `dgpp_core.api.Drafter`.

    Row q joins the target's branches of row q with the embedding of token q + 1 and so predicts token q + 2. It keeps
    keys, values and index keys of its own, at position q; embedding and head are the target's. Beyond the first draft
    the layer reads its own branches.

    Args:
        depth: most tokens a step.
    """

    def __init__(self, config: FlashNextConfig, shard: Shard, model: FlashNextModel, depth: int) -> None:
        self.config, self.model, self.depth = config, model, depth
        self.embedding_norm, self.hidden_norm = (centred(shard, f"draft.{n}_norm") for n in ("embedding", "hidden"))
        self.embedding, self.hidden = Linear.load(shard, "draft.embedding"), Linear.load(shard, "draft.hidden")
        place = sum(config.sparse)
        mixer = SparseAttention(config, shard, "draft.layer", place, model.rope)
        self.layer = Layer(config, shard, "draft.layer", mixer, model.even)
        self.mixer = Mix(config, shard, "draft.mixer")

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """The draft layer over a step's rows, ``[R, B * width]``."""
        step, eps, dtype = Step.of(batch, state), self.config.rms_norm_eps, self.model.dtype
        embedded = unit_norm(self.model.embed[next_tokens], self.embedding_norm, eps).to(dtype)
        normed = unit_norm(hidden, self.hidden_norm, eps).to(dtype)
        own = self.hidden.wide(normed.view(-1, self.config.width), step.decode)
        branches = rows_of(own.view(hidden.shape), self.config)
        branches = branches + self.embedding.wide(embedded, step.decode).unsqueeze(1)
        return self.layer(branches, step).flatten(1).to(dtype)

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
        return greedy(self.model.mixed_logits(self.mixer, hidden))[0]
