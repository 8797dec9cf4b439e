"""Compressed entries: how a source layer makes them, and which of them a row attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Shard
from dgpp_core.layers.history import with_history
from dgpp_core.layers.paged import Selection
from dgpp_core.layers.sparse_index import index_scores, top_keys
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.router import best
from dgpp_deepseek.deepseek41.config import Deepseek41Config
from dgpp_deepseek.deepseek41.rows import ENTRY, KEY
from dgpp_deepseek.deepseek41.step import Step, turned


def entry_pool(step: Step, name: str, ratio: int, place: int) -> Tensor:
    """One source's pool of ``entries`` or ``keys``, ``[blocks, block_tokens / ratio, width]``."""
    pool = step.state[f"{name}_{ratio}"][place]
    return pool.view(len(pool), pool.shape[2] // ratio, ratio * pool.shape[3])


class Compressor:
    """Makes an entry of every ``ratio`` tokens, and the key by which it is found.

    Of one token an entry is ``norm(wkv u)``; of two it is the norm of ``sum over both of softmax(wgate u) wkv u``, a
    softmax over the two in each channel. It is turned to its first token's position; its key is made before that.
    """

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str, layer: int) -> None:
        self.ratio, self.place, self.latent = config.ratios[layer], config.place_of(layer), config.latent
        self.eps, self.dtype = config.rms_norm_eps, shard.dtype
        self.products, self.key = Linear.load(shard, f"{part}.products"), Linear.load(shard, f"{part}.key")
        self.norm, self.key_norm = (shard.weights.take(f"{part}.{name}") for name in ("norm", "key_norm"))

    def __call__(self, u: Tensor, step: Step) -> None:
        """Write the entries that end at the step's rows; the other rows' go to block 0, which no request has."""
        index, batch = step.paged, step.batch
        latent = rms_norm(self._pooled(u, step).to(self.dtype), self.norm, self.eps, self.dtype)
        key = rms_norm(self.key(latent, step.decode), self.key_norm, self.eps, self.dtype)
        angles = step.ropes.compressed.at((batch.positions - self.ratio + 1).clamp(min=0))
        ends = (batch.positions + 1) % self.ratio == 0
        block = torch.where(ends, index.block, 0)
        place = torch.div(index.offset, self.ratio, rounding_mode="floor")
        for name, form, rows in (("entries", ENTRY, latent), ("keys", KEY, key)):
            pool = entry_pool(step, name, self.ratio, self.place)
            pool[block, place] = form.pack(turned(rows.unsqueeze(1), angles).squeeze(1), pool.dtype)

    def _pooled(self, u: Tensor, step: Step) -> Tensor:
        made = self.products.wide(u, step.decode)
        if self.ratio == 1:
            return made
        pairs = []
        for run in with_history(step.batch, made.unsqueeze(1), step.state["halves"][self.place], 1):
            k, g = torch.split(run[:, 1:, 0], self.latent, -1)
            k_before, g_before = torch.split(run[:, :-1, 0], self.latent, -1)
            most = torch.maximum(g_before, g)
            first, second = torch.exp(g_before - most), torch.exp(g - most)
            pairs.append(((k_before * first + k * second) / (first + second)).flatten(0, 1))
        return torch.cat(pairs)


class Chooser:
    """Scores entries as ``sum over h of w_h relu(q_h . key) / sqrt(heads * width)`` and keeps the best.

    The block source also keeps whole blocks of entries by the best score in each, the newest one always; choosers after
    it choose within those.
    """

    def __init__(self, config: Deepseek41Config, shard: Shard, part: str, layer: int) -> None:
        self.heads, self.width, self.top = config.index_heads, config.index_width, config.index_topk
        self.blocks, self.block_size, self.dtype = config.blocks, config.block_size, shard.dtype
        self.keeps_blocks, self.within = layer == config.block_source, layer > config.block_source
        source = config.source_of(layer)
        self.ratio, self.place = config.ratios[source], config.place_of(source)
        self.queries, self.weights = Linear.load(shard, f"{part}.queries"), Linear.load(shard, f"{part}.weights")

    def __call__(self, u: Tensor, query_latent: Tensor, step: Step) -> None:
        """Put the choice for ``u`` ``[R, width]`` into the step; the source's entries of its rows are written."""
        q = self.queries(query_latent, step.decode).view(len(u), self.heads, self.width)
        pool = entry_pool(step, "keys", self.ratio, self.place)
        q = KEY.trip(turned(q, step.compressed), pool.dtype)
        gates = self.weights(u, step.decode).float() * (self.width * self.heads) ** -0.5
        visible = tuple(step.visible(self.ratio))
        needed = self.top if not self.keeps_blocks else min(self.top, self.blocks * self.block_size)
        scores = [
            self._scores(q[rows], gates[rows], pool[blocks], seen) if seen.shape[1] * seen.shape[3] > needed else None
            for (rows, blocks, _), seen in zip(step.paged.groups, visible, strict=True)
        ]
        if self.keeps_blocks:
            step.kept_blocks = self._best(scores, visible, blocks=True)
        elif self.within:
            visible = tuple(seen & kept for seen, kept in zip(visible, step.kept_blocks, strict=True))
        step.chosen = self._best(scores, visible)

    def _scores(self, q: Tensor, gates: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        batch, _, n, _ = visible.shape
        shape = (batch, n, self.heads)
        return index_scores(q.view(*shape, -1), gates.view(shape), KEY.unpack(keys, self.width))

    def _best(self, scores: list[Tensor | None], visible: Selection, *, blocks: bool = False) -> Selection:
        """By entry or by block; without scores there are no more than are kept."""
        made = []
        for each, seen in zip(scores, visible, strict=True):
            if each is None:
                made.append(seen)
            elif blocks:
                made.append(best_blocks(each, seen, self.blocks, self.block_size))
            else:
                made.append(top_keys(each, seen, self.top))
        return tuple(made)


def best_blocks(scores: Tensor, visible: Tensor, count: int, size: int) -> Tensor:
    """The entries of each row's ``count`` best blocks of ``size`` entries; both ``[B, tiles, n, T]``.

    A block's score is the largest of its visible entries, that of the newest one is above all; the lower block goes
    first where scores are equal.
    """
    batch, tiles, n, span = visible.shape
    flat = scores.masked_fill(~visible, -torch.inf).transpose(1, 2).reshape(batch * n, tiles * span)
    missing = -flat.shape[1] % size
    blocks = torch.nn.functional.pad(flat, (0, missing), value=-torch.inf).view(batch * n, -1, size).amax(-1)
    newest = torch.div(visible.sum((1, 3)).view(-1, 1) - 1, size, rounding_mode="floor").clamp(min=0)
    blocks = blocks.scatter(1, newest, torch.inf)
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, best(blocks, count), True)
    entries = kept.repeat_interleave(size, 1)[:, : tiles * span].view(batch, n, tiles, span)
    return entries.transpose(1, 2) & visible
