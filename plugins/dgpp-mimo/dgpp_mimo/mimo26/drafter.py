"""Multi-token prediction by three blocks that all read the target's hidden state of one row (no block feeds another).

Block d knows the hidden state of row r and token r + 1 + d, sits at position r, and predicts token r + 2 + d. Its keys
and values of row r are therefore those of a text only once token r + 1 + d is committed: it lags d rows behind, and
reads hidden states of earlier rows out of a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.history import delayed_batch, delayed_rows, keep_newest, newest_rows
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.pick import greedy
from dgpp_core.ops.residual import draft_input
from dgpp_mimo.mimo26.attention import DraftAttention, Step
from dgpp_mimo.mimo26.config import BLOCKS, Mimo26Config
from dgpp_mimo.mimo26.model import Layer, Mimo26Model


class Block:
    """One draft block; ``place`` is how far it lags, and its place in the state groups."""

    def __init__(self, config: Mimo26Config, shard: Shard, model: Mimo26Model, place: int) -> None:
        part, take = f"draft.{place}", shard.weights.take
        self.model, self.eps = model, config.layernorm_epsilon
        self.embedding_norm, self.hidden_norm = take(f"{part}.embedding_norm"), take(f"{part}.hidden_norm")
        self.mix = Linear.load(shard, f"{part}.mix")
        self.layer = Layer(config, shard, part, DraftAttention, place, sparse=False)
        self.norm = take(f"{part}.norm")

    def __call__(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, state: State) -> Tensor:
        """Run rows at the positions of ``batch`` with the target's ``hidden`` states and their ``tokens``; normed."""
        dtype = self.model.dtype
        norms = self.embedding_norm, self.hidden_norm
        mixed = draft_input(self.model.embed, tokens, hidden, *norms, self.eps, dtype)
        stream = Stream(self.mix.wide(mixed, batch.keep_rows), self.eps, dtype)
        x = rms_norm(stream.residual, self.layer.attention_norm, self.eps, dtype)
        return self.layer(x, stream, self.norm, Step(batch, state, self.model.ropes))


class Mimo26Drafter:
    """Implements `dgpp_core.api.Drafter`.

    Args:
        depth: most tokens a step, one a block. A deployment that drafts fewer has state for fewer blocks, and those
            run; they all keep up with the text, so that a step may draft fewer still.
    """

    def __init__(self, config: Mimo26Config, shard: Shard, model: Mimo26Model, depth: int) -> None:
        self.model, self.depth = model, depth
        self.blocks = [Block(config, shard, model, place) for place in range(BLOCKS)]

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """Every block over the rows whose tokens have become known; the first one's output, ``[R, hidden_size]``.

        With the token after row p, block d runs row p - d: the same tokens for all, at earlier and earlier rows.
        """
        ring = state["draft_hidden"][0]
        running = self.blocks[: len(state["draft_k"])]
        rows = hidden.unsqueeze(1)
        earlier = [delayed_rows(batch, rows, ring, lag).squeeze(1).to(hidden.dtype) for lag in range(len(running))]
        outs = [
            block(delayed_batch(batch, lag), seen, next_tokens, state)
            for lag, (block, seen) in enumerate(zip(running, earlier, strict=True))
        ]
        keep_newest(batch, rows, ring)
        return outs[0]

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        """Drafts ``[B, depth]``; block d catches up over the drafts before it, provisionally."""
        drafts = [self._pick(hidden)]
        ring = state["draft_hidden"][0]
        for lag in range(1, depth):
            rows, earlier = newest_rows(batch, ring, lag)
            known = torch.stack(drafts, dim=1).flatten()
            out = self.blocks[lag](rows, earlier.squeeze(1).to(hidden.dtype), known, state)
            drafts.append(self._pick(out.view(len(tokens), lag, -1)[:, -1]))
        return torch.stack(drafts, dim=1)

    def _pick(self, hidden: Tensor) -> Tensor:
        """The likeliest next token of each draft row."""
        return greedy(self.model.logits(hidden))[0]
