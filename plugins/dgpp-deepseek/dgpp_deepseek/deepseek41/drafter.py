"""Drafts of a block of tokens in one pass (DSpark): layers over a window of what the target's layers said.

The block's rows are the newest token and noise, and see each other both ways; a low-rank head makes each token's
logits of the one before it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.history import keep_newest
from dgpp_core.layers.hyper_connections import collapse
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.pick import greedy
from dgpp_core.ops.tile_attention import tile_attention
from dgpp_deepseek.deepseek41.attention import Projections
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.model import Deepseek41Model, Layer, begun
from dgpp_deepseek.deepseek41.rows import WINDOW
from dgpp_deepseek.deepseek41.step import Angles

TILE = 32
"""Keys of a tile."""


class Block:
    """Where the rows of a block are: ``[B, size]`` of them after ``start`` ``[B]`` rows of each text."""

    def __init__(self, batch: StepBatch, size: int, angles: Angles, state: State) -> None:
        self.start, self.slots, self.size = batch.positions + 1, batch.slots, size
        self.angles, self.state = angles, state


class Stage:
    """One layer of the drafter; ``place`` in its state group."""

    def __init__(self, config: Deepseek41Config, shard: Shard, place: int) -> None:
        part = f"draft.{place}"
        self.place, self.window, self.latent = place, config.window, config.latent
        self.projections = Projections(config, shard, part)
        self.layer = Layer(config, shard, part, config.draft_experts)

    def keep(self, main: Tensor, batch: StepBatch, angles: Angles, state: State) -> None:
        """Put the rows of ``main`` ``[R, width]`` into the window."""
        ring = state["draft_window"][self.place]
        rows = self.projections.row(main, angles, batch.keep_rows)
        keep_newest(batch, WINDOW.pack(rows, ring.dtype).unsqueeze(1), ring)

    def __call__(self, streams: Tensor, pre: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """As `dgpp_deepseek.deepseek41.model.Layer`."""
        return self.layer(streams, pre, functools.partial(self._attend, block=block), True)

    def _attend(self, u: Tensor, block: Block) -> Tensor:
        """Every row sees the window before the block and all of the block; nothing is kept."""
        made, count = self.projections, len(block.start)
        _, q = made.read(u, block.angles, True)
        ring = block.state["draft_window"][self.place]
        own = WINDOW.trip(made.row(u, block.angles, True), ring.dtype).view(count, 1, block.size, self.latent)
        held, at = self._window(ring, block)
        seen = (at < block.start.unsqueeze(1)) & (at >= block.start.unsqueeze(1) - self.window)
        more = -block.size % TILE
        values = torch.cat((held.unsqueeze(1), F.pad(own, (0, 0, 0, more))), 2).view(count, -1, 1, TILE, self.latent)
        inside = torch.arange(block.size + more, device=u.device) < block.size
        visible = torch.cat((seen, inside.expand(count, -1)), 1).view(count, -1, 1, TILE)
        out = tile_attention(
            q.view(count, block.size, *q.shape[1:]), values, values, visible.expand(-1, -1, block.size, -1),
            made.scale, made.sinks,
        )  # fmt: skip
        return made.write(out.flatten(0, 1), block.angles, True)

    def _window(self, ring: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """float32 rows ``[B, tiles * TILE, latent]`` and their positions, from tiles at multiples of `TILE`."""
        tiles = -(-self.window // TILE) + 1
        base = torch.div((block.start - self.window).clamp(min=0), TILE, rounding_mode="floor") * TILE
        at = base.unsqueeze(1) + torch.arange(tiles * TILE, device=ring.device)
        rows = ring[block.slots.unsqueeze(1), 0, at % ring.shape[2]]
        return WINDOW.unpack(rows, self.latent), at


class Deepseek41Drafter:
    """Implements `dgpp_core.api.Drafter` and `dgpp_core.api.Confident`.

    It makes a whole block, whatever the depth of a step.
    """

    def __init__(self, config: Deepseek41Config, shard: Shard, model: Deepseek41Model) -> None:
        self.config, self.model, self.depth, take = config, model, config.draft_block, shard.weights.take
        self.main, self.main_norm = Linear.load(shard, "draft.main"), take("draft.main_norm")
        self.stages = [Stage(config, shard, place) for place in range(config.stages)]
        self.norm, self.markov_embed = take("draft.norm"), take("draft.markov_embed")
        self.markov_head = Linear.load(shard, "draft.markov_head")
        self.confidence = Linear.load(shard, "draft.confidence")

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """Keep what the target's layers said of a step's rows; the hidden states as they were."""
        features, angles = hidden[:, self.config.width :].contiguous(), self.model.ropes.plain.at(batch.positions)
        said = self.main(features, batch.keep_rows)
        main = rms_norm(said, self.main_norm, self.config.rms_norm_eps, self.model.dtype)
        for stage in self.stages:
            stage.keep(main, batch, angles, state)
        return hidden

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        """Drafts ``[B, depth]``."""
        return self.drafted(batch, hidden, tokens, depth, state)[0]

    def drafted(
        self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State
    ) -> tuple[Tensor, Tensor]:
        """Drafts ``[B, depth]``, and what the head for it says of each, float32."""
        config = self.config
        x = self._block(batch, tokens, state)
        base = self.model.said(x, self.norm).view(len(tokens), config.draft_block, -1)
        rows = x.view(len(tokens), config.draft_block, -1)
        drafts, confidence, last = [], [], tokens
        for place in range(depth):
            known = F.embedding(last, self.markov_embed)
            more = self.model.bus.all_gather(self.markov_head.wide(known), dim=1)
            joined = torch.cat((rows[:, place], known), dim=-1)
            confidence.append(self.confidence.wide(joined).squeeze(1))
            last = greedy(base[:, place] + more)[0]
            drafts.append(last)
        return torch.stack(drafts, dim=1), torch.stack(confidence, dim=1)

    def _block(self, batch: StepBatch, tokens: Tensor, state: State) -> Tensor:
        """What the head reads of the block's rows, ``[B * size, width]``, before its norm."""
        config, size = self.config, self.config.draft_block
        noise = torch.full((len(tokens), size - 1), config.noise, dtype=tokens.dtype, device=tokens.device)
        ids = torch.cat((tokens.unsqueeze(1), noise), dim=1).flatten()
        at = (batch.positions.unsqueeze(1) + torch.arange(1, size + 1, device=tokens.device)).flatten()
        block = Block(batch, size, self.model.ropes.plain.at(at), state)
        streams, pre = begun(self.model.embed[ids], config.hc_mult)
        for stage in self.stages:
            streams, pre = stage(streams, pre, block)
        return collapse(streams, pre).to(self.model.dtype)
